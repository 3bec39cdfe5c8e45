"""INT8 convolutions, and group norms that give INT8, on a GPU against float64."""

from __future__ import annotations

import ctypes
import functools
import math

import pytest
import test_group_norm
import torch
from int8_rows import DATA_TYPES, STATIC, Table, address, table
from test_group_norm import draw as draw_images
from test_int8_linear import is_rounded
from torch import Tensor
from torch.nn import functional as F

from trtconvert.c_structs import IMAGE_MARKS, INT8_CONV_VERSION, Int8ConvParams, ModeTable
from trtconvert.library import has_group_norm_kernel, load_library

pytestmark = pytest.mark.gpu

INVALID_ARGUMENT = 1


@pytest.fixture(params=[0, 80], ids=["best", "mma"])
def arch(request: pytest.FixtureRequest) -> int:
    """The kernels of the GPU, and those that every GPU has."""
    return request.param


def one_scale(scale: float) -> Table:
    return Table(1 << STATIC, None, None, torch.tensor([scale], device="cuda"))


@functools.cache
def no_marks(images: int) -> Tensor:
    """Kept, as kernels read the marks when `params` has returned."""
    return torch.zeros(images, IMAGE_MARKS, dtype=torch.uint8, device="cuda")


def params(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, of: Table, y: Tensor, stride: tuple[int, int] = (1, 1),
    pad: tuple[int, int] = (0, 0), /, residual: Tensor | int | None = None, **changed: object,
) -> Int8ConvParams:  # fmt: skip
    """Args: x [B, H, W, C], weight [N, R, S, C] in INT8, y and residual [B, P, Q, N]."""
    given = {
        "struct_size": ctypes.sizeof(Int8ConvParams), "version": INT8_CONV_VERSION,
        "batch": len(x), "height": x.shape[1], "width": x.shape[2],
        "in_channels": x.shape[3], "out_channels": len(weight), "kernel_h": weight.shape[1], "kernel_w": weight.shape[2],
        "stride_y": stride[0], "stride_x": stride[1], "pad_y": pad[0], "pad_x": pad[1], "data_type": DATA_TYPES[y.dtype],
        "table": of.given(), "x": x.data_ptr(), "weight": weight.data_ptr(), "weight_scale": scale.data_ptr(),
        "bias": address(bias), "residual": residual if isinstance(residual, int) else address(residual), "y": y.data_ptr(),
        "stream": torch.cuda.current_stream().cuda_stream, "target_arch": 0, "marks": no_marks(len(x)).data_ptr(),
    }  # fmt: skip
    return Int8ConvParams(**given | changed)


def run(given: Int8ConvParams) -> tuple[int, str]:
    message = ctypes.create_string_buffer(512)
    return load_library().trtconvert_int8_conv_run(ctypes.byref(given), message, 512), message.value.decode()


