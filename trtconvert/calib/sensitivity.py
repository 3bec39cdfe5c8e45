"""What each choice of a mode costs in quality, at the model's output and in the final samples.

The error of a plan is modelled as a sum: over sites and timestep bins, the squared error that the site's mode alone causes
at the denoiser's output, times the bin's gain, which is how much squared error in the final samples one unit of it at the
output becomes. Both factors are measured on seeded denoising runs. What the model leaves out (errors that amplify or cancel
one another) the plan's search settles by sampling, see `plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention import reference
from trtconvert.attention.blocks import SiteBlocks, mask_at
from trtconvert.attention.modes import Mode, Scaling, scaling_at
from trtconvert.attention.reference import AttentionTables, expand_blocks, timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.linear import changes
from trtconvert.linear import reference as linear
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LayerTables
from trtconvert.linear.sites import LayerCall, LayerHandler
from trtconvert.models.denoiser import intercepted

LAYERS_OF = "layers of "
"""What the name of a group of layers begins with, among those of sites."""

MODULATED = len(LayerMode)
"""Choice of a group of layers beside those of `LayerMode`: static in all bins, with caches of their own (MoDiff)."""

INT8_MODES = tuple(mode for mode in Mode if mode != Mode.FP16)
"""Modes that quantise something; FP16 is exact here."""


@dataclass(frozen=True)
class Int8Sites:
    """How converted sites compute, for running a model's INT8 attention in torch.

    Attributes:
        tables: per converted site.
        timestep_max, scaling, smooth_k: as the op's attributes; a scaling of all sites, or by site.
        compute: the specification, or `kernel.attention`.
        masks: [T, H, Bq, Bk] block masks by timestep bin, of the sites that have some.
    """

    tables: Mapping[str, AttentionTables]
    timestep_max: float
    scaling: Scaling
    smooth_k: bool
    compute: Callable[..., Tensor] = reference.attention
    masks: Mapping[str, Tensor] = field(default_factory=dict)

    def attention(self, call: SiteCall, tables: AttentionTables | None = None) -> Tensor:
        """The call's output as the `Int8Attention` op defines it, with the site's own tables or others."""
        masks = self.masks.get(call.name)
        return self.compute(
            call.q,
            call.k,
            call.v,
            call.timestep,
            tables or self.tables[call.name],
            softmax_scale=call.scale,
            timestep_max=self.timestep_max,
            scaling=scaling_at(self.scaling, call.name),
            smooth_k=self.smooth_k,
            mask=call.mask,
            block_mask=None if masks is None else mask_at(masks, call.timestep, self.timestep_max),
        )

    def handler(self) -> Callable[[SiteCall], Tensor]:
        """Runs INT8 attention at converted sites and the model's own elsewhere."""
        return lambda call: self.attention(call) if call.name in self.tables else call.exact()


@dataclass(frozen=True)
class _Caches:
    """Of a layer, see `trtconvert.linear.changes`; o_hat is None where all samples begin."""

    last: Tensor
    a_hat: Tensor
    o_hat: Tensor | None


@dataclass(frozen=True)
class Int8Layers:
    """How converted layers compute, for running them in torch.

    Attributes:
        tables: per converted layer.
        timestep_max: as the op's attribute.
        change_scales: [T] of those that quantise changes. Their caches are kept from call to call, of one trajectory.
        falls: see `trtconvert.linear.changes.steps_of`.
    """

    tables: Mapping[str, LayerTables]
    timestep_max: float
    change_scales: Mapping[str, Tensor] = field(default_factory=dict)
    falls: bool = True
    _caches: dict[str, _Caches] = field(default_factory=dict, init=False, repr=False, compare=False)

    def reset_cache(self) -> None:
        """All samples begin anew in the next call."""
        self._caches.clear()

    def output(self, call: LayerCall, tables: LayerTables | None = None) -> Tensor:
        """The call's output as its op defines it, with the layer's own tables or others, which quantise no changes."""
        if tables is None and call.name in self.change_scales:
            return self._output_of_change(call)
        tables = tables or self.tables[call.name]
        if call.kind == "linear":
            return linear.linear(call.x, call.timestep, tables, timestep_max=self.timestep_max)
        return linear.conv(
            call.x, call.timestep, tables, stride=call.stride, padding=call.padding, timestep_max=self.timestep_max
        )

    def _output_of_change(self, call: LayerCall) -> Tensor:
        tables, x = self.tables[call.name], call.x
        before, dtype = self._caches.get(call.name), changes.cache_dtype(x.dtype)
        if before is None or before.a_hat.shape != x.shape or before.a_hat.dtype != dtype:
            forgotten = torch.full_like(call.timestep, -math.inf, dtype=torch.float32)
            before = _Caches(forgotten, torch.zeros_like(x, dtype=dtype), None)
        begins, last = changes.steps_of(call.timestep, before.last, self.falls)
        first, later = (table.to(x.device)[:, None] for table in (tables.x_scale, self.change_scales[call.name]))
        scale = changes.scales_of(begins, call.timestep, first, later, self.timestep_max)
        factor = tables.x_factor.to(x.device).view(-1, *[1] * (x.dim() - 1 - call.channel_axis))
        q, a_hat = changes.quantise_change(x, factor, before.a_hat, begins, scale)
        o_hat = changes.add_product(
            q, scale, begins, tables, before.o_hat, dtype, stride=call.stride, padding=call.padding
        )
        self._caches[call.name] = _Caches(last, a_hat, o_hat)
        return o_hat.to(x.dtype)

    def handler(self) -> LayerHandler:
        """Runs INT8 layers where they are converted and the model's own elsewhere."""
        return lambda call: self.output(call) if call.name in self.tables else call.exact()


