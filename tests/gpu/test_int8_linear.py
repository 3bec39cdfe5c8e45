"""INT8 linear layers on a GPU against float64."""

from __future__ import annotations

import ctypes
import math

import delta_rows
import int8_rows
import pytest
import torch
from int8_rows import DATA_TYPES, DYNAMIC, STATIC, WEIGHT_ONLY, Rows, Table, address, table
from torch import Tensor
from torch.nn import functional as F

from trtconvert.c_structs import INT8_LINEAR_VERSION, MORE_PARTS, Int8LinearParams, ModeTable
from trtconvert.library import load_library

pytestmark = pytest.mark.gpu

INVALID_ARGUMENT = 1
NO_ACTIVATION, GEGLU, GELU, GELU_TANH = range(4)
STATIC_ROWS = ModeTable(1 << STATIC, 1, 1, 1000.0)
CHANGES = {"changes": 1, "mode_set": 1 << STATIC}


@pytest.fixture(params=[0, 80], ids=["best", "mma"])
def arch(request: pytest.FixtureRequest) -> int:
    """The kernels of the GPU, and those that every GPU has."""
    return request.param


def params(
    rows: Rows,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    y: Tensor,
    /,
    residual: Tensor | None = None,
    **changed: object,
) -> Int8LinearParams:
    given = {
        "struct_size": ctypes.sizeof(Int8LinearParams), "version": INT8_LINEAR_VERSION,
        "rows": len(rows.payload), "in_channels": weight.shape[-1],
        "out_channels": weight.shape[-2], "data_type": DATA_TYPES[y.dtype], "activation": int(weight.dim() == 3),
        "mode_set": 1 << DYNAMIC, "x": rows.payload.data_ptr(), "row_scale": rows.scale.data_ptr(),
        "weight": weight.data_ptr(), "weight_scale": scale.data_ptr(), "bias": address(bias),
        "residual": address(residual), "y": y.data_ptr(), "stream": torch.cuda.current_stream().cuda_stream,
    }  # fmt: skip
    return Int8LinearParams(**given | changed)


def params_16bit(x: Tensor, *rest: Tensor | None, **changed: object) -> Int8LinearParams:
    """The reference for unquantised rows, without scales."""
    return params(Rows(x, x), *rest, **{"mode_set": 1 << WEIGHT_ONLY, "row_scale": None} | changed)


def run(given: Int8LinearParams) -> tuple[int, str]:
    message = ctypes.create_string_buffer(512)
    return load_library().trtconvert_int8_linear_run(ctypes.byref(given), message, 512), message.value.decode()


def draw(rows: int, channels: tuple[int, int], layers: int = 1) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """Rows of integers of every size, weights, their scales, and biases of the size of the results."""
    depth, width = channels
    generator = torch.Generator("cuda").manual_seed(rows * depth + width)
    shape = (2, width) if layers == 2 else (width,)

    def integers(*of: int) -> Tensor:
        return torch.randint(-127, 128, of, generator=generator, device="cuda", dtype=torch.int8)

    def between(low: float, high: float, *of: int) -> Tensor:
        return torch.rand(of, generator=generator, device="cuda") * (high - low) + low

    given = Rows(integers(rows, depth), between(0.5, 1.5, rows) / 73 / depth**0.5)
    return given, integers(*shape, depth), between(0.5, 1.5, *shape) / 73, between(-1, 1, *shape)


