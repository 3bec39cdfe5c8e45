"""INT8 products with scales per group: specification, Triton's kernels in the interpreter, and the choice of layers."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from grouped_products import SIZES, tokens, weight
from support import HELPERS
from tolerances import ROUNDED_TO_HALF, SAME_FLOAT
from torch.nn import functional as F

from trtconvert.linear import groups
from trtconvert.linear.products import dequantised, int8_linear

GRANULARITIES = ["block", "channel"]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tokens_keep_half_a_step(size):
    rows, channels, _ = size
    x = tokens(rows, channels, torch.float32)
    q, step = groups.act_quant(x)
    assert q.shape == x.shape and step.shape == (rows, math.ceil(channels / 128))
    for group in range(step.shape[1]):
        part = slice(group * 128, (group + 1) * 128)
        assert torch.allclose(step[:, group] * 127, x[:, part].abs().amax(1), atol=1e-25)
        off = (q[:, part] * step[:, group, None] - x[:, part]).abs()
        assert bool((off <= step[:, group, None] * 0.5001).all())


def test_nonfinite_values_give_nan_in_their_group_alone():
    x = torch.ones(3, 256)
    x[0, 3], x[1, 200] = math.nan, math.inf
    q, step = groups.act_quant(x)
    assert step.isnan().tolist() == [[True, False], [False, True], [False, False]]
    y = groups.int8_gemm(q, step, torch.ones(4, 256, dtype=torch.int8), torch.ones(4), None, torch.float32)
    assert y.isnan().all(1).tolist() == [True, True, False]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_groups(size, granularity):
    """Integer products by group, in float64."""
    rows, channels, outputs = size
    q, step = groups.act_quant(tokens(rows, channels, torch.float32))
    stored, scale = weight(outputs, channels, granularity)
    bias = torch.randn(outputs)
    wanted = bias.double().expand(rows, -1).clone()
    for group in range(step.shape[1]):
        part = slice(group * 128, (group + 1) * 128)
        whole = q[:, part].long() @ stored[:, part].long().T
        of_outputs = scale if granularity == "channel" else scale[:, group].repeat_interleave(128)[:outputs]
        wanted += whole * step[:, group, None].double() * of_outputs.double()
    y = groups.int8_gemm(q, step, stored, scale, bias, torch.float32)
    assert float((y - wanted).norm() / wanted.norm()) < SAME_FLOAT


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernels_in_the_interpreter():
    ended = subprocess.run(
        [sys.executable, str(HELPERS / "grouped_products.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    every = json.loads(ended.stdout)
    assert len(every) == 4 * len(SIZES)
    for found in every:
        assert found["q"] == found["step"] == found["weight"] == 0
        assert max(found["product"], found["no bias"]) < SAME_FLOAT
        assert found["half"] < ROUNDED_TO_HALF


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_layers_without_a_gpu(granularity):
    stored, scale = weight(200, 300, granularity)
    x, bias = tokens(70, 300, torch.bfloat16).view(7, 10, 300), torch.randn(200).bfloat16()
    y = int8_linear(x, stored, scale, bias)
    assert y.shape == (7, 10, 200) and y.dtype == torch.bfloat16
    wanted = groups.int8_gemm(*groups.act_quant(x.view(70, 300)), stored, scale, bias, torch.bfloat16)
    assert torch.equal(y.view(70, 200), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(int8_linear(x, stored, scale, bias), y)
    exact = F.linear(x.float(), dequantised(stored, scale, torch.float32), bias.float())
    assert 0.001 < float((y - exact).norm() / exact.norm()) < 0.05  # one token is 300 beside N(0, 1)
    assert int8_linear(x[:0], stored, scale, None).shape == (0, 10, 200)
    with pytest.raises(ValueError, match="expected rows of 300 channels, as the weight has, got 299"):
        int8_linear(x[..., 1:], stored, scale, None)


def test_layers_are_compiled_whole():
    stored, scale = weight(64, 128, "block")
    x = tokens(4, 128, torch.float32)
    compiled = torch.compile(int8_linear, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, stored, scale, None), int8_linear(x, stored, scale, None))
    with torch.autocast("cpu", torch.bfloat16):
        assert int8_linear(x, stored, scale, None).dtype == torch.bfloat16
    torch.library.opcheck(torch.ops.trtconvert.int8_product, (x, stored, scale, None))
