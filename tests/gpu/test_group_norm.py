"""Group norms of images with their channels last on a GPU against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trtconvert.c_structs import GROUP_NORM_VERSION, GroupNormParams
from trtconvert.library import has_group_norm_kernel, load_library
from trtconvert.models.recorded_calls import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and has_group_norm_kernel()),
        reason="needs a GPU of compute capability 9.0 or later, and a library compiled for it",
    ),
]

INVALID_ARGUMENT = 1
# Half a step of FP16 (2^-11) and of BF16 (2^-8) relative to results beyond 1, half as much below, and what FP32 loses.
ROUNDED = {torch.float16: 5.5e-4, torch.bfloat16: 4.2e-3}


def params(
    x: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor, normed: Tensor, groups: int, /, **changed: object
) -> GroupNormParams:
    """Args: x [B, pixels, C], shift [B, C], weight, bias [C]."""
    given = {
        "struct_size": ctypes.sizeof(GroupNormParams), "version": GROUP_NORM_VERSION, "batch": x.shape[0], "pixels": x.shape[1],
        "channels": x.shape[2], "groups": groups, "data_type": {torch.float16: 0, torch.bfloat16: 1}[x.dtype],
        "epsilon": 1e-5, "x": x.data_ptr(), "shift": shift.data_ptr() if shift is not None else None,
        "weight": weight.data_ptr(), "bias": bias.data_ptr(), "normed": normed.data_ptr(),
        "stream": torch.cuda.current_stream().cuda_stream,
    }  # fmt: skip
    return GroupNormParams(**given | changed)


def run(given: GroupNormParams) -> tuple[int, str]:
    message = ctypes.create_string_buffer(512)
    return load_library().trtconvert_group_norm_run(ctypes.byref(given), message, 512), message.value.decode()


def draw(batch: int, pixels: int, channels: int, dtype: torch.dtype, offset: float = 0.0) -> list[Tensor]:
    """x, shift, weight, bias. Each channel has a mean of its own."""
    generator = torch.Generator("cuda").manual_seed(batch * pixels * channels)
    shapes = ((batch, pixels, channels), (batch, channels), (channels,), (channels,), (channels,))
    x, shift, weight, bias, means = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    return [tensor.to(dtype) for tensor in (2 * x + means + offset, shift, weight, bias)]


def expected(
    x: Tensor,
    shift: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    groups: int,
    silu: bool = False,
    epsilon: float = 1e-5,
) -> Tensor:
    y = x if shift is None else x + shift[:, None]  # rounded
    normed = F.group_norm(y.double().transpose(1, 2), groups, weight.double(), bias.double(), epsilon).transpose(1, 2)
    return F.silu(normed) if silu else normed


def error(normed: Tensor, right: Tensor) -> float:
    """The largest, relative where results are beyond 1."""
    return float(((normed.double() - right).abs() / right.abs().clamp(min=1)).max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "pixels", "channels", "groups"),
    [
        (2, 4096, 320, 32),  # Stable Diffusion's
        (2, 1024, 1920, 32),
        (2, 256, 1280, 32),
        (2, 64, 2560, 32),
        (2, 128 * 128, 320, 32),  # SDXL's
        (2, 128 * 128, 960, 32),  # more than shared memory holds
        (1, 1, 8, 1),
        (3, 7, 40, 5),
        (5, 4097, 80, 1),
        (1, 3001, 64, 64),  # a group of each channel
        (1, 1000, 408, 8),  # whole groups of 51 and whole vectors are all channels
        (2, 33, 4096, 1),
        (1, 500, 4096, 512),
        (70, 16, 128, 32),  # more images than multiprocessors have room for at once
        (1, 1 << 18, 8, 2),
    ],
)
@pytest.mark.parametrize("silu", [False, True])
def test_norms(batch, pixels, channels, groups, silu, dtype):
    x, shift, weight, bias = draw(batch, pixels, channels, dtype)
    for given in (shift, None):
        normed = torch.full_like(x, torch.nan)
        assert run(params(x, given, weight, bias, normed, groups, silu=silu)) == (0, "")
        assert error(normed, expected(x, given, weight, bias, groups, silu)) <= ROUNDED[dtype]


@pytest.mark.parametrize("pixels", [64, 4096])
def test_images_far_from_zero(pixels):
    """With a mean of a hundred times the deviation, a sum of squares would cancel."""
    x, shift, weight, bias = draw(1, pixels, 320, torch.float16, offset=300.0)
    x[:, 1:, 5] -= 600  # the first pixel is not like the others either
    normed = torch.full_like(x, torch.nan)
    assert run(params(x, shift, weight, bias, normed, 32))[0] == 0
    assert error(normed, expected(x, shift, weight, bias, 32)) <= ROUNDED[torch.float16]


def test_images_without_variance():
    x = torch.full((2, 4096, 64), 2.0, dtype=torch.float16, device="cuda")
    weight, bias = torch.ones_like(x[0, 0]), torch.full_like(x[0, 0], 0.5)
    normed = torch.full_like(x, torch.nan)
    assert run(params(x, None, weight, bias, normed, 8))[0] == 0
    assert torch.equal(normed, bias.expand_as(x))


@pytest.mark.parametrize("channels", [320, 960])
def test_in_place_and_beyond_the_images(channels):
    x, shift, weight, bias = draw(3, 128 * 128, channels, torch.float16)
    right = expected(x[:2], shift[:2], weight, bias, 32, silu=True)
    rest = x[2].clone()
    assert run(params(x, shift, weight, bias, x, 32, batch=2, silu=1))[0] == 0
    assert error(x[:2], right) <= ROUNDED[torch.float16] and torch.equal(x[2], rest)


def test_results_are_the_same_every_time():
    x, shift, weight, bias = draw(2, 4096, 640, torch.float16)
    first, again = torch.empty_like(x), torch.empty_like(x)
    assert run(params(x, shift, weight, bias, first, 32))[0] == 0
    for _ in range(20):
        assert run(params(x, shift, weight, bias, again, 32))[0] == 0
        assert torch.equal(again, first)


def test_between_convolutions_in_a_graph():
    conv = torch.nn.Conv2d(320, 320, 3, padding=1, device="cuda", dtype=torch.float16).to(
        memory_format=torch.channels_last
    )
    x, shift, weight, bias = draw(2, 64 * 64, 320, torch.float16)
    start = x.view(2, 64, 64, 320).permute(0, 3, 1, 2)  # channels last in memory
    normed = torch.full_like(start, torch.nan)
    stream = torch.cuda.Stream()

    def once(image: Tensor) -> Tensor:
        given = params(x, shift, weight, bias, x, 32, silu=1, x=image.data_ptr(), normed=normed.data_ptr())
        assert run(given)[0] == 0
        return conv(normed)

    with torch.no_grad(), torch.cuda.stream(stream):
        once(start)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            image = start
            for _ in range(3):
                image = once(image)
    assert image.is_contiguous(memory_format=torch.channels_last)
    graph.replay()
    torch.cuda.synchronize()
    right = start
    with torch.no_grad():
        for _ in range(3):
            right = conv(F.silu(F.group_norm(right + shift[:, :, None, None], 32, weight, bias)))
    assert relative_error(image, right) <= 2e-3  # torch rounds between norm and SiLU


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"struct_size": 8}, "params: expected version 2 of"),
        ({"version": 1}, "got version 1"),
        ({"batch": 0}, "batch: expected 1..65535, got 0"),
        ({"batch": 65536}, "batch: expected 1..65535, got 65536"),
        ({"pixels": 0}, "pixels: expected 1..2^24, got 0"),
        ({"pixels": 2**24 + 1}, "pixels: expected 1..2^24, got 16777217"),
        ({"channels": 12}, "channels: expected 8..4096 in steps of 8, got 12"),
        ({"groups": 7}, "groups: expected a divisor of 64 channels, got 7"),
        ({"groups": 0}, "groups: expected a divisor of 64 channels, got 0"),
        ({"data_type": 2}, "data_type: expected 0 (float16) or 1 (bfloat16), got 2"),
        ({"silu": 2}, "silu: expected 0 or 1, got 2"),
        ({"epsilon": -1.0}, "epsilon: expected a finite value >= 0, got -1"),
        ({"weight": 0}, "weight: expected a device pointer, got null"),
        ({"shift": 8}, "shift: expected a pointer aligned to 16 bytes, got 0x8"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(changed, said):
    x, shift, weight, bias = draw(2, 16, 64, torch.float16)
    normed = torch.full_like(x, torch.nan)
    status, message = run(params(x, shift, weight, bias, normed, 8, **changed))
    assert status == INVALID_ARGUMENT and said in message
    assert normed.isnan().all()
