"""The U-Net of DDPM, from a user's checkpoint in the layout of the CIFAR-10 checkpoints, as a `DiffusionModel`."""

from __future__ import annotations

from pathlib import Path

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.models.ddpm_unet import BETA_SCHEDULE, IMAGE_SHAPE, PREDICTION, TIMESTEPS, load
from trtconvert.models.pixels import PixelSampler


def ddpm_model(weights: Path) -> DiffusionModel:
    """Loads a checkpoint: `source: trtconvert.models.ddpm:ddpm_model` in a recipe.

    Raises:
        UserError: see `trtconvert.models.ddpm_unet.load`.
    """
    sampler = PixelSampler(NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE)), PREDICTION, IMAGE_SHAPE)
    return sampler.model("ddpm-unet", load(weights), {"batch": (1, 64, 512)})
