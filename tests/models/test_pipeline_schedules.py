"""The noise levels of a pipeline's timesteps, whether they rise or fall."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import tiny_pipelines
import torch
from further_pipelines import latent_upscale
from tiny_pipelines import picture

from trtconvert.attention.modes import Mode
from trtconvert.attention.schedules import scheduler_sigmas, sigma_rule_modes
from trtconvert.errors import UserError
from trtconvert.models.call_options import PROMPTS
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.pipelines import PipelineCaller
from trtconvert.models.probes import first_step

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

SIZES: dict[str, Any] = {"height": 32, "width": 32, "tokens": 8, "batch": 1}


def inverted(folder):
    pipe = tiny_pipelines.stable_diffusion_3()
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, invert_sigmas=True)
    pipe.save_pretrained(folder)
    return diffusers_model(folder, **SIZES)


def test_timesteps_that_rise_while_noise_falls_are_followed(tmp_path):
    """With inverted sigmas the first timestep is 0, the share of the image, and stands for pure noise."""
    model, seen = inverted(tmp_path), []
    assert model.diffusers is not None and model.diffusers.timestep_factor == 1.0
    assert model.diffusers.scheduler == "FlowMatchEulerDiscreteScheduler"
    with pytest.raises(UserError, match="ddim, which stands for it: FlowMatchEulerDiscreteScheduler"):
        model.sample(model.denoiser, [3], steps=2, solver="heun")

    def denoiser(**named):
        seen.append(float(named["timestep"][0]))
        return model.denoiser(**named)

    model.sample(denoiser, [3], steps=5, solver="ddim")
    assert seen[0] == 0 and seen[-1] > 500 and max(seen) < model.timestep_max
    clean, noise = torch.ones(1, 4), torch.full((1, 4), 3.0)
    for timestep, share in ((100.0, 0.9), (750.0, 0.25)):  # share of noise
        mixed = model.noised(clean, noise, torch.tensor([timestep]))
        assert torch.allclose(mixed, (1 - share) * clean + share * noise)
    modes = sigma_rule_modes(model.sigmas, 10)
    assert modes[0] == Mode.AGGRESSIVE and modes[-1] == Mode.PRECISION


@pytest.mark.parametrize(
    "name",
    [
        "stable_diffusion_3",
        "flux",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("stable_diffusion_xl", "wan")),
    ],
)
def test_timesteps_that_fall_with_the_noise_are_as_before(tmp_path, name):
    make, options = tiny_pipelines.PIPELINES[name]
    make().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **SIZES | options)
    assert model.diffusers is not None
    assert model.diffusers.timestep_factor == (1 / 1000 if name == "flux" else 1.0)
    assert bool((model.sigmas.diff() >= 0).all())


def test_an_inverse_scheduler_of_diffusion_has_the_table_of_its_model(tmp_path):
    """The timesteps of an inverse scheduler rise with the noise."""
    pipe = tiny_pipelines.stable_diffusion()
    pipe.scheduler = diffusers.DDIMInverseScheduler.from_config(pipe.scheduler.config)
    pipe.save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **SIZES)
    assert bool((model.sigmas.diff() > 0).all())


def test_schedulers_that_need_several_steps_are_given_them():
    """Pipelines are observed in two steps, but PNDM needs four for its Runge-Kutta steps."""
    pipe = tiny_pipelines.stable_diffusion()
    pipe.scheduler = diffusers.PNDMScheduler(skip_prk_steps=False)
    caller = PipelineCaller(pipe, "unet", 8, PROMPTS, {})
    sizes = {"height": 32, "width": 32, "tokens": 8}
    assert "sample" in caller.first_call([0], sizes)
    with pytest.raises(UserError, match="4 or more, which its scheduler needs, PNDMScheduler"):
        caller([0], 3, sizes)


SIGMAS = {
    "edm": lambda: diffusers.EDMEulerScheduler(sigma_min=0.01, sigma_max=40.0),
    "edm_multistep": lambda: diffusers.EDMDPMSolverMultistepScheduler(sigma_min=0.01, sigma_max=40.0),
    "continuous": lambda: diffusers.EulerDiscreteScheduler(
        timestep_type="continuous",
        prediction_type="v_prediction",
        sigma_min=0.01,
        sigma_max=40.0,
        use_karras_sigmas=True,
    ),
}


@pytest.mark.parametrize("name", SIGMAS)
def test_timesteps_that_are_logarithms_of_noise_have_places(tmp_path, name):
    """The denoiser and the engine take ln σ / 4 as the pipeline passes it; bins are even in ln σ."""
    pipe = tiny_pipelines.stable_diffusion_xl()
    pipe.scheduler = SIGMAS[name]()
    pipe.save_pretrained(tmp_path)
    model, seen = diffusers_model(tmp_path, **SIZES), []
    assert model.noise_input is not None and model.diffusers is not None and model.diffusers.timestep_factor == 1.0

    def denoiser(**named):
        seen.append((float(named["timestep"].flatten()[0]), named["sample"]))
        return model.denoiser(**named)

    model.sample(denoiser, [3], steps=4, solver="ddim")
    levels = torch.tensor([level for level, _ in seen], dtype=torch.float64)
    places = model.noise_input.place(levels)
    assert places[0] == pytest.approx(1000, abs=0.1) and bool((places.diff() < 0).all())
    assert bool(model.covers(levels).all()) and not model.covers(torch.tensor([999.0])).any()
    sigmas = (4 * levels).exp()
    torch.testing.assert_close(places, 1000 * (sigmas / 0.01).log() / math.log(40 / 0.01))
    place = model.noise_input.place(model.timesteps_at(torch.tensor([0.3]))).round()
    assert float(model.sigmas[int(place)]) == pytest.approx(0.01 * 4000**0.3, rel=1e-4)
    # The network's input has the scheduler's variance.
    spread = model.noised(torch.zeros(1, 4096), torch.randn(1, 4096), model.timesteps_at(torch.tensor([0.999]))).std()
    assert float(spread) == pytest.approx(1, abs=0.05) and float(seen[0][1].std()) == pytest.approx(1, abs=0.1)


def test_the_angles_of_the_cosine_schedule_have_places():
    """2/π · atan σ; the class needs the package torchsde, so that its configuration stands in for it."""

    class CosineDPMSolverMultistepScheduler:
        config: ClassVar = {"sigma_min": 0.3, "sigma_max": 500.0, "sigma_data": 1.0}

    noise = scheduler_sigmas(CosineDPMSolverMultistepScheduler())
    assert noise is not None and noise.noise_input is not None and noise.signal is None
    angle = torch.tensor([2.0, 100.0], dtype=torch.float64).atan() * 2 / math.pi
    place = noise.noise_input.place(angle)
    assert noise.sigmas[place.round().long()].tolist() == pytest.approx([2.0, 100.0], rel=0.1)


def test_a_consistency_models_scheduler_is_told_at_250_logarithms():
    noise = scheduler_sigmas(diffusers.CMStochasticIterativeScheduler())
    assert noise is not None and noise.noise_input is not None
    scheduler = diffusers.CMStochasticIterativeScheduler()
    scheduler.set_timesteps(1)
    assert float(noise.noise_input.place(scheduler.timesteps.double())[0]) == pytest.approx(1000)


def test_logarithms_beside_a_scheduler_of_a_table_have_places(tmp_path):
    """The latent upscaler's UNet gets ln σ / 4, and its scheduler has timesteps to 999."""
    latent_upscale().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, images={"image": picture(tmp_path / "image.png", 0)}, batch=1)
    assert model.noise_input is not None and model.diffusers is not None and model.diffusers.timestep_factor == 1.0
    table, seen = scheduler_sigmas(diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear")), []
    noise_input = model.noise_input
    assert table is not None
    assert noise_input.low == pytest.approx(math.log(table.sigmas[0]) / 4)
    assert noise_input.high == pytest.approx(math.log(table.sigmas[-1]) / 4)

    def denoiser(**named):
        seen.append(noise_input.place(named["timestep"])[0])
        return model.denoiser(**named)

    model.sample(denoiser, [3], steps=5, solver="ddim")
    assert seen[0] == pytest.approx(1000, abs=1) and seen == sorted(seen, reverse=True) and seen[-1] < 10


def test_timesteps_that_a_table_does_not_have_are_refused(tmp_path, monkeypatch):
    """A share of the schedule, which only pipelines of flow matching pass."""

    def shares(*arguments):
        step = first_step(*arguments)
        return replace(step, timesteps=[x / 1000 for x in step.timesteps])

    tiny_pipelines.stable_diffusion().save_pretrained(tmp_path)
    monkeypatch.setattr("trtconvert.models.diffusers.first_step", shares)
    with pytest.raises(UserError, match=r"(?s)passes timesteps to its unet that.*does not have.*got: 0.667, 0.334"):
        diffusers_model(tmp_path, **SIZES)


def test_a_scheduler_of_unknown_noise_is_refused(tmp_path, monkeypatch):
    tiny_pipelines.stable_diffusion().save_pretrained(tmp_path)
    monkeypatch.setattr("trtconvert.models.diffusers.scheduler_sigmas", lambda _: None)
    with pytest.raises(UserError, match=r"(?s)noise of \w+ is not known.*of EDM or of consistency models.*remedy"):
        diffusers_model(tmp_path, **SIZES)
