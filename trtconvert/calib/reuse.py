"""Search for the steps that a model may skip: trajectories are measured, and schedules are sampled under the plan's budget.

The trajectories are sampled with all steps, in full precision and with the plan's arithmetic. Which of the two predicts the
errors of samples better differs by model and number of steps. The share of corrections (see `trtconvert.reuse.trajectories`) is
the candidate that leaves the least error in samples; extrapolations read the noisy sample if that leaves less error than a line
through the last two predictions. The growth of errors by noise level is measured by skipping steps in one part of the trajectory
after the other. For each number of computed steps, the best schedules by several objectives are sampled with the plan's
arithmetic. The best schedule is the one with the least mean squared error against samples of the same arithmetic with all steps:
the worst of few samples says less about the worst of many.
Bisection finds the fewest computed steps within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from trtconvert.bars import Steps
from trtconvert.calib.budget import Budget, figures, keeps_budget, squared_error
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.errors import UserError
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.denoiser import not_followed
from trtconvert.models.drawings import CountedDenoiser, with_progress
from trtconvert.noise_input import place_of
from trtconvert.reuse.schedule import Objective, Reuse, Schedule, all_computed, best_schedules, error_of, stated
from trtconvert.reuse.trajectories import Trajectories
from trtconvert.runtime.reuse import SAME, Reusable
from trtconvert.wrapped import WrappedDenoiser

PARTS = 8
"""Parts of a trajectory. The growth of errors is measured separately in each part."""

CORRECTIONS = (0.0, 0.5, 0.75, 1.0)
"""Shares of the correction to try. Denoisers differ in how much a skipped step's change of the sample changes predictions."""

CORRECTED_AT = 0.4
"""Shares of the correction are compared at this share of computed steps."""

OBJECTIVES: tuple[Objective, ...] = ("mean", "worst")

LEAST_GAIN, MOST_GAIN = 0.1, 30.0
"""Limits of a plausible growth of errors."""

NOISE_LIKE = 0.9
"""Correlation of the first prediction with the denoiser's input above which the model is taken to predict noise."""

_ELEMENTS = 2**16
"""Elements of each prediction in one FP64 copy: copies of a whole video's trajectory would take gigabytes."""

_ROUNDING = 1e-6
"""Room for the rounding of a share of steps: 0.29 of 100 steps are 28.999999999999996."""


@dataclass(frozen=True)
class Found:
    """A schedule that was sampled.

    Attributes:
        reuse: source of schedules at run time; None if all steps are computed.
        schedule: for the calibrated number of steps.
        figures: of the samples, for the budget.
        worst: mean squared error of the worst sample.
        added: mean squared error against samples of the same denoiser with all steps computed.
    """

    reuse: Reuse | None
    schedule: Schedule
    figures: dict[str, float]
    worst: float
    added: float

    @property
    def psnr_worst(self) -> float:
        """PSNR of the worst sample in dB."""
        return -10 * math.log10(max(self.worst, 1e-12))


def drawings(steps: int, searched: bool, plans: int = 1) -> int:
    """Estimates how often `measure_trajectories`, and `search_reuse` for each plan, draw all samples."""
    measured = 2 + len(CORRECTIONS) + PARTS
    of_plan = measured + 1 + 2 * len(OBJECTIVES) ** 2 * (math.ceil(math.log2(steps)) if searched else 1)
    return measured + of_plan * plans


