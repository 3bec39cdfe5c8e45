"""Which steps of a trajectory are computed, and which are extrapolated.

For each number of computed steps a dynamic programme takes the schedule of least modelled error. Its state is the last computed
step and the length of the gap behind it, since an extrapolation depends on the last two computed steps. Errors within a gap add
up as vectors, those of different gaps as squares.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from trtconvert.noise_input import NoiseInput
from trtconvert.reuse.trajectories import Trajectories

LONGEST = 8
"""Steps from one computed step to the next, at most."""

Objective = Literal["mean", "worst"]
"""Of the samples' squared errors, what a schedule makes small."""


@dataclass(frozen=True)
class Schedule:
    """A choice of steps.

    Attributes:
        computed: of each step, whether its prediction is computed; the first one is.
        error: modelled mean squared error of the final samples.
    """

    computed: tuple[bool, ...]
    error: float

    @property
    def count(self) -> int:
        """Steps that are computed."""
        return sum(self.computed)


def all_computed(steps: int) -> Schedule:
    """The schedule that leaves nothing out."""
    return Schedule((True,) * steps, 0.0)


def best_schedules(found: Trajectories, timesteps: Tensor, objective: Objective) -> dict[int, Schedule]:
    """For each number of computed steps the best schedule, as far as there is one whose gaps are no longer than `LONGEST`.

    Args:
        timesteps: [M] of all steps, in the order of denoising, no two equal. Steps outside of what was calibrated are computed.
    """
    timesteps = timesteps.double()
    steps = len(timesteps)
    if steps < 2:
        return {steps: all_computed(steps)} if steps else {}
    cost = _costs_of_gaps(found, timesteps, objective)
    best = torch.full((steps, LONGEST), math.inf, dtype=torch.float64)
    best[0] = cost[0, 0]
    ways: list[Tensor] = []
    schedules = dict[int, Schedule]()
    ends = torch.arange(steps)[:, None] + torch.arange(1, LONGEST + 1) == steps
    for count in range(1, steps + 1):
        at_end = best.masked_fill(~ends, math.inf)
        if (least := float(at_end.min())) < math.inf:
            schedules[count] = Schedule(_walked_back(int(at_end.argmin()), ways, steps), least)
        # Of the state (step, length of its gap) the next computed step, by that length.
        before = torch.full_like(best, math.inf)
        for length in range(1, LONGEST + 1):
            before[length:, length - 1] = best[:-length, length - 1] if length < steps else math.inf
        best, way = (before[:, :, None] + cost).min(1)
        ways.append(way)
    return schedules


def _walked_back(state: int, ways: list[Tensor], steps: int) -> tuple[bool, ...]:
    """
    Args:
        state: the last one, as an index of [steps, LONGEST]; ways: for each count, from a state to the length of the gap before.
    """
    step, length = divmod(state, LONGEST)
    computed = [False] * steps
    computed[step] = True
    for way in reversed(ways):
        before = int(way[step, length])
        step, length = step - before - 1, before
        computed[step] = True
    return tuple(computed)


def least_computed(found: Trajectories, timesteps: Tensor, objective: Objective, limit: float) -> Schedule:
    """The schedule with the fewest computed steps whose modelled error is within a limit."""
    schedules = best_schedules(found, timesteps, objective)
    fitting = [schedule for schedule in schedules.values() if schedule.error <= limit]
    return min(fitting, key=lambda schedule: schedule.count, default=all_computed(len(timesteps)))


def error_of(found: Trajectories, timesteps: Tensor, computed: tuple[bool, ...]) -> Tensor:
    """[S] modelled squared error of each sample under a schedule, all its errors added up as vectors."""
    timesteps = timesteps.double()
    weights, products = found.weights(timesteps), _products(found, timesteps)
    total = torch.zeros(len(timesteps), dtype=torch.float64)
    last: list[int] = []
    for step, now in enumerate(computed):
        if now:
            last = [*last, step][-2:]
        else:
            total += weights[step] * _of_extrapolation(timesteps, last, step)
    return torch.einsum("i,sij,j->s", total, products, total)


def extrapolation(timesteps: Sequence[float], last: Sequence[int], step: int) -> float:
    """How far beyond the last computed prediction another one lies, in units of the way to it from the one before.

    Args:
        last: the last two computed steps; one where there are no more, whose prediction is repeated.
    """
    if len(last) < 2:
        return 0.0
    before, at = (timesteps[index] for index in last)
    return (timesteps[step] - at) / (at - before)


def _of_extrapolation(timesteps: Tensor, last: list[int], step: int) -> Tensor:
    """[M] the error of an extrapolated prediction, as a sum of computed ones."""
    error = torch.zeros(len(timesteps), dtype=torch.float64)
    beyond = extrapolation(timesteps.tolist(), last, step)
    error[step] += 1
    error[last[-1]] -= 1 + beyond
    error[last[0]] += beyond
    return error


