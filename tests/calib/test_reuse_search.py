"""Steps that the shipped model may skip: measurements, results, and the loss on unseen seeds."""

from __future__ import annotations

import dataclasses
import functools

import diffusers
import pytest
import torch
from stated_steps import StatedSchedule, StatedSteps
from support import Quiet
from torch import Tensor

from trtconvert.attention.schedules import ddpm_betas
from trtconvert.bars import NoBar
from trtconvert.calib import reuse as calib
from trtconvert.calib.budget import Measure
from trtconvert.calib.reuse import (
    CORRECTIONS,
    PARTS,
    _best_extrapolation,
    drawings,
    measure_trajectories,
    search_reuse,
)
from trtconvert.errors import UserError
from trtconvert.evaluate.metrics import psnr
from trtconvert.models.digits import digits_model
from trtconvert.models.samplers import initial_noise
from trtconvert.reuse.schedule import Schedule, best_schedules, error_of
from trtconvert.reuse.trajectories import Trajectories
from trtconvert.runtime.reuse import Reusable, follow
from trtconvert.shipped import shipped_folder

STEPS, SEEDS, UNSEEN = 20, range(500, 508), range(900, 916)


@pytest.fixture(scope="module")
def model():
    return digits_model(shipped_folder() / "digits-dit.safetensors")


@pytest.fixture(scope="module")
def measured(model):
    """Trajectories, samples, and the number of drawings."""
    bar = Quiet()
    found, full = measure_trajectories(model, SEEDS, STEPS, bar)
    return found, full, bar.done


@pytest.fixture(scope="module")
def search(model, measured):
    @functools.cache
    def search(least, share=None):
        found, full, _ = measured
        bar = Quiet()
        tried = search_reuse(
            model, model.denoiser, found, full, SEEDS, STEPS, [Measure("psnr", psnr, True, least)], share,
            bar,
        )  # fmt: skip
        return tried, bar.done

    return search


def unseen(model, reuse, steps=STEPS):
    """PSNR of samples with skipped steps, and the number of calls."""
    calls = []

    def denoiser(*inputs, **named):
        calls.append(None)
        return model.denoiser(*inputs, **named)

    full = model.sample(model.denoiser, UNSEEN, steps=steps, solver="ddim")
    return psnr(model.sample(Reusable(denoiser, reuse), UNSEEN, steps=steps, solver="ddim"), full), len(calls)


def test_trajectories_are_those_of_the_model(model, measured):
    found, full, drawn = measured
    assert drawn == 2 + len(CORRECTIONS) + PARTS and torch.equal(
        full, model.sample(model.denoiser, SEEDS, steps=STEPS, solver="ddim")
    )
    mean, worst = found["mean"], found["worst"]
    assert mean.timesteps.tolist() == pytest.approx([999 - 50 * step for step in range(STEPS)])
    size = STEPS * (2 if mean.with_samples else 1)
    assert mean.products.shape == (len(SEEDS), size, size)
    assert not mean.predicts_noise and (worst.gain >= mean.gain * 0.5).all()
    # With the gains, the modelled error has the size of the measured error.
    computed = tuple(step % 3 == 0 for step in range(STEPS))
    assert mean.fitted and mean.correction in CORRECTIONS
    moved = model.sample(Reusable(model.denoiser, StatedSteps(computed)), SEEDS, steps=STEPS, solver="ddim")
    squared = (moved - full).double().square().mean()
    modelled = error_of(mean, mean.timesteps, Schedule(computed, 0.0)).mean()
    assert 0.1 < float(modelled / squared) < 10


def test_the_fewest_steps_that_keep_the_budget(model, search):
    tried, calls = search(38.0)
    every, chosen = tried[0], tried[-1]
    assert every.figures["psnr"] > 100 and calls <= drawings(STEPS, True)
    assert chosen.reuse is not None and chosen.figures["psnr"] >= 38 and chosen.schedule.count <= STEPS / 2
    fewer = [found for found in tried if found.schedule.count < chosen.schedule.count]
    assert fewer and all(found.figures["psnr"] < 38 for found in fewer)
    db, computed = unseen(model, chosen.reuse)
    assert computed == chosen.schedule.count and db > 33


