"""The U-Net of DDPM, from a user's checkpoint in the layout of the CIFAR-10 checkpoints, as a `DiffusionModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.diffusion_model import Denoiser, DiffusionModel, ImageEncoder, InputSpec
from trtconvert.models.ddpm_unet import BETA_SCHEDULE, IMAGE_SHAPE, PREDICTION, TIMESTEPS, load
from trtconvert.models.samplers import initial_noise, sample

SCHEDULE = NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE))


def draw(
    denoiser: Denoiser,
    seeds: Sequence[int],
    *,
    steps: int,
    solver: str,
    conditions: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Draws samples without conditions, see `Sampler`."""
    return sample(
        denoiser,
        initial_noise(seeds, IMAGE_SHAPE),
        SCHEDULE,
        prediction=PREDICTION,
        solver=solver,
        steps=steps,
        conditions=conditions,
    )


def ddpm_model(weights: Path) -> DiffusionModel:
    """Loads a checkpoint: `source: trtconvert.models.ddpm:ddpm_model` in a recipe.

    Raises:
        UserError: see `trtconvert.models.ddpm_unet.load`.
    """
    image = ("batch", *IMAGE_SHAPE)
    return DiffusionModel(
        name="ddpm-unet",
        denoiser=load(weights),
        inputs=(InputSpec("x", "float32", image), InputSpec("timestep", "float32", ("batch",))),
        output=InputSpec("prediction", "float32", image),
        timestep_input="timestep",
        timestep_max=float(TIMESTEPS),
        sigmas=SCHEDULE.sigmas,
        dims={"batch": (1, 64, 512)},
        sample=draw,
        encoder=ImageEncoder(IMAGE_SHAPE, lambda images: images * 2 - 1),
    )
