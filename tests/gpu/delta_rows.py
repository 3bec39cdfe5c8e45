"""Deltas of rows as INT8 layers read them: `plugins/quantise/change.cu` called from tests, and what it should give."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import int8_rows
import torch
from int8_rows import DATA_TYPES, STATIC, Rows, address
from torch import Tensor

from trtconvert.c_structs import QUANTISE_CHANGE_VERSION, QuantiseChangeParams
from trtconvert.library import load_library
from trtconvert.linear.deltas import quantise_delta


@dataclass
class Deltas:
    """INT8 rows with their scales, and the cache from now on, [M, K]."""

    rows: Rows
    a_next: Tensor

    @property
    def q(self) -> Tensor:
        """[M, K]."""
        return self.rows.int8(self.a_next.shape[1])


def blank(x: Tensor) -> Deltas:
    """Rows of -128, which is never written, and of NaN."""
    return Deltas(int8_rows.blank(*x.shape, 1 << STATIC), torch.full_like(x, torch.nan))


def params(
    x: Tensor, a_hat: Tensor, scales: Tensor, out: Deltas, factor: Tensor | None = None, /, **changed: object
) -> QuantiseChangeParams:
    """The reference for scales [batch, places]."""
    given = {
        "struct_size": ctypes.sizeof(QuantiseChangeParams), "version": QUANTISE_CHANGE_VERSION,
        "rows": x.shape[0], "channels": x.shape[1],
        "data_type": DATA_TYPES[x.dtype], "batch": scales.shape[0], "places": scales.shape[1], "x": x.data_ptr(),
        "factor": address(factor), "a_hat": a_hat.data_ptr(), "scales": scales.data_ptr(),
        "payload": out.rows.payload.data_ptr(), "row_scale": out.rows.scale.data_ptr(), "a_next": out.a_next.data_ptr(),
        "stream": torch.cuda.current_stream().cuda_stream,
    }  # fmt: skip
    return QuantiseChangeParams(**given | changed)


def run(given: QuantiseChangeParams | None) -> tuple[int, str]:
    message = ctypes.create_string_buffer(512)
    status = load_library().trtconvert_quantise_change_run(given and ctypes.byref(given), message, 512)
    return status, message.value.decode()


def quantised(x: Tensor, a_hat: Tensor, scales: Tensor, factor: Tensor | None = None, /, **changed: object) -> Deltas:
    """By scales [batch, places], or [batch] of the only place."""
    table = scales.view(len(scales), -1)
    out = blank(x)
    assert run(params(x, a_hat, table, out, factor, **changed)) == (0, "")
    return out


def specified(x: Tensor, a_hat: Tensor, scales: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """q and the new cache by signed scales [batch]. The specification has FP32, which is rounded once."""
    of_channels = torch.ones((), device=x.device) if factor is None else factor
    known = a_hat.float().view(len(scales), -1)
    q, a_next = quantise_delta(x, of_channels, known, scales.signbit(), scales.abs()[:, None])
    return q, a_next.view(x.shape).to(a_hat.dtype)
