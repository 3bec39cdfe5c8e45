"""Schedules against the enumeration of all schedules, and modelled errors against errors of predictions."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from trtconvert.reuse import schedule as of_schedules
from trtconvert.reuse.schedule import (
    LONGEST,
    Reuse,
    Schedule,
    all_computed,
    best_schedules,
    error_of,
    extrapolation,
    least_computed,
    stated,
)
from trtconvert.reuse.trajectories import Trajectories

STEPS, SAMPLES, ELEMENTS = 9, 3, 5


def trajectories(
    predictions: Tensor, timesteps: Tensor, predicts_noise: bool = False, samples: Tensor | None = None
) -> Trajectories:
    """
    Args:
        predictions: [S, N, E]. samples: the noisy ones, likewise.
    """
    sigmas = torch.linspace(2.0, -3.0, len(timesteps), dtype=torch.float64).exp()
    of_products = predictions if samples is None else torch.cat([predictions, samples], 1)
    products = of_products @ of_products.transpose(1, 2) / predictions.shape[2]
    gain = torch.ones_like(timesteps)
    return Trajectories(timesteps, products, sigmas, gain, predicts_noise, with_samples=samples is not None)


@pytest.fixture
def timesteps() -> Tensor:
    return torch.tensor([990.0, 900, 800, 660, 500, 370, 250, 100, 10], dtype=torch.float64)


@pytest.fixture
def predictions(timesteps: Tensor) -> Tensor:
    """Trajectories that bend, differently for each sample."""
    generator = torch.Generator().manual_seed(1)
    rate = torch.rand(SAMPLES, 1, ELEMENTS, generator=generator, dtype=torch.float64)
    return torch.sin(rate * timesteps[:, None] / 150) + rate


@pytest.fixture
def samples(timesteps: Tensor, predictions: Tensor) -> Tensor:
    """Noisy samples, which predictions follow in part."""
    noise = torch.randn(SAMPLES, 1, ELEMENTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return noise * timesteps[:, None] / 500 + predictions.roll(-1, 1)


def extrapolated(predictions: Tensor, timesteps: Tensor, computed: tuple[bool, ...]) -> Tensor:
    """[S, N, E] predictions that a sampler receives."""
    given, last = [], list[int]()
    for step, now in enumerate(computed):
        if now:
            last = [*last, step][-2:]
            given.append(predictions[:, step])
        elif len(last) == 1:
            given.append(predictions[:, last[0]])
        else:
            a, b = last
            slope = (predictions[:, b] - predictions[:, a]) / (timesteps[b] - timesteps[a])
            given.append(predictions[:, b] + slope * (timesteps[step] - timesteps[b]))
    return torch.stack(given, 1)


@pytest.mark.parametrize("computed", ["110101101", "101001001", "111111111", "100000000", "110000001"])
@pytest.mark.parametrize("predicts_noise", [False, True])
def test_errors_are_those_of_what_is_extrapolated(timesteps, predictions, computed, predicts_noise):
    found = trajectories(predictions, timesteps, predicts_noise)
    steps = tuple(x == "1" for x in computed)
    moved = (predictions - extrapolated(predictions, timesteps, steps)) * found.weights(timesteps)[:, None]
    expected = moved.sum(1).square().mean(1)
    torch.testing.assert_close(error_of(found, timesteps, Schedule(steps, 0.0)), expected, rtol=1e-7, atol=1e-12)


def cost_of(found: Trajectories, timesteps: Tensor, computed: tuple[bool, ...], objective: str) -> float:
    """Modelled error, gap by gap."""
    total, places = 0.0, [i for i, now in enumerate(computed) if now]
    for place, end in zip(places, [*places[1:], len(computed)], strict=True):
        before = [i for i in places if i < place][-1:]
        weights = found.weights(timesteps)
        error = torch.zeros(len(computed), dtype=torch.float64)
        for step in range(place + 1, end):
            of_last, of_before, _ = extrapolation(
                timesteps.tolist(), all_computed(len(computed)), [*before, place], step
            )
            error[step] += weights[step]
            error[place] -= weights[step] * of_last
            if before:
                error[before[0]] -= weights[step] * of_before
        squared = torch.einsum("i,sij,j->s", error, found.products, error)
        total += float(squared.mean() if objective == "mean" else squared.max())
    return total


def used(predictions: Tensor, timesteps: Tensor, schedule: Schedule, samples: Tensor | None = None) -> Tensor:
    """[S, N, E] predictions that a sampler receives with a fitted schedule, including corrections."""
    given, last = [], list[int]()
    for step, now in enumerate(schedule.computed):
        exact = predictions[:, step]
        if last:
            of_last, of_before, of_sample = extrapolation(timesteps.tolist(), schedule, last, step)
            line = of_last * predictions[:, last[-1]] + of_before * predictions[:, last[0]]
            line = line if samples is None else line + of_sample * samples[:, step]
            given.append(exact + schedule.correction(step) * (exact - line) if now else line)
        else:
            given.append(exact)
        last = [*last, step][-2:] if now else last
    return torch.stack(given, 1)


@pytest.mark.parametrize("computed", ["110101101", "101001001", "110010010"])
@pytest.mark.parametrize("with_samples", [False, True])
def test_a_correction_takes_back_most_of_what_its_gap_has_moved(
    timesteps, predictions, samples, with_samples, computed
):
    steps, noisy = tuple(x == "1" for x in computed), samples if with_samples else None

    def moved(fitted: bool, correction: float) -> float:
        found = replace(trajectories(predictions, timesteps, samples=noisy), fitted=fitted, correction=correction)
        schedule = stated(found, timesteps, steps)
        assert schedule.computed == steps and any(schedule.corrections) == (correction > 0)
        errors = (predictions - used(predictions, timesteps, schedule, noisy)) * found.weights(timesteps)[:, None]
        of_samples = errors.sum(1).square().mean(1)
        # The model adds the denoiser's response before the correction.
        assert (error_of(found, timesteps, schedule) >= of_samples - 1e-12).all()
        return float(of_samples.mean())

    assert moved(True, 1.0) < moved(True, 0.5) < moved(True, 0.0)
    if not with_samples:
        assert moved(False, 1.0) < moved(False, 0.0) / 4


def test_no_other_factors_come_nearer_to_the_next_predictions(timesteps, predictions, samples):
    found = replace(trajectories(predictions, timesteps, samples=samples), fitted=True)
    line = replace(trajectories(predictions, timesteps), fitted=True)
    steps = tuple(x == "1" for x in "110010100")
    schedule, on_line = stated(found, timesteps, steps), stated(line, timesteps, steps)
    assert not any(of_sample for _, _, of_sample in on_line.factors)
    for step in (2, 3, 5, 7, 8):
        before, at = schedule.before(step)
        basis = torch.stack([predictions[:, at], predictions[:, before], samples[:, step]])

        def missed(factors) -> float:
            away = predictions[:, step] - torch.einsum("k,ksd->sd", torch.tensor(factors, dtype=torch.float64), basis)  # noqa: B023
            return float(away.square().mean())

        of_last, of_before, _ = on_line.factors[step]
        assert of_last + of_before == pytest.approx(1)
        for of_sample in (-0.02, 0.0, 0.02):
            assert missed(schedule.factors[step]) <= missed((of_last, of_before, of_sample))
        for place, off in product(range(3), (-0.02, 0.02)):
            moved = [x + off * (i == place) for i, x in enumerate(schedule.factors[step])]
            assert missed(schedule.factors[step]) <= missed(moved)
        for off in (-0.02, 0.02):
            assert missed(on_line.factors[step]) <= missed((of_last + off, of_before - off, 0.0))


def test_fits_exist_at_calibrated_timesteps_only(timesteps, predictions):
    found = replace(trajectories(predictions, timesteps), fitted=True, correction=1.0)
    longer = torch.cat([timesteps, torch.tensor([5.0, 1.0])])
    for schedule in best_schedules(found, longer, "mean").values():
        assert not any(schedule.correction(step) for step in (9, 10)) and schedule.computed[9:] == (True, True)


@pytest.mark.parametrize("objective", ["mean", "worst"])
def test_no_schedule_is_better(timesteps, predictions, objective):
    found = trajectories(predictions, timesteps)
    schedules = best_schedules(found, timesteps, objective)
    least: dict[int, float] = {}
    for rest in product([False, True], repeat=STEPS - 1):
        computed = (True, *rest)
        gaps = "".join("1" if now else "0" for now in computed)
        if "0" * LONGEST in gaps:
            continue
        cost = cost_of(found, timesteps, computed, objective)
        least[sum(computed)] = min(cost, least.get(sum(computed), cost))
    assert schedules.keys() == least.keys()
    for count, schedule in schedules.items():
        assert schedule.computed[0] and schedule.count == count
        assert schedule.error == pytest.approx(least[count], rel=1e-9, abs=1e-15)
        assert schedule.error == pytest.approx(
            cost_of(found, timesteps, schedule.computed, objective), rel=1e-9, abs=1e-15
        )


def test_errors_fall_with_computed_steps_down_to_none(timesteps, predictions):
    schedules = best_schedules(trajectories(predictions, timesteps), timesteps, "mean")
    errors = [schedules[count].error for count in sorted(schedules)]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0 and len(set(errors)) == len(errors)


@pytest.mark.parametrize("with_samples", [False, True])
def test_long_trajectories_are_priced_in_parts(timesteps, predictions, samples, monkeypatch, with_samples):
    """Products of all pairs of 1000 steps would take gigabytes when a trajectory begins."""
    found = trajectories(predictions, timesteps, samples=samples if with_samples else None)
    many = torch.linspace(990, 10, 40, dtype=torch.float64)
    whole = best_schedules(found, many, "worst")
    sizes = list[int]()
    products_of = of_schedules._products_of
    monkeypatch.setattr(of_schedules, "_AT_ONCE", 7)
    monkeypatch.setattr(of_schedules, "_products_of", lambda *given: sizes.append(len(given[1])) or products_of(*given))
    parts = best_schedules(found, many, "worst")
    assert max(sizes) < len(many)
    assert [(n, s.computed) for n, s in parts.items()] == [(n, s.computed) for n, s in whole.items()]
    assert [s.error for s in parts.values()] == pytest.approx([s.error for s in whole.values()], rel=1e-6)
    limit = whole[20].error
    fewest = min(n for n, s in whole.items() if s.error <= limit)
    assert least_computed(found, many, "worst", limit * (1 + 1e-6)).count == fewest


def test_linear_trajectories_compute_two_steps(timesteps):
    line = torch.ones(1, 1, ELEMENTS, dtype=torch.float64) * (timesteps[:, None] / 1000)
    schedule = least_computed(trajectories(line, timesteps), timesteps, "worst", 1e-12)
    assert schedule.count == 2 and schedule.computed[:2] == (True, True)


@pytest.mark.parametrize("count", [5, 9, 17, 40])
def test_other_numbers_of_steps_are_priced_by_what_lies_between(count):
    """The interpolation of cubic predictions is exact."""
    grid = torch.linspace(1000, 20, 15, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    factors = torch.randn(SAMPLES, 4, ELEMENTS, generator=generator, dtype=torch.float64)

    def cubic(t: Tensor) -> Tensor:
        powers = torch.stack([(t / 1000) ** k for k in range(4)], 1)
        return torch.einsum("tk,ske->ste", powers, factors)

    found = trajectories(cubic(grid), grid)
    other = torch.linspace(995, 25, count, dtype=torch.float64)
    torch.testing.assert_close(
        torch.einsum("tn,sne->ste", found.interpolation(other), cubic(grid)), cubic(other), rtol=1e-9, atol=1e-9
    )
    steps = tuple(index % 3 == 0 for index in range(count))
    moved = (cubic(other) - extrapolated(cubic(other), other, steps)) * found.weights(other)[:, None]
    torch.testing.assert_close(
        error_of(found, other, Schedule(steps, 0.0)), moved.sum(1).square().mean(1), rtol=1e-6, atol=1e-12
    )


@pytest.fixture
def uneven() -> Trajectories:
    """50 steps of a cosine schedule. Predictions fall fast at first, as those of the emoji model, and have a small part of each
    timestep's own, as by embeddings of the timestep."""
    grid = torch.linspace(999, 19, 50, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    rate = torch.rand(4, 1, 200, generator=generator, dtype=torch.float64)
    own = torch.randn(1, len(grid), 200, generator=generator, dtype=torch.float64)
    at_first = rate.flip(2) * ((grid[:, None] - 999) / 10).exp()
    found = trajectories(torch.sin(rate * grid[:, None] / 150) + at_first + 0.01 * own, grid)
    return replace(found, fitted=True, correction=1.0, sigmas=(grid / 1000 * torch.pi / 2).tan())


def every_second(found: Trajectories) -> Trajectories:
    """The same trajectories, measured at half of the timesteps."""
    kept = slice(0, None, 2)
    return replace(
        found,
        timesteps=found.timesteps[kept],
        products=found.products[:, kept, kept],
        sigmas=found.sigmas[kept],
        gain=found.gain[kept],
    )


def test_interpolated_predictions_have_the_size_of_calibrated_ones():
    """Noise that is independent from step to step keeps its size between calibrated timesteps."""
    grid = torch.linspace(999, 19, 50, dtype=torch.float64)
    noise = torch.randn(8, len(grid), 200, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found, between = trajectories(noise, grid), (grid[2:-3] + grid[3:-2]) / 2
    through = found.interpolation(between)
    kept = torch.einsum("mi,sij,mj->sm", through, found.products, through)
    assert float(kept.mean()) == pytest.approx(0.64, rel=0.05)
    assert float((kept + found.unseen(between)).mean()) == pytest.approx(1, rel=0.05)
    assert not found.unseen(grid).any()
    few = replace(found, timesteps=grid[:4], products=found.products[:, :4, :4])
    assert not few.unseen(grid[:3] - 5).any()


def test_schedules_of_coarser_measurements_cost_little_more(uneven):
    """Within 3 dB of the schedules of these timesteps, by the errors of these timesteps."""
    inside = uneven.timesteps[:-1]
    best, coarse = (best_schedules(of, inside, "mean") for of in (uneven, every_second(uneven)))
    for count in (12, 16, 20, 25):
        errors = [float(error_of(uneven, inside, of[count]).mean()) for of in (best, coarse)]
        assert errors[1] < 2 * errors[0]


def test_noise_levels_between_calibrated_timesteps_are_those_of_the_schedule(uneven):
    """The first noise level of a cosine schedule is 636, the next ones are 30, 15, …"""
    inside = uneven.timesteps[:-1]
    torch.testing.assert_close(every_second(uneven).weights(inside), uneven.weights(inside), rtol=1e-6, atol=0)


def test_timesteps_may_rise():
    grid = torch.linspace(0, 1, 12, dtype=torch.float64)
    predictions = torch.sin(grid * 3)[None, :, None].expand(2, -1, ELEMENTS)
    reuse = Reuse(trajectories(predictions, grid), "mean", 1e-4)
    schedule = reuse.schedule(grid.tolist())
    assert 1 < schedule.count < len(grid)
    assert reuse.schedule(grid.flip(0).tolist()) == all_computed(len(grid))


@pytest.mark.parametrize("away", [-1.0, -1e-4, 1e-5, 1.0])
def test_rounded_timesteps_have_the_schedule_of_the_calibrated_ones(timesteps, predictions, away):
    """A build's limit is the error of the chosen schedule: it computed more steps at run time than it told."""
    found = trajectories(predictions, timesteps)
    for count, schedule in best_schedules(found, timesteps, "mean").items():
        reuse = Reuse(found, "mean", schedule.error * (1 + 1e-9))
        assert reuse.schedule((timesteps + away).tolist()).count == reuse.schedule(timesteps.tolist()).count <= count
        # As of an image that begins in the middle.
        later, rounded = timesteps[2:], (timesteps + away)[2:]
        assert reuse.schedule(rounded.tolist()).computed == reuse.schedule(later.tolist()).computed


def test_steps_outside_of_what_was_calibrated_are_computed(timesteps, predictions):
    found = trajectories(predictions, timesteps)
    wider = torch.cat([torch.tensor([1200.0, 1100.0]), timesteps])
    for schedule in best_schedules(found, wider, "mean").values():
        assert schedule.computed[:4] == (True,) * 4
    assert least_computed(found, wider, "mean", 1e9).count < len(wider)


@pytest.mark.parametrize("times", [[], [500.0], [500.0, 500.0, 400.0], [400.0, 500.0, 300.0], [900.0, 899.0]])
def test_strange_lists_of_timesteps_are_computed(timesteps, predictions, times):
    reuse = Reuse(trajectories(predictions, timesteps), "mean", 0.0)
    assert reuse.schedule(times) == all_computed(len(times))


def test_tensors_come_back(timesteps, predictions):
    found = replace(trajectories(predictions, timesteps, True), fitted=True, correction=0.75)
    again = Trajectories.of_tensors(found.tensors())
    assert again.predicts_noise is True and torch.equal(again.products, found.products)
    assert again.fitted is True and again.correction == 0.75
    before = {name: x for name, x in found.tensors().items() if name not in ("fitted", "correction")}
    assert (Trajectories.of_tensors(before).fitted, Trajectories.of_tensors(before).correction) == (False, 0.0)
