"""docs/models.md: what the tests convert, from their own lists. `python tests/helpers/models_page.py` writes it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from further_pipelines import CONVERTIBLE, REFUSED
from tiny_pipelines import PIPELINES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """# Pipelines

`tests/models` builds each pipeline of the first table: its own class of diffusers, with random weights of a few layers, is
converted, and draws with the bundle's denoiser in the place of its own. Others are tried in the same way when they are built: no
pipeline is known by its name. This page is made of the tests' lists, and a test holds it to them.

| pipeline | denoiser | samples are of | tested with, beside sizes |
| --- | --- | --- | --- |
"""

_BETWEEN = """
Labels of classes are drawn by the seed of each sample, or are those of `model.options.call.class_labels` by turns. Pipelines
that are saved without text encoders get embeddings that are noise, seeded by the sample. Images come from the recipe's
`model.images`.

## Prompts of any length

`model.options.tokens: [min, opt, max]` gives the denoiser, and text encoders that are converted, a range of tokens:

- Pipelines with an argument `max_sequence_length` that pad prompts to it (Flux, SD 3, PixArt, Wan, LTX) are called with any
  length in the range, also with embeddings of one.
- Those that pad to a length of their own (77 of CLIP) draw prompts as they are, and take embeddings (`prompt_embeds`) of any
  length in the range, as tools for long prompts make them: `tokens: [77, 77, 231]`.
- Those that do not pad (Qwen-Image) need a range. Its prompts are checked against it before anything is calibrated.
- Those that pass a list with each prompt's own tokens (Z-Image) need a number or a range: the bundle's denoiser pads shorter
  prompts and masks what it has added.

A number instead of a range is the length that prompts are padded to. A prompt or embeddings outside of the range are refused,
with what to change.

## Timesteps of tokens and frames, sound, experts

- Where tokens or frames of a sample have timesteps of their own (Wan 2.2 5B, LTX, SkyReels V2, AnyFlow), the noisiest decides the
  timestep bin. The others are an input of the engine, as shares of that timestep.
- Several predictions of one call (LTX-2: video and sound) lie side by side in one output of the engine. Sizes are one number each
  then. The quality gate of predictions weighs all numbers alike; PSNR is that of the video.
- LTX-2's guidance by skipped attention and by separate modalities makes calls of other kinds, which the engine refuses:
  `call: {stg_scale: 0, audio_stg_scale: 0, modality_scale: 1, audio_modality_scale: 1}`.
- PSNR of sound is that of its amplitudes at full scale.
- Of mixtures of experts that send tokens by their values (HiDream) each expert computes all tokens: twice the work for 2 of 4.
- The engine of a model with a ControlNet takes what the ControlNet gives; the ControlNet stays in the pipeline.
- HunyuanVideo 1.5 needs `batch: 1`: the VAE of diffusers decodes one video at a time.

## Sizes

Where a pipeline rounds sizes, or draws at the nearest of its own (`use_resolution_binning`), a build says so before it
calibrates: "draws height 1000 as 992". Ranges of height and width need `call: {use_resolution_binning: false}`.

## Refused

Before anything is calibrated, with what stands in the way:

| pipeline | why |
| --- | --- |
"""


_OF_TESTS = ("base_num_frames", "max_area", "max_sequence_length", "decode_timestep", "intermediate_timesteps")
"""Arguments that fit the sizes of tiny models."""

_AFTER = """| AnyFlowFARPipeline | its model gives a cache of keys and values, which the next chunk's calls take |
| Cosmos3OmniPipeline | what is denoised is a list in a packed sequence with the prompt, and has no timestep for each sample |
| QwenImage21Pipeline | each step's call takes a cache; with `call: {use_kv_cache: false}`, values of a mask decide |

These three are tried without being saved, with stand-ins for their tokenizers. Not tried, since diffusers makes their prompts by
large models of transformers alone: Ideogram4Pipeline, whose second network would be `denoiser: unconditional_transformer`, and
GlmImagePipeline with its own tokens. GLM-Image's transformer converts without an image, with given tokens. Kandinsky 6 is tried
without sound, and its upscaler is not. Cosmos 2 needs the package cosmos_guardrail; it is tried with a stand-in.
"""


def page() -> str:
    """What docs/models.md holds."""
    rows = []
    for make, options in PIPELINES.values():
        of = "a prompt, a video" if "frames" in options else "a prompt"
        rows.append(_row(make(), of, options))
    rows += [_row(tiny.make(), tiny.of, tiny.options, tiny.exclude) for tiny in CONVERTIBLE.values()]
    refused = [f"| {type(tiny.make()).__name__} | {tiny.why} |" for tiny in REFUSED.values()]
    return _HEAD + "\n".join(sorted(rows)) + "\n" + _BETWEEN + "\n".join(sorted(refused)) + "\n" + _AFTER


def _row(pipe: Any, of: str, options: Any, exclude: Sequence[str] = ()) -> str:
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    # The sizes are those of tiny models; the rest is what the pipeline wants.
    others = {name: value for name, value in options.items() if name not in ("height", "width", "frames")}
    call = others.pop("call", {})
    told = [f"`{name}: {value}`" for name, value in others.items()]
    told += [f"`call: {{{name}: {str(value).lower()}}}`" for name, value in call.items() if name not in _OF_TESTS]
    told += [f"`attention: {{exclude: ['{pattern}']}}`" for pattern in exclude]
    return f"| {type(pipe).__name__} | {type(denoiser).__name__} | {of} | {', '.join(told)} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PAGE.write_text(page(), encoding="utf-8")