def draw(
    batch: int, size: tuple[int, int], channels: tuple[int, int], kernel: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and weights of integers of every size, the weights' scales, and biases of the size of the results."""
    inputs, outputs = channels
    generator = torch.Generator("cuda").manual_seed(batch * size[0] + inputs * outputs)

    def integers(*of: int) -> Tensor:
        return torch.randint(-127, 128, of, generator=generator, device="cuda", dtype=torch.int8)

    depth = inputs * kernel[0] * kernel[1]
    scale = (torch.rand(outputs, generator=generator, device="cuda") + 0.5) / 73**2 / depth**0.5
    bias = torch.rand(outputs, generator=generator, device="cuda") * 2 - 1
    return integers(batch, *size, inputs), integers(outputs, *kernel, inputs), scale, bias


def exact(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, steps: Tensor, stride: tuple[int, int], pad: tuple[int, int],
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[B, P, Q, N] in float64, and what FP32 may be off. Args: steps: [B] the images' scales."""
    sums = F.conv2d(x.double().permute(0, 3, 1, 2), weight.double().permute(0, 3, 1, 2), stride=stride, padding=pad)
    y = sums.permute(0, 2, 3, 1) * steps.double().view(-1, 1, 1, 1) * scale.double()
    magnitude = y.abs()
    for added in (bias, residual):
        if added is not None:
            y, magnitude = y + added.double(), magnitude + added.double().abs()
    return y, 4 * 2.0**-24 * magnitude


def blank(right: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(right.shape, torch.nan, dtype=dtype, device="cuda")


SHAPES = [  # batch, image, channels in and out, kernel, stride, padding
    (1, (1, 1), (16, 8), (1, 1), (1, 1), (0, 0)),
    (1, (3, 3), (16, 8), (3, 3), (1, 1), (0, 0)),
    (2, (64, 64), (320, 320), (3, 3), (1, 1), (1, 1)),  # Stable Diffusion's
    (2, (64, 64), (320, 320), (3, 3), (2, 2), (1, 1)),
    (2, (32, 32), (640, 640), (3, 3), (1, 1), (1, 1)),
    (2, (16, 16), (2560, 1280), (3, 3), (1, 1), (1, 1)),
    (2, (8, 8), (1280, 1280), (3, 3), (1, 1), (1, 1)),
    (2, (64, 64), (960, 320), (1, 1), (1, 1), (0, 0)),
    (1, (128, 128), (320, 320), (3, 3), (1, 1), (1, 1)),  # SDXL's
    (3, (7, 13), (48, 40), (3, 3), (1, 1), (1, 1)),  # tiles that end in images, and beyond the last one
    (3, (7, 13), (48, 40), (3, 3), (2, 3), (1, 0)),
    (2, (9, 20), (144, 72), (5, 1), (1, 1), (2, 0)),
    (2, (9, 20), (128, 64), (1, 7), (1, 2), (0, 3)),
    (1, (33, 31), (80, 512), (3, 3), (1, 1), (2, 2)),
    (5, (1, 300), (32, 96), (1, 3), (1, 1), (0, 1)),
    (300, (2, 2), (64, 160), (2, 2), (1, 1), (1, 1)),
    (1, (20, 20), (16, 256), (15, 15), (8, 8), (14, 14)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions(shape, biased, dtype, arch):
    batch, size, channels, kernel, stride, pad = shape
    x, weight, scale, bias = draw(batch, size, channels, kernel)
    bias = bias if biased else None
    right, off = exact(x, weight, scale, bias, torch.full((batch,), 0.9, device="cuda"), stride, pad)
    y = blank(torch.empty(batch + 1, *right.shape[1:]), dtype)
    assert run(params(x, weight, scale, bias, one_scale(0.9), y, stride, pad, target_arch=arch)) == (0, "")
    assert is_rounded(y[:batch], right, off)
    assert y[batch:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[9], SHAPES[10]], ids=str)
def test_residuals(shape, in_place, dtype, arch):
    batch, size, channels, kernel, stride, pad = shape
    x, weight, scale, bias = draw(batch, size, channels, kernel)
    steps = torch.ones(batch, device="cuda")
    right, _ = exact(x, weight, scale, bias, steps, stride, pad)
    residual = torch.randn(right.shape, device="cuda").to(dtype)  # channels last, which `right` is not in memory
    right, off = exact(x, weight, scale, bias, steps, stride, pad, residual)
    y = residual.clone() if in_place else blank(right, dtype)
    given = params(
        x, weight, scale, bias, one_scale(1.0), y, stride, pad, residual=y if in_place else residual, target_arch=arch
    )
    assert run(given) == (0, "")
    assert is_rounded(y, right, off)


def test_images_have_the_scale_of_their_samples_timestep(arch):
    """Six images of three samples, in bins of their own; one whose timestep is NaN, and one whose scale is of no use, are NaN."""
    x, weight, scale, _ = draw(6, (9, 9), (64, 128), (3, 3))
    of = table([STATIC] * 4, [900.0, 300.0, 10.0], [0.5, 0.75, 1.0, 1.25])
    steps = torch.tensor([1.25, 1.25, 0.75, 0.75, 0.5, 0.5], device="cuda")
    right, off = exact(x, weight, scale, None, steps, (1, 1), (1, 1))
    y = blank(right, torch.float16)
    assert run(params(x, weight, scale, None, of, y, (1, 1), (1, 1), target_arch=arch)) == (0, "")
    assert is_rounded(y, right, off)
    of = table([STATIC] * 4, [math.nan, 300.0, 10.0], [math.inf, 0.75, 1.0, 1.25])
    assert run(params(x, weight, scale, None, of, y, (1, 1), (1, 1), target_arch=arch)) == (0, "")
    assert y[[0, 1, 4, 5]].isnan().all() and is_rounded(y[2:4], right[2:4], off[2:4])


def test_sums_far_beyond_fp32(arch):
    """127 · 127 · 14,400 is more than 2²⁷."""
    x = torch.full((1, 16, 16, 1600), 127, dtype=torch.int8, device="cuda")
    weight = torch.full((64, 3, 3, 1600), 127, dtype=torch.int8, device="cuda")
    scale = torch.full((64,), 2.0**-18, device="cuda")
    right, off = exact(x, weight, scale, None, torch.ones(1, device="cuda"), (1, 1), (1, 1))
    y = blank(right, torch.float16)
    assert run(params(x, weight, scale, None, one_scale(1.0), y, (1, 1), (1, 1), target_arch=arch)) == (0, "")
    assert is_rounded(y, right, off)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_marked_images_are_nan(shape, arch):
    """Whichever of its marks an image has, and wherever its rows lie in tiles."""
    batch, size, channels, kernel, stride, pad = shape
    x, weight, scale, bias = draw(batch, size, channels, kernel)
    right, _ = exact(x, weight, scale, bias, torch.ones(batch, device="cuda"), stride, pad)

    def result(marks: Tensor) -> Tensor:
        y = blank(right, torch.float16)
        given = params(x, weight, scale, bias, one_scale(1.0), y, stride, pad, target_arch=arch, marks=marks.data_ptr())
        assert run(given) == (0, "")
        return y

    marks = no_marks(batch).clone()
    whole = result(marks)
    for first in range(0, IMAGE_MARKS, 5):
        marks.zero_()
        marked = torch.arange(first % 2, batch, 2, device="cuda")
        marks[marked, (first + marked) % IMAGE_MARKS] = 1
        y = result(marks)
        assert y[marked].isnan().all()
        y[marked] = whole[marked]
        assert torch.equal(y, whole)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"struct_size": 8}, "params: expected version 2 of"),
        ({"version": 1}, "got version 1"),
        ({"batch": 0}, "batch: expected 1..65536, got 0"),
        ({"batch": 65536, "height": 512}, "expected at most 2^24 pixels of x and of y"),
        ({"height": 0}, "height: expected 1..16384, got 0"),
        ({"width": 16385}, "width: expected 1..16384, got 16385"),
        ({"in_channels": 24}, "in_channels: expected 16..16384 in steps of 16, got 24"),
        ({"out_channels": 12}, "out_channels: expected 8..65536 in steps of 8, got 12"),
        ({"kernel_h": 16}, "kernel_h: expected 1..15, got 16"),
        ({"stride_x": 9}, "stride_x: expected 1..8, got 9"),
        ({"pad_y": 3}, "pad_y: expected 0 or more, and less than the kernel, got 3"),
        ({"width": 1, "kernel_w": 4}, "width: expected at least a window of 4 with the padding of 1, got 1"),
        ({"data_type": 2}, "data_type: expected 0 (float16) or 1 (bfloat16), got 2"),
        pytest.param(
            {"table": ModeTable(4, 1, 1, 1000.0)}, "table.mode_set: expected 8 (static), got 4", id="mode_set"
        ),
        ({"target_arch": 90}, "target_arch: expected 0 or 80, got 90"),
        ({"weight": 0}, "weight: expected a device pointer, got null"),
        ({"residual": 8}, "residual: expected a pointer aligned to 16 bytes, got 0x8"),
        ({"marks": 0}, "marks: expected a device pointer, got null"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(changed, said):
    x, weight, scale, bias = draw(2, (8, 8), (32, 16), (3, 3))
    y = torch.full((2, 8, 8, 16), torch.nan, dtype=torch.float16, device="cuda")
    status, message = run(params(x, weight, scale, bias, one_scale(1.0), y, (1, 1), (1, 1), **changed))
    assert status == INVALID_ARGUMENT and said in message
    assert y.isnan().all()


# Group norms that give INT8 ---------------------------------------------------------------------------------------------

norms = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_group_norm_kernel()),
    reason="needs a GPU of compute capability 9.0 or later, and a library compiled for it",
)


def set_marks(images: int) -> Tensor:
    """Marks that a norm has to clear."""
    return torch.full((images, IMAGE_MARKS), 255, dtype=torch.uint8, device="cuda")


@norms
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factored", [True, False], ids=["factor", "no factor"])
@pytest.mark.parametrize(
    ("batch", "pixels", "channels", "groups"), [(2, 4096, 320, 32), (4, 7, 48, 3), (2, 128 * 128, 960, 32)]
)
@pytest.mark.parametrize("silu", [False, True])
def test_norms_in_int8_are_those_of_16_bits_quantised(batch, pixels, channels, groups, silu, factored, dtype):
    """To the last bit, but where a quotient lies in the middle of two integers."""
    x, shift, weight, bias = draw_images(batch, pixels, channels, dtype)
    normed = torch.full_like(x, torch.nan)
    assert test_group_norm.run(test_group_norm.params(x, shift, weight, bias, normed, groups, silu=silu)) == (0, "")
    factor = torch.rand(channels, device="cuda") + 0.5 if factored else None
    of = table([STATIC] * 2, [100.0, 900.0], [0.02, 0.03])
    payload = torch.full(x.shape, -128, dtype=torch.int8, device="cuda")
    given = test_group_norm.params(
        x, shift, weight, bias, normed, groups, silu=silu, normed=None, table=of.given(), factor=address(factor),
        payload=payload.data_ptr(), marks=set_marks(batch).data_ptr(),
    )  # fmt: skip
    assert test_group_norm.run(given) == (0, "")
    steps = torch.tensor([0.02, 0.03], device="cuda").repeat_interleave(batch // 2).view(-1, 1, 1)
    right = (normed.float() * (1 if factor is None else factor) / steps).round().clamp(-127, 127)
    off = (payload.float() - right).abs()
    assert off.max() <= 1 and (off > 0).double().mean() < 1e-5


@norms
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"table": ModeTable(4, 1, 1, 1000.0)}, "table.mode_set: expected 0 (none) or 8 (static), got 4"),
        ({"table": ModeTable(8, 1, 3, 1000.0)}, "rows: expected as many of each of 3 samples, got 2 in all"),
        ({"normed": 64}, "normed: expected null where a payload is wanted"),
        ({"payload": 0}, "payload: expected a device pointer, got null"),
        ({"marks": 0}, "marks: expected a device pointer, got null"),
        ({"marks": 8}, "marks: expected a pointer aligned to 16 bytes, got 0x8"),
    ],
    ids=["mode_set", "samples", "normed", "payload", "marks", "aligned"],
)
def test_payloads_that_are_refused(changed, said):
    x, shift, weight, bias = draw_images(2, 16, 64, torch.float16)
    payload = torch.empty(x.shape, dtype=torch.int8, device="cuda")
    asked = {"normed": None, "table": one_scale(1.0).given(), "payload": payload.data_ptr()}
    asked |= {"marks": set_marks(2).data_ptr()} | changed
    status, message = test_group_norm.run(test_group_norm.params(x, shift, weight, bias, x, 8, **asked))
    assert status == INVALID_ARGUMENT and said in message
