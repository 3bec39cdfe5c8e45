"""Schedules: which steps of a trajectory are computed, and which are extrapolated.

For each number of computed steps a dynamic programme finds the schedule of least modelled error. Its state is the last computed
step and the length of the gap before that step, as an extrapolation depends on the last two computed steps. Errors in one gap add
up as vectors, errors of different gaps as squares. Least squares over the calibrated samples determine the factors of an
extrapolation, and how much the next computed step corrects.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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

RIDGE = 1e-9
"""Regularisation of fits to basis vectors of unit length: the last two computed predictions may be nearly parallel."""

SAME = 1.5e-3
"""Tolerance of equal timesteps, relative to the range of timesteps: some pipelines count timesteps from 0, and some from 1. See
`trtconvert.runtime.reuse.tolerance` for narrow types."""

Factors = tuple[float, float, float]
"""Factors of an extrapolation: of the last computed prediction, of the one before, and of the skipped call's noisy sample."""

Objective = Literal["mean", "worst"]
"""The aggregate of the samples' squared errors that a schedule minimises."""


@dataclass(frozen=True)
class Schedule:
    """A choice of steps.

    Attributes:
        computed: for each step, true if its prediction is computed; the first step is.
        error: modelled mean squared error of the final samples.
        factors: for each step, those of its extrapolation; empty: linear in the timestep.
        corrections: for each step, the factor of its correction, see `trtconvert.reuse.trajectories`; empty: no corrections.
    """

    computed: tuple[bool, ...]
    error: float
    factors: tuple[Factors, ...] = ()
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
    return dict(_best_by_count(found, timesteps, objective))


def _best_by_count(found: Trajectories, timesteps: Tensor, objective: Objective) -> Iterator[tuple[int, Schedule]]:
    """Yields the entries of `best_schedules`, from the fewest computed steps."""
    timesteps = timesteps.double()
    steps = len(timesteps)
    if steps < 2:
        if steps:
            yield steps, all_computed(steps)
        return
    gaps = _gaps(found, timesteps, objective)
    cost = gaps.cost
    best = torch.full((steps, LONGEST), math.inf, dtype=torch.float64)
    best[0] = cost[0, 0]
    ways: list[Tensor] = []
    ends = torch.arange(steps)[:, None] + torch.arange(1, LONGEST + 1) == steps
    for count in range(1, steps + 1):
        at_end = best.masked_fill(~ends, math.inf)
        if (least := float(at_end.min())) < math.inf:
            computed = _walked_back(int(at_end.argmin()), ways, steps)
            yield count, gaps.schedule(computed, least)
        # The next computed step, from the state (step, length of the gap), by that length.
        before = torch.full_like(best, math.inf)
        for length in range(1, LONGEST + 1):
            before[length:, length - 1] = best[:-length, length - 1] if length < steps else math.inf
        best, way = (before[:, :, None] + cost).min(1)
        ways.append(way)


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
    schedules = (schedule for _, schedule in _best_by_count(found, timesteps, objective))
    return next((schedule for schedule in schedules if schedule.error <= limit), all_computed(len(timesteps)))


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
    # Rows: errors after the corrections, and errors before them.
    left, answered, gap = torch.zeros(3, products.shape[1], dtype=torch.float64)
    last: list[int] = []
    for step, now in enumerate(schedule.computed):
        # The weight of a gap, and of its correction, is the weight of its first skipped step.
        weight = gain[last[-1] + 1 if last else step] * weights[step]
        if not now:
            gap = gap + weight * _of_extrapolation(timesteps, schedule, last, step, len(gap))
            continue
        if factor := schedule.correction(step):
            left = left - factor * weight * _of_extrapolation(timesteps, schedule, last, step, len(gap))
            answered = answered + gap
        left, gap, last = left + gap, torch.zeros_like(gap), [*last, step][-2:]
    errors = torch.stack([left + gap, RESPONSE * answered])
    return torch.einsum("ri,sij,rj->s", errors, products, errors)


