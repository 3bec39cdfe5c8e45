"""Captions and images become inputs of pipelines' denoisers."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_pipelines
import torch
from tiny_pipelines import PIPELINES, TOKENS, picture

from trtconvert.errors import UserError
from trtconvert.evaluate.verify import psnr
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.loading import load_pipeline

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

PROMPTS = ["a cat", "dogs and foxes"]


def instruct_pix2pix(folder) -> dict[str, Any]:
    """The denoiser takes three rows for a sample: with text and image, with the image, with neither."""
    parts = tiny_pipelines.with_text("stable_diffusion").components | {"unet": tiny_pipelines.unet(in_channels=8)}
    diffusers.StableDiffusionInstructPix2PixPipeline(**parts).save_pretrained(folder / "pipeline")
    return {"images": {"image": picture(folder / "image.png", 0)}}


def wan(folder) -> dict[str, Any]:
    """The pipeline calls its denoiser twice a step."""
    tiny_pipelines.with_text("wan").save_pretrained(folder / "pipeline")
    return PIPELINES["wan"][1] | {"call": {"max_sequence_length": TOKENS}}


@pytest.mark.parametrize("make", [instruct_pix2pix, wan])
def test_captions_are_told_from_what_stands_for_no_prompt(tmp_path, make):
    options = make(tmp_path)
    model = diffusers_model(tmp_path / "pipeline", batch=[1, 2, 2], prompts=PROMPTS, **options)
    assert model.condition is not None
    given = model.condition(PROMPTS)
    nothing = model.condition(["", ""])
    text = "encoder_hidden_states"
    pipe = load_pipeline(tmp_path / "pipeline")
    with torch.no_grad():
        if make is wan:
            expected, _ = pipe.encode_prompt(PROMPTS, max_sequence_length=TOKENS)
        else:
            expected = pipe._encode_prompt(PROMPTS, "cpu", 1, False)
    torch.testing.assert_close(given[text], expected)
    assert (given[text] - nothing[text]).abs().amax((1, 2)).min() > 0.01
    by_prompt = model.sample(model.denoiser, [0, 1], steps=2, solver="ddim")
    conditioned = model.sample(model.denoiser, [0, 1], steps=2, solver="ddim", conditions=given)
    assert psnr(conditioned, by_prompt).min() > 80
    swapped = {name: x.flip(0) for name, x in given.items()}
    assert psnr(model.sample(model.denoiser, [0, 1], steps=2, solver="ddim", conditions=swapped), by_prompt).max() < 60


def test_captions_of_which_there_are_rows_for_each_frame_are_refused(tmp_path):
    tiny_pipelines.animatediff().save_pretrained(tmp_path)
    model = diffusers_model(tmp_path, height=32, width=32, frames=4, tokens=8, batch=1)
    assert model.condition is not None
    with pytest.raises(
        UserError, match=r"(?s)more or fewer rows of 'encoder_hidden_states'.*remedy: .*options.prompts"
    ):
        model.condition(["a cat"])


def test_images_become_the_latents_of_a_vae_that_draws_none(tmp_path):
    """AutoencoderTiny returns latents instead of their distribution."""
    parts = tiny_pipelines.with_text("stable_diffusion").components
    channels = (8, 8, 8)
    tiny = diffusers.AutoencoderTiny(
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    )
    pipe = diffusers.StableDiffusionPipeline(
        **parts | {"vae": tiny_pipelines.randomised(tiny)}, requires_safety_checker=False
    )
    pipe.save_pretrained(tmp_path)
    model, images = diffusers_model(tmp_path, height=32, width=32), torch.rand(2, 3, 32, 32)
    assert model.encoder is not None and model.encoder.shape == (3, 32, 32)
    with torch.no_grad():
        expected = pipe.vae.encode(images * 2 - 1).latents * pipe.vae.config.scaling_factor
    torch.testing.assert_close(model.encoder.encode(images), expected)
    assert model.components is not None
    for half, outputs in (("vae_encoder", ["latents"]), ("vae_decoder", ["sample"])):
        assert [spec.name for spec in model.components(half).outputs] == outputs
