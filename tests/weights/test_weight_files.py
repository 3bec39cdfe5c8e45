"""Weights in FP8 with scales of every granularity, and other weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from trtconvert.errors import UserError
from trtconvert.weights.sources import open_source
from trtconvert.weights.weight_files import dequantised, read_tensors

WEIGHT = torch.arange(200 * 300).reshape(200, 300).remainder(17).to(torch.float8_e4m3fn)


def described(format: str) -> torch.Tensor:
    """ComfyUI's description of a layer: JSON in bytes."""
    return torch.tensor(list(json.dumps({"format": format}).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (torch.tensor(0.5), torch.tensor(0.5)),
        (torch.tensor([[0.5]]), torch.tensor(0.5)),
        (torch.arange(200) / 8, torch.arange(200)[:, None] / 8),
        (torch.arange(200)[:, None] / 8, torch.arange(200)[:, None] / 8),
        (
            torch.arange(6).reshape(2, 3) / 8,
            (torch.arange(200)[:, None] // 128 * 3 + torch.arange(300) // 128) / 8,
        ),
    ],
    ids=["number", "1 x 1", "rows", "column", "blocks"],
)
def test_scales_multiply_what_they_are_of(scale, factor):
    got = dequantised(
        {"a.weight": WEIGHT, "a.weight_scale": scale, "a.comfy_quant": described("float8_e4m3fn")}, "file"
    )
    assert got.keys() == {"a.weight"} and torch.equal(got["a.weight"], WEIGHT.float() * factor)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"a.weight_scale": torch.ones(3)}, r"a.weight: \[200, 300\] with scales \[3\]"),
        ({"a.weight_scale": torch.ones(200, 10)}, r"with scales \[200, 10\]"),  # 32 columns each, as in MXFP8
        ({"a.weight_scale": torch.ones(()), "a.weight_scale_2": torch.ones(())}, "weight_scale_2"),
        ({"a.comfy_quant": described("nvfp4")}, "a.comfy_quant: nvfp4"),
        ({"a.comfy_quant": torch.ones(3, dtype=torch.uint8)}, "a.comfy_quant: a description that is none"),
        ({"b.weight.quant_state.bitsandbytes__nf4": torch.ones(3, dtype=torch.uint8)}, "bitsandbytes__nf4"),
    ],
)
def test_weights_that_cannot_be_dequantised_are_refused_by_name(more, told):
    with pytest.raises(UserError, match=rf"(?s)weights in file are quantised.*got: .*{told}.*remedy: "):
        dequantised({"a.weight": WEIGHT} | more, "file")


def test_tensors_that_are_not_fp8_stay_unchanged():
    given = {"a.weight": torch.ones(2, dtype=torch.bfloat16), "ids": torch.arange(3), "a.scale_weight": torch.ones(1)}
    got = dequantised(given, "file")
    assert got.keys() == {"a.weight", "ids"} and got["a.weight"] is given["a.weight"]


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("mark", ["scaled_fp8", "inner.scaled_fp8"])
def test_a_mark_promises_scales_in_files_of_every_kind(tmp_path, ending, mark):
    """Also to `trtconvert analyze` and `quantize`. Without the mark, or with the mark of another model, FP8 is taken as it is."""
    path = tmp_path / f"model.{ending}"

    def write(**tensors):
        torch.save(tensors, path) if ending == "pt" else save_file(tensors, path)

    prefix = mark.removesuffix("scaled_fp8")
    scaled = {f"{prefix}a.weight": WEIGHT.clone(), f"{prefix}a.weight_scale": torch.ones(())}
    plain = {f"{prefix}b.weight": WEIGHT.clone(), f"{prefix}b.scale_input": torch.ones(())}
    marked = {mark: torch.zeros(2).to(torch.float8_e4m3fn)}
    write(**scaled, **plain, **marked)
    for read in (lambda: read_tensors([path]), lambda: open_source(path)):
        with pytest.raises(UserError, match=rf"(?s)scale is missing.*expected: {prefix}b.scale_weight.*remedy: "):
            read()
    for others in ({}, {"other.scaled_fp8": marked[mark]}):
        write(**scaled, **plain, **others)
        assert torch.equal(read_tensors([path])[f"{prefix}b.weight"], WEIGHT.float())
        found = {tensor.name: tensor.read() for tensor in open_source(path).tensors}
        assert torch.equal(found[f"{prefix}b.weight"], WEIGHT.float())
