"""FP8 checkpoints that are marked as scaled and lack a scale."""

from __future__ import annotations

import pytest
import tiny_pipelines
import torch
from safetensors.torch import load_file, save_file

from trtconvert.errors import UserError
from trtconvert.models.loading import load_pipeline

UNET = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path):
    tiny_pipelines.stable_diffusion().save_pretrained(tmp_path / "pipeline")
    return tmp_path / "pipeline"


def _in_fp8(state, mark="scaled_fp8", prefix="", scaled=True):
    """Puts two layers into FP8 with scales and a mark; returns the layers' names."""
    layers = [name.removesuffix(".weight") for name in state if name.endswith(".to_q.weight")][:2]
    changed = {prefix + name: x.clone() for name, x in state.items()}
    for layer in layers:
        scale = state[f"{layer}.weight"].abs().max() / 448
        changed[f"{prefix}{layer}.weight"] = (state[f"{layer}.weight"] / scale).to(torch.float8_e4m3fn)
        changed[f"{prefix}{layer}.scale_input"] = torch.ones(())
        if scaled:
            changed[f"{prefix}{layer}.scale_weight"] = scale
    if mark:
        changed[mark] = torch.zeros(2).to(torch.float8_e4m3fn)
    return changed, [prefix + layer for layer in layers]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_marked_file_that_lacks_a_scale_is_refused_with_the_weight(folder, tmp_path, prefix):
    state, layers = _in_fp8(load_file(folder / "unet" / UNET), f"{prefix}scaled_fp8", prefix)
    save_file(state, tmp_path / "model.safetensors")
    assert load_pipeline(tmp_path / "model.safetensors", config=folder)
    del state[f"{layers[1]}.scale_weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError,
        match=rf"(?s)scale is missing.*expected: {layers[1]}\.scale_weight.*got: {layers[1]}\.weight in FP8.*remedy",
    ):
        load_pipeline(tmp_path / "model.safetensors", config=folder)


def test_a_marked_folder_that_lacks_a_scale_is_refused_with_the_weight(folder):
    path = folder / "unet" / UNET
    state, layers = _in_fp8(load_file(path), scaled=False)
    save_file(state, path, {"format": "pt"})
    with pytest.raises(
        UserError, match=rf"(?s)scale is missing in .*{UNET}.*got: {layers[0]}\.weight in FP8.*and 1 more"
    ):
        load_pipeline(folder)


def test_a_mark_of_another_model_in_the_file_asks_for_no_scales(folder, tmp_path):
    """All-in-one files may mark a text encoder alone."""
    prefix = "model.diffusion_model."
    state, layers = _in_fp8(
        load_file(folder / "unet" / UNET), "text_encoders.clip_l.transformer.scaled_fp8", prefix, scaled=False
    )
    save_file(state, tmp_path / "model.safetensors")
    loaded = load_pipeline(tmp_path / "model.safetensors", config=folder).unet.state_dict()
    name = f"{layers[0]}.weight"
    assert torch.equal(loaded[name.removeprefix(prefix)], state[name].float())
