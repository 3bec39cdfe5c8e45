"""The U-Net of DDPM, from a user's checkpoint in the layout of the CIFAR-10 checkpoints, as a `DiffusionModel`."""

from __future__ import annotations

from pathlib import Path

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError
from trtconvert.models.ddpm_unet import BETA_SCHEDULE, IMAGE_SHAPE, PREDICTION, TIMESTEPS, load
from trtconvert.models.pixels import PixelSampler


def ddpm_model(weights: Path, size: int = IMAGE_SHAPE[1]) -> DiffusionModel:
    """Loads a checkpoint: `source: trtconvert.models.ddpm:ddpm_model` in a recipe.

    Args:
        size: height and width of images in pixels, a multiple of 2^(levels − 1): `options: {size: 64}` in a recipe.
    Raises:
        UserError: see `trtconvert.models.ddpm_unet.load`; or the model cannot take images of this size.
    """
    denoiser = load(weights)
    multiple = 2 ** (len(denoiser.down) - 1)
    if size < 1 or size % multiple:
        raise UserError(
            f"the U-Net in {weights} cannot take images of {size} × {size} pixels",
            expected=f"a multiple of {multiple}, because its levels halve images {len(denoiser.down) - 1} times",
            got=f"{size}",
            remedy="set size in the recipe's model.options to that of the training images",
        )
    shape = (denoiser.conv_in.in_channels, size, size)
    sampler = PixelSampler(NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE)), PREDICTION, shape)
    return sampler.model("ddpm-unet", denoiser, {"batch": (1, 64, 512)})
