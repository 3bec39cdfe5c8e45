"""Sums of images with their channels last on a GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from trtconvert.c_structs import CHANNELS_LAST_ADD_VERSION, ChannelsLastAddParams
from trtconvert.library import load_library

pytestmark = pytest.mark.gpu

INVALID_ARGUMENT = 1


def run(x: Tensor, y: Tensor, total: Tensor, /, **changed: int) -> tuple[int, str]:
    given = {
        "struct_size": ctypes.sizeof(ChannelsLastAddParams), "version": CHANNELS_LAST_ADD_VERSION,
        "pixels": x.shape[0], "channels": x.shape[1],
        "data_type": {torch.float16: 0, torch.bfloat16: 1}[x.dtype], "x": x.data_ptr(), "y": y.data_ptr(),
        "sum": total.data_ptr(), "stream": torch.cuda.current_stream().cuda_stream,
    }  # fmt: skip
    message = ctypes.create_string_buffer(512)
    status = load_library().trtconvert_channels_last_add_run(
        ctypes.byref(ChannelsLastAddParams(**given | changed)), message, 512
    )
    return status, message.value.decode()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("pixels", "channels"), [(1, 8), (3, 40), (8192, 320), (513, 1288), (2 * 128 * 128, 640)])
def test_sums(pixels, channels, dtype):
    x, y = (torch.randn(pixels + 1, channels, device="cuda").to(dtype) for _ in range(2))
    total = torch.full_like(x, torch.nan)
    assert run(x, y, total, pixels=pixels) == (0, "")
    assert torch.equal(total[:-1], (x + y)[:-1]) and total[-1].isnan().all()


def test_in_place():
    x, y = (torch.randn(1000, 320, device="cuda").half() for _ in range(2))
    right = x + y
    assert run(x, y, y)[0] == 0 and torch.equal(y, right)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"version": 2}, "got version 2"),
        ({"pixels": 0}, "pixels: expected 1..2^31, got 0"),
        ({"channels": 12}, "channels: expected 8..65536 in steps of 8, got 12"),
        ({"data_type": 2}, "data_type: expected 0 (float16) or 1 (bfloat16), got 2"),
        ({"y": 0}, "y: expected a device pointer, got null"),
        ({"sum": 8}, "sum: expected a pointer aligned to 16 bytes, got 0x8"),
    ],
    ids=str,
)
def test_refusals_say_what_is_wrong(changed, said):
    x = torch.zeros(2, 64, dtype=torch.float16, device="cuda")
    status, message = run(x, x, x, **changed)
    assert status == INVALID_ARGUMENT and said in message
