"""Prompts of any length within a range, and pipelines that draw other sizes than those in the recipe."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_pipelines
import torch
from converted_pipelines import convert, options, recipe_of
from rich.console import Console
from tiny_pipelines import TOKENS, WIDTH, errors_beside
from tolerances import INT8_CALL

from trtconvert import runtime
from trtconvert.cache import Cache
from trtconvert.errors import UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.pipeline import build
from trtconvert.progress import Reporter

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES: dict[str, Any] = {"height": 32, "width": 32, "batch": 1}


def test_embeddings_of_any_length_in_the_range_are_drawn_with(unet_build):
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(unet_build.pipeline, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    with runtime.load(unet_build.bundle) as bundle:
        denoiser, original = bundle.as_diffusers(), pipe.unet
        prompts = ["a bird", "in a tree", "near a lake", "at night"]
        parts, nothing = (x.flatten(0, 1)[None] for x in pipe.encode_prompt(prompts, "cpu", 1, True))
        assert bundle.manifest.components["denoiser"].dims["tokens"] == (8, 16, 32)
        errors = errors_beside(denoiser, original)
        pipe.unet, pipe.text_encoder = denoiser, bundle.as_diffusers("text_encoder")
        pipe("a bird", height=32, width=32, num_inference_steps=2, output_type="latent")
        for tokens in (8, 11, 24, 32):
            embeddings = {"prompt_embeds": parts[:, :tokens], "negative_prompt_embeds": nothing[:, :tokens]}
            pipe(**embeddings, height=32, width=32, num_inference_steps=2, output_type="latent")
        assert len(errors) == 10 and max(errors) <= INT8_CALL
        for tokens in (7, 33):
            given = torch.randn(1, tokens, WIDTH)
            with pytest.raises(UserError, match=r"(?s)tokens 8\.\.32.*remedy: set model.options.tokens .*\[min, opt"):
                pipe(prompt_embeds=given, negative_prompt_embeds=given, height=32, width=32, num_inference_steps=1)


@pytest.mark.slow
def test_lengths_that_prompts_do_not_come_to_are_refused_and_the_remedy_works(unet_build):
    """Every prompt has 8 tokens."""
    for tokens, held in (([12, 16, 32], [8, 16, 32]), (6, [6, 6, 8]), ([4, 4, 6], [4, 4, 8])):
        with pytest.raises(UserError, match=r"(?s)have lengths outside.*got: 8 for 'a cat'") as error:
            diffusers_model(unet_build.pipeline, **SIZES, tokens=tokens, prompts=["a cat"])
        assert f"remedy: give model.options.tokens as {held}" in str(error.value)
        model = diffusers_model(unet_build.pipeline, **SIZES, tokens=held, prompts=["a cat"])
        assert model.dims["tokens"] == tuple(held)
    fixed = diffusers_model(unet_build.pipeline, **SIZES, tokens=8, prompts=["a cat"])
    assert {spec.name: spec.shape for spec in fixed.inputs}["encoder_hidden_states"] == ("batch", 8, WIDTH)


def test_a_pipeline_without_text_encoders_takes_a_range_too(tmp_path):
    tiny_pipelines.stable_diffusion().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **SIZES, tokens=[3, 8, 20])
    assert model.dims["tokens"] == (3, 8, 20)
    sizes = {name: low for name, (low, _, _) in model.dims.items()}
    assert model.denoiser(**model.example(0, sizes)).isfinite().all()


@pytest.mark.first_case
@pytest.mark.parametrize("name", ["stable_diffusion_3", "flux", "pixart"])
def test_prompts_are_padded_to_any_length_in_the_range(tmp_path, name):
    """In pipelines with an argument for the length, denoiser and T5 take the range, and CLIP has a fixed length."""
    tiny_pipelines.with_text(name).save_pretrained(tmp_path / "pipeline")
    given = options(name, batch=1, tokens=[4, TOKENS, 12])
    del given["call"]["max_sequence_length"]
    model = diffusers_model(tmp_path / "pipeline", **given)
    assert model.components is not None
    ranges = {
        part: model.components(part).dims.get("tokens")
        for part in model.components.names
        if part.startswith("text_encoder")
    }
    *clip, t5 = ranges.values()
    assert t5 == (4, TOKENS, 12) and not any(clip)
    more = TOKENS if name == "stable_diffusion_3" else 0  # the tokens of CLIP
    assert model.dims["tokens"] == (4 + more, TOKENS + more, 12 + more)


@pytest.mark.soak
def test_a_bundle_draws_prompts_of_any_length_in_the_range(tmp_path):
    tiny_pipelines.with_text("flux").save_pretrained(tmp_path / "pipeline")
    given = options("flux", batch=1, tokens=[4, TOKENS, 12])
    del given["call"]["max_sequence_length"]
    parts = {"text_encoder": {}, "text_encoder_2": {}}
    convert(tmp_path, "flux", parts, model={"options": given})
    saved = diffusers.FluxPipeline.from_pretrained(tmp_path / "pipeline")
    with runtime.load(tmp_path / "bundle") as bundle:
        pipe = bundle.pipeline(vae=saved.vae)
        pipe.set_progress_bar_config(disable=True)
        errors = errors_beside(pipe.transformer, saved.transformer)
        drawn = {"height": 32, "width": 32, "num_inference_steps": 1, "output_type": "latent"}
        for length in (4, 7, 12):
            pipe("a bird in a tree", **drawn, max_sequence_length=length)
        assert len(errors) == 3 and max(errors) <= INT8_CALL
        with pytest.raises(
            UserError, match=r"(?s)tokens 4\.\.12.*model.options.tokens.*max_sequence_length within the range"
        ):
            pipe("a bird in a tree", **drawn, max_sequence_length=13)


def qwen_image() -> Any:
    """QwenImage with its text encoder, which gets prompts without padding, after a text of 34 tokens that is cut off again."""
    letters = {letter: number for number, letter in enumerate(sorted(set(_BYTES.values())))}
    tokenizer = transformers.Qwen2Tokenizer(vocab=letters, merges=[])
    text = {
        "vocab_size": len(tokenizer) + 8,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "rope_theta": 10000.0,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    pipe = tiny_pipelines.qwen_image()
    pipe.register_modules(
        text_encoder=tiny_pipelines.randomised(transformers.Qwen2_5_VLForConditionalGeneration(config)),
        tokenizer=tokenizer,
    )
    return pipe


_BYTES = {number: chr(number if 32 < number < 127 else 256 + number) for number in range(256)}


@pytest.mark.as_of(transformers="5")
def test_prompts_that_are_not_padded_have_any_length_in_the_range(tmp_path):
    qwen_image().save_pretrained(tmp_path / "pipeline")
    prompts = ["a cat", "a dog in a garden"]
    with pytest.raises(
        UserError, match=r"(?s)as many tokens as its longest prompt.*give model.options.tokens as"
    ) as error:
        diffusers_model(tmp_path / "pipeline", **SIZES, prompts=prompts)
    held = json.loads(str(error.value).partition("tokens as [min, opt, max], such as ")[2])
    model = diffusers_model(tmp_path / "pipeline", **SIZES, prompts=prompts, tokens=held)
    assert model.components is not None and model.dims["tokens"] == tuple(held)
    encoder = model.components("text_encoder")
    assert encoder.dims["tokens"] == tuple(n + 34 for n in held)
    with pytest.raises(UserError, match=r"(?s)have lengths outside.*remedy: give model.options.tokens as "):
        diffusers_model(tmp_path / "pipeline", **SIZES, prompts=prompts, tokens=[held[0], held[0], held[0] + 1])

    # The negative prompt has another length, in a separate call.
    away = {"negative_prompt": "a blurry picture of nothing in particular", "true_cfg_scale": 4.0}
    narrow = [held[0], held[0], held[1]]
    with pytest.raises(UserError, match=r"(?s)have lengths outside.*negative prompt") as error:
        diffusers_model(tmp_path / "pipeline", **SIZES, prompts=prompts, tokens=narrow, call=away)
    held = json.loads(str(error.value).partition("give model.options.tokens as ")[2])
    assert held[2] > narrow[2]
    model = diffusers_model(tmp_path / "pipeline", **SIZES, prompts=prompts, tokens=held, call=away)
    assert model.components is not None
    assert model.components("text_encoder").dims["tokens"] == tuple(n + 34 for n in held)


def binned(**own: Any) -> dict[str, Any]:
    """PixArt for images of 256 × 256."""
    return {"height": 250, "width": 200, "batch": 1, "tokens": 8} | own


@pytest.fixture(scope="module")
def pixart(tmp_path_factory) -> Path:
    pipe = tiny_pipelines.pixart()
    config = dict(pipe.transformer.config) | {"sample_size": 32, "use_additional_conditions": False}
    pipe.register_modules(transformer=tiny_pipelines.randomised(type(pipe.transformer).from_config(config)))
    folder = tmp_path_factory.mktemp("pixart")
    pipe.save_pretrained(folder)
    return folder


def test_sizes_that_a_pipeline_bins_are_named_as_what_they_become(pixart):
    (said,) = diffusers_model(pixart, **binned()).notices
    assert said == "PixArtAlphaPipeline draws height 250 × width 200 as 272 × 224 (use_resolution_binning)"
    assert diffusers_model(pixart, **binned(height=272, width=224)).notices == ()


def test_a_range_of_sizes_that_a_pipeline_bins_is_refused_and_the_remedy_works(pixart):
    varied = binned(height=[192, 256, 320])
    with pytest.raises(
        UserError, match=r"(?s)nearest of sizes of its own.*remedy: .*\{use_resolution_binning: false\}"
    ):
        diffusers_model(pixart, **varied)
    model = diffusers_model(pixart, **varied, call={"use_resolution_binning": False})
    assert model.dims["height"] == (48, 64, 80) and model.notices == ()


def test_a_build_says_what_sizes_become_before_it_calibrates(tmp_path, monkeypatch):
    def calibrating(started):
        started.source.model()
        raise InterruptedError

    monkeypatch.setattr("trtconvert.pipeline.calibrate_stage", calibrating)
    tiny_pipelines.flux().save_pretrained(tmp_path / "pipeline")
    console = Console(record=True, quiet=False, width=200, file=io.StringIO())
    recipe = recipe_of(tmp_path, "flux", {}, model={"options": SIZES | {"tokens": 8, "height": 39}})
    with pytest.raises(InterruptedError):
        build(recipe, tmp_path / "bundle", Cache(tmp_path / "cache"), Reporter(console))
    assert "notice: FluxPipeline draws height 39 as 32" in console.export_text()
