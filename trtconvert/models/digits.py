"""The digits DiT as a `DiffusionModel`, which ships with the project and which the demo converts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.attention.schedules import NoiseSchedule, ddpm_betas
from trtconvert.diffusion_model import Denoiser, DiffusionModel, ImageEncoder, InputSpec
from trtconvert.models.digits_dit import (
    BETA_SCHEDULE,
    CLASSES,
    IMAGE_SHAPE,
    NULL_LABEL,
    PREDICTION,
    TIMESTEPS,
    load_digits_dit,
)
from trtconvert.models.samplers import class_labels, initial_noise, sample

_SCHEDULE = NoiseSchedule(ddpm_betas(TIMESTEPS, BETA_SCHEDULE))


def draw_digits(
    denoiser: Denoiser,
    seeds: Sequence[int],
    *,
    steps: int,
    solver: str,
    conditions: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Draws samples, see `Sampler`: seed i draws the digit i mod 10, unless conditions are given. Without guidance."""
    conditions = conditions or {"label": torch.tensor([seed % CLASSES for seed in seeds])}
    return sample(
        denoiser,
        initial_noise(seeds, IMAGE_SHAPE),
        _SCHEDULE,
        prediction=PREDICTION,
        solver=solver,
        steps=steps,
        conditions=conditions,
        null_conditions={"label": torch.full_like(conditions["label"], NULL_LABEL)},
    )


def digit_labels(captions: Sequence[str]) -> dict[str, Tensor]:
    """Turns captions into conditions: a caption is a digit, or empty for none.

    Raises:
        ValueError: another caption.
    """
    return class_labels(captions, [str(digit) for digit in range(CLASSES)], f"a digit from 0 to {CLASSES - 1}")


def digits_model(weights: Path) -> DiffusionModel:
    """Loads the trained model.

    Raises:
        UserError: see `load_digits_dit`.
    """
    image = ("batch", IMAGE_SHAPE[0], "height", "width")
    return DiffusionModel(
        name="digits-dit",
        denoiser=load_digits_dit(weights),
        inputs=(
            InputSpec("x", "float32", image),
            InputSpec("timestep", "float32", ("batch",)),
            InputSpec("label", "int64", ("batch",)),
        ),
        output=InputSpec("prediction", "float32", image),
        timestep_input="timestep",
        timestep_max=float(TIMESTEPS),
        sigmas=_SCHEDULE.sigmas,
        dims={"batch": (1, 16, 64), "height": (4, 8, 16), "width": (4, 8, 16)},
        sample=draw_digits,
        encoder=ImageEncoder(IMAGE_SHAPE, lambda images: images * 2 - 1),
        condition=digit_labels,
    )