def extrapolation(timesteps: Sequence[float], schedule: Schedule, last: Sequence[int], step: int) -> Factors:
    """Returns the factors of an extrapolation.

    Args:
        last: the last two computed steps, or the only one. If they are not the schedule's, the extrapolation is linear in the
            timestep; a single prediction is repeated.
    """
    if schedule.factors and list(last) == schedule.before(step):
        return schedule.factors[step]
    if len(last) < 2:
        return 1.0, 0.0, 0.0
    before, at = (timesteps[index] for index in last)
    beyond = (timesteps[step] - at) / (at - before)
    return 1 + beyond, -beyond, 0.0


def _of_extrapolation(timesteps: Tensor, schedule: Schedule, last: list[int], step: int, size: int) -> Tensor:
    """[size] error of an extrapolated prediction, as a sum of computed predictions, and of samples behind them."""
    error = torch.zeros(size, dtype=torch.float64)
    of_last, of_before, of_sample = extrapolation(timesteps.tolist(), schedule, last, step)
    error[step] += 1
    error[last[-1]] -= of_last
    error[last[0]] -= of_before
    if of_sample:
        error[len(timesteps) + step] -= of_sample
    return error


def _products(found: Trajectories, timesteps: Tensor) -> Tensor:
    """[S, M, M] products of the predictions, or [S, 2·M, 2·M] with those of the samples, at other timesteps than the calibrated
    ones.

    Between calibrated timesteps a prediction has a part that its neighbours do not show, such as that of the embedding of the
    timestep. Without this part, extrapolations over short distances would seem exact. The part is taken as independent from step
    to step. Samples are sums of predictions over many steps, and have next to none of it.
    """
    return _products_of(found, found.interpolation(timesteps), found.unseen(timesteps))


def _products_of(found: Trajectories, through: Tensor, unseen: Tensor) -> Tensor:
    """See `_products`; through: [M, N] weights of the calibrated predictions, unseen: [S, M] squared size of what these lack."""
    if found.with_samples:
        through, unseen = torch.block_diag(through, through), pad(unseen, (0, len(through)))
    return through @ found.products @ through.T + unseen.diag_embed()


def _windows(found: Trajectories, timesteps: Tensor) -> Tensor:
    """[M, S, w, w] products in the window of each step, 0 beyond the trajectory."""
    kinds, ends = 2 if found.with_samples else 1, (LONGEST, LONGEST + 1)
    through, unseen = pad(found.interpolation(timesteps), (0, 0, *ends)), pad(found.unseen(timesteps), ends)
    windows: list[Tensor] = []
    for first in range(0, len(timesteps), _AT_ONCE):
        count = min(_AT_ONCE, len(timesteps) - first)
        some = slice(first, first + count + _WINDOW)
        products = _products_of(found, through[some], unseen[:, some])
        products = products.unflatten(1, (kinds, -1)).unflatten(3, (kinds, -1))
        window = [slice(at, at + _WINDOW) for at in range(count)]
        windows += [products[:, :, at][..., at].flatten(3).flatten(1, 2) for at in window]
    return torch.stack(windows)


@dataclass(frozen=True)
class _Gaps:
    """All possible gaps of a schedule, by computed step, distance from the computed step before it, and length of the gap.

    Distance and length are in steps from 1. The first step has no computed step before it: for any distance its prediction is
    repeated.

    Attributes:
        cost: [M, LONGEST, LONGEST] modelled squared error.
        factors: [M, LONGEST, LONGEST, 3] `Factors` for the computed step after the gap; steps in the gap take those of shorter
            gaps.
        corrections: [M, LONGEST, LONGEST] factor at the computed step after the gap.
    """

    cost: Tensor
    factors: Tensor
    corrections: Tensor

    def schedule(self, computed: tuple[bool, ...], error: float) -> Schedule:
        """Returns the schedule of computed steps. A gap longer than `LONGEST` makes it linear, without corrections."""
        if all(computed):
            return all_computed(len(computed))
        factors: list[Factors] = [(1.0, 0.0, 0.0)] * len(computed)
        corrections = [0.0] * len(computed)
        places = [step for step, now in enumerate(computed) if now]
        for before, at, end in zip([0, *places], places, [*places[1:], len(computed)], strict=False):
            distance = max(at - before, 1)
            if max(distance, end - at) > LONGEST:
                return Schedule(computed, error)
            of_gap = self.factors[at, distance - 1].tolist()
            for step in range(at + 1, min(end + 1, len(computed))):
                factors[step] = tuple(of_gap[step - at - 1])
            if end < len(computed):
                corrections[end] = float(self.corrections[at, distance - 1, end - at - 1])
        return Schedule(computed, error, tuple(factors), tuple(corrections))


