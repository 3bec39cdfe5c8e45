"""The emoji DiT as a `DiffusionModel`, the colour model that ships with the project."""

from __future__ import annotations

from pathlib import Path

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.models.emoji_dit import (
    BETA_SCHEDULE,
    CATEGORIES,
    CLASSES,
    IMAGE_SHAPE,
    PREDICTION,
    TIMESTEPS,
    load_emoji_dit,
)
from trtconvert.models.pixels import PixelSampler

GUIDANCE = 2.0


def label_of_seed(seed: int) -> int:
    """Returns the label for a seed: seeds take the categories by turns, and within each its subgroups by turns."""
    category = list(CATEGORIES.values())[seed % len(CATEGORIES)]
    return CLASSES.index(category[seed // len(CATEGORIES) % len(category)])


draw_emoji = PixelSampler(
    NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE)), PREDICTION, IMAGE_SHAPE, CLASSES, label_of_seed, GUIDANCE
)


def emoji_model(weights: Path) -> DiffusionModel:
    """Loads the trained model.

    Raises:
        UserError: see `load_emoji_dit`.
    """
    dims = {"batch": (1, 8, 64), "height": (32, 64, 128), "width": (32, 64, 128)}
    return draw_emoji.model("emoji-dit", load_emoji_dit(weights), dims)
