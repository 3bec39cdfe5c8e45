"""Linear layers on a GPU against float64."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_residual_norm as norms
import torch
from torch import Tensor
from torch.nn import functional as F

from trtconvert.c_structs import LINEAR_VERSION, LinearParams
from trtconvert.library import load_library

pytestmark = pytest.mark.gpu

INVALID_ARGUMENT = 1


@pytest.fixture(scope="module", autouse=True)
def supported() -> None:
    if not load_library().trtconvert_linear_is_supported():
        pytest.skip("needs a GPU of compute capability 9.0, and a library compiled for 90a")


def params(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, /, **changed: int) -> LinearParams:
    given = {
        "struct_size": ctypes.sizeof(LinearParams), "version": LINEAR_VERSION, "rows": x.shape[0], "in_channels": x.shape[1],
        "out_channels": weight.shape[-2], "data_type": {torch.float16: 0, torch.bfloat16: 1}[x.dtype],
        "geglu": int(weight.dim() == 3), "x": x.data_ptr(), "weight": weight.data_ptr(),
        "bias": None if bias is None else bias.data_ptr(), "y": y.data_ptr(),
        "stream": torch.cuda.current_stream().cuda_stream,
    }  # fmt: skip
    return LinearParams(**given | changed)


def run(given: LinearParams) -> tuple[int, str]:
    message = ctypes.create_string_buffer(512)
    return load_library().trtconvert_linear_run(ctypes.byref(given), message, 512), message.value.decode()


def draw(rows: int, channels: tuple[int, int], dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias whose products are about one, whatever the depth."""
    depth, width = channels
    generator = torch.Generator("cuda").manual_seed(rows * depth + width)
    x, weight, bias = (
        torch.randn(shape, generator=generator, device="cuda") for shape in ((rows, depth), (width, depth), (width,))
    )
    return x.to(dtype), (weight / depth**0.5).to(dtype), bias.to(dtype)


def blank(rows: int, like: Tensor) -> Tensor:
    """An output of as many rows, with the channels that the weight `like` makes."""
    return like.new_full((rows, like.shape[-2]), torch.nan)


