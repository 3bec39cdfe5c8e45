"""Options of a recipe for a pipeline's calls, and the names of pipelines' arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trtconvert.errors import UserError, unfit_option

BATCH = [1, 2, 8]
"""Images per call of a pipeline, (min, opt, max), unless the recipe says otherwise."""

PROMPTS = (
    "a photograph of a mountain lake at sunrise",
    "a watercolour painting of an old harbour town",
    "a close-up portrait of an elderly man, studio light",
    "an isometric drawing of a small workshop full of tools",
    "a red bicycle leaning against a white wall",
    "two dogs running along a beach, motion blur",
    "a bowl of fruit on a wooden table, oil painting",
    "a city street at night after rain, neon signs",
)

TIMESTEPS = ("timestep", "timesteps", "t")
"""Names of a denoiser's timestep argument; HiDream uses the second, Z-Image the third."""

TOKENS = "tokens"
"""The option for the number of a prompt's tokens, and the symbolic dimension that follows it."""

LENGTH = "max_sequence_length"
"""The pipelines' argument for the number of tokens that prompts are padded or cut to."""

BINNING = "use_resolution_binning"
"""The pipelines' argument that draws at the nearest of a list of sizes and resizes the result."""

SIZE_ARGUMENTS = {"height": ("height",), "width": ("width",), "frames": ("num_frames", "frames", "video_length")}
"""Sizes among `model.options`, and the pipelines' arguments for them: Sana's video and Latte name the frames in other ways."""

PROMPT = re.compile(r"(negative_)?prompt(_\d)?")
"""Arguments of a call that hold one text for each sample."""

SET_ELSEWHERE = {
    "num_inference_steps": "calibration.steps, plan.steps and verify.steps",
    "prompt": "model.options.prompts",
    "height": "model.options.height",
    "width": "model.options.width",
    "num_frames": "model.options.frames",
    "generator": "calibration.seed and verify.seed",
    "output_type": "nothing: samples are images, or latents of a pipeline without a VAE",
}
"""Arguments that every call gets here, and the field of the recipe that decides each."""

Sizes = int | list[int] | None
"""A fixed size, [min, opt, max], or None for the pipeline's default."""


def size_range(name: str, size: int | Sequence[int]) -> tuple[int, int, int]:
    """Returns a size of `model.options` as (min, opt, max).

    Raises:
        UserError: it is neither a whole number nor such a list.
    """
    values: list[Any] = list(size) if isinstance(size, (list, tuple)) else [size] * 3
    if len(values) != 3 or not all(type(n) is int and n > 0 for n in values) or values != sorted(values):
        raise unfit_option(name, "a whole number, or [min, opt, max]", size)
    low, opt, high = values
    return low, opt, high


def refuse_unfit(prompts: Sequence[str], call: Mapping[str, Any]) -> None:
    """
    Raises:
        UserError: prompts are not a list of texts, or the call sets arguments that other fields of the recipe decide.
    """
    if isinstance(prompts, str) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
        raise unfit_option("prompts", "a list of one text or more", prompts)
    if taken := [name for name in SET_ELSEWHERE if name in call]:
        raise UserError(
            f"model.options.call sets {taken[0]}",
            expected="other arguments of the pipeline than " + ", ".join(SET_ELSEWHERE),
            got=f"{taken[0]}: {call[taken[0]]!r}",
            remedy=f"remove it from model.options.call; it is decided by {SET_ELSEWHERE[taken[0]]}",
        )


def refuse_unfit_texts(kind: str, arguments: Mapping[str, Any], has_text_encoder: bool) -> None:
    """
    Args:
        kind: class of the pipeline.
        arguments: `model.options.call`.
    Raises:
        UserError: a prompt in the call is not a text or a list of texts, or no text encoder reads it.
    """
    for name, value in arguments.items():
        if not PROMPT.fullmatch(name) or value is None:
            continue
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(x, str) for x in listed):
            raise unfit_option(f"call.{name}", "a text for all samples, or a list of texts by turns", value)
        if not has_text_encoder:
            raise UserError(
                f"no text encoder reads model.options.call.{name}",
                expected=f"a {kind} with its text encoders",
                got=f"{value!r}, and a pipeline without text encoders, which gets noise as prompt embeddings",
                remedy=f"save the pipeline with its text encoders and tokenizers, or remove {name} from model.options.call",
            )
