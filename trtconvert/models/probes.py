"""Runs a pipeline with a stand-in for its denoiser, which computes next to nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtconvert.bundle import DiffusersRecord
from trtconvert.errors import UserError
from trtconvert.models.pipelines import Called, PipelineCaller, replaced
from trtconvert.models.sample_rows import changed_argument
from trtconvert.runtime.diffusers import DiffusersDenoiser
from trtconvert.runtime.signature import shape_like


def first_inputs(
    caller: PipelineCaller,
    record: DiffusersRecord,
    timestep: str,
    seeds: Sequence[int],
    sizes: Mapping[str, int],
    captions: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Returns the inputs of the pipeline's first call of a converted denoiser.

    Raises:
        UserError: see `PipelineCaller.until_called`; or the pipeline uses a part of its model that a converted model lacks.
    """

    def stop(**named: Tensor) -> Tensor:
        raise Called(named)

    with caller.denoising_with(stand_in(stop, record, timestep)):
        return caller.until_called(seeds, sizes, captions)


@dataclass(frozen=True)
class FirstStep:
    """The calls of the denoiser in a pipeline's first step.

    Attributes:
        shapes: of the inputs of each call.
        timesteps: the first two timesteps; one timestep where the pipeline passes no other.
    """

    shapes: list[dict[str, tuple[int, ...]]]
    timesteps: list[float]


def first_step(
    caller: PipelineCaller,
    record: DiffusersRecord,
    timestep: str,
    sizes: Mapping[str, int],
    prediction: Sequence[int | str],
    captions: Sequence[str] | None = None,
) -> FirstStep:
    """Runs the pipeline, for one sample or for these captions, until the timestep changes.

    Args:
        prediction: symbolic shape of the denoiser's output.
    Raises:
        UserError: see `first_inputs`.
    """
    step, predicted = FirstStep([], []), number_of_sample(timestep, prediction)

    def watched(**named: Tensor) -> Tensor:
        at = float(named[timestep].flatten()[0])
        if not step.timesteps:
            step.timesteps.append(at)
        elif at != step.timesteps[0]:
            step.timesteps.append(at)
            raise Called({})
        step.shapes.append({name: tuple(x.shape) for name, x in named.items()})
        return predicted(**named)

    with caller.denoising_with(stand_in(watched, record, timestep)):
        try:
            caller.until_called([0] * len(captions or [""]), sizes, captions)
        except UserError:
            if not step.timesteps:  # a pipeline of one timestep runs to its end
                raise
    return step


def number_of_sample(timestep: str, prediction: Sequence[int | str]) -> Callable[..., Tensor]:
    """Returns a denoiser that predicts multiples of one number for each row, so that samples differ: the first noisy number.

    Pipelines may divide by the deviation of a sample's prediction (guidance_rescale) or of a batch's (Bria's normalize), so that
    the multiples differ, and the halves of guidance by the means of their prompts' embeddings.

    Args:
        timestep: name of this input.
        prediction: symbolic shape of the output.
    """

    def predicted(**named: Tensor) -> Tensor:
        first = next(x for name, x in named.items() if name != timestep)
        shape = shape_like(prediction, first)
        number = first.flatten(1)[:, 0]
        # Other inputs may have as many rows by chance: positions of tokens, or layers of a text encoder.
        texts = named.get("encoder_hidden_states")
        if texts is not None and len(texts) == len(first):
            number = number + texts.flatten(1).mean(1).nan_to_num().tanh()
        multiples = torch.linspace(0.5, 1.5, math.prod(shape[1:]), device=first.device)
        return (number[:, None] * multiples).reshape(shape)

    return predicted


def changed_in_batch(
    caller: PipelineCaller,
    record: DiffusersRecord,
    timestep: str,
    sizes: Mapping[str, int],
    prediction: Sequence[int | str],
) -> str:
    """Returns what the pipeline computes otherwise for a sample in a call of two than for the sample alone, in words; "" where it
    is the same, as far as the denoiser's first call and the latents at the end tell.

    Args:
        prediction: symbolic shape of the denoiser's output.
    """

    def decoded(*_: Any, **__: Any) -> None:
        raise Called({})

    predicted = number_of_sample(timestep, prediction)
    vae: Any = getattr(caller.pipe, "vae", None)
    with torch.no_grad(), ExitStack() as stack:
        try:
            if name := changed_argument(*(caller.first_call(seeds, sizes) for seeds in ([0, 1], [1]))):
                return f"its {record.component} gets another '{name}'"
            stack.enter_context(caller.others_idling())
            stack.enter_context(caller.denoising_with(stand_in(predicted, record, timestep)))
            if hasattr(vae, "decode"):
                stack.enter_context(replaced(vae, "decode", decoded))
            steps = caller.probing_steps()
            # One prompt, as a longer one may pad that of the sample.
            texts = [caller.prompts[0]] * 2
            both, alone = (
                {"latents": caller(seeds, steps, sizes, texts[: len(seeds)], as_latents=True)}
                for seeds in ([0, 1], [1])
            )
        except (UserError, Called):  # the pipeline draws one sample in a call, or returns no latents
            return ""
    return "the same predictions give other latents" if changed_argument(both, alone) else ""


def stand_in(denoiser: Callable[..., Tensor], record: DiffusersRecord, timestep: str) -> DiffusersDenoiser:
    """Wraps a function of named tensors as a pipeline's denoiser."""
    return DiffusersDenoiser(denoiser, record, timestep, dtype=torch.float32, device=torch.device("cpu"))
