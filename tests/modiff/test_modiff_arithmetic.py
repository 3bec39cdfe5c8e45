"""The arithmetic of modulated layers: specification, Triton's kernels in the interpreter, operators in compiled graphs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from modiff_kernels import CASES, copied, made
from support import HELPERS
from tolerances import SAME_FLOAT
from torch.nn import functional as F

from trtconvert.modiff import reference
from trtconvert.modiff.reference import HIGH, LOW, PRODUCT, RESET, SCALE, ZERO, Geometry


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantisers_reach_their_range_and_hold_zero(bits, symmetric):
    low, high = torch.tensor([-1.0, 0.0, -0.3, 0.0]), torch.tensor([2.0, 5.0, 0.0, 0.0])
    scale, least, most, zero, reset, product = reference.quantiser(low, high, bits, symmetric, True).T
    assert torch.equal(zero, zero.round()) and bool(((least <= zero) & (zero <= most)).all())
    assert int(most[0] - least[0]) == 2**bits - (2 if symmetric else 1)
    # The ends are within half a step of the outermost codes.
    assert bool(
        ((most - zero) * scale >= high - scale * 0.51).all() and ((least - zero) * scale <= low + scale * 0.51).all()
    )
    assert torch.equal(scale, product) and bool((scale > 0).all() and (reset == 1).all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_what_the_equations_say(case):
    """Against integer products by patch, in float64."""
    x, a_hat, rows, weight, o_hat = made(case, torch.float32, "cpu")
    batch, height, width = case.image
    a_before, o_before = copied(a_hat), copied(o_hat)
    codes = reference.quantise_delta(x, a_hat, rows, case.channels)
    of_pixels = rows.repeat_interleave(len(x) // rows.shape[1], 1)
    reset = of_pixels[0, :, RESET, None] > 0
    known = torch.zeros_like(x) if a_before is None else torch.where(reset, 0.0, a_before)
    spread = torch.cat([of_pixels[part, :, None].expand(-1, count, -1) for part, count in enumerate(case.channels)], 1)
    scale, zero = spread[..., SCALE], spread[..., ZERO]
    q = scale * (codes - zero)
    delta = x - known
    inside = (spread[..., LOW] < codes) & (codes < spread[..., HIGH])
    assert bool(((q - delta).abs() <= scale * 0.5001)[inside].all()) and 0.3 < inside.float().mean() < 1
    if a_hat is not None:
        torch.testing.assert_close(a_hat, known + q, rtol=0, atol=0)

    y = torch.empty(batch, *case.geometry.output(height, width), case.outputs)
    reference.add_product(
        codes.view(batch, height, width, -1), rows, case.channels, weight, o_hat, y, case.geometry, True
    )
    g, total = case.geometry, torch.zeros(1)
    for part, values in enumerate((codes - zero).int().view(batch, height, width, -1).split(case.channels, 3)):
        patches = F.unfold(values.permute(0, 3, 1, 2).double(), g.kernel, g.dilation, g.padding, g.stride).int()
        own = weight.codes.split(case.channels, 3)[part].permute(0, 3, 1, 2).flatten(1).int()
        sums = (own @ patches).view(batch, case.outputs, *y.shape[1:3]).permute(0, 2, 3, 1)
        steps = (
            rows[part, :, SCALE].double().repeat_interleave(y[..., 0].numel() // rows.shape[1]).view(*y.shape[:3], 1)
        )
        total = total + sums.double() * steps * weight.scale[part].double()
    assert weight.bias is not None
    before = weight.bias.double().expand_as(y)
    if o_before is not None:
        starts = (rows[0, :, RESET] > 0).repeat_interleave(y[..., 0].numel() // rows.shape[1]).view(*y.shape[:3], 1)
        before = torch.where(starts, before, o_before.double())
    wanted = before + total
    assert float((y - wanted).norm() / wanted.norm()) < SAME_FLOAT
    assert o_hat is None or torch.equal(o_hat, y)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.soak  # tests/gpu/test_modiff_on_gpu.py has the same cases
def test_the_kernels_in_the_interpreter():
    ended = subprocess.run(
        [sys.executable, str(HELPERS / "modiff_kernels.py")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    every = json.loads(ended.stdout)
    assert len(every) == len(CASES) + 1 and {found["spoilt"] for found in every} == {0, 1}
    for found in every:
        assert found["codes"] == found["rows"] == found["a_hat"] == found["nan"] == 0
        assert max(found["y"], found["o_hat"], found["measured"]) < SAME_FLOAT


def test_inputs_of_more_parts_than_the_kernels_take_are_computed_in_torch(monkeypatch):
    from trtconvert.modiff import products

    kernels = ModuleType("kernels")
    monkeypatch.setattr(products, "_kernels", lambda: kernels)
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert [products._triton(on_gpu, [8] * parts) for parts in (1, 2, 3)] == [kernels, kernels, None]


def test_no_rows_have_no_codes():
    rows = reference.quantiser(-torch.ones(1, 2), torch.ones(1, 2), 8, True, False)
    assert reference.quantise_delta(torch.empty(0, 16), torch.empty(0, 16), rows, [16]).shape == (0, 16)
    assert rows.isfinite().all()


def test_nan_spoils_its_sample_alone():
    x, a_hat, rows, weight, o_hat = made(CASES[0], torch.float32, "cpu")
    assert o_hat is not None
    x[-1, 0] = torch.nan
    codes = reference.quantise_delta(x, a_hat, rows, CASES[0].channels)
    assert rows[0, :, PRODUCT].isnan().tolist() == [False, False, True]
    reference.add_product(
        codes.view(3, 8, 8, -1), rows, CASES[0].channels, weight, o_hat, None, CASES[0].geometry, False
    )
    assert o_hat.flatten(1).isnan().all(1).tolist() == [False, False, True]
    assert o_hat[:2].isfinite().all()


def test_operators_hold_what_they_promise_to_compilers():
    from trtconvert.modiff import products  # noqa: F401 (makes the operators)

    x, a_hat, rows, weight, o_hat = made(CASES[5], torch.float32, "cpu")
    assert a_hat is not None and o_hat is not None
    a_hat.nan_to_num_(0)
    o_hat.nan_to_num_(0)
    for cache in (a_hat, None):
        torch.library.opcheck(torch.ops.trtconvert.modiff_delta, (x, cache, rows, [200]))
    codes = torch.ones(70, 1, 1, 200, dtype=torch.int8)
    points = [1, 1, 0, 0, 1, 1]
    for results in ((o_hat, None), (None, o_hat), (o_hat, o_hat.half())):
        torch.library.opcheck(
            torch.ops.trtconvert.modiff_product, (codes, rows, [200], *weight, *results, points, False)
        )


def test_large_sums_are_exact():
    """Beyond 2^24, where FP32 is not exact."""
    codes = torch.full((1, 1, 1, 4608), 127, dtype=torch.int8)
    weight = torch.full((1, 1, 1, 4608), 127, dtype=torch.int8)
    weight[..., 0] = 126
    one = torch.ones(1, 1)
    exact = 4608 * 127 * 127 - 127
    rows = reference.quantiser(-one, one, 8, True, True)
    rows[..., PRODUCT] = 1.0
    y = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    of = reference.Weight(weight, one, weight.int().sum().view(1, 1).int(), torch.tensor([-float(2**26)]))
    reference.add_product(codes, rows, [4608], of, None, y, Geometry(), False)
    assert float(y) == float(torch.tensor(exact, dtype=torch.float32)) - 2**26