def blank(rows: int, weight: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """An output of as many rows, with the channels that a weight makes."""
    return torch.full((rows, weight.shape[-2]), torch.nan, dtype=dtype, device="cuda")


def exact(rows: Rows, weight: Tensor, scale: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """One layer in float64, and the tolerance of FP32: half a last place of sum, scale and result."""
    sums = rows.payload.view(torch.int8).double() @ weight.double().T
    y = sums * rows.scale.double()[:, None] * scale.double()
    magnitude = y.abs()
    if bias is not None:
        y, magnitude = y + bias.double(), magnitude + bias.double().abs()
    return y, 4 * 2.0**-24 * magnitude


def is_rounded(y: Tensor, expected: Tensor, off: Tensor) -> bool:
    """True if y is the expected number within the tolerance, rounded to its type."""
    unit = torch.finfo(y.dtype).eps / 2
    rounded = unit * (expected.abs() + off) + unit * torch.finfo(y.dtype).smallest_normal
    return bool(((y.double() - expected).abs() <= off + rounded).all())  # NaN is not


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "channels",
    [
        *((16, 8), (80, 200), (320, 320), (640, 1280), (1280, 1280), (5120, 1280)),
        *((2048, 96), (1280, 1536), (1280, 3840), (64, 256), (208, 64), (1152, 4608)),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 3, 127, 128, 129, 2048, 8200, 8577])
def test_products(rows, channels, biased, dtype, arch):
    given, weight, scale, bias = draw(rows, channels)
    bias = bias if biased else None
    y = blank(rows + 3, weight, dtype)
    assert run(params(given, weight, scale, bias, y, target_arch=arch)) == (0, "")
    assert is_rounded(y[:rows], *exact(given, weight, scale, bias))
    assert y[rows:].isnan().all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("channels", [(16, 8), (80, 200), (320, 1280), (640, 2560), (1280, 5120)], ids=str)
@pytest.mark.parametrize("rows", [1, 129, 2048, 8200])
def test_geglu(rows, channels, biased, dtype, arch):
    """One layer times the GELU of another. GELU has a slope of at most 1.13 and an error of 8e-8 of its argument."""
    given, weight, scale, bias = draw(rows, channels, 2)
    y = blank(rows + 3, weight, dtype)
    assert run(params(given, weight, scale, bias if biased else None, y, target_arch=arch)) == (0, "")
    (value, value_off), (gate, gate_off) = (
        exact(given, weight[i], scale[i], bias[i] if biased else None) for i in range(2)
    )
    off = value_off * F.gelu(gate).abs() + value.abs() * (1.13 * gate_off + 1e-7 * gate.abs() + 1e-7)
    assert is_rounded(y[:rows], value * F.gelu(gate), off + 1e-7 * (value * gate).abs())
    assert y[rows:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [GELU, GELU_TANH])
@pytest.mark.parametrize("rows", [3, 2048])
def test_gelu(rows, activation, dtype, arch):
    given, weight, scale, bias = draw(rows, (640, 1280))
    bias *= 6
    y = blank(rows, weight, dtype)
    assert run(params(given, weight, scale, bias, y, activation=activation, target_arch=arch)) == (0, "")
    z, off = exact(given, weight, scale, bias)
    expected = F.gelu(z, approximate="tanh" if activation == GELU_TANH else "none")
    assert is_rounded(y, expected, 1.13 * off + 1e-6 * z.abs())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("channels", [(80, 200), (1280, 1280), (1280, 3840)], ids=str)
@pytest.mark.parametrize("rows", [1, 300, 2048])
def test_residuals(rows, channels, in_place, dtype, arch):
    given, weight, scale, bias = draw(rows, channels)
    residual = torch.randn(rows, channels[1], device="cuda").to(dtype)
    expected, off = exact(given, weight, scale, bias)
    expected, off = expected + residual.double(), off + 2.0**-23 * (expected.abs() + residual.double().abs())
    y = residual if in_place else blank(rows, weight, dtype)
    assert run(params(given, weight, scale, bias, y, residual=residual, target_arch=arch)) == (0, "")
    assert is_rounded(y, expected, off)


def exact_deltas(
    rows: Rows, weight: Tensor, scale: Tensor, bias: Tensor | None, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Like `exact`, added to the previous row, or to the bias if the row's scale is negative."""
    y, off = exact(Rows(rows.payload, rows.scale.abs()), weight, scale, None)
    of_bias = y.new_zeros(()) if bias is None else bias.double()
    known = torch.where(rows.scale.signbit()[:, None], of_bias, before.double())
    return y + known, off + 2.0**-23 * (y.abs() + known.abs())


@pytest.mark.one_in(7)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("channels", [(16, 8), (80, 200), (320, 320), (640, 1280), (5120, 1280), (1280, 3840)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 129, 2048, 8200])
def test_deltas(rows, channels, biased, dtype, arch):
    """Every second row is reset, where what it was is NaN."""
    given, weight, scale, bias = draw(rows, channels)
    bias = bias if biased else None
    sizes = given.scale
    for first in (0, 1):
        given.scale = sizes * (1 - 2 * ((torch.arange(rows, device="cuda") + first) % 2))
        before, y = torch.randn(rows, channels[1], device="cuda").to(dtype), blank(rows + 3, weight, dtype)
        before[given.scale < 0] = math.nan
        assert run(params(given, weight, scale, bias, y, residual=before, target_arch=arch, **CHANGES)) == (0, "")
        assert is_rounded(y[:rows], *exact_deltas(given, weight, scale, bias, before))
        assert y[rows:].isnan().all()
        in_place = params(given, weight, scale, bias, before, residual=before, target_arch=arch, **CHANGES)
        assert run(in_place) == (0, "")
        assert torch.equal(before, y[:rows])


def test_deltas_whose_scale_is_nan_are_nan(arch):
    given, weight, scale, bias = draw(300, (80, 200))
    given.scale[::2] *= -1
    before, clean, y = torch.randn(300, 200, device="cuda").half(), blank(300, weight), blank(300, weight)

    def run_into(out: Tensor) -> None:
        of = params(given, weight, scale, bias, out, residual=before, target_arch=arch, **CHANGES)
        assert run(of) == (0, "")

    run_into(clean)
    struck = [5, 127, 128, 299]
    given.scale[struck] = math.nan
    run_into(y)
    assert y[struck].isnan().all()
    y[struck] = clean[struck]
    assert torch.equal(y, clean)


def test_sums_far_beyond_fp32(arch):
    """The longest sums of the largest numbers are exact in INT32, and rounded to FP32 once."""
    rows = Rows(
        torch.full((130, 65536), 127, dtype=torch.int8, device="cuda"), torch.full((130,), 2.0**-20, device="cuda")
    )
    weight = torch.full((72, 65536), 127, dtype=torch.int8, device="cuda")
    weight[1::2] *= -1
    weight[2, 0] = 126
    scale, y = torch.full((72,), 2.0**-9, device="cuda"), blank(130, weight)
    assert run(params(rows, weight, scale, None, y, target_arch=arch)) == (0, "")
    assert is_rounded(y, *exact(rows, weight, scale, None))
    assert (y[:, 0] > 1.9).all() and (y[:, 1] < -1.9).all()


def test_rows_whose_scale_is_nan_are_nan(arch):
    given, weight, scale, bias = draw(300, (80, 200))
    clean, y = blank(300, weight), blank(300, weight)
    assert run(params(given, weight, scale, bias, clean, target_arch=arch))[0] == 0
    struck = [5, 127, 128, 299]
    given.scale[struck] = math.nan
    assert run(params(given, weight, scale, bias, y, target_arch=arch))[0] == 0
    assert y[struck].isnan().all()
    y[struck] = clean[struck]
    assert torch.equal(y, clean)


def draw_16bit(rows: int, channels: tuple[int, int], dtype: torch.dtype, layers: int = 1) -> tuple[Tensor, ...]:
    """Like `draw`, with rows in 16 bits."""
    _, weight, scale, bias = draw(rows, channels, layers)
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, channels[0], generator=generator, device="cuda")
    return x.to(dtype), weight, scale / channels[0] ** 0.5, bias


def exact_16bit(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """One layer in float64, and the tolerance of FP32: sums like those of tests/gpu/test_linear.py, and the epilogue."""
    wide, weights = x.double(), weight.double()
    y = wide @ weights.T * scale.double()
    off = (x.shape[1] + 1) * 2.0**-24 * (wide.abs() @ weights.abs().T) * scale.double()
    magnitude = y.abs() + (0 if bias is None else bias.double().abs())
    return y if bias is None else y + bias.double(), off + 4 * 2.0**-24 * magnitude


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "channels", [(16, 8), (80, 200), (320, 320), (320, 2048), (640, 1280), (1280, 1288), (3072, 4608)], ids=str
)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 129, 300, 2048])
def test_16bit_rows(rows, channels, biased, dtype, arch):
    """At most 16 are another kernel's. Tiles of every kind: choose_weight_only_instance() takes these with 132 multiprocessors.

    64 rows: 2048 of (320, 320); 128: 300 of (3072, 4608); 160, 192 and 256: 2048 of (640, 1280), (1280, 1288) and (320, 2048).
    """
    x, weight, scale, bias = draw_16bit(rows, channels, dtype)
    bias = bias if biased else None
    y = blank(rows + 3, weight, dtype)
    assert run(params_16bit(x, weight, scale, bias, y, target_arch=arch)) == (0, "")
    assert is_rounded(y[:rows], *exact_16bit(x, weight, scale, bias))
    assert y[rows:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("channels", "parts"), [((16, 16), 2), ((80, 264), 3), ((1536, 9216), 6), ((3072, 24576), 8)], ids=str
)
@pytest.mark.parametrize("rows", [1, 2, 9, 16])
def test_parts_of_few_rows(rows, channels, parts, dtype):
    """Bit by bit the columns of the whole result, each part with nothing behind it."""
    x, weight, scale, bias = draw_16bit(rows, channels, dtype)
    whole = blank(rows, weight, dtype)
    assert run(params_16bit(x, weight, scale, bias, whole)) == (0, "")
    width = channels[1] // parts
    made = [torch.full((rows + 1, width), torch.nan, dtype=dtype, device="cuda") for _ in range(parts)]
    more = (ctypes.c_void_p * MORE_PARTS)(*(part.data_ptr() for part in made[1:]))
    assert run(params_16bit(x, weight, scale, bias, made[0], parts=parts, more_y=more)) == (0, "")
    for index, part in enumerate(made):
        assert torch.equal(part[:rows], whole[:rows, index * width : (index + 1) * width])
        assert part[rows:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [(80, 200), (640, 2560)], ids=str)