def _gaps(found: Trajectories, timesteps: Tensor, objective: Objective) -> _Gaps:
    """Computes the cost of every gap, and its fitted factors."""
    steps = len(timesteps)
    known = found.covers(timesteps)
    inside = timesteps.clamp(*found.timesteps.aminmax())
    gain = found.gain_at(inside)
    kinds = 2 if found.with_samples else 1
    windows = _windows(found, inside)
    weights, fits = pad(found.weights(inside), (0, LONGEST + 1)), pad(known.double(), (0, LONGEST + 1))
    weight_of_gap = torch.cat([gain[1:], gain[-1:]]).square()  # the weight of the first skipped step
    gaps = _Gaps(*(torch.zeros(steps, LONGEST, LONGEST, *of, dtype=torch.float64) for of in ((), (3,), ())))
    index = torch.arange(steps)
    mean = windows.mean(1)
    for distance in range(1, LONGEST + 1):
        error, errors = torch.zeros(steps, kinds * _WINDOW, dtype=torch.float64), list[Tensor]()
        for length in range(1, LONGEST + 1):
            behind = index + length
            beyond = _beyond(timesteps, distance, length)
            factors = torch.stack([1 + beyond, -beyond, torch.zeros_like(beyond)], 1)
            last, before, ahead = (_one(steps, kinds, place) for place in (0, -distance, length))
            sample = _one(steps, kinds, length + _WINDOW) if found.with_samples else torch.zeros_like(last)
            if found.with_samples:
                fitted = _fitted(mean, [last, before, sample], ahead)
                factors = torch.where(fits[behind][:, None] > 0, fitted, factors)
            elif found.fitted:
                fitted = _fitted(mean, [last - before], ahead - last)
                fitted = torch.cat([1 + fitted, -fitted, torch.zeros_like(fitted)], 1)
                factors = torch.where(((index >= distance) & (fits[behind] > 0))[:, None], fitted, factors)
            missed = ahead - sum(factors[:, i, None] * x for i, x in enumerate((last, before, sample)))
            if length > 1:
                weighed = weights[behind][:, None] * missed
                fitted = _fitted(mean, [weighed], error)[:, 0]
                factor = gaps.corrections[:, distance - 1, length - 1] = found.correction * fits[behind] * fitted
                errors += [error - factor[:, None] * weighed, RESPONSE * error * (factor != 0)[:, None]]
            gaps.factors[:, distance - 1, length - 1] = factors
            error = error + weights[behind][:, None] * missed
        # A gap of one step skips none.
        sums = torch.stack(errors, 2)[:, None]  # [M, 1, w, both errors of each length]
        squared = ((windows @ sums) * sums).sum(2).unflatten(2, (LONGEST - 1, 2)).sum(3)
        of_samples = squared.mean(1) if objective == "mean" else squared.amax(1)
        gaps.cost[:, distance - 1, 1:] = weight_of_gap[:, None] * of_samples.clamp_min(0)
        gaps.cost[(index < distance) & (index > 0), distance - 1] = math.inf
    gaps.cost.masked_fill_(_impossible(known), math.inf)
    return gaps


