"""Rows as INT8 layers read them: `plugins/quantise` called from tests, and what it should give."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.c_structs import QUANTISE_VERSION, ModeTable, QuantiseParams
from trtconvert.library import load_library

WEIGHT_ONLY, DYNAMIC, STATIC = 1, 2, 3
"""Modes; the bit of each in a set of modes is 1 << mode."""
DATA_TYPES = {torch.float16: 0, torch.bfloat16: 1}
LEAST_SCALE = 2.0**-100


@dataclass
class Table:
    """Modes and scales of timestep bins, and the timesteps of a call. None as null."""

    mode_set: int
    timestep: Tensor | None = None
    modes: Tensor | None = None
    x_scale: Tensor | None = None
    timestep_max: float = 1000.0

    @property
    def batch(self) -> int:
        return 1 if self.timestep is None else len(self.timestep)

    def given(self) -> ModeTable:
        bins = next((len(table) for table in (self.modes, self.x_scale) if table is not None), 1)
        tensors = (address(tensor) for tensor in (self.timestep, self.modes, self.x_scale))
        return ModeTable(self.mode_set, bins, self.batch, self.timestep_max, *tensors)


def table(modes: list[int], timestep: list[float], scales: list[float] | None = None, mode_set: int = 0) -> Table:
    """On the GPU; the set is that of the modes unless it is given."""
    return Table(
        mode_set or sum({1 << mode for mode in modes}),
        torch.tensor(timestep, dtype=torch.float32, device="cuda"),
        torch.tensor(modes, dtype=torch.int32, device="cuda"),
        None if scales is None else torch.tensor(scales, dtype=torch.float32, device="cuda"),
    )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass
class Rows:
    """A payload's bytes, [M, K], or [M, 2 K] where it may hold 16-bit rows, and FP32 scales, [M]."""

    payload: Tensor
    scale: Tensor

    def int8(self, channels: int) -> Tensor:
        """[M, K]: such rows lie one behind the other from the buffer's start."""
        return self.payload.flatten()[: len(self.scale) * channels].view(torch.int8).view(-1, channels)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """[M, K] in 16 bits."""
        return self.payload.view(dtype)


def blank(rows: int, channels: int, mode_set: int) -> Rows:
    """Rows of -128, which is never written, and of NaN."""
    wide = 2 if mode_set & 1 << WEIGHT_ONLY else 1
    payload = torch.full((rows, wide * channels), 0x80, dtype=torch.uint8, device="cuda")
    return Rows(payload, torch.full((rows,), torch.nan, device="cuda"))


def params(
    x: Tensor, of: Table, out: Rows, factor: Tensor | None = None, offset: Tensor | None = None, /, **changed: object
) -> QuantiseParams:
    given = {
        "struct_size": ctypes.sizeof(QuantiseParams), "version": QUANTISE_VERSION, "rows": x.shape[0], "channels": x.shape[1],
        "data_type": DATA_TYPES[x.dtype], "table": of.given(), "x": x.data_ptr(), "factor": address(factor),
        "offset": address(offset), "payload": out.payload.data_ptr(), "row_scale": out.scale.data_ptr(),
        "stream": torch.cuda.current_stream().cuda_stream, "starts_early": 0,
    }  # fmt: skip
    return QuantiseParams(**given | changed)


def run(given: QuantiseParams) -> tuple[int, str]:
    message = ctypes.create_string_buffer(512)
    return load_library().trtconvert_quantise_run(ctypes.byref(given), message, 512), message.value.decode()


def quantised(x: Tensor, of: Table | None = None, factor: Tensor | None = None, offset: Tensor | None = None) -> Rows:
    """Rows in mode DYNAMIC unless a table is given."""
    of = of or Table(1 << DYNAMIC)
    out = blank(*x.shape, of.mode_set)
    assert run(params(x, of, out, factor, offset)) == (0, "")
    return out


def equalised(x: Tensor, factor: Tensor | None, offset: Tensor | None) -> Tensor:
    """FP32, as the kernel computes it."""
    moved = x.float() if offset is None else x.float() - offset
    return moved if factor is None else moved * factor


def dynamic_scale(xhat: Tensor) -> Tensor:
    """[M] of [M, K]."""
    return (xhat.abs().amax(1) / 127).clamp_min(LEAST_SCALE)


def are_steps_of(q: Tensor, xhat: Tensor, scale: Tensor) -> bool:
    """True if INT8 rows are rounded quotients. A few may be a step off, next to the middle of two integers."""
    expected = (xhat / scale[:, None]).round().clamp(-127, 127)
    off = (q.float() - expected).abs()
    return bool((off <= 1).all() and (off > 0).double().mean() < 1e-5)
