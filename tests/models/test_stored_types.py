"""The type of engines where a recipe does not say it: that in which a pipeline's denoiser was saved."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from trtconvert.models.saved import with_dtype
from trtconvert.recipe import ModelSection


def saved(folder, name="transformer/diffusion_pytorch_model.safetensors", dtype=torch.bfloat16, norms=torch.float32):
    """A file of weights, most of them of one type."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.zeros(64, 64, dtype=dtype), "norm.weight": torch.zeros(64, dtype=norms)}, path)
    return folder


def dtype_of(folder, source="diffusers", **fields):
    return with_dtype(ModelSection(source=source, weights=folder, **fields)).dtype


@pytest.mark.parametrize("component", ["transformer", "unet"])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float32, "float32"),
        (torch.float8_e4m3fn, "float32"),
    ],
)
def test_it_is_that_of_most_weights_of_the_denoiser(tmp_path, component, stored, dtype):
    saved(tmp_path, "text_encoder/model.safetensors", torch.float16)
    assert dtype_of(saved(tmp_path, f"{component}/diffusion_pytorch_model.safetensors", stored)) == dtype


def test_variants_and_second_denoisers_and_single_files_have_their_own(tmp_path):
    saved(tmp_path, dtype=torch.float32)
    saved(tmp_path, "transformer/diffusion_pytorch_model.fp16.safetensors", torch.float16)
    saved(tmp_path, "transformer_2/diffusion_pytorch_model-00001-of-00002.safetensors", torch.bfloat16)
    assert dtype_of(tmp_path) == "float32"
    assert dtype_of(tmp_path, options={"variant": "fp16"}) == "float16"
    assert dtype_of(tmp_path, options={"denoiser": "transformer_2"}) == "bfloat16"
    assert dtype_of(tmp_path / "transformer" / "diffusion_pytorch_model.fp16.safetensors") == "float16"


def test_what_the_recipe_says_stands_and_other_models_are_float32(tmp_path):
    saved(tmp_path)
    assert dtype_of(tmp_path, dtype="float16") == "float16"
    assert dtype_of(tmp_path, source="package.module:function") == "float32"
    assert dtype_of(tmp_path / "nowhere") == "float32"
    (tmp_path / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"damaged")
    assert dtype_of(tmp_path) == "float32"