DENSE = 0
"""The level of a site without block masks; those of `Sensitivity.shares` follow."""


def choice_of(mode: int, level: int) -> int:
    """A mode and a level as one number, among the choices of a site and timestep bin."""
    return level * len(Mode) + mode


@dataclass(frozen=True)
class Sensitivity:
    """S sites and groups of layers, T timestep bins.

    A choice is a mode and a level, see `choice_of`. Levels are `DENSE`, the shares of attention that a block mask may lose, and
    all blocks by a mask, which sites with masks have in bins that need them all. Without shares there is one level.

    Attributes:
        sites: names, in the order of the first axis; those of groups begin with `LAYERS_OF`.
        error: [S, T, choices] mean squared error at the denoiser's output when one site alone runs in each `Mode`, or one group
            of layers in each `LayerMode`, or `MODULATED`; zero for FP16, NaN for modes that were not measured. At a level, that
            of exact attention with the mask besides: errors of rounding and of what is left out add up.
        gain: [T] squared error in the final samples for one unit of it at the output, in every step of one bin.
        steps: [T] share of the denoising steps that fall into each bin.
        shares: of attention, of the levels between.
    """

    sites: list[str]
    error: Tensor
    gain: Tensor
    steps: Tensor
    shares: tuple[float, ...] = ()

    @property
    def levels(self) -> int:
        """How many there are."""
        return len(self.shares) + 2 if self.shares else 1

    def cost(self) -> Tensor:
        """[S, T, choices] squared error that each choice is modelled to add to the final samples.

        FP16 of all blocks adds nothing, whatever the gain. What was not measured costs infinity: modes that were left out, any
        other choice in a bin that no step fell into, and what gave a NaN or Inf.
        """
        cost = (self.error * self.gain[:, None]).nan_to_num(nan=math.inf, posinf=math.inf)
        cost[:, self.steps == 0] = math.inf
        for level in {DENSE, self.levels - 1}:
            cost[..., choice_of(Mode.FP16, level)] = 0
        return cost


def measure_sensitivity(
    model: DiffusionModel,
    sites: Int8Sites,
    bins: int,
    *,
    modes: Collection[Mode] = tuple(Mode),
    layers: Int8Layers | None = None,
    groups: Mapping[str, Collection[str]] | None = None,
    layer_modes: Mapping[str, Collection[int]] | None = None,
    blocks: Mapping[str, SiteBlocks] | None = None,
    shares: Sequence[float] = (),
    seeds: range,
    steps: int,
    done: Callable[[], None],
) -> Sensitivity:
    """Measure one site or group of layers and one mode at a time on the model's own trajectories.

    Args:
        sites: their modes do not matter.
        modes: to measure; each takes a pass through the model for each site in every step.
        layers: whose modes do not matter either; groups: their names, by the first layer that reads the same tensor.
        layer_modes: to measure, of each group, `MODULATED` among them, which needs scales of changes, and keeps caches from step
            to step; each takes a pass in every step.
        blocks: of the sites that may have block masks; shares: of attention that may be lost. Each takes a pass in every step.
        seeds: of the samples that are drawn, one batch.
        steps: denoising steps; at least one per bin, so that every bin is seen.
        done: called `steps + bins + 1` times.
    """
    groups, layer_modes, blocks = groups or {}, layer_modes or {}, blocks or {}
    choices: dict[str, list[tuple[int, Callable[[], Denoiser]]]] = {
        name: [(mode, partial(_with_site, model, sites, name, mode)) for mode in INT8_MODES if mode in modes]
        for name in sites.tables
    }
    if layers is not None:
        choices |= {
            LAYERS_OF + name: [
                (mode, _kept(mode, partial(_with_layers, model, layers, members, mode))) for mode in layer_modes[name]
            ]
            for name, members in groups.items()
        }
    for name, of_site in blocks.items():
        choices[name] += [
            (len(Mode) + number, partial(_with_mask, model, name, of_site, share))
            for number, share in enumerate(shares)
        ]
    names = list(choices)
    squared = torch.full((len(names), bins, len(Mode) + len(shares)), math.nan, dtype=torch.float64)
    for row, of_name in enumerate(choices.values()):
        squared[row, :, [0, *(mode for mode, _ in of_name)]] = 0
    visits = torch.zeros(bins, dtype=torch.float64)
    exact = intercepted(model, lambda call: call.exact())
    bins_of = _bins_of_calls(model, bins)

    def watched(*inputs: Tensor, **named: Tensor) -> Tensor:
        """The exact output; on the way, the errors of all single choices."""
        output = exact(*inputs, **named)
        index = bins_of(inputs, named, len(output))
        visits.index_add_(0, index, torch.ones(len(index), dtype=torch.float64))
        for row, of_name in enumerate(choices.values()):
            for mode, denoiser in of_name:
                difference = denoiser()(*inputs, **named) - output
                squared[row, :, mode].index_add_(0, index, difference.double().square().flatten(1).mean(1))
        done()
        return output

    with torch.no_grad():
        samples = model.sample(watched, seeds, steps=steps, solver="ddim")
        error = _of_choices(squared / visits.clamp_min(1)[:, None], len(shares))
        gain = _gains(model, exact, samples, error, visits, seeds, steps, done)
    return Sensitivity(names, error, gain, visits / visits.sum(), tuple(shares))


