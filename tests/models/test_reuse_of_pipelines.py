"""Pipelines of diffusers leave denoising steps out: by schedulers of every kind, with one call a step and with two."""

from __future__ import annotations

import warnings

import pytest
from tiny_pipelines import PIPELINES

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

from trtconvert.bars import NoBar  # noqa: E402
from trtconvert.calib.budget import Measure  # noqa: E402
from trtconvert.calib.reuse import measure_trajectories, search_reuse  # noqa: E402
from trtconvert.evaluate.metrics import psnr  # noqa: E402
from trtconvert.models.diffusers import diffusers_model  # noqa: E402
from trtconvert.runtime.reuse import Reusable  # noqa: E402

STEPS, SEEDS = 8, range(2)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("stable_diffusion", 1),
        ("stable_diffusion_xl", 1),
        ("flux", 1),
        ("pixart", 1),
        ("wan", 2),
        ("stable_diffusion_3", 1),
    ],
)
def test_half_of_a_pipelines_steps_are_computed(tmp_path, name, calls):
    make, options = PIPELINES[name]
    make().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **options, batch=[1, 2, 2])
    made: list[float] = []

    def counted(**named):
        made.append(float(named[model.timestep_input][0]))
        return model.denoiser(**named)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        measured, full = measure_trajectories(model, SEEDS, STEPS, NoBar())
        budget = [Measure("psnr", psnr, True, 0.0)]
        chosen = search_reuse(model, model.denoiser, measured, full, SEEDS, STEPS, budget, 0.5, NoBar())[-1]
    assert not [w for w in told if "all steps" in str(w.message)]
    assert chosen.reuse is not None and chosen.schedule.count == STEPS // 2
    model.sample(Reusable(counted, chosen.reuse), SEEDS, steps=STEPS, solver="ddim")
    kept = [float(t) for t, now in zip(measured["mean"].timesteps, chosen.schedule.computed, strict=True) if now]
    assert made == pytest.approx([t for t in kept for _ in range(calls)], rel=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("denoiser", ["transformer", "transformer_2"])
def test_each_of_two_denoisers_leaves_out_steps_of_its_own(tmp_path, denoiser):
    """Half of the noise levels belong to the other denoiser, whose steps are neither left out nor used for extrapolation."""
    make, options = PIPELINES["wan"]
    second = make().transformer
    diffusers.WanPipeline(**make().components | {"transformer_2": second}, boundary_ratio=0.5).save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, denoiser=denoiser, tokens=8, batch=[1, 2, 2], **options)
    made: list[float] = []

    def counted(**named):
        made.append(float(named[model.timestep_input][0]))
        return model.denoiser(**named)

    steps = 16
    measured, full = measure_trajectories(model, SEEDS, steps, NoBar())
    own = measured["mean"].timesteps.tolist()
    assert all((t >= 500) == (denoiser == "transformer") for t in own) and 2 < len(own) < steps
    budget = [Measure("psnr", psnr, True, 0.0)]
    chosen = search_reuse(model, model.denoiser, measured, full, SEEDS, steps, budget, 0.6, NoBar())[-1]
    assert chosen.reuse is not None and chosen.schedule.count < len(own)
    model.sample(Reusable(counted, chosen.reuse), SEEDS, steps=steps, solver="ddim")
    assert set(made) <= set(own) and len(made) < 2 * len(own)


def test_a_scheduler_that_adds_noise_leaves_nothing_out(tmp_path):
    from trtconvert.errors import UserError

    pipe = PIPELINES["stable_diffusion"][0]()
    pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=32, width=32, batch=[1, 2, 2])
    with pytest.warns(RuntimeWarning, match="EulerAncestral"), pytest.raises(UserError, match="can be left out"):
        measure_trajectories(model, SEEDS, STEPS, NoBar())
