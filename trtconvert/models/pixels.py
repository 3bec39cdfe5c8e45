"""Denoisers of pixels in [-1, 1] by DDPM's timesteps, with labels or without, as `DiffusionModel`s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trtconvert.attention.schedules import NoiseSchedule
from trtconvert.diffusion_model import Denoiser, DiffusionModel, ImageEncoder, InputSpec
from trtconvert.models.samplers import initial_noise, sample


@dataclass(frozen=True, eq=False)
class PixelSampler:
    """Draws samples, see `Sampler`.

    Args:
        schedule, prediction: of the training.
        shape: of an image, [C, H, W].
        classes: names of the labels; nothing for a model without labels. The label after the last stands for no class.
        label_of_seed: returns the label of a sample, unless conditions are given.
        guidance: classifier-free guidance of samples: with one other than 1 each call of the denoiser has two rows for each.
    """

    schedule: NoiseSchedule
    prediction: str
    shape: tuple[int, int, int]
    classes: Sequence[str] = ()
    label_of_seed: Callable[[int], int] = lambda seed: seed
    guidance: float = 1.0

    def __call__(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        *,
        steps: int,
        solver: str,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        null_conditions = None
        if self.classes:
            conditions = conditions or {"label": torch.tensor([self.label_of_seed(seed) for seed in seeds])}
            null_conditions = {"label": torch.full_like(conditions["label"], len(self.classes))}
        return sample(
            denoiser,
            initial_noise(seeds, self.shape),
            self.schedule,
            prediction=self.prediction,
            solver=solver,
            steps=steps,
            conditions=conditions,
            null_conditions=null_conditions,
            guidance=self.guidance,
        )

    def labels(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Turns captions into conditions: a caption is a class, or empty for none.

        Raises:
            ValueError: another caption; the text has the valid ones.
        """
        known = {name: label for label, name in enumerate((*self.classes, ""))}
        if any(caption not in known for caption in captions):
            raise ValueError(f"one of {', '.join(self.classes)}, or nothing")
        return {"label": torch.tensor([known[caption] for caption in captions])}

    def model(self, name: str, denoiser: nn.Module, dims: Mapping[str, tuple[int, int, int]]) -> DiffusionModel:
        """Returns the model of a denoiser.

        Args:
            dims: see `DiffusionModel`: "batch", and "height" and "width" if they vary.
        """
        channels, height, width = self.shape
        sizes = ("height", "width") if "height" in dims else (height, width)
        image = ("batch", channels, *sizes)
        inputs = [InputSpec("x", "float32", image), InputSpec("timestep", "float32", ("batch",))]
        if self.classes:
            inputs.append(InputSpec("label", "int64", ("batch",)))
        return DiffusionModel(
            name=name,
            denoiser=denoiser,
            inputs=tuple(inputs),
            output=InputSpec("prediction", "float32", image),
            timestep_input="timestep",
            timestep_max=float(self.schedule.timesteps),
            sigmas=self.schedule.sigmas,
            dims=dict(dims),
            sample=self,
            encoder=ImageEncoder(self.shape, lambda images: images * 2 - 1),
            condition=self.labels if self.classes else None,
        )