def _of_choices(error: Tensor, shares: int) -> Tensor:
    """[…, modes + shares] errors of modes and of masks → […, choices], see `Sensitivity`."""
    of_modes, of_masks = error.split([len(Mode), shares], -1)
    masked = [of_modes + of_masks[..., [level]] for level in range(shares)]
    # The last level computes what DENSE does, of the sites that have levels.
    last = [of_modes + 0 * of_masks[..., :1]] if shares else []
    return torch.cat([of_modes, *masked, *last], -1)


def _with_site(model: DiffusionModel, sites: Int8Sites, name: str, mode: Mode) -> Denoiser:
    """The denoiser with one site alone in a mode."""
    tables = sites.tables[name].with_modes(mode)
    return intercepted(model, lambda call: sites.attention(call, tables) if call.name == name else call.exact())


def _with_mask(model: DiffusionModel, name: str, blocks: SiteBlocks, share: float) -> Denoiser:
    """The denoiser with one site alone attending exactly to the blocks that are left at a share."""

    def attend(call: SiteCall) -> Tensor:
        if call.name != name:
            return call.exact()
        index = timestep_bin(call.timestep, model.timestep_max, len(blocks.block_bits)).cpu()
        chosen = expand_blocks(blocks.at(share, index).to(call.q.device), call.q.shape[2], call.k.shape[2])
        grouped = call.q.shape[1] != call.k.shape[1]
        return scaled_dot_product_attention(call.q, call.k, call.v, chosen, scale=call.scale, enable_gqa=grouped)

    return intercepted(model, attend)


def _kept(mode: int, make: Callable[[], Denoiser]) -> Callable[[], Denoiser]:
    """What makes a denoiser once where its caches go on from step to step, else for each call."""
    return cache(make) if mode == MODULATED else make


def _with_layers(model: DiffusionModel, layers: Int8Layers, names: Collection[str], mode: int) -> Denoiser:
    """The denoiser with some layers alone in a mode."""
    if mode == MODULATED:
        tables = {name: layers.tables[name].with_modes(LayerMode.STATIC) for name in names}
        changes_of = {name: layers.change_scales[name] for name in names}
        alone = Int8Layers(tables, layers.timestep_max, changes_of, model.timesteps_fall)
        return intercepted(model, layers=alone.handler())
    mode = LayerMode(mode)
    tables = {name: layers.tables[name].with_modes(mode) for name in names}
    return intercepted(model, layers=Int8Layers(tables, layers.timestep_max).handler())


def _gains(
    model: DiffusionModel,
    exact: Denoiser,
    samples: Tensor,
    error: Tensor,
    visits: Tensor,
    seeds: range,
    steps: int,
    done: Callable[[], None],
) -> Tensor:
    """Disturb the output in one bin at a time with noise as large as all sites' errors, and look at the samples."""
    bins = len(visits)
    bins_of = _bins_of_calls(model, bins)
    gain = torch.zeros(bins, dtype=torch.float64)
    for index in range(bins):
        variance = float(error[:, index].nan_to_num(posinf=0.0).amax(-1).sum())
        if visits[index] and variance:
            generator = torch.Generator().manual_seed(index)

            def disturbed(*inputs: Tensor, index: int = index, std: float = variance**0.5, **named: Tensor) -> Tensor:
                output = exact(*inputs, **named)
                here = bins_of(inputs, named, len(output)) == index
                noise = torch.randn(output.shape, generator=generator) * std  # noqa: B023 (used within the iteration)
                return output + noise.to(output) * here.view(-1, *[1] * (output.dim() - 1))

            moved = model.sample(disturbed, seeds, steps=steps, solver="ddim")
            gain[index] = float((moved - samples).double().square().mean()) / variance
        done()
    return gain


def _bins_of_calls(
    model: DiffusionModel, bins: int
) -> Callable[[tuple[Tensor, ...], Mapping[str, Tensor], int], Tensor]:
    """What gives the timestep bin of every element of a denoiser call."""
    names = [spec.name for spec in model.inputs]

    def bins_of(inputs: tuple[Tensor, ...], named: Mapping[str, Tensor], batch: int) -> Tensor:
        timestep = (dict(zip(names, inputs, strict=False)) | dict(named))[model.timestep_input]
        return timestep_bin(timestep.reshape(-1).expand(batch), model.timestep_max, bins)

    return bins_of
