"""What each choice of a mode costs in quality, at the model's output and in the final samples.

The error of a plan is modelled as a sum: over sites and timestep bins, the squared error that the site's mode alone causes
at the denoiser's output, times the bin's gain, which is how much squared error in the final samples one unit of it at the
output becomes. Both factors are measured on seeded denoising runs. What the model leaves out (errors that amplify or cancel
one another) the plan's search settles by sampling, see `plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.attention.blocks import SiteBlocks
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import timestep_bin
from trtconvert.calib.candidates import Candidate, candidates_of, error_columns
from trtconvert.calib.probes import Probes
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.models.denoiser import intercepted
from trtconvert.quant.forward import Int8Layers, Int8Sites

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
    method: str = "exact",
) -> Sensitivity:
    """Measure each site or group of layers in each mode on the model's own trajectories.

    Args:
        sites: their modes do not matter.
        modes: to measure.
        layers: their modes do not matter either; groups: their names, by the first layer that reads the same tensor.
        layer_modes: to measure, of each group, `MODULATED` among them, which needs scales of changes, and keeps caches from step
            to step.
        blocks: of the sites that may have block masks; shares: of attention that may be lost.
        seeds: of the samples that are drawn, one batch.
        steps: denoising steps; at least one per bin, so that every bin is seen.
        done: called `steps + bins + 1` times.
        method: "exact" runs the model once for each candidate in every step. "probes" measures what each candidate changes at its
            own output and carries random projections of the prediction back to it, see `Probes`: its cost does not grow with the
            number of sites. "auto" is "exact" for up to `MOST_EXACT` candidates.
    """
    found = candidates_of(model, sites, modes, layers, groups or {}, layer_modes or {}, blocks or {}, shares)
    rows = list(found)
    squared = torch.full((len(rows), bins, error_columns(shares)), math.nan, dtype=torch.float64)
    for row, of_row in enumerate(found.values()):
        squared[row, :, [0, *(candidate.column for candidate in of_row)]] = 0
    every = [(row, candidate) for row, of_row in enumerate(found.values()) for candidate in of_row]
    exact = intercepted(model, lambda call: call.exact())
    bins_of = _bins_of_calls(model, bins)
    visits = torch.zeros(bins, dtype=torch.float64)
    candidates = [candidate for _, candidate in every]
    by_probes = method == "probes" or (method == "auto" and len(every) > MOST_EXACT)
    measure = (
        Probes(model, candidates, draws=DRAWS * bins / steps).errors if by_probes else _one_at_a_time(model, candidates)
    )

    def watched(*inputs: Tensor, **named: Tensor) -> Tensor:
        """The exact output; on the way, the errors of all single choices."""
        given = model.named(inputs, named)
        output, errors = measure(exact, given)
        index = bins_of(inputs, named, len(output)).cpu()
        visits.index_add_(0, index, torch.ones(len(index), dtype=torch.float64))
        # [candidates, B] in one transfer: nothing waits for single candidates.
        of_samples = torch.stack(errors).double().cpu() if errors else torch.zeros(0, len(index))
        for (row, candidate), error in zip(every, of_samples, strict=True):
            squared[row, :, candidate.column].index_add_(0, index, error)
        done()
        return output

    with torch.no_grad():
        samples = model.sample(watched, seeds, steps=steps, solver="ddim")
        error = _of_choices(squared / visits.clamp_min(1)[:, None], len(shares))
        gain = _gains(model, exact, samples, error, visits, seeds, steps, done)
    return Sensitivity(rows, error, gain, visits / visits.sum(), tuple(shares))


MOST_EXACT = 64
"""Candidates up to which each takes a forward of its own in every step: probes take about as long as some twenty forwards."""

DRAWS = 64
"""Projections, of all samples and steps of a timestep bin, that an error is the mean of: its relative standard deviation is about
√(2 / DRAWS) where no direction of the output stands out."""

Measure = Callable[[Denoiser, Mapping[str, Tensor]], tuple[Tensor, list[Tensor]]]
"""(exact denoiser, inputs by name) to its output, and of each candidate the mean squared error of every sample, [B]."""


def _one_at_a_time(model: DiffusionModel, candidates: Sequence[Candidate]) -> Measure:
    """Runs the whole model with one candidate after the other."""
    alone = [intercepted(model, *candidate.handlers()) for candidate in candidates]

    def measure(exact: Denoiser, given: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        output = exact(**given)
        errors = [(one(**given) - output).double().square().flatten(1).mean(1) for one in alone]
        return output, errors

    return measure


def _of_choices(error: Tensor, shares: int) -> Tensor:
    """[…, modes + shares] errors of modes and of masks → […, choices], see `Sensitivity`."""
    of_modes, of_masks = error.split([len(Mode), shares], -1)
    masked = [of_modes + of_masks[..., [level]] for level in range(shares)]
    # The last level computes what DENSE does, of the sites that have levels.
    last = [of_modes + 0 * of_masks[..., :1]] if shares else []
    return torch.cat([of_modes, *masked, *last], -1)


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
                return output + noise.to(output) * here.to(output.device).view(-1, *[1] * (output.dim() - 1))

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