@torch.no_grad()
def measure_trajectories(
    model: DiffusionModel, seeds: Sequence[int], steps: int, bar: Steps, denoiser: Denoiser | None = None
) -> tuple[dict[str, Trajectories], Tensor]:
    """Measures the model's trajectories with two measures of the growth of errors: over all samples, and of the worst sample.

    Args:
        seeds: of the samples; steps: number of steps, all computed.
        bar: receives `2 + len(CORRECTIONS) + PARTS` steps.
        denoiser: draws the samples; None: the model's own, in full precision.
    Returns:
        The trajectories by objective, and the samples with all steps computed.
    Raises:
        UserError: the sampler does not expose its timesteps, see `trtconvert.runtime.follow`, or skipped steps save no call.
    """
    model, denoiser = with_progress(model, bar), denoiser or graphed(model, model.denoiser)
    calls: list[int] = []

    def counted() -> Denoiser:
        """Counts the calls of another drawing."""
        calls.append(0)

        def called() -> None:
            calls[-1] += 1

        return CountedDenoiser(denoiser, called)

    watch = _Watch(model, counted())
    full = _drawn(model, watch, seeds, steps)
    found = watch.trajectories()
    bar.step()
    expected = tuple(found.timesteps.tolist())

    def error_with(schedule: Schedule) -> Tensor:
        """[S] squared error of samples with a schedule."""
        moved = _drawn(model, Reusable(counted(), _Stated(model, expected, schedule)), seeds, steps)
        if min(calls[1:]) >= calls[0]:
            raise not_followed(model)
        bar.step()
        return squared_error(moved, full)

    found = _best_extrapolation(replace(found, fitted=True), error_with, bar)
    gains = {objective: torch.ones(len(expected), dtype=torch.float64) for objective in OBJECTIVES}
    for part in torch.arange(1, len(expected)).tensor_split(PARTS):
        # Every third step of this part is computed, elsewhere every step.
        computed = [True] * len(expected)
        for place, step in enumerate(part.tolist()):
            computed[step] = place % 3 == 2
        if not all(computed):
            schedule = stated(found, found.timesteps, tuple(computed))
            squared, modelled = error_with(schedule), error_of(found, found.timesteps, schedule)
            for objective, of in (("mean", Tensor.mean), ("worst", Tensor.amax)):
                ratio = float(of(squared)) / max(float(of(modelled)), 1e-30)
                gains[objective][part] = min(max(ratio**0.5, LEAST_GAIN), MOST_GAIN)  # type: ignore[index]
        else:
            bar.skip()
    return {objective: replace(found, gain=gain) for objective, gain in gains.items()}, full


def with_trajectories_of(
    denoiser: Denoiser,
    measured: Mapping[str, Trajectories],
    model: DiffusionModel,
    seeds: Sequence[int],
    steps: int,
    bar: Steps,
) -> dict[str, Trajectories]:
    """Returns measured trajectories of full precision, and those of a plan's denoiser beside them, by other names. For the
    arguments see `measure_trajectories`."""
    own, _ = measure_trajectories(model, seeds, steps, bar, denoiser)
    return {**measured, **{f"{name}, of the plan": trajectories for name, trajectories in own.items()}}


def _best_extrapolation(found: Trajectories, error_with: Callable[[Schedule], Tensor], bar: Steps) -> Trajectories:
    """Returns the trajectories with the share of corrections, and with or without samples, that leave the least
    error in samples."""

    def error_of_best(tried: Trajectories) -> float:
        schedules = best_schedules(tried, tried.timesteps, "mean")
        count = max((n for n in schedules if n <= CORRECTED_AT * len(tried.timesteps)), default=min(schedules))
        if all(schedules[count].computed):
            bar.skip()
            return math.inf
        return float(error_with(schedules[count]).mean())

    errors = {share: error_of_best(replace(found, correction=share)) for share in CORRECTIONS}
    best = min(errors, key=errors.__getitem__)
    found = replace(found, correction=best if errors[best] < math.inf else 0.0)
    if not found.with_samples:
        bar.skip()
        return found
    line = found.without_samples()
    return line if error_of_best(line) < errors[best] else found


