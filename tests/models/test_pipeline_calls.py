"""Calls of diffusers pipelines: their steps, and their texts other than the prompts."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_pipelines
import torch
from tiny_pipelines import WIDTH, picture

from trtconvert.errors import UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.pipelines import PipelineCaller

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

TWO: dict[str, Any] = {"height": 32, "width": 32, "prompts": ["a cat", "a dog"]}


@pytest.mark.parametrize("strength", [0.07, 0.5])
@pytest.mark.parametrize("kind", ["StableDiffusionImg2ImgPipeline", "FluxImg2ImgPipeline"])
def test_a_pipeline_that_begins_with_an_image_takes_a_step_whatever_its_strength(tmp_path, kind, strength):
    """`evaluate` draws with one step to find out the size of images."""
    make = tiny_pipelines.flux if kind.startswith("Flux") else tiny_pipelines.stable_diffusion
    getattr(diffusers, kind)(**make().components).save_pretrained(tmp_path / "pipeline")
    image, calls = {"image": picture(tmp_path / "image.png", 0)}, []
    sizes: dict[str, Any] = {"height": 32, "width": 32} if kind.startswith("Flux") else {}
    model = diffusers_model(
        tmp_path / "pipeline", tokens=8, batch=1, images=image, call={"strength": strength}, **sizes
    )

    def denoiser(**named):
        calls.append(float(named["timestep"][0]))
        return model.denoiser(**named)

    for steps, taken in ((1, 1), (20, max(1, int(20 * strength)))):
        calls.clear()
        assert model.sample(denoiser, [3], steps=steps, solver="ddim").shape == (1, 3, 32, 32)
        assert taken <= len(set(calls)) <= taken + 1  # some round up the steps that strength leaves


def test_a_part_of_the_schedule_has_a_step(tmp_path):
    """SDXL's base may take all but the last fifth of the schedule, or the first fifth alone."""
    tiny_pipelines.stable_diffusion_xl().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=32, width=32, tokens=8, batch=1, call={"denoising_end": 0.2})
    assert model.sample(model.denoiser, [3], steps=1, solver="ddim").isfinite().all()


def test_a_strength_of_nothing_is_refused(tmp_path):
    components = tiny_pipelines.stable_diffusion().components
    diffusers.StableDiffusionImg2ImgPipeline(**components).save_pretrained(tmp_path / "pipeline")
    with pytest.raises(UserError, match=r"(?s)call.strength does not fit.*leaves every image as it is.*0.6"):
        image = {"image": picture(tmp_path / "image.png", 0)}
        diffusers_model(tmp_path / "pipeline", tokens=8, images=image, call={"strength": 0})


def drawn(folder, seeds=(0, 1, 2), **call):
    model = diffusers_model(folder, **TWO, batch=[1, 2, 3], call=call)
    return model.sample(model.denoiser, list(seeds), steps=2, solver="ddim")


@pytest.mark.slow
def test_negative_prompts_are_those_of_every_sample(saved):
    """One negative prompt for all samples, or several by turns, with any batch."""
    plain, one = drawn(saved), drawn(saved, negative_prompt="blurry")
    assert (one - plain).abs().amax((1, 2, 3)).min() > 1e-3
    torch.testing.assert_close(drawn(saved, negative_prompt=["blurry"]), one)
    turns = drawn(saved, negative_prompt=["blurry", "grey"])
    torch.testing.assert_close(turns[[0, 2]], one[[0, 2]], atol=1e-4, rtol=0)
    assert (turns[1] - one[1]).abs().max() > 1e-3
    torch.testing.assert_close(drawn(saved, seeds=[2], negative_prompt="blurry"), one[2:], atol=1e-4, rtol=0)


def test_prompts_of_further_text_encoders_are_those_of_every_sample(tmp_path):
    tiny_pipelines.with_text("flux").save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, **TWO, batch=[1, 2, 2], call={"prompt_2": "a bird", "max_sequence_length": 8})
    alone = model.sample(model.denoiser, [1], steps=2, solver="ddim")
    torch.testing.assert_close(
        model.sample(model.denoiser, [0, 1], steps=2, solver="ddim")[1:], alone, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("value", [3, [], ["blurry", 3]])
def test_values_other_than_prompts_are_refused(saved, value):
    with pytest.raises(UserError, match=r"(?s)call.negative_prompt does not fit.*expected: a text for all samples"):
        diffusers_model(saved, **TWO, call={"negative_prompt": value})


def test_a_prompt_that_nothing_reads_is_refused(tmp_path):
    tiny_pipelines.stable_diffusion().save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"(?s)no text encoder reads model.options.call.negative_prompt.*with its text encoders"
    ):
        diffusers_model(tmp_path, height=32, width=32, tokens=8, call={"negative_prompt": "blurry"})
    assert diffusers_model(tmp_path, height=32, width=32, tokens=8, call={"negative_prompt": None}).inputs


@pytest.mark.parametrize("refines", [False, True])
def test_prompts_are_heeded_where_the_first_of_two_text_encoders_is_absent(tmp_path, refines):
    """SDXL's pipeline may lack the first text encoder, and its refiner always does; the refiner takes five numbers, not six."""
    numbers = 5 if refines else 6
    unet = tiny_pipelines.unet(
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=WIDTH + numbers * 8,
        use_linear_projection=True,
    )
    second = tiny_pipelines.clip(width=WIDTH, projection=WIDTH)
    parts = tiny_pipelines.stable_diffusion_xl().components | {
        "unet": unet,
        "text_encoder_2": second,
        "tokenizer_2": tiny_pipelines.clip_tokenizer(),
    }
    kind = diffusers.StableDiffusionXLImg2ImgPipeline if refines else diffusers.StableDiffusionXLPipeline
    pipe = kind(**parts, requires_aesthetics_score=True) if refines else kind(**parts)
    pipe.save_pretrained(tmp_path / "pipeline")
    images: dict[str, Any] = (
        {"images": {"image": picture(tmp_path / "image.png", 0)}} if refines else {"height": 32, "width": 32}
    )
    found = []
    for prompts in (["a cat"], ["dogs and foxes"]):
        model = diffusers_model(tmp_path / "pipeline", batch=1, prompts=prompts, **images)
        found.append(model.sample(model.denoiser, [0], steps=4, solver="ddim"))
    assert (found[0] - found[1]).abs().max() > 1e-3
    assert model.condition is not None and model.components is not None
    encoder = ("vae_encoder",) if refines else ()
    assert model.components.used == ("text_encoder_2", "vae_decoder", *encoder)


def test_a_text_encoder_that_the_pipeline_cannot_do_with_alone_reads_nothing():
    """Flux needs both text encoders."""
    pipe = tiny_pipelines.flux()
    pipe.register_modules(**{k: x for k, x in tiny_pipelines.TEXT["flux"]().items() if k.endswith("_2")})
    assert not PipelineCaller(pipe, "transformer", 8, ("a cat",), {}).has_text_encoder
