"""INT4 attention: its integers against Python's, its error against exact attention, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tolerances
import torch
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention import int4_attention
from trtconvert.attention.int4 import int4_product, quantise_int4
from trtconvert.errors import UserError
from trtconvert.models.recorded_calls import relative_error as error


def tensors(heads=4, kv_heads=2, queries=70, keys=200, dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.randn(2, h, n, dim, generator=generator) for h, n in shapes)
    q_mean, k_mean = (torch.randn(1, h, 1, dim, generator=generator) for h in (heads, kv_heads))
    return q + q_mean, k + 2 * k_mean, v + 0.5


def exact(q, k, v, mask=None):
    return scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, enable_gqa=True)


@pytest.mark.parametrize(("tokens", "channels"), [(1, None), (3, None), (1, 8), (100, 16)])
def test_codes_are_those_of_a_loop(tokens, channels):
    x = torch.randn(1, 2, 10, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, 0, 4:7] = 0
    got, size = quantise_int4(x, tokens=tokens, channels=channels), channels or 32
    for head in range(2):
        rows = x[0, head].tolist()
        for token, row in enumerate(rows):
            start = token // tokens * tokens
            for group in range(32 // size):
                part = slice(group * size, (group + 1) * size)
                peak = max(abs(value) for other in rows[start : start + tokens] for value in other[part])
                assert got.scale[0, head, token, group].item() == (peak / 7 or 2.0**-100)
                codes = [round(value / (peak / 7)) if peak else 0 for value in row[part]]
                assert got.codes[0, head, token, part].tolist() == codes
    # Only the largest magnitude of a scale certainly reaches the last code.
    assert got.codes.abs().max() == 7 and got.codes.unique().numel() == 15


@pytest.mark.parametrize("dim", [32, 256])
def test_the_product_of_codes_is_exact(dim):
    """Up to the largest possible sum, which FP32 represents exactly, but 16-bit types do not."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-7, 8, (1, 1, n, dim), generator=generator) for n in (5, 9))
    q[..., 0, :], k[..., 0, :], k[..., 1, :] = 7, 7, -7
    codes = [quantise_int4(x.float()) for x in (q, k)]
    integers = torch.tensor(
        [[sum(a * b for a, b in zip(i, j, strict=True)) for j in k[0, 0].tolist()] for i in q[0, 0].tolist()]
    )
    assert integers[0, 0] == 49 * dim and integers[0, 1] == -49 * dim
    scales = codes[0].scale * codes[1].scale.transpose(2, 3)
    assert torch.equal(int4_product(*codes) / scales, integers[None, None].float())


@pytest.mark.parametrize("channels", [None, 8])
def test_attention_is_what_its_formula_says(channels):
    """One head and one block of queries, computed from dequantised codes in float64."""
    q, k, v = (x[:1, :1].double() for x in tensors(queries=20, keys=50, dim=32))
    means = torch.cat([part.mean(2, keepdim=True).expand_as(part) for part in q.split(8, 2)], 2)
    centred = k - k.mean(2, keepdim=True)

    def rounded(x, tokens):
        got = quantise_int4(x, tokens=tokens, channels=channels)
        return got.codes * got.scale.repeat_interleave(channels or 32, -1)

    logits = rounded(q - means, 1) @ rounded(centred, 4).transpose(2, 3) + means @ centred.transpose(2, 3)
    expected = (logits * 0.3).softmax(-1) @ v
    options = {"softmax_scale": 0.3, "query_block": 8, "key_block": 4, "group_size": channels}
    out = int4_attention(q, k, v, **options)
    assert error(out, expected) < tolerances.SAME_DOUBLE
    assert error(int4_attention(*(x.float() for x in (q, k, v)), **options), expected) < tolerances.SAME_ARITHMETIC


def test_error_is_bounded_and_falls_with_what_is_finer():
    q, k, v = tensors(queries=300)
    expected = exact(q, k, v)
    coarse = error(int4_attention(q, k, v, query_block=0, key_block=128), expected)
    tokens = error(int4_attention(q, k, v, query_block=0), expected)
    means = error(int4_attention(q, k, v), expected)
    groups = error(int4_attention(q, k, v, group_size=16), expected)
    assert groups < means < tokens < coarse and means < tolerances.INT4_ERROR


def test_means_of_queries_and_keys_cost_nothing():
    """A common offset of all keys, or of all queries of a block, is not rounded, however large."""
    q, k, v = (x.double() for x in tensors(queries=256))
    generator = torch.Generator().manual_seed(1)
    q_more, k_more = (100 * torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(2))
    q = q - q.mean(2, keepdim=True)
    whole = int4_attention(q, k, v, query_block=256)
    assert error(int4_attention(q, k + k_more, v, query_block=256), whole) < 1e-9
    shifted = (q + q_more, k + k_more, v)
    assert error(int4_attention(*shifted), exact(*shifted)) < tolerances.INT4_ERROR