_WINDOW = 2 * LONGEST + 1
"""Steps around a computed step that a gap behind it depends on."""

_AT_ONCE = 64
"""Steps whose products are computed together: those of all pairs of 1000 steps would take gigabytes."""


def _beyond(timesteps: Tensor, distance: int, length: int) -> Tensor:
    """[M] reach of each computed step's extrapolation that is linear in the timestep, in units of the last two's difference."""
    index = torch.arange(len(timesteps))
    before, behind = (index - distance).clamp_min(0), (index + length).clamp_max(len(index) - 1)
    beyond = (timesteps[behind] - timesteps) / (timesteps - timesteps[before])
    return torch.where(index >= distance, beyond, 0.0)


def _one(steps: int, kinds: int, place: int) -> Tensor:
    """[M, w] one prediction, or one sample behind the predictions, by its offset in the window of each step."""
    found = torch.zeros(steps, kinds * _WINDOW, dtype=torch.float64)
    found[:, LONGEST + place] = 1
    return found


def _fitted(products: Tensor, basis: Sequence[Tensor], sought: Tensor) -> Tensor:
    """[M, K] factors of K sums of predictions that are nearest to the sought ones in the mean of the samples.

    Args:
        products: [M, w, w] of the predictions in each window, in the mean of the samples.
        basis, sought: sums [M, w].
    """
    vectors = torch.stack([*basis, sought], 1)
    inner = vectors @ products @ vectors.transpose(1, 2)  # [M, K + 1, K + 1]
    squares, along = inner[:, :-1, :-1], inner[:, :-1, -1]
    if len(basis) == 1:
        return along / squares[:, 0].clamp_min(1e-30)
    lengths = squares.diagonal(dim1=1, dim2=2).clamp_min(1e-30).sqrt()
    scaled = squares / lengths[:, :, None] / lengths[:, None] + RIDGE * torch.eye(len(basis), dtype=squares.dtype)
    return torch.linalg.solve(scaled, along / lengths) / lengths


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
        timesteps_fall: places fall during denoising.
        sample_input: name of the input with the noisy sample, which is the first input other than the timestep.
    """

    @property
    def sample_input(self) -> str: ...

    @property
    def timestep_input(self) -> str: ...

    @property
    def timestep_place(self) -> int: ...

    @property
    def noise_input(self) -> NoiseInput | None: ...

    @property
    def timesteps_fall(self) -> bool: ...

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
        timestep_input, timestep_place, noise_input, sample_input: see `Scheduler`.
    """

    found: Trajectories
    objective: Objective
    limit: float
    timestep_input: str = "timestep"
    timestep_place: int = 1
    noise_input: NoiseInput | None = None
    sample_input: str = "x"

    @property
    def timesteps_fall(self) -> bool:
        """See `Scheduler`."""
        return float(self.found.timesteps[0]) > float(self.found.timesteps[-1])

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """See `Scheduler`. If timesteps are not monotonic, all steps are computed."""
        return _scheduled(self, tuple(map(float, timesteps)))


def reuse_of(denoiser: Any) -> Scheduler | None:
    """Returns the scheduler of a denoiser; None if the denoiser computes all steps."""
    return getattr(denoiser, "reuse", None)


@functools.lru_cache(maxsize=64)
def _scheduled(reuse: Reuse, timesteps: tuple[float, ...]) -> Schedule:
    given, own = torch.tensor(timesteps, dtype=torch.float64), reuse.found.timesteps
    if len(given) < 2:
        return all_computed(len(given))
    # The calibrated trajectory's schedule is at the limit: its error at rounded timesteps would be beyond.
    away, nearest = (given[:, None] - own).abs().min(1)
    rounded = torch.where(away <= SAME * own.abs().max(), own[nearest], given)
    for times in (rounded, given):
        steps = times.diff()
        if bool((steps < 0).all() if reuse.timesteps_fall else (steps > 0).all()):
            return least_computed(reuse.found, times, reuse.objective, reuse.limit)
    return all_computed(len(given))