@pytest.mark.soak
def test_trajectories_of_a_plan_are_those_of_its_arithmetic(model, measured):
    """The search takes them beside those of full precision, and keeps the schedule whose samples are nearest."""

    def rounded(*inputs, **named):
        return (model.denoiser(*inputs, **named) * 16).round() / 16

    own, drawn = measure_trajectories(model, SEEDS, STEPS, Quiet(), rounded)
    assert torch.equal(drawn, model.sample(rounded, SEEDS, steps=STEPS, solver="ddim"))
    assert not torch.equal(own["mean"].products, measured[0]["mean"].products)
    both = measured[0] | {f"{name}, of the plan": of for name, of in own.items()}
    budget = [Measure("psnr", psnr, True, 0.0)]
    alone, joint = (
        search_reuse(model, rounded, given, measured[1], SEEDS, STEPS, budget, 0.5, Quiet())[-1]
        for given in (measured[0], both)
    )
    assert joint.schedule.count == alone.schedule.count and joint.added <= alone.added


def test_one_bad_sample_does_not_outweigh_the_others(model, measured, monkeypatch):
    """The chosen schedule has the least mean squared error, not the best of the worst samples."""
    schedules = {
        "mean": Schedule((True, False) * (STEPS // 2), 1.0),
        "worst": Schedule((True, True, False, False) * (STEPS // 4), 1.0),
    }
    errors = {"mean": [0.1, 0.1, 0.1, 0.4], "worst": [0.3] * 4}

    def drawn(model, denoiser, seeds, steps):
        error = errors[denoiser.reuse.objective] if isinstance(denoiser, Reusable) else [0.0] * 4
        return torch.tensor(error).view(4, 1, 1, 1)

    monkeypatch.setattr(calib, "best_schedules", lambda found, timesteps, objective: {STEPS // 2: schedules[objective]})
    monkeypatch.setattr(calib, "_drawn", drawn)
    found, full, _ = measured
    budget = [Measure("psnr", psnr, True, 0.0)]
    chosen = search_reuse(model, model.denoiser, found, full[:4] * 0, SEEDS, STEPS, budget, 0.5, Quiet())[-1]
    assert chosen.schedule is schedules["mean"]
    assert chosen.added == pytest.approx(0.0475) and chosen.worst == pytest.approx(0.16)


@pytest.mark.parametrize(("share", "steps", "count"), [(0.29, 100, 29), (0.58, 50, 29), (0.3, 11, 3)])
def test_a_stated_share_is_not_one_step_short_by_rounding(model, measured, monkeypatch, share, steps, count):
    found = dataclasses.replace(measured[0]["mean"], timesteps=torch.linspace(999, 0, steps, dtype=torch.float64))
    by_count = {n: Schedule((True,) * n + (False,) * (steps - n), 1.0) for n in range(2, steps)}
    monkeypatch.setattr(calib, "best_schedules", lambda found, timesteps, objective: by_count)
    monkeypatch.setattr(calib, "_drawn", lambda *_: torch.zeros(1, 1, 1, 1))
    chosen = search_reuse(
        model, model.denoiser, {"mean": found}, torch.zeros(1, 1, 1, 1), [1], steps, [], share, NoBar()
    )
    assert chosen[-1].schedule.count == count


def test_stated_steps_are_found_by_the_schedulers_timesteps(model):
    """The denoiser got them rounded to BF16; timesteps of a pipeline's other denoiser, a step away, are computed."""
    times = torch.linspace(1000, 1, 30, dtype=torch.float64)
    computed = tuple(step % 3 == 0 for step in range(20))
    factors = tuple((float(step), 0.0, 0.0) for step in range(20))
    stated = calib._Stated(model, tuple(times[:20].bfloat16().tolist()), Schedule(computed, 0.0, factors, (0.0,) * 20))
    found = stated.schedule(times.tolist())
    assert found.computed == (*computed, *[True] * 10)
    assert found.factors == (*factors, *[(1.0, 0.0, 0.0)] * 10)


def test_products_of_large_predictions_are_summed_in_parts(model, monkeypatch):
    monkeypatch.setattr(calib, "_ELEMENTS", 7)
    predictions = torch.randn(3, 2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    given = iter(predictions)
    watch = calib._Watch(model, lambda *_, **__: next(given))
    samples = predictions.flip(0)
    for x, t in zip(samples, (900.0, 500.0, 100.0), strict=True):
        watch(**model.named((x, torch.full((2,), t), torch.zeros(2, dtype=torch.long)), {}))
    flat = torch.cat([predictions, samples]).flatten(2).transpose(0, 1).double()
    torch.testing.assert_close(watch.trajectories().products, flat @ flat.mT / 64)


def test_a_stated_share(model, search):
    tried, _ = search(200.0, share=0.5)
    assert tried[-1].schedule.count == STEPS // 2
    db, computed = unseen(model, tried[-1].reuse)
    uniform, calls = unseen(model, StatedSteps([step % 2 == 0 for step in range(STEPS)]))
    assert computed == calls and db > uniform + 6


@pytest.mark.soak
def test_nothing_is_left_out_where_the_budget_says_so(search):
    tried, _ = search(200.0)
    assert tried[-1].reuse is None and all(tried[-1].schedule.computed)


@pytest.mark.first_case
@pytest.mark.parametrize("steps", [12, 30])
def test_other_numbers_of_steps_lose_no_more(model, search, steps):
    """Measurements at 20 steps predict the error at other numbers of steps within 4 dB."""
    chosen = search(38.0)[0][-1]
    assert chosen.reuse is not None
    db, computed = unseen(model, chosen.reuse, steps)
    assert db > 34 and computed < steps


def test_few_steps_leave_out_what_the_budget_allows(model, search):
    chosen = search(38.0)[0][-1]
    assert chosen.reuse is not None
    db, computed = unseen(model, chosen.reuse, steps=4)
    assert computed >= 3 and db > 36


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "EulerDiscreteScheduler"])
def test_other_schedulers_lose_no_more(model, measured, name):
    """DDIM's measurements hold for other samplers, including corrections, although some use a prediction for several steps."""
    found = measured[0]["mean"]

    def drawn(reuse: StatedSchedule | None) -> Tensor:
        scheduler = getattr(diffusers, name)(
            trained_betas=ddpm_betas(1000, "linear").numpy(),
            prediction_type="v_prediction",
            timestep_spacing="trailing",
        )
        scheduler.set_timesteps(STEPS)
        denoiser = (
            model.denoiser if reuse is None else follow(Reusable(model.denoiser, reuse), scheduler.timesteps.float())
        )
        x = initial_noise(UNSEEN, (1, 8, 8)) * scheduler.init_noise_sigma
        for t in scheduler.timesteps:
            seen = scheduler.scale_model_input(x, t)
            prediction = denoiser(seen, torch.full((len(x),), float(t)), torch.tensor([seed % 10 for seed in UNSEEN]))
            x = scheduler.step(prediction, t, x).prev_sample
        return ((x + 1) / 2).clamp(0, 1)

    full, of_ddim = drawn(None), model.sample(model.denoiser, UNSEEN, steps=STEPS, solver="ddim")
    corrected, lines = (
        StatedSchedule(best_schedules(of, of.timesteps, "mean")[STEPS // 2])
        for of in (found, dataclasses.replace(found, fitted=False, correction=0.0))
    )
    with_ddim = psnr(model.sample(Reusable(model.denoiser, corrected), UNSEEN, steps=STEPS, solver="ddim"), of_ddim)
    db = psnr(drawn(corrected), full)
    assert db > with_ddim - 3 and db > psnr(drawn(lines), full)


def test_samplers_that_tell_no_timesteps(model):
    def sample(denoiser, seeds, **options):
        def told_nothing(*inputs, **named):
            return denoiser(*inputs, **named)

        return model.sample(told_nothing, seeds, **options)

    with pytest.raises(UserError, match="can be left out") as error:
        measure_trajectories(dataclasses.replace(model, sample=sample), range(2), 6, Quiet())
    assert "follow(denoiser, timesteps)" in error.value.remedy


@pytest.mark.parametrize("with_samples", [True, False])
def test_extrapolations_read_the_noisy_sample_where_samples_come_nearer(with_samples):
    steps, generator = 12, torch.Generator().manual_seed(0)
    timesteps = torch.linspace(990, 0, steps, dtype=torch.float64)
    both = torch.randn(2, 2 * steps, 30, generator=generator, dtype=torch.float64).cumsum(1)
    found = Trajectories(
        timesteps,
        both @ both.transpose(1, 2) / 30,
        torch.linspace(2, -3, steps, dtype=torch.float64).exp(),
        torch.ones(steps, dtype=torch.float64),
        False,
        fitted=True,
        with_samples=True,
    )

    def error_with(schedule: Schedule) -> torch.Tensor:
        reads = any(of_sample for _, _, of_sample in schedule.factors)
        return torch.tensor([0.5 if reads == with_samples else 1.0])

    chosen = _best_extrapolation(found, error_with, NoBar())
    assert chosen.with_samples == with_samples
    assert chosen.products.shape[1] == steps * (2 if with_samples else 1)
