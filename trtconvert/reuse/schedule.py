"""Schedules: which steps of a trajectory are computed, and which are extrapolated.

For each number of computed steps a dynamic programme finds the schedule of least modelled error. Its state is the last computed
step and the length of the gap before that step, as an extrapolation depends on the last two computed steps. Errors in one gap add
up as vectors, errors of different gaps as squares. Least squares over the calibrated samples determine how far an extrapolation
goes, and how much the next computed step corrects.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtconvert.noise_input import NoiseInput
from trtconvert.reuse.trajectories import Trajectories

RESPONSE = 0.35
"""Share of a gap's error that remains after the correction, besides the correction's own error: by then the denoiser has
responded to the shifted sample."""

LONGEST = 8
"""Largest number of steps from one computed step to the next."""

Objective = Literal["mean", "worst"]
"""The aggregate of the samples' squared errors that a schedule minimises."""


@dataclass(frozen=True)
class Schedule:
    """A choice of steps.

    Attributes:
        computed: for each step, true if its prediction is computed; the first step is.
        error: modelled mean squared error of the final samples.
        ahead: for each step, the extrapolation's factor: how far its prediction lies beyond the last computed prediction, in
            units of the difference of the last two computed predictions; empty: linear in the timestep.
        corrections: for each step, the factor of its correction, see `trtconvert.reuse.trajectories`; empty: no corrections.
    """

    computed: tuple[bool, ...]
    error: float
    ahead: tuple[float, ...] = ()
    corrections: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        """Number of computed steps."""
        return sum(self.computed)

    def before(self, step: int) -> list[int]:
        """Returns the last two computed steps before a step, or as many as there are."""
        return self._before[step]

    @functools.cached_property
    def _before(self) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for step, computed in enumerate(self.computed):
            found.append([*found[-1][-1:], step] if computed else found[-1])
        return found

    def correction(self, step: int) -> float:
        """Returns the factor of a step's correction; 0: no correction."""
        return self.corrections[step] if self.corrections else 0.0


def all_computed(steps: int) -> Schedule:
    """Returns the schedule that computes all steps."""
    return Schedule((True,) * steps, 0.0)


def best_schedules(found: Trajectories, timesteps: Tensor, objective: Objective) -> dict[int, Schedule]:
    """Returns the best schedule for each number of computed steps that allows gaps of at most `LONGEST`.

    Args:
        timesteps: [M] of all steps, in the order of denoising, all different. Steps outside of the calibrated range are computed.
    """
    timesteps = timesteps.double()
    steps = len(timesteps)
    if steps < 2:
        return {steps: all_computed(steps)} if steps else {}
    gaps = _gaps(found, timesteps, objective)
    cost = gaps.cost
    best = torch.full((steps, LONGEST), math.inf, dtype=torch.float64)
    best[0] = cost[0, 0]
    ways: list[Tensor] = []
    schedules = dict[int, Schedule]()
    ends = torch.arange(steps)[:, None] + torch.arange(1, LONGEST + 1) == steps
    for count in range(1, steps + 1):
        at_end = best.masked_fill(~ends, math.inf)
        if (least := float(at_end.min())) < math.inf:
            computed = _walked_back(int(at_end.argmin()), ways, steps)
            schedules[count] = gaps.schedule(computed, least)
        # The next computed step, from the state (step, length of the gap), by that length.
        before = torch.full_like(best, math.inf)
        for length in range(1, LONGEST + 1):
            before[length:, length - 1] = best[:-length, length - 1] if length < steps else math.inf
        best, way = (before[:, :, None] + cost).min(1)
        ways.append(way)
    return schedules


def _walked_back(state: int, ways: list[Tensor], steps: int) -> tuple[bool, ...]:
    """Follows the dynamic programme back from the last state, an index of [steps, LONGEST], to the computed steps; ways: for each
    count, maps a state to the length of the gap before."""
    step, length = divmod(state, LONGEST)
    computed = [False] * steps
    computed[step] = True
    for way in reversed(ways):
        before = int(way[step, length])
        step, length = step - before - 1, before
        computed[step] = True
    return tuple(computed)


def least_computed(found: Trajectories, timesteps: Tensor, objective: Objective, limit: float) -> Schedule:
    """Returns the schedule with the fewest computed steps whose modelled error is within a limit."""
    schedules = best_schedules(found, timesteps, objective)
    fitting = [schedule for schedule in schedules.values() if schedule.error <= limit]
    return min(fitting, key=lambda schedule: schedule.count, default=all_computed(len(timesteps)))


def stated(found: Trajectories, timesteps: Tensor, computed: tuple[bool, ...]) -> Schedule:
    """Returns a schedule of given computed steps, with fitted extrapolations and corrections. Its error is the samples' mean."""
    timesteps = timesteps.double()
    schedule = _gaps(found, timesteps, "mean").schedule(computed, 0.0)
    return replace(schedule, error=float(error_of(found, timesteps, schedule).mean()))


