"""Candidates of a search: the choices of each attention site, and their computation in torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention.blocks import SiteBlocks
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import expand_blocks, timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.quant.decision import Choice, Decision, Unit
from trtconvert.quant.forward import Int8Layers, Int8Sites

Handler = Callable[[Any], Tensor]

MOST_EXACT = 64
"""Largest number of candidates that the exact sensitivity measures with a forward of each candidate in each step."""

PROBES_FORWARDS = 20
"""Forwards that take about as long as the probes of one call."""


def attention_units(
    scalings: Mapping[str, str], allowed: Collection[Mode], blocks: Collection[str] = (), shares: Sequence[float] = ()
) -> list[Unit]:
    """Returns attention sites with their choices: every mode, and the allowed modes with a block mask at sites that may have one,
    at each share of attention that may be lost; scalings: of each site."""
    dense = tuple(Choice(mode) for mode in Mode)
    masked = tuple(Choice(mode, share) for share in (*shares, 0.0) for mode in Mode if mode in allowed)
    compared = frozenset(choice for choice in dense if choice.mode not in allowed)
    return [
        Unit("attention", name, (name,), dense + masked if name in blocks else dense, compared, scaling)
        for name, scaling in scalings.items()
    ]


@dataclass(frozen=True)
class Candidate:
    """One choice of one unit, measured alone; output: computes a call of one of the unit's operations under the choice."""

    unit: Unit
    choice: Choice
    output: Handler

    def handlers(self) -> tuple[Handler | None, Handler | None]:
        """Returns the handlers of `intercepted` for attention and layers: this choice only, everything else exact."""

        def handle(call: Any) -> Tensor:
            return self.output(call) if call.name in self.unit.members else call.exact()

        return (handle, None) if self.unit.kind == "attention" else (None, handle)


def candidates_of(
    model: DiffusionModel,
    units: Iterable[Unit],
    sites: Int8Sites,
    layers: Int8Layers | None,
    blocks: Mapping[str, SiteBlocks],
) -> list[Candidate]:
    """Returns every choice to measure: inexact choices that a search may take, except sums of other choices. For the arguments
    see `measure_sensitivity`."""

    def output(unit: Unit, choice: Choice) -> Handler:
        if unit.kind == "layer":
            assert layers is not None
            bins = len(layers.tables[unit.members[0]].modes)
            return layers.in_plan(dict.fromkeys(unit.members, Decision((choice,) * bins))).output
        if choice.mask_share:
            return _behind_mask(model, blocks[unit.name], choice.mask_share)
        tables = sites.tables[unit.name].with_modes(Mode(choice.mode))
        return lambda call: sites.attention(call, tables)

    return [
        Candidate(unit, choice, output(unit, choice))
        for unit in units
        for choice in unit.choices
        if choice.parts == (choice,) and choice not in unit.compared
    ]


def _behind_mask(model: DiffusionModel, blocks: SiteBlocks, share: float) -> Callable[[SiteCall], Tensor]:
    """Exact attention to the blocks at a share."""

    def attend(call: SiteCall) -> Tensor:
        index = timestep_bin(call.timestep, model.timestep_max, len(blocks.block_bits)).cpu()
        chosen = expand_blocks(blocks.at(share, index).to(call.q.device), call.q.shape[2], call.k.shape[2])
        grouped = call.q.shape[1] != call.k.shape[1]
        return scaled_dot_product_attention(call.q, call.k, call.v, chosen, scale=call.scale, enable_gqa=grouped)

    return attend