@pytest.mark.parametrize("rows", [2, 13, 130, 2048])
def test_geglu_of_16bit_rows(rows, channels, dtype, arch):
    x, weight, scale, bias = draw_16bit(rows, channels, dtype, 2)
    y = blank(rows, weight, dtype)
    assert run(params_16bit(x, weight, scale, bias, y, target_arch=arch)) == (0, "")
    (value, value_off), (gate, gate_off) = (exact_16bit(x, weight[i], scale[i], bias[i]) for i in range(2))
    off = value_off * F.gelu(gate).abs() + value.abs() * (1.13 * gate_off + 1e-7 * gate.abs() + 1e-7)
    assert is_rounded(y, value * F.gelu(gate), off + 1e-7 * (value * gate).abs())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [2, 300, 2048])
def test_epilogues_of_16bit_rows(rows, dtype, arch):
    x, weight, scale, bias = draw_16bit(rows, (640, 1288), dtype)
    z, off = exact_16bit(x, weight, scale, bias)
    for activation, kind in ((GELU, "none"), (GELU_TANH, "tanh")):
        y = blank(rows, weight, dtype)
        assert run(params_16bit(x, weight, scale, bias, y, activation=activation, target_arch=arch)) == (0, "")
        assert is_rounded(y, F.gelu(z, approximate=kind), 1.13 * off + 1e-6 * z.abs())
    residual, y = torch.randn(rows, 1288, device="cuda").to(dtype), blank(rows, weight, dtype)
    assert run(params_16bit(x, weight, scale, bias, y, residual=residual, target_arch=arch)) == (0, "")
    assert is_rounded(y, z + residual.double(), off + 2.0**-23 * (z.abs() + residual.double().abs()))