def _products(found: Trajectories, timesteps: Tensor) -> Tensor:
    """[S, M, M] products of the predictions at other timesteps."""
    through = found.interpolation(timesteps)
    return through @ found.products @ through.T


def _costs_of_gaps(found: Trajectories, timesteps: Tensor, objective: Objective) -> Tensor:
    """[M, LONGEST, LONGEST] error of a gap: by its computed step, the way to it from the computed one before, and its length.

    Both are counted in steps from 1. The first step has none before: whatever the way, its cost is that of repeating it.
    """
    steps = len(timesteps)
    window = 2 * LONGEST  # steps that a gap's error depends on
    known = found.covers(timesteps)
    inside = timesteps.clamp(*found.timesteps.aminmax())
    weights = found.weights(inside)
    # Padded, so that every window is whole.
    products = torch.nn.functional.pad(_products(found, inside), (LONGEST, LONGEST, LONGEST, LONGEST))
    windows = torch.stack(
        [products[:, at : at + window, at : at + window] for at in range(steps)]
    )  # of each step [S, w, w]
    padded = torch.nn.functional.pad(weights, (0, LONGEST))
    times = torch.cat([timesteps, timesteps[-1:].expand(LONGEST)])
    cost = torch.full((steps, LONGEST, LONGEST), math.inf, dtype=torch.float64)
    index = torch.arange(steps)
    for distance in range(1, LONGEST + 1):
        before = index - distance
        has = before >= 0
        way = timesteps - timesteps[before.clamp_min(0)]
        error = torch.zeros(steps, window, dtype=torch.float64)
        for length in range(1, LONGEST + 1):
            if length > 1:
                step = index + length - 1
                weight = padded[step]
                beyond = torch.where(has, (times[step] - timesteps) / way, 0.0)
                error[:, LONGEST + length - 1] += weight
                error[:, LONGEST] -= weight * (1 + beyond)
                error[:, LONGEST - distance] += weight * beyond
            squared = torch.einsum("ti,tsij,tj->ts", error, windows, error)
            found_cost = squared.mean(1) if objective == "mean" else squared.amax(1)
            cost[:, distance - 1, length - 1] = found_cost.clamp_min(0)
        cost[~has & (index > 0), distance - 1] = math.inf
    # A gap ends with the trajectory. Extrapolations to and from what was not calibrated are not known: it is computed.
    unknown = torch.nn.functional.pad(~known, (LONGEST, LONGEST), value=False)
    for distance in range(1, LONGEST + 1):
        left_out = unknown[LONGEST:][:steps] | unknown[LONGEST - distance :][:steps]
        for length in range(2, LONGEST + 1):
            left_out = left_out | unknown[LONGEST + length - 1 :][:steps]
            cost[left_out, distance - 1, length - 1] = math.inf
    beyond_end = index[:, None] + torch.arange(1, LONGEST + 1) > steps
    return cost.masked_fill_(beyond_end[:, None], math.inf)


class Scheduler(Protocol):
    """What decides which steps a denoiser leaves out.

    Attributes:
        timestep_input, timestep_place: the timestep among the denoiser's inputs.
        noise_input: what that one holds, where it is no timestep.
    """

    @property
    def timestep_input(self) -> str: ...

    @property
    def timestep_place(self) -> int: ...

    @property
    def noise_input(self) -> NoiseInput | None: ...

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """The steps of one trajectory.

        Args:
            timesteps: of all its calls, in their order; places, where the denoiser is told the noise otherwise.
        """
        ...


@dataclass(frozen=True, eq=False)
class Reuse:
    """A `Scheduler` of any trajectory of a model.

    Attributes:
        found: what was measured of its trajectories.
        objective: of the schedules.
        limit: on the modelled error of a schedule.
        timestep_input, timestep_place, noise_input: see `Scheduler`.
    """

    found: Trajectories
    objective: Objective
    limit: float
    timestep_input: str = "timestep"
    timestep_place: int = 1
    noise_input: NoiseInput | None = None

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """See `Scheduler`. Where timesteps do not go one way, all are computed."""
        return _scheduled(self, tuple(map(float, timesteps)))


def reuse_of(denoiser: Any) -> Scheduler | None:
    """Which steps a denoiser leaves out; None for one that computes all."""
    return getattr(denoiser, "reuse", None)


@functools.lru_cache(maxsize=64)
def _scheduled(reuse: Reuse, timesteps: tuple[float, ...]) -> Schedule:
    falls = float(reuse.found.timesteps[0]) > float(reuse.found.timesteps[-1])
    goes_on = all((x > y) if falls else (x < y) for x, y in pairwise(timesteps))
    if not goes_on or len(timesteps) < 2:
        return all_computed(len(timesteps))
    return least_computed(reuse.found, torch.tensor(timesteps, dtype=torch.float64), reuse.objective, reuse.limit)
