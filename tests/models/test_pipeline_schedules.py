"""The noise that a pipeline's timesteps stand for, whichever way they go."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_pipelines
import torch

from trtconvert.attention.modes import Mode
from trtconvert.attention.schedules import sigma_rule_modes
from trtconvert.errors import UserError
from trtconvert.models.diffusers import diffusers_model

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

SIZES: dict[str, Any] = {"height": 32, "width": 32, "tokens": 8, "batch": 1}


def inverted(folder):
    pipe = tiny_pipelines.stable_diffusion_3()
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, invert_sigmas=True)
    pipe.save_pretrained(folder)
    return diffusers_model(folder, **SIZES)


def test_timesteps_that_rise_while_noise_falls_are_followed(tmp_path):
    """As with inverted sigmas: the first timestep is 0, which is no share of 1, and stands for noise alone."""
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
    for timestep, share in ((100.0, 0.9), (750.0, 0.25)):  # of noise
        mixed = model.noised(clean, noise, torch.tensor([timestep]))
        assert torch.allclose(mixed, (1 - share) * clean + share * noise)
    modes = sigma_rule_modes(model.sigmas, 10)
    assert modes[0] == Mode.AGGRESSIVE and modes[-1] == Mode.PRECISION


@pytest.mark.parametrize("name", ["stable_diffusion_3", "flux", "stable_diffusion_xl", "wan"])
def test_timesteps_that_fall_with_the_noise_are_as_before(tmp_path, name):
    make, options = tiny_pipelines.PIPELINES[name]
    make().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **SIZES | options)
    assert model.diffusers is not None
    assert model.diffusers.timestep_factor == (1 / 1000 if name == "flux" else 1.0)
    assert bool((model.sigmas.diff() >= 0).all())


def test_an_inverse_scheduler_of_diffusion_has_the_table_of_its_model(tmp_path):
    """Its timesteps rise because noise does."""
    pipe = tiny_pipelines.stable_diffusion()
    pipe.scheduler = diffusers.DDIMInverseScheduler.from_config(pipe.scheduler.config)
    pipe.save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **SIZES)
    assert bool((model.sigmas.diff() > 0).all())


def test_timesteps_that_are_no_places_in_a_table_are_refused(tmp_path):
    pipe = tiny_pipelines.stable_diffusion_xl()
    pipe.scheduler = diffusers.EulerDiscreteScheduler(
        timestep_type="continuous", prediction_type="v_prediction", sigma_min=0.002, sigma_max=700.0
    )
    pipe.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"(?s)noise of EulerDiscrete.*got: .*timestep_type: continuous.*remedy"):
        diffusers_model(tmp_path, **SIZES)