def error_of(found: Trajectories, timesteps: Tensor, schedule: Schedule) -> Tensor:
    """[S] modelled squared error of each sample under a schedule, with all errors added as vectors."""
    timesteps = timesteps.double()
    weights, gain = found.weights(timesteps), found.gain_at(timesteps)
    products = _products(found, timesteps)
    steps = len(timesteps)
    # Rows: errors after the corrections, and errors before them.
    left, answered, gap = torch.zeros(3, steps, dtype=torch.float64)
    last: list[int] = []
    for step, now in enumerate(schedule.computed):
        # The weight of a gap, and of its correction, is the weight of its first skipped step.
        weight = gain[last[-1] + 1 if last else step] * weights[step]
        if not now:
            gap = gap + weight * _of_extrapolation(timesteps, schedule, last, step)
            continue
        if factor := schedule.correction(step):
            left = left - factor * weight * _of_extrapolation(timesteps, schedule, last, step)
            answered = answered + gap
        left, gap, last = left + gap, torch.zeros_like(gap), [*last, step][-2:]
    errors = torch.stack([left + gap, RESPONSE * answered])
    return torch.einsum("ri,sij,rj->s", errors, products, errors)


def extrapolation(timesteps: Sequence[float], schedule: Schedule, last: Sequence[int], step: int) -> float:
    """Returns the factor of an extrapolation beyond the last computed prediction, in units of the last two's difference.

    Args:
        last: the last two computed steps; a single step is repeated. If they are not the schedule's, the extrapolation is linear
            in the timestep.
    """
    if len(last) < 2:
        return 0.0
    if schedule.ahead and list(last) == schedule.before(step):
        return schedule.ahead[step]
    before, at = (timesteps[index] for index in last)
    return (timesteps[step] - at) / (at - before)


def _of_extrapolation(timesteps: Tensor, schedule: Schedule, last: list[int], step: int) -> Tensor:
    """[M] error of an extrapolated prediction, as a sum of computed predictions."""
    error = torch.zeros(len(timesteps), dtype=torch.float64)
    beyond = extrapolation(timesteps.tolist(), schedule, last, step)
    error[step] += 1
    error[last[-1]] -= 1 + beyond
    error[last[0]] += beyond
    return error


def _products(found: Trajectories, timesteps: Tensor) -> Tensor:
    """[S, M, M] products of the predictions at other timesteps than the calibrated ones."""
    through = found.interpolation(timesteps)
    return through @ found.products @ through.T


@dataclass(frozen=True)
class _Gaps:
    """All possible gaps of a schedule, by computed step, distance from the computed step before it, and length of the gap.

    Distance and length are in steps from 1. The first step has no computed step before it: for any distance its prediction is
    repeated.

    Attributes:
        cost: [M, LONGEST, LONGEST] modelled squared error.
        ahead: the same shape, factor for the computed step after the gap, see `Schedule`; steps in the gap take those of shorter
            gaps.
        corrections: the same shape, factor at the computed step after the gap.
    """

    cost: Tensor
    ahead: Tensor
    corrections: Tensor

    def schedule(self, computed: tuple[bool, ...], error: float) -> Schedule:
        """Returns the schedule of computed steps. A gap longer than `LONGEST` makes it linear, without corrections."""
        if all(computed):
            return all_computed(len(computed))
        ahead, corrections = [0.0] * len(computed), [0.0] * len(computed)
        places = [step for step, now in enumerate(computed) if now]
        for before, at, end in zip([0, *places], places, [*places[1:], len(computed)], strict=False):
            distance = max(at - before, 1)
            if max(distance, end - at) > LONGEST:
                return Schedule(computed, error)
            ways, factors = self.ahead[at, distance - 1].tolist(), self.corrections[at, distance - 1].tolist()
            for step in range(at + 1, min(end + 1, len(computed))):
                ahead[step] = ways[step - at - 1]
            if end < len(computed):
                corrections[end] = factors[end - at - 1]
        return Schedule(computed, error, tuple(ahead), tuple(corrections))


