"""Draws samples with a diffusers pipeline and a replaced denoiser."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from trtconvert.bundle import ComponentRecord, DiffusersRecord
from trtconvert.diffusion_model import Denoiser
from trtconvert.errors import UserError
from trtconvert.images import SOUND_ROW, laid_out, read_picture
from trtconvert.models.call_options import BATCH, PROMPTS, SIZE_ARGUMENTS, TOKENS, size_range
from trtconvert.models.captions import STAND_IN, Captions
from trtconvert.models.drawings import CountedDenoiser
from trtconvert.models.pipelines import PipelineCaller
from trtconvert.runtime.diffusers import DiffusersDenoiser
from trtconvert.wrapped import begin


def pipeline_sampler(
    pipe: Any,
    component: ComponentRecord,
    options: Mapping[str, Any],
    prompts: Sequence[str] = (),
    images: Mapping[str, Path | list[Path]] | None = None,
) -> PipelineSampler:
    """Returns the sampler of a pipeline that is made of a bundle's components.

    Args:
        component: the denoiser's record in the manifest.
        options: of the recipe, see `diffusers_model`.
        prompts: instead of the recipe's.
        images: see `diffusers_model`.
    """
    assert component.diffusers is not None
    caller = PipelineCaller(
        pipe,
        component.diffusers.component,
        None if options.get(TOKENS) is None else size_range(TOKENS, options[TOKENS])[1],
        tuple(prompts or options.get("prompts", PROMPTS)),
        dict(options.get("call") or {}),
        read_pictures(images or {}),
    )
    caller.pads = bool(component.diffusers.padded_by)
    sizes = {name: size_range(name, options[name])[1] for name in SIZE_ARGUMENTS if options.get(name) is not None}
    batch = size_range("batch", options.get("batch") or BATCH)[2]
    return PipelineSampler(caller, component.diffusers, component.timestep_input, sizes, batch)


def read_pictures(files: Mapping[str, Path | list[Path]]) -> dict[str, Image | list[Image]]:
    """Reads `model.images` of a recipe, by argument of the pipeline's call.

    Raises:
        UserError: a file cannot be read.
    """

    def read(path: Path) -> Image:
        return read_picture(path, "correct model.images in the recipe")

    return {name: list(map(read, of)) if isinstance(of, list) else read(of) for name, of in files.items()}


@dataclass(frozen=True)
class PipelineSampler:
    """Runs the pipeline's own loop with any denoiser, see `trtconvert.diffusion_model.Sampler`.

    Args:
        caller: calls the pipeline.
        record, timestep_input: see `DiffusersDenoiser`.
        sizes: of the samples.
        batch: samples in a call of the pipeline.
    """

    caller: PipelineCaller
    record: DiffusersRecord
    timestep_input: str
    sizes: Mapping[str, int]
    batch: int

    @cached_property
    def captions(self) -> Captions:
        """Turns captions into conditions of the denoiser."""
        return Captions(self.caller, self.sizes, self.record, self.timestep_input)

    def __call__(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        *,
        steps: int,
        solver: str,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Returns images [N, C, H, W] in [0, 1]. Without a decoder these show the channels of latents one below the other; the
        frames of a video are one below the other too. If a pipeline's strength leaves none of so few steps, it takes one.

        Raises:
            UserError: the solver is not "ddim", which stands for the pipeline's own scheduler; or the pipeline has several
                denoisers and does not call this one in so few steps.
        """
        if solver != "ddim":
            raise UserError(
                "a diffusers pipeline samples with its own scheduler",
                expected=f"ddim, which stands for it: {type(self.caller.pipe.scheduler).__name__}",
                got=solver,
                remedy="leave the solver out, or save the pipeline with another scheduler",
            )
        # The pipeline runs on the device of an engine; other denoisers move the tensors that they get from the CPU.
        device = getattr(denoiser, "device", torch.device("cpu"))
        images, calls = [], 0

        def called() -> None:
            nonlocal calls
            calls += 1

        counted = CountedDenoiser(denoiser, called)
        for start in range(0, len(seeds), self.batch):
            chunk = seeds[start : start + self.batch]
            given = {name: x[start : start + self.batch] for name, x in (conditions or {}).items()}
            captioned = self.captions.given_to(counted, given) if given else counted
            captions = [STAND_IN] * len(chunk) if given else None
            images.append(self.draw(captioned, device, chunk, steps, captions))
        if not calls:
            raise UserError(
                f"{self.record.pipeline} does not call its {self.record.component} in {steps} steps",
                expected=f"a number of steps that includes the noise levels of {self.record.component}",
                got="images drawn by the other denoisers alone",
                remedy="take more steps",
            )
        return torch.cat(images)

    def draw(
        self,
        denoiser: Denoiser,
        device: torch.device,
        seeds: Sequence[int],
        steps: int,
        captions: Sequence[str] | None = None,
    ) -> Tensor:
        """Returns the images of one call of the pipeline.

        Args:
            device: of the denoiser's inputs.
            captions: one per seed, instead of the prompts.
        Raises:
            UserError: see `PipelineCaller`.
        """
        begin(denoiser)  # an image of one step does not begin with more noise than the one before
        dropped_in = DiffusersDenoiser(denoiser, self.record, self.timestep_input, dtype=torch.float32, device=device)
        with torch.no_grad(), self.caller.denoising_with(dropped_in):
            drawn = self.caller(seeds, self.caller.taken_steps(steps), self.sizes, captions)
        return as_images(drawn.cpu(), decoded=self.caller.decodes)


def as_images(output: Tensor, *, decoded: bool) -> Tensor:
    """Returns the output of a pipeline as images [N, C, H, W] in [0, 1].

    Args:
        output: images [N, C, H, W], videos [N, F, C, H, W], sounds [N, C, S] in [-1, 1], or latents [N, …, H, W] of about unit
            variance.
    """
    if not decoded:
        output = (output.float() / 8 + 0.5).clamp(0, 1)  # four standard deviations to either side
        return output.flatten(1, -2)[:, None]
    if output.dim() == 3:
        output = output.float() / 2 + 0.5
    return laid_out(output.float()).clamp(0, 1)


def notices_of_sound(pipe: Any) -> tuple[str, ...]:
    """Returns the notice about a pipeline that draws sound; nothing for other pipelines."""
    rates = [getattr(getattr(pipe, "vae", None), "config", {}).get("sampling_rate")]
    if (
        "audio_length_in_s" in inspect.signature(pipe.__call__).parameters
    ):  # vocoders of other pipelines make a video's sound
        rates.append(getattr(getattr(getattr(pipe, "vocoder", None), "config", None), "sampling_rate", None))
    if not any(rates):
        return ()
    return (
        f"{type(pipe).__name__} draws sound: PSNR compares its amplitudes at full scale, and pictures show amplitudes as grey, "
        f"{SOUND_ROW} a row",
    )
