"""Sensitivity: the cost in quality of each choice of a mode, at the model's output and in the final samples.

The error of a plan is modelled as a sum over sites and timestep bins: the squared error that the site's mode alone causes at the
denoiser's output, times the bin's gain, the squared error in the final samples per unit of squared error at the output. Both
factors are measured on seeded denoising runs. The model ignores errors that amplify or cancel each other; the plan's search
covers these by sampling, see `plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.attention.blocks import SiteBlocks
from trtconvert.bars import NoBar, Steps
from trtconvert.calib.candidates import MOST_EXACT, PROBES_FORWARDS, Candidate, candidates_of
from trtconvert.calib.distributed import ALONE, Ranks
from trtconvert.calib.probes import Probes
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.denoiser import intercepted
from trtconvert.models.drawings import WatchedSampler, with_progress
from trtconvert.quant.decision import Choice, Plan, Unit
from trtconvert.quant.forward import Int8Layers, Int8Sites


@dataclass(frozen=True)
class Sensitivity:
    """S units, T timestep bins, and as many choices as the unit with the most choices.

    Attributes:
        units: in the order of the first axis.
        error: [S, T, choices] mean squared error at the denoiser's output if one unit alone takes a choice; NaN for choices that
            were not measured, and after the last choice of a unit with fewer.
        gain: [T] squared error in the final samples per unit of squared error at the output, in every step of one bin.
        steps: [T] share of the denoising steps in each bin.
        power: [T] mean square of the denoiser's output.
    """

    units: Sequence[Unit]
    error: Tensor
    gain: Tensor
    steps: Tensor
    power: Tensor

    def cost(self) -> Tensor:
        """[S, T, choices] modelled squared error that each choice adds to the final samples.

        Exact choices cost nothing, whatever the gain. Choices that a search may not take cost infinity, and so do choices without
        a measurement: excluded modes, inexact choices in a bin without steps, and choices that gave NaN or Inf. Layers are an
        exception, as a layer is INT8 in all bins or none: a bin without steps costs a layer nothing.
        """
        cost = (self.error * self.gain[:, None]).nan_to_num(nan=math.inf, posinf=math.inf)
        unseen = self.steps == 0
        cost[:, unseen] = math.inf
        for row, unit in enumerate(self.units):
            if unit.kind == "layer":
                known = self.error[row].isfinite().any(0)
                cost[row, unseen] = torch.where(known, 0.0, cost[row, unseen])
            for column, choice in enumerate(unit.choices):
                if choice.exact:
                    cost[row, :, column] = 0
                elif choice in unit.compared:
                    cost[row, :, column] = math.inf
        return cost

    def relative(self) -> Tensor:
        """[S, T, choices] squared error that each choice adds to the output, in terms of the output's mean square. Zero for
        exact choices, in bins without steps, and for choices without a measurement."""
        found = (self.error / self.power[:, None]).nan_to_num(nan=0.0)
        found[:, self.steps == 0] = 0
        for row, unit in enumerate(self.units):
            for column, choice in enumerate(unit.choices):
                if choice.exact:
                    found[row, :, column] = 0
        return found

    def prediction_error(self, plan: Plan) -> Tensor:
        """[T] modelled relative L2 error of the output of a plan."""
        taken = torch.tensor([[unit.choices.index(choice) for choice in plan.choices_of(unit)] for unit in self.units])
        return self.relative().gather(-1, taken[..., None]).sum((0, 2)).sqrt()


def measure_sensitivity(
    model: DiffusionModel,
    units: Sequence[Unit],
    sites: Int8Sites,
    bins: int,
    *,
    layers: Int8Layers | None = None,
    blocks: Mapping[str, SiteBlocks] | None = None,
    seeds: range,
    steps: int,
    bar: Steps | None = None,
    method: str = "exact",
    ranks: Ranks = ALONE,
) -> Sensitivity:
    """Measures each unit in each of its choices on the model's own trajectories.

    Args:
        units: of these sites and layers.
        sites: their modes are ignored.
        layers: their modes are ignored. Layers that may quantise deltas have scales of deltas, and keep caches from step to step.
        blocks: of the sites that may have block masks.
        seeds: of the samples, one batch.
        steps: denoising steps; at least one per bin, so that every bin is measured.
        bar: receives further steps, each as long as a drawing of all samples.
        method: "exact" runs the model once for each candidate in every step. "probes" measures each candidate's error at its own
            output and projects it to the prediction, see `Probes`; its cost does not grow with the number of sites. "auto" is
            "exact" for up to `MOST_EXACT` candidates.
        ranks: processes that share the candidates of "exact", and the bins' gains; all call this function with the same
            arguments and get the same result. All repeat the one drawing of "probes".
    """
    candidates = candidates_of(model, units, sites, layers, blocks or {})
    exact = _Remembering(graphed(model, intercepted(model, lambda call: call.exact())), model)
    visits = torch.zeros(bins, dtype=torch.float64)
    by_probes = method == "probes" or (method == "auto" and len(candidates) > MOST_EXACT)
    own = candidates if by_probes else candidates[ranks.rank :: ranks.size]
    squared = torch.zeros(1 + len(own), bins, dtype=torch.float64)  # of the output, then of each error

    bar = bar or NoBar()
    drawings = 1 + (PROBES_FORWARDS if by_probes else len(own))
    bar.more(drawings + bins)
    if by_probes:
        calls = steps * WatchedSampler(model.sample).chunks(len(seeds))
        measure = Probes(model, own, draws=DRAWS * bins / calls).errors
    else:
        measure = _one_at_a_time(model, own)

    def watched(*inputs: Tensor, **named: Tensor) -> Tensor:
        """Returns the exact output and measures the errors of all single choices."""
        given = model.named(inputs, named)
        output, errors = measure(exact.denoiser, given)
        exact.remember(given, output)
        index = _bins_of(model, bins, given, len(output)).cpu()
        visits.index_add_(0, index, torch.ones(len(index), dtype=torch.float64))
        of_output = output.float().square().flatten(1).mean(1).to(errors[0].dtype if errors else torch.float32)
        # [1 + own, B] in one transfer, so that the GPU synchronises once.
        squared.index_add_(1, index, torch.stack([of_output, *errors]).double().cpu())
        return output

    with torch.no_grad():
        samples = with_progress(model, bar, drawings).sample(watched, seeds, steps=steps, solver="ddim")
        bar.step(drawings)
        power, squared = squared[0] / visits.clamp_min(1), squared[1:]
        if by_probes:
            squared = ranks.broadcast(squared)
        else:
            every = ranks.gather(squared)
            squared = torch.zeros(len(candidates), bins, dtype=torch.float64)
            for rank, of_rank in enumerate(every):
                squared[rank :: ranks.size] = of_rank
        error = _of_choices(units, candidates, squared / visits.clamp_min(1))
        gain = _gains(with_progress(model, bar), exact, samples, error, visits, seeds, steps, bar, ranks)
    return Sensitivity(units, error, gain, visits / visits.sum(), power)


DRAWS = 64
"""Projections per error, over all samples and steps of a timestep bin: the relative standard deviation of the error is about
√(2 / DRAWS) if no direction of the output dominates."""

Measure = Callable[[Denoiser, Mapping[str, Tensor]], tuple[Tensor, list[Tensor]]]
"""(exact denoiser, inputs by name) → (output, mean squared error [B] of each candidate)."""


def _one_at_a_time(model: DiffusionModel, candidates: Sequence[Candidate]) -> Measure:
    """Returns a measure that runs the whole model with one candidate after the other."""
    alone = [intercepted(model, *candidate.handlers()) for candidate in candidates]

    def measure(exact: Denoiser, given: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        output = exact(**given)
        errors = [(one(**given) - output).double().square().flatten(1).mean(1) for one in alone]
        return output, errors

    return measure


def _of_choices(units: Sequence[Unit], candidates: Sequence[Candidate], errors: Tensor) -> Tensor:
    """[candidates, T] → [S, T, choices], see `Sensitivity`: errors of quantisation and of block masks add up."""
    measured: dict[tuple[Unit, Choice], Tensor] = {
        (candidate.unit, candidate.choice): error for candidate, error in zip(candidates, errors, strict=True)
    }
    most = max(len(unit.choices) for unit in units)
    found = errors.new_full((len(units), errors.shape[1], most), math.nan)
    for row, unit in enumerate(units):
        for column, choice in enumerate(unit.choices):
            if all((unit, part) in measured for part in choice.parts):
                parts = [measured[unit, part] for part in choice.parts]
                found[row, :, column] = sum(parts, torch.zeros(errors.shape[1]))
    return found


class _Remembering:
    """The exact denoiser with a cache of one drawing: drawings that are disturbed from some step on share the steps before it."""

    def __init__(self, denoiser: Denoiser, model: DiffusionModel) -> None:
        self.denoiser, self._model = denoiser, model
        self._calls: list[tuple[Tensor, Tensor, Tensor]] = []
        self._next = 0

    def _noised(self, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the inputs that change along a trajectory."""
        return given[self._model.inputs[0].name], given[self._model.timestep_input]

    def remember(self, given: Mapping[str, Tensor], output: Tensor) -> None:
        """Stores the next call of the drawing and its output."""
        x, timestep = self._noised(given)
        self._calls.append((x.clone(), timestep.clone(), output.clone()))

    def begin(self) -> None:
        """Starts the drawing again."""
        self._next = 0

    def __call__(self, **given: Tensor) -> Tensor:
        x, timestep = self._noised(given)
        if self._next < len(self._calls):
            before, before_timestep, output = self._calls[self._next]
            self._next += 1
            if torch.equal(timestep, before_timestep) and torch.equal(x, before):
                return output.clone()
        return self.denoiser(**given)


