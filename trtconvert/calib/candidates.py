"""What a search may choose for each attention site and each group of layers, and what each choice computes in torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention.blocks import SiteBlocks
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, expand_blocks, timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.linear.modes import LayerMode
from trtconvert.quant.forward import Int8Layers, Int8Sites

LAYERS_OF = "layers of "
"""What the name of a group of layers begins with, among those of sites."""

MODULATED = len(LayerMode)
"""Choice of a group of layers beside those of `LayerMode`: static in all bins, with caches of their own (MoDiff)."""

INT8_MODES = tuple(mode for mode in Mode if mode != Mode.FP16)
"""Modes that quantise something; FP16 is exact here."""

Handler = Callable[[Any], Tensor]


def error_columns(shares: Sequence[float]) -> int:
    """Columns of measured errors: one for each mode, and one for each share of attention that a mask leaves out."""
    return len(Mode) + len(shares)


@dataclass(frozen=True)
class Candidate:
    """One choice for one attention site or one group of layers.

    Attributes:
        names: of the site, or of the layers of the group.
        column: of the table of errors, see `error_columns`.
        output: the output of one call of one of them under this choice.
        of_layers: whether they are layers.
        keeps_state: outputs depend on the calls before, so that each call is computed once.
    """

    names: frozenset[str]
    column: int
    output: Handler
    of_layers: bool = False
    keeps_state: bool = False

    def handlers(self) -> tuple[Handler | None, Handler | None]:
        """What `intercepted` takes for attention and for layers: this choice alone, everything else exact."""

        def handle(call: Any) -> Tensor:
            return self.output(call) if call.name in self.names else call.exact()

        return (None, handle) if self.of_layers else (handle, None)


def candidates_of(
    model: DiffusionModel,
    sites: Int8Sites,
    modes: Collection[Mode],
    layers: Int8Layers | None,
    groups: Mapping[str, Collection[str]],
    layer_modes: Mapping[str, Collection[int]],
    blocks: Mapping[str, SiteBlocks],
    shares: Sequence[float],
) -> dict[str, list[Candidate]]:
    """Every choice beside the exact one, by site, and by group of layers under `LAYERS_OF` and its name.

    Args: see `measure_sensitivity`.
    """
    found = {
        name: [
            Candidate(frozenset([name]), mode, _in_mode(sites, tables, mode)) for mode in INT8_MODES if mode in modes
        ]
        for name, tables in sites.tables.items()
    }
    for name, of_site in blocks.items():
        found[name] += [
            Candidate(frozenset([name]), len(Mode) + number, _behind_mask(model, of_site, share))
            for number, share in enumerate(shares)
        ]
    if layers is not None:
        for name, members in groups.items():
            found[LAYERS_OF + name] = [
                Candidate(frozenset(members), mode, _layers_in_mode(layers, members, mode), True, mode == MODULATED)
                for mode in layer_modes[name]
            ]
    return found


def _in_mode(sites: Int8Sites, tables: AttentionTables, mode: Mode) -> Callable[[SiteCall], Tensor]:
    tables = tables.with_modes(mode)
    return lambda call: sites.attention(call, tables)


def _layers_in_mode(layers: Int8Layers, names: Collection[str], mode: int) -> Handler:
    of_mode = LayerMode.STATIC if mode == MODULATED else LayerMode(mode)
    tables = {name: layers.tables[name].with_modes(of_mode) for name in names}
    scales = {name: layers.change_scales[name] for name in names} if mode == MODULATED else {}
    return Int8Layers(tables, layers.timestep_max, scales, layers.falls).output


def _behind_mask(model: DiffusionModel, blocks: SiteBlocks, share: float) -> Callable[[SiteCall], Tensor]:
    """Exact attention to the blocks that are left at a share."""

    def attend(call: SiteCall) -> Tensor:
        index = timestep_bin(call.timestep, model.timestep_max, len(blocks.block_bits)).cpu()
        chosen = expand_blocks(blocks.at(share, index).to(call.q.device), call.q.shape[2], call.k.shape[2])
        grouped = call.q.shape[1] != call.k.shape[1]
        return scaled_dot_product_attention(call.q, call.k, call.v, chosen, scale=call.scale, enable_gqa=grouped)

    return attend