def test_no_query_block_leaves_means_in():
    q, k, v = tensors()
    expected = int4_attention(q, k, v, query_block=0)
    assert error(int4_attention(q, k, v), expected) > 1e-3
    assert torch.equal(int4_attention(q, k, v, query_block=10**9), int4_attention(q, k, v, query_block=70))
    assert torch.equal(int4_attention(q, k, v, key_block=10**9), int4_attention(q, k, v, key_block=200))


def test_many_queries_are_those_of_parts():
    """Logits are computed in chunks of queries; blocks of queries may span the edge of a chunk."""
    q, k, v = tensors(heads=1, kv_heads=1, queries=2100, keys=40, dim=32)
    whole = int4_attention(q, k, v, query_block=300)
    parts = [int4_attention(part, k, v, query_block=300) for part in q.split(300, 2)]
    assert error(whole, torch.cat(parts, 2)) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    q, k, v = (x.to(dtype) for x in tensors())
    out = int4_attention(q, k, v)
    assert (
        out.dtype == dtype
        and error(out, int4_attention(q.float(), k.float(), v.float())) < tolerances.ROUNDED_INPUT[dtype]
    )


def test_autocast_rounds_nothing_more():
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        out = int4_attention(q, k, v)
    assert torch.equal(out, int4_attention(q, k, v))


def test_masks_hide_keys():
    q, k, v = tensors(queries=1100, keys=96)
    visible = torch.rand(1100, 96, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[5] = False
    out = int4_attention(q, k, v, mask=visible)
    rows = visible.any(-1)
    assert (out[:, :, ~rows] == 0).all()
    assert error(out[:, :, rows], exact(q, k, v, visible)[:, :, rows]) < tolerances.INT4_ERROR
    additive = torch.zeros(1100, 96).masked_fill(~visible, -math.inf)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert torch.equal(int4_attention(q, k, v, mask=additive.to(dtype)), out)
    of_keys = torch.arange(96) < 60
    assert error(int4_attention(q, k, v, mask=of_keys), exact(q, k, v, of_keys[None])) < tolerances.INT4_ERROR


def test_values_that_are_not_finite_reach_the_output():
    q, k, v = tensors()
    k[0, 0, 3, 5] = math.inf
    out = int4_attention(q, k, v)
    assert out[0, :2].isnan().all() and out[0, 2:].isfinite().all() and out[1].isfinite().all()
    zero = torch.zeros(1, 1, 4, 32)
    assert torch.equal(int4_attention(zero, zero, zero + 1), zero + 1)


def test_compiles_whole():
    q, k, v = tensors()
    compiled = torch.compile(int4_attention, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, k, v, group_size=16), int4_attention(q, k, v, group_size=16))


@pytest.mark.gpu
def test_gpu_computes_what_the_cpu_does():
    q, k, v = (x.half() for x in tensors(queries=1500))
    everywhere: tuple[dict[str, Any], ...] = ({}, {"query_block": 0, "key_block": 128}, {"group_size": 16})
    for options in everywhere:
        out = int4_attention(q.cuda(), k.cuda(), v.cuda(), **options).cpu()
        assert error(out, int4_attention(q, k, v, **options)) < tolerances.HALF_INPUTS


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda q, k, v: (q[0], k, v), {}, "q does not fit"),
        (lambda q, k, v: (q[:, :, :0], k, v), {}, "q does not fit"),
        (lambda q, k, v: (q, k.int(), v), {}, "k does not fit"),
        (lambda q, k, v: (q[:, :3], k, v), {}, "k and v does not fit"),
        (lambda q, k, v: (q, k, v[:, :, :5]), {}, "k and v does not fit"),
        (lambda q, k, v: (q, k[..., :32], v[..., :32]), {}, "k and v does not fit"),
        (lambda q, k, v: (q, k.half(), v), {}, "q, k and v does not fit"),
        (lambda q, k, v: (q.to("meta"), k, v), {}, "one device"),
        (lambda q, k, v: (q.requires_grad_(), k, v), {}, "torch.no_grad"),
        (lambda q, k, v: (q, k, v), {"mask": torch.ones(70, 199)}, "mask does not fit"),
        (lambda q, k, v: (q, k, v), {"mask": torch.ones(70, 200, dtype=torch.int32)}, "mask does not fit"),
        (lambda q, k, v: (q, k, v), {"query_block": -1}, "query_block does not fit"),
        (lambda q, k, v: (q, k, v), {"key_block": 0}, "key_block does not fit"),
        (lambda q, k, v: (q, k, v), {"key_block": 1.5}, "key_block does not fit"),
        (lambda q, k, v: (q, k, v), {"group_size": 0}, "group_size does not fit"),
        (lambda q, k, v: (q, k, v), {"group_size": 24}, "a divisor of head_dim, 64"),
    ],
)
def test_refusals(change, options, message):
    q, k, v = tensors()
    with pytest.raises(UserError, match=message):
        int4_attention(*change(q, k, v), **options)
    with torch.no_grad():
        assert int4_attention(q, k, v).isfinite().all()