def _gains(
    model: DiffusionModel,
    exact: _Remembering,
    samples: Tensor,
    error: Tensor,
    visits: Tensor,
    seeds: range,
    steps: int,
    bar: Steps,
    ranks: Ranks,
) -> Tensor:
    """Disturbs the output in one bin at a time by noise as large as the sites' errors, and measures the samples' error. The
    processes take turns with the bins."""
    bins = len(visits)
    gain = torch.zeros(bins, dtype=torch.float64)
    for index in range(bins):
        variance = float(error[:, index].nan_to_num(posinf=0.0).amax(-1).sum())
        if index % ranks.size != ranks.rank:
            bar.step()
        elif visits[index] and variance:
            generator = torch.Generator().manual_seed(index)

            def disturbed(*inputs: Tensor, index: int = index, std: float = variance**0.5, **named: Tensor) -> Tensor:
                given = model.named(inputs, named)
                output = exact(**given)
                here = _bins_of(model, bins, given, len(output)) == index
                noise = torch.randn(output.shape, generator=generator) * std  # noqa: B023 (used within the iteration)
                return output + noise.to(output) * here.to(output.device).view(-1, *[1] * (output.dim() - 1))

            exact.begin()
            moved = model.sample(disturbed, seeds, steps=steps, solver="ddim")
            gain[index] = float((moved - samples).double().square().mean()) / variance
            bar.step()
        else:
            bar.skip()
    return torch.stack(ranks.gather(gain)).sum(0)


def _bins_of(model: DiffusionModel, bins: int, given: Mapping[str, Tensor], batch: int) -> Tensor:
    """[B] timestep bin of every element of a denoiser call with inputs by name."""
    timestep = given[model.timestep_input].reshape(-1).expand(batch)
    return model.bin_of(timestep, bins)
