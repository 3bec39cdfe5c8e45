"""The ComfyUI node: samplers get the same from a bundle as from the original network."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import pytest
import tiny_pipelines
import torch
from comfy_stand_in import BaseModel, ModelType, comfy_ui, in_memory
from tiny_pipelines import PIPELINES, WIDTH
from tolerances import INT8_CALL

from trtconvert.bundle import GuidanceRecord
from trtconvert.errors import UserError
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.recorded_calls import relative_error

SIZES: dict[str, Any] = {"height": 32, "width": 32, "batch": [1, 1, 2]}


@pytest.fixture
def node(tmp_path):
    with comfy_ui(tmp_path / "models") as loaded:
        yield loaded


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(folder, name: str, **options: Any) -> tuple[Any, Any]:
    """A pipeline, and a stand-in for its bundle."""
    pipe = PIPELINES[name][0]()
    pipe.save_pretrained(folder)
    model = diffusers_model(folder, **SIZES | options)
    return pipe, in_memory(model, model.denoiser)


def comfy_model(node, bundle, kind: str, unet: dict[str, Any] | None = None) -> Any:
    """ComfyUI's model of a kind with the bundle's denoiser."""
    parts = sys.modules[f"{node.__name__}.denoiser"]
    family = parts.family_of(bundle)
    assert family.name == kind
    model = sys.modules[f"{node.__name__}.nodes"]._model(
        family, bundle.manifest.components["denoiser"].diffusers.config, "eps"
    )
    model.diffusion_model = parts.ComfyDenoiser(bundle, family)
    return model


def test_stable_diffusion_with_prompts_of_several_lengths(node, tmp_path):
    pipe, bundle = made(tmp_path, "stable_diffusion", tokens=[8, 8, 24])
    model = comfy_model(node, bundle, "SD1")
    for tokens in (8, 24):  # ComfyUI appends further pieces of long prompts
        x, sigma, text = noise(3, 4, 8, 8), torch.tensor([14.0, 1.0, 0.1]), noise(3, tokens, WIDTH, seed=1)
        steps = model.model_sampling.timestep(sigma)
        with torch.no_grad():
            predicted = pipe.unet(x / (sigma.view(-1, 1, 1, 1) ** 2 + 1) ** 0.5, steps, text).sample
        denoised = model.apply_model(x, sigma, c_crossattn=text)
        torch.testing.assert_close(denoised, x - sigma.view(-1, 1, 1, 1) * predicted, atol=1e-4, rtol=1e-4)


def test_sdxl_is_given_its_sizes_as_numbers(node, tmp_path):
    pipe, bundle = made(tmp_path, "stable_diffusion_xl", tokens=8)
    model = comfy_model(node, bundle, "SDXL")
    x, sigma, text, pooled = (
        noise(2, 4, 8, 8),
        torch.tensor([5.0, 0.5]),
        noise(2, 8, WIDTH, seed=1),
        noise(2, WIDTH, seed=2),
    )
    sizes = {"height": 1016, "width": 4095, "crop_h": 3, "crop_w": 7, "target_height": 2049, "target_width": 1023}
    y = model.encode_adm(pooled_output=pooled, **sizes)
    ids = torch.tensor([[1016.0, 4095, 3, 7, 2049, 1023]]).expand(2, -1)
    with torch.no_grad():
        predicted = pipe.unet(
            x / (sigma.view(-1, 1, 1, 1) ** 2 + 1) ** 0.5, model.model_sampling.timestep(sigma), text,
            added_cond_kwargs={"text_embeds": pooled, "time_ids": ids},
        ).sample  # fmt: skip
    denoised = model.apply_model(x, sigma, c_crossattn=text, y=y)
    torch.testing.assert_close(denoised, x - sigma.view(-1, 1, 1, 1) * predicted, atol=1e-4, rtol=1e-4)


def test_stable_diffusion_3(node, tmp_path):
    pipe, bundle = made(tmp_path, "stable_diffusion_3", tokens=8)
    model = comfy_model(node, bundle, "SD3")
    assert model.model_type is ModelType.FLOW
    x, sigma, text, pooled = (
        noise(2, 16, 8, 8),
        torch.tensor([1.0, 0.25]),
        noise(2, 8, WIDTH, seed=1),
        noise(2, WIDTH, seed=2),
    )
    with torch.no_grad():
        velocity = pipe.transformer(x, text, pooled, sigma * 1000).sample
    denoised = model.apply_model(x, sigma, c_crossattn=text, y=pooled)
    torch.testing.assert_close(denoised, x - sigma.view(-1, 1, 1, 1) * velocity, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("guided", "kind"), [(True, ModelType.FLUX), (False, ModelType.FLOW)], ids=["dev", "schnell"])
def test_flux_is_cut_into_patches_and_put_together_again(node, tmp_path, guided, kind, monkeypatch):
    flux = tiny_pipelines.flux()
    if not guided:
        flux.register_modules(
            transformer=tiny_pipelines.randomised(
                type(flux.transformer).from_config(dict(flux.transformer.config) | {"guidance_embeds": False})
            )
        )
    monkeypatch.setitem(PIPELINES, "flux", (lambda: flux, {}))
    pipe, bundle = made(tmp_path, "flux", tokens=8, height=48)
    model = comfy_model(node, bundle, "FLUX")
    assert model.model_type is kind
    x, sigma = noise(2, 16, 12, 8), torch.tensor([0.9, 0.3])
    text, pooled, guidance = noise(2, 8, WIDTH, seed=1), noise(2, WIDTH, seed=2), torch.tensor([3.5, 2.0])
    packed = pipe._pack_latents(x, 2, 16, 12, 8)
    ids = pipe._prepare_latent_image_ids(2, 6, 4, x.device, x.dtype)
    with torch.no_grad():
        velocity = pipe.transformer(
            packed, text, pooled, sigma, img_ids=ids, txt_ids=torch.zeros(8, 3), guidance=guidance if guided else None
        ).sample
    velocity = pipe._unpack_latents(velocity, 12 * 4, 8 * 4, 4)  # of a VAE four times as large
    denoised = model.apply_model(x, sigma, c_crossattn=text, y=pooled, guidance=guidance)
    torch.testing.assert_close(denoised, x - sigma.view(-1, 1, 1, 1) * velocity, atol=1e-4, rtol=1e-4)


def test_batches_beyond_the_engines_are_split(node, tmp_path):
    _, bundle = made(tmp_path, "stable_diffusion", tokens=8)
    model = comfy_model(node, bundle, "SD1")
    x, sigma, text = noise(7, 4, 8, 8), torch.full((7,), 2.0), noise(7, 8, WIDTH, seed=1)
    together = model.apply_model(x, sigma, c_crossattn=text)
    alone = [model.apply_model(x[i : i + 1], sigma[:1], c_crossattn=text[i : i + 1]) for i in range(7)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"control": {"output": []}}, "a ControlNet reaches into the network"),
        (
            {"transformer_options": {"patches_replace": {"attn2": {}}}},
            "a node patches the inside.*patches_replace of attn2",
        ),
        (
            {"transformer_options": {"wrappers": {"diffusion_model": {"cache": []}}}},
            "a node wraps the network.*got: cache",
        ),
        ({"ref_latents": [torch.zeros(1)]}, "was not built for.*got: ref_latents"),
        ({"c_crossattn": None}, "the conditioning has no text"),
        ({"c_crossattn": torch.zeros(1, 9, WIDTH)}, r"'encoder_hidden_states' is outside.*model\.options\.tokens"),
    ],
)
def test_inputs_that_an_engine_lacks_are_refused(node, tmp_path, given, told):
    _, bundle = made(tmp_path, "stable_diffusion", tokens=8)
    model = comfy_model(node, bundle, "SD1")
    usual = {"c_crossattn": noise(1, 8, WIDTH)}
    with pytest.raises(UserError, match=f"(?s){told}"):
        model.apply_model(noise(1, 4, 8, 8), torch.tensor([1.0]), **usual | given)
    usual = {
        "c_crossattn": noise(1, 8, WIDTH),
        "transformer_options": {"patches": {}, "cond_or_uncond": [0], "sigmas": 1},
    }
    assert model.apply_model(noise(1, 4, 8, 8), torch.tensor([1.0]), **usual).isfinite().all()


def test_models_that_comfy_ui_has_otherwise_are_refused(node, tmp_path):
    _, bundle = made(tmp_path, "ltx", tokens=8, frames=9, batch=1)
    with pytest.raises(UserError, match=r"(?s)node has no ComfyUI model for.*got: LTXPipeline.*remedy: draw samples"):
        sys.modules[f"{node.__name__}.denoiser"].family_of(bundle)


def test_guidance_inside_is_refused(node, tmp_path):
    _, bundle = made(tmp_path, "stable_diffusion", tokens=8)
    record = bundle.manifest.components["denoiser"]
    guidance = GuidanceRecord(
        scale="guidance_scale", negative={"encoder_hidden_states": "negative_encoder_hidden_states"}
    )
    bundle.manifest.components["denoiser"] = record.model_copy(update={"guidance": guidance})
    with pytest.raises(
        UserError, match=r"(?s)applies guidance inside.*remedy: build it with engine.guidance: separate"
    ):
        sys.modules[f"{node.__name__}.denoiser"].family_of(bundle)


@pytest.mark.slow
def test_a_bundle_is_found_loaded_and_loaded_again_when_it_changes(node, tmp_path, unet_build):
    at = shutil.copytree(unet_build.bundle, tmp_path / "models" / "trtconvert" / "mine" / "sd")
    ((name, loader),) = node.NODE_CLASS_MAPPINGS.items()
    assert name in node.NODE_DISPLAY_NAME_MAPPINGS and loader.RETURN_TYPES == ("MODEL",)
    assert loader.INPUT_TYPES()["required"]["bundle"] == (["mine/sd"],)
    before = loader.IS_CHANGED("mine/sd")
    (patcher,) = getattr(loader(), loader.FUNCTION)("mine/sd")
    assert isinstance(patcher.model, BaseModel) and patcher.size == 0 and patcher.model.memory_required([1]) == 0
    x, sigma, text = noise(2, 4, 8, 8), torch.tensor([3.0, 1.0]), noise(2, 8, WIDTH, seed=1)
    pipe = tiny_pipelines.stable_diffusion()
    with torch.no_grad():
        expected = pipe.unet(
            x / (sigma.view(-1, 1, 1, 1) ** 2 + 1) ** 0.5, patcher.model.model_sampling.timestep(sigma), text
        )
    denoised = patcher.model.apply_model(x, sigma, c_crossattn=text)
    assert relative_error((x - denoised) / sigma.view(-1, 1, 1, 1), expected.sample) <= INT8_CALL
    manifest = at / "manifest.json"
    content = manifest.read_bytes()
    manifest.unlink()
    manifest.write_bytes(content)
    assert loader.IS_CHANGED("mine/sd") != before
    with pytest.raises(UserError, match=r"(?s)there is no bundle 'other'.*expected: mine/sd"):
        loader().load("other")


@pytest.mark.parametrize(
    ("says", "asked", "expected"),
    [
        ("v_prediction", "auto", "V_PREDICTION"),
        ("v_prediction", "eps", "EPS"),
        (None, "auto", "EPS"),
        (None, "v_prediction", "V_PREDICTION"),
    ],
)
def test_prediction_of_a_unet_follows_its_scheduler(node, tmp_path, says, asked, expected):
    nodes = sys.modules[f"{node.__name__}.nodes"]
    if says is not None:
        file = tmp_path / nodes._SCHEDULER
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"prediction_type": says}))
    family = sys.modules[f"{node.__name__}.denoiser"].Family.SD2
    model = nodes._model(family, {"in_channels": 9}, nodes._prediction(tmp_path, asked))
    assert model.model_type.name == expected and model.concat_keys == ("mask", "masked_image")
