"""The emoji DiT as a `DiffusionModel`, the colour model that ships with the project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.diffusion_model import Denoiser, DiffusionModel, ImageEncoder, InputSpec
from trtconvert.models.emoji_dit import (
    BETA_SCHEDULE,
    CATEGORIES,
    CLASSES,
    IMAGE_SHAPE,
    NULL_LABEL,
    PREDICTION,
    TIMESTEPS,
    load_emoji_dit,
)
from trtconvert.models.samplers import class_labels, initial_noise, sample

SCHEDULE = NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE))
GUIDANCE = 2.0
"""Classifier-free guidance of samples: each call of the denoiser has two rows for each."""


def label_of_seed(seed: int) -> int:
    """Returns the label for a seed: seeds take the categories by turns, and within each its subgroups by turns."""
    category = list(CATEGORIES.values())[seed % len(CATEGORIES)]
    return CLASSES.index(category[seed // len(CATEGORIES) % len(category)])


def draw_emoji(
    denoiser: Denoiser,
    seeds: Sequence[int],
    *,
    steps: int,
    solver: str,
    conditions: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Draws samples, see `Sampler`: labels are those of `label_of_seed`, unless conditions are given."""
    conditions = conditions or {"label": torch.tensor([label_of_seed(seed) for seed in seeds])}
    return sample(
        denoiser,
        initial_noise(seeds, IMAGE_SHAPE),
        SCHEDULE,
        prediction=PREDICTION,
        solver=solver,
        steps=steps,
        conditions=conditions,
        null_conditions={"label": torch.full_like(conditions["label"], NULL_LABEL)},
        guidance=GUIDANCE,
    )


def emoji_labels(captions: Sequence[str]) -> dict[str, Tensor]:
    """Turns captions into conditions: a caption is one of `CLASSES`, or empty for none.

    Raises:
        ValueError: another caption.
    """
    return class_labels(captions, CLASSES, f"a subgroup of Unicode's emoji: {', '.join(CLASSES)}")


def emoji_model(weights: Path) -> DiffusionModel:
    """Loads the trained model.

    Raises:
        UserError: see `load_emoji_dit`.
    """
    image = ("batch", IMAGE_SHAPE[0], "height", "width")
    return DiffusionModel(
        name="emoji-dit",
        denoiser=load_emoji_dit(weights),
        inputs=(
            InputSpec("x", "float32", image),
            InputSpec("timestep", "float32", ("batch",)),
            InputSpec("label", "int64", ("batch",)),
        ),
        output=InputSpec("prediction", "float32", image),
        timestep_input="timestep",
        timestep_max=float(TIMESTEPS),
        sigmas=SCHEDULE.sigmas,
        dims={"batch": (1, 8, 64), "height": (32, 64, 128), "width": (32, 64, 128)},
        sample=draw_emoji,
        encoder=ImageEncoder(IMAGE_SHAPE, lambda images: images * 2 - 1),
        condition=emoji_labels,
    )