@pytest.mark.parametrize("rows", [8, 260, 2048])
def test_rows_tell_which_kernel_they_are_for(rows, arch):
    """One call for both, as one engine for all timesteps, gives what each alone does."""
    x, weight, scale, bias = draw_16bit(rows, (640, 1280), torch.float16)
    both = 1 << WEIGHT_ONLY | 1 << DYNAMIC

    def result(given: Rows, mode_set: int) -> Tensor:
        y = blank(rows, weight)
        assert run(params(given, weight, scale, bias, y, mode_set=mode_set, target_arch=arch, rows=rows)) == (0, "")
        return y

    def rows_at(*timestep: float) -> Rows:
        return int8_rows.quantised(x, table([WEIGHT_ONLY, DYNAMIC], list(timestep)))

    assert torch.equal(result(rows_at(700.0), both), result(int8_rows.quantised(x), 1 << DYNAMIC))
    y = blank(rows, weight)
    assert run(params_16bit(x, weight, scale, bias, y, target_arch=arch)) == (0, "")
    assert torch.equal(result(rows_at(100.0), both), y)
    half = result(rows_at(math.nan, 300.0), both)  # of two samples the first has no timestep
    assert half[: rows // 2].isnan().all() and torch.equal(half[rows // 2 :], y[rows // 2 :])
    half = result(rows_at(600.0, math.nan), both)  # which counts as the first bin
    assert half[rows // 2 :].isnan().all() and torch.equal(half[: rows // 2], y[: rows // 2])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [NO_ACTIVATION, GEGLU, GELU, GELU_TANH])
@pytest.mark.parametrize("channels", [(80, 208), (640, 1280), (1280, 5120)], ids=str)
@pytest.mark.parametrize("rows", [2, 130, 2048])
def test_quantised_rows_are_those_of_the_result(rows, channels, activation, dtype, arch):
    """Bit by bit, with and without factors and offsets, by the scale of each sample's timestep bin."""
    given, weight, scale, bias = draw(rows, channels, 1 + (activation == GEGLU))
    given.scale[1] = math.nan
    y = blank(rows, weight, dtype)
    assert run(params(given, weight, scale, bias, y, activation=activation, target_arch=arch)) == (0, "")
    factor, offset = torch.rand(channels[1], device="cuda") + 0.5, torch.randn(channels[1], device="cuda")
    of = table([STATIC] * 4, [300.0, 800.0], [0.1, 0.02, 0.03, 0.05])
    for equalised in ((None, None), (factor, None), (factor, offset)):
        out = int8_rows.blank(rows, channels[1], of.mode_set)
        called = params(
            given, weight, scale, bias, y, activation=activation, target_arch=arch, y=None, out_table=of.given(),
            out_factor=address(equalised[0]), out_offset=address(equalised[1]), out_payload=out.payload.data_ptr(),
            out_row_scale=out.scale.data_ptr(),
        )  # fmt: skip
        assert run(called) == (0, "")
        expected = int8_rows.quantised(y, of, *equalised)
        assert torch.equal(out.scale.view(torch.int32), expected.scale.view(torch.int32))
        usable = ~out.scale.isnan()
        assert usable.sum() == rows - 1
        assert torch.equal(out.int8(channels[1])[usable], expected.int8(channels[1])[usable])


@pytest.mark.parametrize("rows", [128, 2048, 8200])
def test_behind_what_quantises_in_a_graph(rows):
    """Each starts before the one in front of it ends, and reads what that writes."""
    x = torch.empty(rows, 1280, device="cuda").half()
    _, weight, scale, bias = draw(1, (1280, 1280))
    scale /= 40  # rows of every layer have numbers of the size of 1
    hidden = [x, *(torch.empty_like(x) for _ in range(3))]
    quantised = int8_rows.blank(rows, 1280, 1 << DYNAMIC)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        for read, written in zip(hidden, hidden[1:], strict=False):
            of = int8_rows.params(read, Table(1 << DYNAMIC), quantised, starts_early=1)
            assert int8_rows.run(of) == (0, "")
            assert run(params(quantised, weight, scale, bias, written)) == (0, "")
    for _ in range(3):
        x.normal_()
        for output in hidden[1:]:
            output.fill_(torch.nan)
        graph.replay()
        for read, written in zip(hidden, hidden[1:], strict=False):
            assert is_rounded(written, *exact(int8_rows.quantised(read), weight, scale, bias))


@pytest.mark.parametrize("rows", [2, 130, 2048])
def test_steps_of_deltas_in_a_graph(rows, arch):
    """Two samples; the second one is reset. Two kernels update their caches in place."""
    x = torch.empty(rows, 640, device="cuda").half()
    _, weight, scale, bias = draw(1, (640, 1280))
    scale /= 25  # results have numbers of the size of 1
    scales, deltas, y = torch.empty(2, 1, device="cuda"), delta_rows.blank(x), blank(rows, weight)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        assert delta_rows.run(delta_rows.params(x, deltas.a_next, scales, deltas)) == (0, "")
        of = params(deltas.rows, weight, scale, bias, y, residual=y, target_arch=arch, **CHANGES)
        assert run(of) == (0, "")
    for of_samples in ((-0.03, -0.04), (0.02, 0.01), (0.02, -0.03), (0.03, 0.02)):
        x.normal_()
        scales.copy_(torch.tensor(of_samples)[:, None])
        a_hat, before = deltas.a_next.clone(), y.clone()
        graph.replay()
        q, a_next = delta_rows.specified(x, a_hat, scales[:, 0])
        assert torch.equal(deltas.q, q) and torch.equal(deltas.a_next, a_next)
        assert is_rounded(y, *exact_deltas(deltas.rows, weight, scale, bias, before))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"struct_size": 8}, "params: expected version 2 of"),
        ({"version": 1}, "got version 1"),
        ({"rows": 0}, "rows: expected 1..2^24, got 0"),
        ({"in_channels": 24}, "in_channels: expected 16..65536 in steps of 16, got 24"),
        ({"out_channels": 65544}, "out_channels: expected 8..65536 in steps of 8, got 65544"),
        ({"data_type": 2}, "data_type: expected 0 (float16) or 1 (bfloat16), got 2"),
        ({"activation": 4}, "activation: expected 0 (none), 1 (GEGLU), 2 (GELU) or 3 (GELU by tanh), got 4"),
        ({"mode_set": 0}, "mode_set: expected a sum of"),
        ({"target_arch": 90}, "target_arch: expected 0 or 80, got 90"),
        ({"changes": 2}, "changes: expected 0 or 1, got 2"),
        ({"parts": 9}, "parts: expected 0..8, got 9"),
        ({"parts": 2}, "mode_set: expected 2 (weight_only) with several parts, got 4"),
        ({"parts": 2, "mode_set": 2, "rows": 17}, "rows: expected 1..16 with several parts, got 17"),
        ({"changes": 1}, "mode_set: expected 8 (static) where rows are changes, got 4"),
        (CHANGES | {"mode_set": 12}, "mode_set: expected 8 (static) where rows are changes, got 12"),
        (CHANGES | {"activation": GELU}, "activation: expected 0 (none) where rows are changes, got 2"),
        (CHANGES | {"out_table": STATIC_ROWS}, "out_table.mode_set: expected 0 (none) where rows are changes, got 8"),
        (CHANGES, "residual: expected a device pointer, got null"),
        ({"row_scale": 0}, "row_scale: expected a device pointer, got null"),
        ({"out_table": STATIC_ROWS}, "y: expected null where quantised rows are wanted"),
        ({"out_table": STATIC_ROWS, "y": 0}, "out_payload: expected a device pointer, got null"),
        ({"out_table": STATIC_ROWS, "mode_set": 6}, "mode_set: expected a sum of 4 (dynamic) and 8 (static) where"),
        ({"out_table": ModeTable(4, 1, 1, 1000.0)}, "out_table.mode_set: expected 0 (none) or 8 (static), got 4"),
        ({"out_table": STATIC_ROWS, "out_channels": 72}, "out_channels: expected 16..65536 in steps of 16 where"),
        ({"x": 0}, "x: expected a device pointer, got null"),
        ({"row_scale": 8}, "row_scale: expected a pointer aligned to 16 bytes, got 0x8"),
        ({"bias": 8}, "bias: expected a pointer aligned to 16 bytes, got 0x8"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_refusals_say_what_is_wrong(changed, said):
    given, weight, scale, bias = draw(2, (64, 80))
    y = blank(2, weight)
    status, message = run(params(given, weight, scale, bias, y, **changed))
    assert status == INVALID_ARGUMENT and said in message
    assert y.isnan().all()


def test_a_residual_behind_an_activation_is_refused():
    given, weight, scale, bias = draw(2, (64, 72))
    y = blank(2, weight)
    status, message = run(params(given, weight, scale, bias, y, residual=y, activation=GELU))
    assert status == INVALID_ARGUMENT and "residual: expected null with an activation or quantised rows" in message