def search_reuse(
    model: DiffusionModel,
    denoiser: Denoiser,
    measured: Mapping[str, Trajectories],
    full: Tensor,
    seeds: Sequence[int],
    steps: int,
    budget: Budget,
    share: float | None,
    bar: Steps,
    most: int | None = None,
) -> list[Found]:
    """Samples schedules; the last entry of the result is the chosen one.

    Args:
        denoiser: computes with the plan's arithmetic.
        measured: trajectories by any names, see `measure_trajectories`.
        full: samples of the same seeds and steps in full precision.
        share: share of the steps that may be computed; None: the fewest steps within the budget.
        bar: receives one step per sampling.
        most: largest useful number of computed steps; None: all but one.
    Returns:
        The schedule with all steps computed; then the tried schedules; then the chosen one, which computes all steps if no
        other is within the budget.
    """
    model, timesteps = with_progress(model, bar), next(iter(measured.values())).timesteps

    def drawn(reuse: Reuse | None) -> Tensor:
        samples = _drawn(model, denoiser if reuse is None else Reusable(denoiser, reuse), seeds, steps)
        bar.step()
        return samples

    def found_of(samples: Tensor, reuse: Reuse | None, schedule: Schedule) -> Found:
        worst, added = squared_error(samples, full).max(), squared_error(samples, of_all_steps).mean()
        return Found(reuse, schedule, figures(budget, samples, full), float(worst), float(added))

    def best_of(count: int) -> Found | None:
        """Returns the best schedule with this many computed steps."""
        tried = dict[tuple[bool, ...], Found]()
        for name, objective in product(measured, OBJECTIVES):
            schedule = schedules[name, objective].get(count)
            if schedule is not None and schedule.computed not in tried:
                # The limit allows for rounding of the modelled error.
                reuse = Reuse(
                    measured[name],
                    objective,
                    schedule.error * (1 + 1e-9),
                    model.timestep_input,
                    model.timestep_place,
                    model.noise_input,
                    model.sample_input,
                )
                tried[schedule.computed] = found_of(drawn(reuse), reuse, schedule)
        # `added` excludes the error of INT8, which is the same for all and may be much larger than that of skipped steps.
        return min(tried.values(), key=lambda found: found.added, default=None)

    schedules = {
        (name, objective): best_schedules(measured[name], timesteps, objective)
        for name, objective in product(measured, OBJECTIVES)
    }
    counts = sorted({count for by_count in schedules.values() for count in by_count})
    of_all_steps = drawn(None)
    every = found_of(of_all_steps, None, all_computed(len(timesteps)))
    tried = [every]
    if share is not None:
        count = max((n for n in counts if n <= share * len(timesteps) + _ROUNDING), default=counts[0])
        return [every, best_of(count) or every]
    counts = [count for count in counts if count <= (len(timesteps) - 1 if most is None else most)]
    low, high, chosen = 0, len(counts), every
    while low < high:
        middle = (low + high) // 2
        found = best_of(counts[middle])
        if found is None or not keeps_budget(budget, found.figures):
            low = middle + 1
        else:
            high, chosen = middle, found
        tried += [] if found is None else [found]
    return [*tried, chosen]


def _drawn(model: DiffusionModel, denoiser: Denoiser, seeds: Sequence[int], steps: int) -> Tensor:
    return model.sample(denoiser, seeds, steps=steps, solver="ddim")


class _Stated:
    """A `Scheduler` with stated steps, by their timesteps. Other timesteps, as of a pipeline's other denoiser, are computed."""

    def __init__(self, model: DiffusionModel, timesteps: tuple[float, ...], schedule: Schedule) -> None:
        self._timesteps = torch.tensor(timesteps, dtype=torch.float64)
        self._room = _room_around(self._timesteps)
        self._schedule = schedule
        self.timestep_input = model.timestep_input
        self.timestep_place = model.timestep_place
        self.noise_input = model.noise_input
        self.sample_input = model.sample_input
        self.timesteps_fall = model.timesteps_fall

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """See `Scheduler`."""
        apart = (torch.tensor(timesteps, dtype=torch.float64)[:, None] - self._timesteps).abs()
        distances, steps = apart.min(1)
        known = distances <= self._room[steps]
        nearest = [int(step) if knows else None for step, knows in zip(steps, known, strict=True)]
        of = self._schedule
        return Schedule(
            tuple(step is None or of.computed[step] for step in nearest),
            0.0,
            tuple((1.0, 0.0, 0.0) if step is None else of.factors[step] for step in nearest),
            tuple(0.0 if step is None else of.corrections[step] for step in nearest),
        )


