"""The digits DiT as a `DiffusionModel`, which ships with the project and which the demo converts."""

from __future__ import annotations

from pathlib import Path

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.models.digits_dit import BETA_SCHEDULE, CLASSES, IMAGE_SHAPE, PREDICTION, TIMESTEPS, load_digits_dit
from trtconvert.models.pixels import PixelSampler

_SCHEDULE = NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE))

draw_digits = PixelSampler(
    _SCHEDULE, PREDICTION, IMAGE_SHAPE, [str(digit) for digit in range(CLASSES)], lambda seed: seed % CLASSES
)
"""Draws samples: seed i draws the digit i mod 10, unless conditions are given. Without guidance."""


def digits_model(weights: Path) -> DiffusionModel:
    """Loads the trained model.

    Raises:
        UserError: see `load_digits_dit`.
    """
    dims = {"batch": (1, 16, 64), "height": (4, 8, 16), "width": (4, 8, 16)}
    return draw_digits.model("digits-dit", load_digits_dit(weights), dims)
