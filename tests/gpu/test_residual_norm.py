"""Residual connections and their norms on a GPU against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from int8_rows import DYNAMIC, STATIC, WEIGHT_ONLY, Rows, Table, address, table
from int8_rows import blank as blank_rows
from int8_rows import quantised as rows_of
from torch import Tensor
from torch.nn import functional as F

from trtconvert.c_structs import RESIDUAL_NORM_VERSION, ResidualNormParams
from trtconvert.library import load_library
from trtconvert.models.recorded_calls import relative_error

pytestmark = pytest.mark.gpu

INVALID_ARGUMENT = 1
# The output's rounding: half of 2^-10 (FP16) and of 2^-7 (BF16) at most, relative to outputs of up to 16, and what FP32 loses.
ROUNDED = {torch.float16: 8e-3, torch.bfloat16: 7e-2}


def params(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, total: Tensor, normed: Tensor, /, **changed: object
) -> ResidualNormParams:
    given = {
        "struct_size": ctypes.sizeof(ResidualNormParams), "version": RESIDUAL_NORM_VERSION,
        "rows": x.numel() // x.shape[-1], "channels": x.shape[-1],
        "data_type": {torch.float16: 0, torch.bfloat16: 1}[x.dtype], "epsilon": 1e-5, "x": x.data_ptr(),
        "residual": residual.data_ptr(), "weight": weight.data_ptr(), "bias": bias.data_ptr(), "sum": total.data_ptr(),
        "normed": normed.data_ptr(), "stream": torch.cuda.current_stream().cuda_stream,
    }  # fmt: skip
    return ResidualNormParams(**given | changed)


def run(given: ResidualNormParams) -> tuple[int, str]:
    message = ctypes.create_string_buffer(512)
    return load_library().trtconvert_residual_norm_run(ctypes.byref(given), message, 512), message.value.decode()


def draw(rows: int, channels: int, dtype: torch.dtype, offset: float = 0.0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows * channels)
    shapes = ((rows, channels), (rows, channels), (channels,), (channels,))
    x, residual, weight, bias = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    return [tensor.to(dtype) for tensor in (x + offset, residual * 3, weight, bias)]


def blank(like: Tensor) -> tuple[Tensor, Tensor]:
    return torch.full_like(like, torch.nan), torch.full_like(like, torch.nan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [8, 256, 320, 640, 768, 1280, 1536, 2048, 2056, 3072, 4096])
@pytest.mark.parametrize("rows", [1, 3, 2048])
def test_sums_and_norms(rows, channels, dtype):
    given = draw(rows, channels, dtype)
    total, normed = blank(given[0])
    assert run(params(*given, total, normed)) == (0, "")
    x, residual, weight, bias = given
    assert torch.equal(total, x + residual)  # one rounding each
    expected = F.layer_norm(total.double(), (channels,), weight.double(), bias.double(), 1e-5)
    assert (normed.double() - expected).abs().max() <= ROUNDED[dtype]


def test_rows_far_from_zero():
    """With a mean of a hundred times the deviation, a sum of squares would cancel."""
    given = draw(64, 1280, torch.float16, offset=300.0)
    total, normed = blank(given[0])
    assert run(params(*given, total, normed))[0] == 0
    expected = F.layer_norm(total.double(), (1280,), given[2].double(), given[3].double(), 1e-5)
    assert (normed.double() - expected).abs().max() <= ROUNDED[torch.float16]


def test_rows_without_variance():
    x = torch.full((2, 64), 2.0, dtype=torch.float16, device="cuda")
    weight, bias = torch.ones_like(x[0]), torch.full_like(x[0], 0.5)
    total, normed = blank(x)
    assert run(params(x, x, weight, bias, total, normed))[0] == 0
    assert torch.equal(total, x + x) and torch.equal(normed, bias.expand_as(x))


def test_in_place_and_beyond_the_rows():
    x, residual, weight, bias = draw(9, 640, torch.float16)
    expected = x[:7] + residual[:7]
    rest, normed = x[7:].clone(), torch.full_like(x, torch.nan)
    assert run(params(x, residual, weight, bias, x, normed, rows=7))[0] == 0
    assert torch.equal(x[:7], expected) and torch.equal(x[7:], rest)
    assert normed[:7].isfinite().all() and normed[7:].isnan().all()


def quantised(
    given: list[Tensor], of: Table, normed: Tensor | None, factor: Tensor | None = None, offset: Tensor | None = None
) -> Rows:
    """Quantised rows beside the norm, or in its place."""
    out, total = blank_rows(*given[0].shape, of.mode_set), torch.empty_like(given[0])
    called = params(
        *given, total, total, normed=address(normed), table=of.given(), factor=address(factor), offset=address(offset),
        payload=out.payload.data_ptr(), row_scale=out.scale.data_ptr(),
    )  # fmt: skip
    assert run(called) == (0, "")
    assert torch.equal(total, given[0] + given[1])
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [16, 320, 640, 1280, 1536, 2048, 2064, 3072, 4096])
@pytest.mark.parametrize("rows", [3, 514])
def test_quantised_rows_are_those_of_the_norm(rows, channels, dtype):
    """Bit by bit, in every mode, with and without factors and offsets, beside the norm and in its place."""
    given = draw(rows, channels, dtype)
    factor = torch.rand(channels, device="cuda") + 0.5
    offset = torch.randn(channels, device="cuda")
    modes = [WEIGHT_ONLY, DYNAMIC, STATIC, STATIC]
    for timestep in (0.0, 300.0, 600.0, 900.0, torch.nan):
        of = table(modes, [timestep], [0.1, 0.2, 0.01, 0.03])
        for equalised in ((None, None), (factor, None), (factor, offset)):
            normed = torch.full_like(given[0], torch.nan)
            beside, alone = quantised(given, of, normed, *equalised), quantised(given, of, None, *equalised)
            expected = rows_of(normed, of, *equalised)
            assert torch.equal(beside.payload, expected.payload) and torch.equal(alone.payload, expected.payload)
            for scale in (beside.scale, alone.scale):
                assert torch.equal(scale.view(torch.int32), expected.scale.view(torch.int32))


@pytest.mark.parametrize(
    ("changed", "of", "said"),
    [
        ({"channels": 24}, {}, "channels: expected 16..4096 in steps of 16 with quantised rows, got 24"),
        ({"rows": 1 << 31}, {}, "rows: expected 1..2^31 - 1 with quantised rows, got 2147483648"),
        ({}, {"mode_set": 1}, "mode_set: expected a sum of"),
        ({}, {"mode_set": 8}, "x_scale: expected a device pointer, got null"),
        ({"payload": 0}, {}, "payload: expected a device pointer, got null"),
        ({"row_scale": 8}, {}, "row_scale: expected a pointer aligned to 16 bytes, got 0x8"),
    ],
    ids=str,
)
def test_refusals_of_quantised_rows_say_what_is_wrong(changed, of, said):
    given = draw(2, 64, torch.float16)
    total, normed = blank(given[0])
    rows = blank_rows(2, 64, 1 << DYNAMIC)
    of = Table(**{"mode_set": 1 << DYNAMIC} | of).given()
    places = {"table": of, "payload": rows.payload.data_ptr(), "row_scale": rows.scale.data_ptr()}
    status, message = run(params(*given, total, normed, **places | changed))
    assert status == INVALID_ARGUMENT and said in message
    assert total.isnan().all() and normed.isnan().all()


@pytest.mark.parametrize("starts_early", [0, 1])
def test_between_products_in_a_graph(starts_early):
    big = torch.randn(4096, 4096, device="cuda").half()
    weight, bias = torch.ones(4096, device="cuda").half(), torch.zeros(4096, device="cuda").half()
    x, (total, normed) = torch.empty_like(big), blank(big)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.mm(big, big, out=x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                torch.mm(big, big, out=x)
                assert run(params(x, big, weight, bias, total, normed, starts_early=starts_early))[0] == 0
                torch.add(total, 0, out=big)  # its output is what the next round begins with
    torch.cuda.synchronize()
    start = (torch.randn(4096, 4096, device="cuda") / 64).half()
    big.copy_(start)
    graph.replay()
    torch.cuda.synchronize()
    expected = start
    for _ in range(3):
        expected = torch.mm(expected, expected) + expected
    assert relative_error(total, expected) <= 1e-3  # the products may be other kernels in a graph
    assert relative_error(normed, F.layer_norm(expected.float(), (4096,))) <= 1e-3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"struct_size": 8}, "params: expected version 3 of"),
        ({"version": 1}, "got version 1"),
        ({"rows": 0}, "rows: expected 1..2^31, got 0"),
        ({"channels": 12}, "channels: expected 8..4096 in steps of 8, got 12"),
        ({"data_type": 2}, "data_type: expected 0 (float16) or 1 (bfloat16), got 2"),
        ({"starts_early": 2}, "starts_early: expected 0 or 1, got 2"),
        ({"epsilon": -1.0}, "epsilon: expected a finite value >= 0, got -1"),
        ({"weight": 0}, "weight: expected a device pointer, got null"),
        ({"x": 8}, "x: expected a pointer aligned to 16 bytes, got 0x8"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(changed, said):
    given = draw(2, 64, torch.float16)
    total, normed = blank(given[0])
    status, message = run(params(*given, total, normed, **changed))
    assert status == INVALID_ARGUMENT and said in message
    assert total.isnan().all() and normed.isnan().all()