def _room_around(timesteps: Tensor) -> Tensor:
    """[N] largest distance between a scheduler's timestep and the same timestep at the denoiser: half the gap to the nearest
    other timestep, because a pipeline may round timesteps to the type of its latents."""
    gaps = timesteps.diff().abs()
    between = torch.minimum(torch.cat([gaps[:1], gaps]), torch.cat([gaps, gaps[-1:]])) / 2
    return between.clamp_min(SAME * float(timesteps.abs().max()))


class _Watch(WrappedDenoiser):
    """A denoiser that records its predictions along each trajectory."""

    def __init__(self, model: DiffusionModel, denoiser: Denoiser) -> None:
        super().__init__(denoiser)
        self._model = model
        self._calls: list[tuple[float, Tensor, Tensor]] = []
        self._products: list[Tensor] = []
        self._timesteps: tuple[float, ...] = ()
        self._with_samples = True
        self._likeness: list[float] = []

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        given = self._model.named(inputs, named)
        prediction = self._denoiser(*inputs, **named)
        time = float(place_of(self._model.noise_input, given[self._model.timestep_input].flatten()[0].double()))
        if self._calls and self._goes_back(time):
            self._end()
        sample = given[self._model.sample_input]
        if not self._calls:
            self._with_samples = sample.shape == prediction.shape
            self._likeness.append(_correlation(sample, prediction) if self._with_samples else 0.0)
        # The same timestep again is another call of the same step, with other conditions.
        prediction_here, sample_here = (x.to("cpu", torch.float32, copy=True) for x in (prediction, sample))
        if self._calls and self._calls[-1][0] == time:
            _, others, samples = self._calls.pop()
            prediction_here, sample_here = torch.cat([others, prediction_here]), torch.cat([samples, sample_here])
        self._calls.append((time, prediction_here, sample_here))
        return prediction

    def _goes_back(self, time: float) -> bool:
        last = self._calls[-1][0]
        return time > last if self._model.timesteps_fall else time < last

    def _end(self) -> None:
        """Reduces a finished trajectory to the products of its predictions."""
        timesteps = tuple(time for time, *_ in self._calls)
        if self._timesteps and timesteps != self._timesteps:
            raise UserError(
                f"trajectories of {self._model.name} go through different timesteps",
                expected="the same for all samples",
                got=f"{len(self._timesteps)} and {len(timesteps)} of them",
                remedy="remove steps.computed from the recipe",
            )
        self._timesteps = timesteps
        rows = min(len(prediction) for _, prediction, _ in self._calls)  # guidance may end before the last step
        _, predictions, samples = zip(*self._calls, strict=True)
        flat = [x[:rows].flatten(1) for x in ([*predictions, *samples] if self._with_samples else predictions)]
        products = torch.zeros(rows, len(flat), len(flat), dtype=torch.float64)
        for part in zip(*(x.split(_ELEMENTS, 1) for x in flat), strict=True):
            kept = torch.stack(part, 1).double()
            products += kept @ kept.transpose(1, 2)
        self._products.append(products / flat[0].shape[1])
        self._calls = []

    def trajectories(self) -> Trajectories:
        """Returns all recorded trajectories."""
        if self._calls:
            self._end()
        timesteps = torch.tensor(self._timesteps, dtype=torch.float64)
        levels = self._model.sigmas.double().clamp_min(1e-6).log()
        place = timesteps.clamp(0, len(levels) - 1)
        low = place.floor().long()
        high = (low + 1).clamp_max(len(levels) - 1)
        sigmas = torch.lerp(levels[low], levels[high], place - low).exp()
        likeness = sum(self._likeness) / len(self._likeness) if self._likeness else 0.0
        return Trajectories(
            timesteps,
            torch.cat(self._products),
            sigmas,
            torch.ones_like(timesteps),
            likeness > NOISE_LIKE,
            with_samples=self._with_samples,
        )


def _correlation(x: Tensor, y: Tensor) -> float:
    x, y = x.double().flatten(), y.double().flatten()
    return float((x @ y) / (x.norm() * y.norm()).clamp_min(1e-12))
