"""Deltas of rows on a GPU against their specification in torch."""

from __future__ import annotations

import math

import delta_rows
import int8_rows
import pytest
import torch
from delta_rows import Deltas, blank, params, quantised, specified
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.gpu

INVALID_ARGUMENT = 1
GELU, GELU_TANH = 2, 3
NAN, INF = math.nan, math.inf


def draw(
    rows: int, channels: int, batch: int, dtype: torch.dtype = torch.float16, first: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, a cache next to it, signed scales of samples, and factors. Every second sample is reset, from the `first` on."""
    generator = torch.Generator("cuda").manual_seed(rows * channels)
    x, moved = torch.randn(2, rows, channels, generator=generator, device="cuda")
    factor = torch.rand(channels, generator=generator, device="cuda") + 0.5
    reset = torch.arange(batch, device="cuda") % 2 == first
    a_hat = x.to(dtype) * factor + 0.2 * moved
    a_hat.view(batch, -1)[reset] = NAN  # which nobody reads
    scales = torch.where(reset, -0.03, 0.004) * (torch.rand(batch, generator=generator, device="cuda") + 0.5)
    return x.to(dtype), a_hat.to(dtype), scales, factor


def are_specified(out: Deltas, x: Tensor, a_hat: Tensor, scales: Tensor, factor: Tensor | None = None) -> bool:
    """Bit by bit."""
    q, a_next = specified(x, a_hat, scales, factor)
    of_rows = scales.repeat_interleave(len(x) // len(scales))
    return torch.equal(out.q, q) and torch.equal(out.a_next, a_next) and torch.equal(out.rows.scale, of_rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [16, 48, 128, 256, 320, 512, 640, 1024, 1152, 3072, 4096, 4608, 20480, 65536])
@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (3, 3), (130, 10)])
def test_deltas_of_samples(rows, batch, channels, dtype):
    """Every number of threads and vectors of a row; samples that begin beside others, in a warp where rows are short."""
    for first in (0, 1):
        x, a_hat, scales, factor = draw(rows, channels, batch, dtype, first)
        for of in (None, factor):
            assert are_specified(quantised(x, a_hat, scales, of), x, a_hat, scales, of)


@pytest.mark.parametrize("place", [0, 3, 6])
def test_one_column_of_the_scales_is_meant(place):
    x, a_hat, scales, factor = draw(130, 320, 10)
    table = torch.full((10, 7), NAN, device="cuda")
    table[:, place] = scales
    assert are_specified(quantised(x, a_hat, table, factor, place=place), x, a_hat, scales, factor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [GELU, GELU_TANH])
@pytest.mark.parametrize("channels", [48, 640, 4608])
def test_activations(channels, activation, dtype):
    """GELU is off by some 1e-6: few codes are those of its neighbours. The cache is as the codes say."""
    x, a_hat, scales, factor = draw(130, channels, 10, dtype)
    out = quantised(x, a_hat, scales, factor, activation=activation)
    q, _ = specified(
        F.gelu(x.float(), approximate="tanh" if activation == GELU_TANH else "none"), a_hat, scales, factor
    )
    off = (out.q.int() - q.int()).abs()
    assert (off <= 1).all() and (off > 0).double().mean() < 1e-3
    of_rows = scales.repeat_interleave(13)[:, None]
    known = torch.where(of_rows < 0, 0.0, a_hat.float())
    assert torch.equal(out.a_next, (known + out.q * of_rows.abs()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [48, 640, 4608])
def test_a_cache_in_place_comes_as_near_as_its_scale(channels, dtype):
    """The next step's delta contains the clipped part of a step."""
    x, a_hat, _, factor = draw(130, channels, 10, dtype)
    out = blank(x)
    out.a_next.copy_(a_hat)
    for sign in (-1, 1, 1, 1, 1, 1, 1, 1):
        scales = torch.full((10,), sign * 0.02, device="cuda")
        before = out.a_next.clone()
        assert delta_rows.run(params(x, out.a_next, scales[:, None], out, factor)) == (0, "")
        assert are_specified(out, x, before, scales, factor)
    far = (out.a_next.float() - x.float() * factor).abs()
    assert (far <= 0.0101 + torch.finfo(dtype).eps / 2 * out.a_next.float().abs()).all()


@pytest.mark.parametrize("channels", [48, 256, 640, 1024, 20480])
def test_rows_that_are_not_finite_have_no_scale(channels):
    """All other numbers are as without them; a NaN is -127."""
    x, a_hat, scales, factor = draw(12, channels, 4)
    clean = quantised(x, a_hat, scales, factor)
    rows, columns = [0, 4, 5, 8, 10], [1, channels - 1, 0, 3, 2]
    x[0, 1], x[4, -1], x[8, 3], a_hat[5, 0], a_hat[10, 2] = NAN, INF, -INF, -INF, NAN
    out = quantised(x, a_hat, scales, factor)
    assert out.rows.scale.isnan().nonzero().flatten().tolist() == rows
    assert out.q[rows, columns].tolist() == [-127, 127, 127, -127, -127]
    out.rows.scale[rows] = clean.rows.scale[rows]
    for found, expected in ((out.q, clean.q), (out.a_next, clean.a_next)):
        found[rows, columns] = expected[rows, columns]
        assert torch.equal(found, expected)
    assert torch.equal(out.rows.scale, clean.rows.scale)


@pytest.mark.parametrize("channels", [48, 640, 4608])
def test_samples_whose_scale_is_of_no_use_have_none(channels):
    x, a_hat, _, factor = draw(24, channels, 8, first=1)
    scales = torch.tensor([0.0, -0.03, NAN, -0.0, INF, -INF, 0.004, -0.03], device="cuda")
    out = quantised(x, a_hat, scales, factor)
    assert out.rows.scale.isnan().view(8, 3).all(1).tolist() == [True, False, True, True, True, True, False, False]
    usable = ~out.rows.scale.isnan()
    good = Deltas(int8_rows.Rows(out.q[usable].view(torch.uint8), out.rows.scale[usable]), out.a_next[usable])
    assert are_specified(good, x[usable], a_hat[usable], scales[[1, 6, 7]], factor)


@pytest.mark.parametrize("channels", [16, 640, 4608])
def test_beyond_the_rows_nothing_is_written(channels):
    x, a_hat, scales, _ = draw(9, channels, 9)
    out = blank(x)
    assert delta_rows.run(params(x, a_hat, scales[:, None], out, rows=7, batch=7)) == (0, "")
    assert (out.rows.payload[7:] == 0x80).all() and out.rows.scale[7:].isnan().all() and out.a_next[7:].isnan().all()
    assert not (out.rows.payload[:7] == 0x80).any() and out.a_next[:7].isfinite().all()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"struct_size": 8}, "params: expected version 1 of"),
        ({"version": 2}, "got version 2"),
        ({"rows": 0}, "rows: expected 1..2^31 - 1, got 0"),
        ({"rows": 1 << 31}, "rows: expected 1..2^31 - 1, got 2147483648"),
        ({"channels": 24}, "channels: expected 16..65536 in steps of 16, got 24"),
        ({"channels": 65552}, "channels: expected 16..65536 in steps of 16, got 65552"),
        ({"data_type": 2}, "data_type: expected 0 (float16) or 1 (bfloat16), got 2"),
        ({"activation": 1}, "activation: expected 0 (none), 2 (GELU) or 3 (GELU by tanh), got 1"),
        ({"batch": 0}, "batch: expected 1..65536, got 0"),
        ({"batch": 3}, "rows: expected as many of each of 3 samples, got 2 in all"),
        ({"places": 0}, "places: expected 1..65536, got 0"),
        ({"place": -1}, "place: expected one of 5 columns of scales, from 0, got -1"),
        ({"place": 5}, "place: expected one of 5 columns of scales, from 0, got 5"),
        ({"x": 8}, "x: expected a pointer aligned to 16 bytes, got 0x8"),
        ({"factor": 8}, "factor: expected a pointer aligned to 16 bytes, got 0x8"),
        ({"a_hat": 0}, "a_hat: expected a device pointer, got null"),
        ({"scales": 0}, "scales: expected a device pointer, got null"),
        ({"payload": 0}, "payload: expected a device pointer, got null"),
        ({"row_scale": 8}, "row_scale: expected a pointer aligned to 16 bytes, got 0x8"),
        ({"a_next": 0}, "a_next: expected a device pointer, got null"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(changed, said):
    x, a_hat, scales, _ = draw(2, 64, 2)
    out = blank(x)
    status, message = delta_rows.run(params(x, a_hat, scales[:, None].repeat(1, 5), out, **changed))
    assert status == INVALID_ARGUMENT and said in message
    assert (out.rows.payload == 0x80).all() and out.rows.scale.isnan().all() and out.a_next.isnan().all()


def test_no_params_are_refused():
    assert delta_rows.run(None) == (INVALID_ARGUMENT, "params: expected a pointer, got null")
