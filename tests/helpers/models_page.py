"""Writes docs/models.md from the lists of pipelines that the tests convert: `python tests/helpers/models_page.py`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from further_pipelines import CONVERTIBLE, REFUSED
from tiny_pipelines import PIPELINES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """# Pipelines

`tests/models` builds each pipeline of the first table: its own class of diffusers, with random weights of a few layers, is
converted, and draws with the bundle's denoiser in place of its own. A build treats other pipelines in the same way, because no
pipeline is known by its name. This page is generated from the tests' lists, and a test compares them.

| pipeline | denoiser | subject of samples | options in tests, beside sizes |
| --- | --- | --- | --- |
"""

_BETWEEN = """
The seed of each sample draws its class label, or samples take `model.options.call.class_labels` by turns. Pipelines without text
encoders get embeddings of noise, seeded by the sample. Images come from the recipe's `model.images`.

## Prompts of any length

`model.options.tokens: [min, opt, max]` gives the denoiser and converted text encoders a range of tokens:

- Pipelines that pad prompts to their argument `max_sequence_length` (Flux, SD 3, PixArt, Wan, LTX) take any length in the range,
  for prompts and for embeddings.
- Pipelines that pad to a fixed length (77 for CLIP) draw prompts at this length, and take embeddings (`prompt_embeds`) of any
  length in the range, as tools for long prompts make them: `tokens: [77, 77, 231]`.
- Pipelines that do not pad (Qwen-Image) need a range. The recipe's prompts are checked against it before the calibration.
- Pipelines that pass a list with each prompt's own tokens (Z-Image) need a number or a range: the bundle's denoiser pads shorter
  prompts and masks the padding.

A number instead of a range is the length that prompts are padded to. Prompts and embeddings outside of the range are refused,
with a remedy.

## Timesteps of tokens and frames, sound, experts

- If tokens or frames of a sample have timesteps of their own (Wan 2.2 5B, LTX, SkyReels V2, AnyFlow), the noisiest one decides
  the timestep bin. The others are an input of the engine, as shares of this timestep.
- Several predictions of one call (LTX-2: video and sound) are concatenated in one output of the engine, and each size must be one
  number. The quality gate of predictions weighs all numbers equally; PSNR is that of the video.
- LTX-2's guidance by skipped attention and by separate modalities makes other calls, which the engine refuses. Turn this guidance
  off: `call: {stg_scale: 0, audio_stg_scale: 0, modality_scale: 1, audio_modality_scale: 1}`.
- PSNR of sound compares amplitudes at full scale.
- In mixtures of experts that route tokens by their values (HiDream), each expert computes all tokens: twice the work for 2 of 4.
- The engine of a model with a ControlNet takes the ControlNet's outputs; the ControlNet stays in the pipeline.
- A bundle holds one denoiser. Ideogram 4 has two networks: build one bundle for `transformer`, and another for
  `denoiser: unconditional_transformer`. The default `guidance_schedule` has an entry for each of 48 steps, so that other numbers
  of steps need `call: {guidance_scale: NUMBER, guidance_schedule: null}`.
- If the prediction does not depend on the result of some attention or layer, as on the sound's text in Kandinsky 6 without sound,
  a build leaves this attention or layer out of INT8. Its record in the manifest has the reason.
- HunyuanVideo 1.5 needs `batch: 1`: the VAE of diffusers decodes one video at a time.
- Some pipelines draw a sample otherwise in a call of several than alone: Panorama gives samples each other's prompts, and
  Kandinsky 5 scales first frames by all samples of a call. A build says so, and `batch: 1` keeps samples apart.
- The latent upscaler of Stable Diffusion gets ln σ / 4 as its timestep, and its timestep bins are even in it.

## Sizes

If a pipeline rounds sizes, or draws at the nearest of its own sizes (`use_resolution_binning`), a build reports it before the
calibration: "draws height 1000 as 992". Ranges of height and width need `call: {use_resolution_binning: false}`.

## Refused

These pipelines are refused before the calibration:

| pipeline | reason |
| --- | --- |
"""


_OF_TESTS = ("base_num_frames", "max_area", "max_sequence_length", "decode_timestep", "intermediate_timesteps")
"""Arguments that are needed for the sizes of tiny models alone."""

_AFTER = """\
| Kandinsky6SRPipeline | its attention is torch's flex_attention, of blocks that it chooses by values |
| Cosmos3OmniPipeline | its samples are a list in a packed sequence with the prompt, without a timestep for each sample |
| QwenImage21Pipeline | each step's call takes a cache; with `call: {use_kv_cache: false}`, shapes depend on a mask's values |

The last two were tried without saving, with stand-ins for their tokenizers. GLM-Image is tested without an image. Its text in
quotation marks has embeddings of its own length, so that prompts of a bundle have quotations of one length. Cosmos 2 needs the
package cosmos_guardrail; it is tested with a stand-in.
"""


def page() -> str:
    """Returns the text of docs/models.md."""
    rows = []
    for make, options in PIPELINES.values():
        of = "a prompt, a video" if "frames" in options else "a prompt"
        rows.append(_row(make(), of, options))
    rows += [_row(tiny.make(), tiny.of, tiny.options) for tiny in CONVERTIBLE.values()]
    refused = [f"| {type(tiny.make()).__name__} | {tiny.why} |" for tiny in REFUSED.values()]
    return _HEAD + "\n".join(sorted(rows)) + "\n" + _BETWEEN + "\n".join(sorted(refused)) + "\n" + _AFTER


def _row(pipe: Any, of: str, options: Any) -> str:
    denoiser = getattr(pipe, "transformer", None) or pipe.unet
    # The sizes are those of tiny models; other options are needed by the pipeline.
    others = {name: value for name, value in options.items() if name not in ("height", "width", "frames")}
    call = others.pop("call", {})
    told = [f"`{name}: {json.dumps(value)}`" for name, value in others.items()]
    told += [f"`call: {{{name}: {json.dumps(value)}}}`" for name, value in call.items() if name not in _OF_TESTS]
    return f"| {type(pipe).__name__} | {type(denoiser).__name__} | {of} | {', '.join(told)} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PAGE.write_text(page(), encoding="utf-8")