def _gaps(found: Trajectories, timesteps: Tensor, objective: Objective) -> _Gaps:
    """Computes the cost of every gap, and its fitted factors."""
    steps = len(timesteps)
    known = found.covers(timesteps)
    inside = timesteps.clamp(*found.timesteps.aminmax())
    gain = found.gain_at(inside)
    # Padded, so that every window of steps that a gap's error depends on is complete.
    window = 2 * LONGEST + 1
    products = pad(_products(found, inside), (LONGEST, LONGEST + 1) * 2)
    windows = torch.stack([products[:, at : at + window, at : at + window] for at in range(steps)])  # [M, S, w, w]
    weights, fits = pad(found.weights(inside), (0, LONGEST + 1)), pad(known.double(), (0, LONGEST + 1))
    weight_of_gap = torch.cat([gain[1:], gain[-1:]]).square()  # the weight of the first skipped step
    gaps = _Gaps(*torch.zeros(3, steps, LONGEST, LONGEST, dtype=torch.float64))
    index = torch.arange(steps)

    def product(x: Tensor, y: Tensor) -> Tensor:
        """[M, S] ⟨x, y⟩ of each sample, for sums of predictions in each window."""
        return torch.einsum("ti,tsij,tj->ts", x, windows, y)

    for distance in range(1, LONGEST + 1):
        error = torch.zeros(steps, window, dtype=torch.float64)
        for length in range(1, LONGEST + 1):
            behind = index + length
            line = _line(timesteps, distance, length)
            if found.fitted:
                way, sought = _sum(steps, {0: 1, -distance: -1}), _sum(steps, {length: 1, 0: -1})
                fitted = product(way, sought).mean(1) / product(way, way).mean(1).clamp_min(1e-30)
                line = torch.where((index >= distance) & (fits[behind] > 0), fitted, line)
            missed = _sum(steps, {length: 1, 0: -1 - line, -distance: line})
            squared = torch.zeros(steps, products.shape[0], dtype=torch.float64)
            if length > 1:
                weighed = weights[behind][:, None] * missed
                fitted = product(error, weighed).mean(1) / product(weighed, weighed).mean(1).clamp_min(1e-30)
                factor = gaps.corrections[:, distance - 1, length - 1] = found.correction * fits[behind] * fitted
                left = error - factor[:, None] * weighed
                squared = product(left, left) + RESPONSE**2 * product(error, error) * (factor != 0)[:, None]
            of_samples = squared.mean(1) if objective == "mean" else squared.amax(1)
            gaps.cost[:, distance - 1, length - 1] = weight_of_gap * of_samples.clamp_min(0)
            gaps.ahead[:, distance - 1, length - 1] = line
            error = error + weights[behind][:, None] * missed
        gaps.cost[(index < distance) & (index > 0), distance - 1] = math.inf
    gaps.cost.masked_fill_(_impossible(known), math.inf)
    return gaps


def _line(timesteps: Tensor, distance: int, length: int) -> Tensor:
    """[M] factor of each computed step's extrapolation that is linear in the timestep."""
    index = torch.arange(len(timesteps))
    before, behind = (index - distance).clamp_min(0), (index + length).clamp_max(len(index) - 1)
    beyond = (timesteps[behind] - timesteps) / (timesteps - timesteps[before])
    return torch.where(index >= distance, beyond, 0.0)


def _sum(steps: int, factors: Mapping[int, Tensor | float]) -> Tensor:
    """[M, w] a sum of predictions, by their offsets in the window of each step."""
    found = torch.zeros(steps, 2 * LONGEST + 1, dtype=torch.float64)
    for place, factor in factors.items():
        found[:, LONGEST + place] += factor
    return found


def _impossible(known: Tensor) -> Tensor:
    """[M, LONGEST, LONGEST] true for impossible gaps: beyond the end of the trajectory, or with extrapolations from or to steps
    outside of the calibrated range."""
    steps, index = len(known), torch.arange(len(known))
    found = (index[:, None] + torch.arange(1, LONGEST + 1) > steps)[:, None].repeat(1, LONGEST, 1)
    unknown = pad(~known, (LONGEST, LONGEST), value=False)
    for distance in range(1, LONGEST + 1):
        left_out = unknown[LONGEST:][:steps] | unknown[LONGEST - distance :][:steps]
        for length in range(2, LONGEST + 1):
            left_out = left_out | unknown[LONGEST + length - 1 :][:steps]
            found[:, distance - 1, length - 1] |= left_out
    return found


class Scheduler(Protocol):
    """Decides which steps a denoiser skips.

    Attributes:
        timestep_input, timestep_place: name and position of the denoiser's timestep input.
        noise_input: maps the timestep input to places; None if it holds DDPM timesteps.
    """

    @property
    def timestep_input(self) -> str: ...

    @property
    def timestep_place(self) -> int: ...

    @property
    def noise_input(self) -> NoiseInput | None: ...

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """Returns the schedule of one trajectory from all its timesteps in order; places if there is a `noise_input`."""
        ...


@dataclass(frozen=True, eq=False)
class Reuse:
    """A `Scheduler` for any trajectory of a model.

    Attributes:
        found: the model's measured trajectories.
        objective: objective of the schedules.
        limit: limit on the modelled error of a schedule.
        timestep_input, timestep_place, noise_input: see `Scheduler`.
    """

    found: Trajectories
    objective: Objective
    limit: float
    timestep_input: str = "timestep"
    timestep_place: int = 1
    noise_input: NoiseInput | None = None

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """See `Scheduler`. If timesteps are not monotonic, all steps are computed."""
        return _scheduled(self, tuple(map(float, timesteps)))


def reuse_of(denoiser: Any) -> Scheduler | None:
    """Returns the scheduler of a denoiser; None if the denoiser computes all steps."""
    return getattr(denoiser, "reuse", None)


@functools.lru_cache(maxsize=64)
def _scheduled(reuse: Reuse, timesteps: tuple[float, ...]) -> Schedule:
    falls = float(reuse.found.timesteps[0]) > float(reuse.found.timesteps[-1])
    goes_on = all((x > y) if falls else (x < y) for x, y in pairwise(timesteps))
    if not goes_on or len(timesteps) < 2:
        return all_computed(len(timesteps))
    return least_computed(reuse.found, torch.tensor(timesteps, dtype=torch.float64), reuse.objective, reuse.limit)