def is_right(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if y is within a single rounding behind FP32 sums.

    Products of 16-bit numbers are exact in FP32. A sum of K of them and a bias in any order, each addition rounded or cut,
    is off by at most (K + 1) * 2^-24 of the sum of magnitudes: tensor cores cut each of 16 products and the sum before
    at 2^-25 of the largest, and their sum at 2^-23, which together is 1.3 K * 2^-25. Then y is off by half a last place
    of that: `unit` of it, and never less than half of the smallest number.
    """
    wide = [tensor.double() for tensor in (x, weight)]
    expected, magnitude = wide[0] @ wide[1].T, wide[0].abs() @ wide[1].abs().T
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    summed = (x.shape[1] + 1) * 2.0**-24 * magnitude
    unit = torch.finfo(y.dtype).eps / 2
    rounded = unit * (expected.abs() + summed) + unit * torch.finfo(y.dtype).smallest_normal
    return bool(((y.double() - expected).abs() <= summed + rounded).all())  # NaN is not


@pytest.mark.one_in(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "channels",
    [
        *((8, 8), (72, 200), (320, 320), (640, 1280), (1280, 1280), (5120, 1280)),
        *((2048, 96), (1280, 1536), (1280, 3840), (64, 256), (200, 64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 3, 127, 128, 129, 2048, 8200, 8577])
def test_products(rows, channels, biased, dtype):
    """Tiles of every kind: choose_instance() takes these with 132 multiprocessors.

    64 columns: (200, 64); 96: 8577 rows of (2048, 96); 160: 2048 of (640, 1280), (1280, 1280), (5120, 1280), 8200 of (320, 320);
    192: 2048 of (1280, 1536); 128, consumers alternating: 2048 of (1280, 3840), 8200 of (640, 1280).
    """
    x, weight, bias = draw(rows, channels, dtype)
    y = blank(rows + 3, weight)
    assert run(params(x, weight, bias if biased else None, y)) == (0, "")
    assert is_right(y[:rows], x, weight, bias if biased else None)
    assert y[rows:].isnan().all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("channels", [(8, 8), (72, 200), (320, 1280), (640, 2560), (1280, 5120)], ids=str)
@pytest.mark.parametrize("rows", [1, 129, 2048, 8200])
def test_geglu(rows, channels, biased, dtype):
    """One layer times the GELU of another.

    Both sums have the error of `is_right`; GELU has a slope of at most 1.13 and an error of 8e-8 of its argument. One
    rounding follows.
    """
    depth, width = channels
    x, weight, bias = draw(rows, (depth, 2 * width), dtype)
    weight, bias = weight.reshape(2, width, depth), bias.reshape(2, width)
    y = blank(rows + 3, weight)
    assert run(params(x, weight, bias if biased else None, y)) == (0, "")
    wide, layers = x.double(), weight.double()
    value, gate = (wide @ layer.T for layer in layers)
    summed = [(depth + 1) * 2.0**-24 * (wide.abs() @ layer.abs().T + bias.double().abs().max()) for layer in layers]
    if biased:
        value, gate = value + bias[0].double(), gate + bias[1].double()
    expected = value * F.gelu(gate)
    off = summed[0] * F.gelu(gate).abs() + value.abs() * (1.13 * summed[1] + 1e-7 * gate.abs() + 1e-7)
    unit = torch.finfo(dtype).eps / 2
    rounded = unit * (expected.abs() + off) + unit * torch.finfo(dtype).smallest_normal
    assert ((y[:rows].double() - expected).abs() <= off + rounded).all()
    assert y[rows:].isnan().all()


def test_gates_of_every_size():
    """GELU alone: the value is 1, the gate its bias, all numbers of FP16 among them infinity and NaN."""
    gate = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.float16)[:65528]
    x, weight = torch.zeros((1, 8), device="cuda").half(), torch.zeros((2, gate.numel(), 8), device="cuda").half()
    y = blank(1, weight)
    assert run(params(x, weight, torch.stack([torch.ones_like(gate), gate]), y))[0] == 0
    expected, finite = F.gelu(gate.double()), gate.isfinite()
    assert ((y[0].double() - expected)[finite].abs() <= 2.0**-11 * expected[finite].abs() + 4e-7).all()
    assert y[0][gate.isposinf()].isposinf().all() and y[0][gate.isnan()].isnan().all()


def test_sums_far_beyond_the_output():
    """Whole numbers whose sums stay below 2^24 are exact in FP32; those in between are a hundred times what FP16 holds."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.full((130, 1280), 100.0, dtype=torch.float16, device="cuda")
    weight = torch.randint(-2, 3, (200, 1280), generator=generator, device="cuda").half()
    weight[:, :640] += 100
    weight[1:, 640:] -= 100  # and the first column's sums stay out of reach
    bias = torch.randint(-9, 10, (200,), generator=generator, device="cuda").half()
    y = blank(130, weight)
    assert run(params(x, weight, bias, y))[0] == 0
    expected = (x.double() @ weight.double().T + bias.double()).half()
    assert torch.equal(y, expected)
    assert y[:, 0].isposinf().all() and y[:, 1:].isfinite().all()


def test_nonfinite_values_reach_their_row_only():
    x, weight, bias = draw(300, (72, 200))
    clean, y = blank(300, weight), blank(300, weight)
    assert run(params(x, weight, bias, clean))[0] == 0
    struck = [5, 127, 128, 299]
    x[struck, [3, 71, 0, 64]] = torch.tensor([torch.inf, torch.nan, -torch.inf, torch.nan], device="cuda").half()
    assert run(params(x, weight, bias, y))[0] == 0
    assert not y[struck].isfinite().any()
    y[struck] = clean[struck]
    assert torch.equal(y, clean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_launches_in_a_row_wait_for_each_other(dtype):
    """Each reads what the one before wrote: x at first, then the weight, then the bias."""
    x, weight, bias = draw(2048, (1280, 1280), dtype)
    narrow, few = draw(300, (1280, 64), dtype)[0], draw(1, (64, 2048), dtype)
    big = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    for _ in range(5):
        hidden = [x, *(blank(2048, weight) for _ in range(6))]
        by_weight, by_bias = blank(300, hidden[-1]), blank(1, few[1])
        torch.mm(big, big)  # the launches queue up behind it
        for read, written in zip(hidden, hidden[1:], strict=False):
            assert run(params(read, weight, bias, written))[0] == 0
        assert run(params(narrow, hidden[-1], None, by_weight))[0] == 0
        assert run(params(few[0], few[1], by_weight[299], by_bias))[0] == 0
        for read, written in zip(hidden, hidden[1:], strict=False):
            assert is_right(written, read, weight, bias)
        assert is_right(by_weight, narrow, hidden[-1], None)
        assert is_right(by_bias, few[0], few[1], by_weight[299])


@pytest.mark.parametrize("rows", [128, 8200])
def test_between_norms_in_a_graph(rows):
    """Each starts before the one in front of it ends, and reads what that writes."""
    x, weight, bias = draw(rows, (1280, 1280))
    residual, ones, zeros = torch.empty_like(x), torch.ones_like(bias), torch.zeros_like(bias)
    outputs = total, normed, product, last_total, last_normed = [torch.empty_like(x) for _ in range(5)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        assert norms.run(norms.params(x, residual, ones, zeros, total, normed)) == (0, "")
        assert run(params(normed, weight, bias, product)) == (0, "")
        assert norms.run(norms.params(product, total, ones, zeros, last_total, last_normed, starts_early=1)) == (0, "")
    for offset in (-1.0, 0.0, 2.0):
        x.normal_(offset)
        residual.normal_()
        for output in outputs:
            output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(total, x + residual) and torch.equal(last_total, product + total)
        assert is_right(product, normed, weight, bias)
        for of, made in ((total, normed), (last_total, last_normed)):
            expected = F.layer_norm(of.double(), (1280,))
            assert (made.double() - expected).abs().max() <= norms.ROUNDED[torch.float16]


def test_two_streams_at_once():
    """Each from a thread of its own; what they write is what one launch alone does."""
    given = [draw(513, (1280, 3840)), draw(2048, (320, 320))]
    alone = [blank(x.shape[0], weight) for x, weight, _ in given]
    for of, y in zip(given, alone, strict=True):
        assert run(params(*of, y))[0] == 0
        assert is_right(y, *of)
    outputs = [[torch.full_like(y, torch.nan) for _ in range(50)] for y in alone]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()

    def launch_all(lane: int) -> set[tuple[int, str]]:
        return {run(params(*given[lane], y, stream=streams[lane].cuda_stream)) for y in outputs[lane]}

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(launch_all, (0, 1))) == [{(0, "")}] * 2
    torch.cuda.synchronize()
    for expected, written in zip(alone, outputs, strict=True):
        assert all(torch.equal(y, expected) for y in written)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"struct_size": 8}, "params: expected version 1 of"),
        ({"version": 2}, "got version 2"),
        ({"rows": 0}, "rows: expected 1..2^24, got 0"),
        ({"rows": (1 << 24) + 1}, "rows: expected 1..2^24, got 16777217"),
        ({"in_channels": 12}, "in_channels: expected 8..65536 in steps of 8, got 12"),
        ({"out_channels": 65544}, "out_channels: expected 8..65536 in steps of 8, got 65544"),
        ({"data_type": 2}, "data_type: expected 0 (float16) or 1 (bfloat16), got 2"),
        ({"geglu": 2}, "geglu: expected 0 or 1, got 2"),
        ({"x": 0}, "x: expected a device pointer, got null"),
        ({"weight": 8}, "weight: expected a pointer aligned to 16 bytes, got 0x8"),
        ({"bias": 8}, "bias: expected a pointer aligned to 16 bytes, got 0x8"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(changed, said):
    x, weight, bias = draw(2, (64, 72))
    y = blank(2, weight)
    status, message = run(params(x, weight, bias, y, **changed))
    assert status == INVALID_ARGUMENT and said in message
    assert y.isnan().all()
