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

`tests/models` builds each pipeline of the first table: its class of diffusers, with random weights of a few layers, is converted,
and draws with the bundle's denoiser in place of its own. A build treats other pipelines in the same way, because no pipeline is
known by its name. This page is generated from the tests' lists, and a test compares them.

| pipeline | denoiser | samples are of | tested with, beside sizes |
| --- | --- | --- | --- |
"""

_BETWEEN = """
The seed of each sample decides its class label, unless `model.options.call.class_labels` lists labels. Pipelines that are saved
without text encoders get seeded noise as embeddings. Images come from the recipe's `model.images`.

## Prompts of any length

`model.options.tokens: [min, opt, max]` gives the denoiser and converted text encoders a range of tokens:

- Pipelines that pad prompts to their argument `max_sequence_length` (Flux, SD 3, PixArt, Wan, LTX) may be called with any length
  in the range, and with embeddings of any length in the range.
- Pipelines that pad to a fixed length (77 for CLIP) draw prompts at this length, and take embeddings (`prompt_embeds`) of any
  length in the range, as tools for long prompts make them: `tokens: [77, 77, 231]`.
- Pipelines that do not pad (Qwen-Image) need a range. Prompts are checked against the range before the calibration.
- Pipelines that pass a list with each prompt's tokens (Z-Image) need a number or a range: the bundle's denoiser pads shorter
  prompts and masks the padding.

A number in place of a range is the padded length of prompts. A prompt or embeddings outside of the range are refused with a
remedy.

## Timesteps of tokens and frames, sound, experts

- If tokens or frames of a sample have different timesteps (Wan 2.2 5B, LTX, SkyReels V2, AnyFlow), the noisiest decides the
  timestep bin. The others are an input of the engine, as shares of that timestep.
- Several predictions of one call (LTX-2: video and sound) are concatenated in one output of the engine, and each size must be one
  number. The gate of predictions weighs all numbers equally; PSNR is that of the video.
- LTX-2's guidance by skipped attention and by separate modalities makes other calls, which the engine refuses. Turn this guidance
  off: `call: {stg_scale: 0, audio_stg_scale: 0, modality_scale: 1, audio_modality_scale: 1}`.
- PSNR of sound is that of its amplitudes at full scale.
- In mixtures of experts that route tokens by their values (HiDream), each expert computes all tokens: twice the work for 2 of 4.
- The engine of a model with a ControlNet takes the ControlNet's outputs; the ControlNet stays in the pipeline.
- HunyuanVideo 1.5 needs `batch: 1`: the VAE of diffusers decodes one video at a time.

## Sizes

If a pipeline rounds sizes, or draws at the nearest of its own sizes (`use_resolution_binning`), a build prints this before the
calibration: "draws height 1000 as 992". Ranges of height and width need `call: {use_resolution_binning: false}`.

## Refused

These pipelines are refused before the calibration:

| pipeline | why |
| --- | --- |
"""


_OF_TESTS = ("base_num_frames", "max_area", "max_sequence_length", "decode_timestep", "intermediate_timesteps")
"""Arguments that fit the sizes of tiny models."""

_AFTER = """| AnyFlowFARPipeline | its model returns a cache of keys and values for the calls of the next chunk |
| Cosmos3OmniPipeline | the noisy sample is a list in a packed sequence with the prompt, without a timestep for each sample |
| QwenImage21Pipeline | each step's call takes a cache; with `call: {use_kv_cache: false}`, operations depend on a mask |

The last three are tested without saving them, with stand-ins for their tokenizers. Ideogram4Pipeline, whose second network would
be `denoiser: unconditional_transformer`, and GlmImagePipeline with its own tokens are not tested, because diffusers makes their
prompts with large models of transformers only. GLM-Image's transformer converts without an image, with given tokens. Kandinsky 6
is tested without sound and without its upscaler. Cosmos 2 needs the package cosmos_guardrail, and is tested with a stand-in.
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
