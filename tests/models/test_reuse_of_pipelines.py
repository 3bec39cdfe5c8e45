"""Pipelines of diffusers leave denoising steps out: by schedulers of every kind, with one call a step and with two."""

from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from further_pipelines import CONVERTIBLE
from stated_steps import StatedSteps
from tiny_pipelines import PIPELINES, arguments, picture

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

from trtconvert.bars import NoBar  # noqa: E402
from trtconvert.calib.budget import Measure  # noqa: E402
from trtconvert.calib.reuse import measure_trajectories, search_reuse  # noqa: E402
from trtconvert.errors import UserError  # noqa: E402
from trtconvert.evaluate.metrics import psnr  # noqa: E402
from trtconvert.models.denoiser import refuse_unfollowed  # noqa: E402
from trtconvert.models.diffusers import diffusers_model  # noqa: E402
from trtconvert.runtime.diffusers import DiffusersDenoiser  # noqa: E402
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
        ("z_image", 1),
        ("sana", 1),
    ],
)
def test_half_of_a_pipelines_steps_are_computed(tmp_path, name, calls):
    model = tiny_model(tmp_path, name, batch=[1, 2, 2])
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
    pipe = PIPELINES["stable_diffusion"][0]()
    pipe.scheduler = diffusers.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    pipe.save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=32, width=32, batch=[1, 2, 2])
    with pytest.warns(RuntimeWarning, match="EulerAncestral"), pytest.raises(UserError, match="can be left out"):
        measure_trajectories(model, SEEDS, STEPS, NoBar())


OWN_TIMESTEPS = ["z_image", "ernie_image", "glm_image", "ideogram4", "kandinsky5", "lumina2", "panorama", "prx", "sana"]
"""Pipelines that compute timesteps from those of their schedulers."""


@pytest.mark.first_case
@pytest.mark.parametrize("name", OWN_TIMESTEPS)
def test_pipelines_that_compute_their_timesteps_are_followed(tmp_path, name):
    refuse_unfollowed(tiny_model(tmp_path, name), 5)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("latent_upscale", "its timesteps are not those of the EulerDiscreteScheduler"),
        ("sky_reels", "a timestep for each token or frame"),
        ("image_to_video", "a timestep for each token or frame"),
        ("wan_image_to_video", "a timestep for each token or frame"),
        ("anyflow", "a timestep for each token or frame"),
    ],
)
def test_pipelines_that_are_not_followed_are_refused(tmp_path, name, why):
    model = tiny_model(tmp_path, name)
    with pytest.warns(RuntimeWarning, match=why), pytest.raises(UserError, match="can be left out"):
        refuse_unfollowed(model, 5)


def tiny_model(folder, name, **options):
    if name in PIPELINES:
        make, given = PIPELINES[name]
        pictures = {}
    else:
        tiny = CONVERTIBLE[name]
        make, given = tiny.make, {"tokens": 8, **tiny.options}
        pictures = {image: picture(folder / f"{image}.png", 0, tiny.side) for image in tiny.images}
    make().save_pretrained(folder / "pipeline")
    return diffusers_model(folder / "pipeline", images=pictures, **given, **options)


def test_a_sampler_that_passes_other_timesteps_than_it_told_is_refused():
    """All steps would be computed, of each schedule."""
    from trtconvert.models.digits import digits_model
    from trtconvert.runtime import follow
    from trtconvert.shipped import shipped_folder

    model = digits_model(shipped_folder() / "digits-dit.safetensors")

    def sample(denoiser, seeds, *, steps, solver, conditions=None):
        times = torch.linspace(999, 0, steps)
        followed = follow(denoiser, times * 0.9)
        x, label = torch.zeros(len(seeds), 1, 8, 8), torch.zeros(len(seeds), dtype=torch.int64)
        for t in times:
            x = followed(x, t.expand(len(x)), label)
        return x.clamp(0, 1)

    def nothing(x, timestep, label):
        return torch.zeros_like(x)

    other = dataclasses.replace(model, sample=sample)
    for refused in (
        lambda: refuse_unfollowed(other, 6),
        lambda: measure_trajectories(other, SEEDS, 6, NoBar(), nothing),
    ):
        with pytest.warns(RuntimeWarning, match="is not that of the step"), pytest.raises(UserError) as raised:
            refused()
        assert "passes other timesteps than it told" in raised.value.got


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Returns a pipeline whose denoiser skips two of five steps, and the list of the timesteps of its calls."""
    pipe, seen = PIPELINES["stable_diffusion"][0](), []
    folder = tmp_path_factory.mktemp("shared")
    pipe.save_pretrained(folder)
    model = diffusers_model(folder, **PIPELINES["stable_diffusion"][1], batch=[1, 2, 2])

    def counted(**named):
        seen.append(float(named[model.timestep_input][0]))
        return model.denoiser(**named)

    stated = StatedSteps((True, True, False, False, True))
    stated.sample_input = model.sample_input
    pipe.unet = DiffusersDenoiser(
        Reusable(counted, stated),
        model.diffusers,
        model.timestep_input,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return pipe, seen


def drawn(pipe, seen, **options):
    seen.clear()
    pipe.set_progress_bar_config(disable=True)
    pipe(**arguments(pipe, "stable_diffusion") | {"num_inference_steps": 5} | options)
    times = pipe.scheduler.timesteps.tolist()
    return [times.index(t) for t in seen]


def test_each_of_the_pipelines_that_share_a_model_is_followed(shared):
    """Also a copy, and one with another scheduler; after an exception too."""
    pipe, seen = shared
    others = [copy.deepcopy(pipe), diffusers.StableDiffusionPipeline(**pipe.components)]
    others[1].scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    for one in (pipe, *others, pipe):
        assert drawn(one, seen) == [0, 1, 4]

    def fails(_pipe, step, *_):
        if step == 1:
            raise ZeroDivisionError
        return {}

    for one, other in ((pipe, others[1]), (others[1], pipe)):
        with pytest.raises(ZeroDivisionError):
            drawn(one, seen, callback_on_step_end=fails)
        assert drawn(other, seen) == [0, 1, 4]
    assert others[0].unet._called is not pipe.unet._called


def test_noise_that_a_call_adds_is_told(shared):
    pipe, seen = shared
    with pytest.warns(RuntimeWarning, match="adds noise with eta: 1"):
        assert drawn(copy.deepcopy(pipe), seen, eta=1.0) == [0, 1, 2, 3, 4]
