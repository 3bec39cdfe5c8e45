"""INT8 products with a scale per group of channels, in Triton: `trtconvert.linear.groups` is the specification.

Import this module only with a GPU: Triton comes with torch for CUDA. Tiles are read through tensor descriptors (TMA on Hopper and
later), which give zeros beyond a matrix: sizes need not be multiples of the tiles.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.errors import OutOfResources, PTXASError
from triton.testing import do_bench
from triton.tools.tensor_descriptor import TensorDescriptor

from trtconvert.linear.groups import GROUP, group_count
from trtconvert.linear.reference import LEVELS, TINY_SCALE

_LEVELS, _TINY = tl.constexpr(float(LEVELS)), tl.constexpr(TINY_SCALE)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting this rounds FP32 to integers, ties to even."""

Kind = TypeVar("Kind")

_ALIGNED = 16  # bytes: alignment of rows for tensor descriptors


@dataclass(frozen=True)
class Tiles:
    """A tiling of a product.

    Attributes:
        rows: of a tile. strip: output channels, at most 128, which share a scale of the weight.
        strips: per tile, 1 or 2. With two, some warps multiply while others scale.
        warps, stages: of Triton.
    """

    rows: int
    strip: int
    strips: int
    warps: int
    stages: int


MANY_ROWS = (
    Tiles(128, 128, 2, 8, 4),
    Tiles(128, 128, 2, 8, 3),
    Tiles(256, 128, 1, 16, 4),
    Tiles(128, 128, 1, 8, 4),
    Tiles(128, 64, 2, 8, 4),
    Tiles(64, 128, 2, 4, 3),
    Tiles(64, 128, 1, 4, 4),
    Tiles(64, 128, 1, 4, 3),
)
FEW_ROWS = (
    Tiles(64, 64, 1, 4, 4),
    Tiles(32, 64, 1, 4, 4),
    Tiles(16, 64, 1, 4, 4),
    Tiles(16, 128, 1, 4, 4),
    Tiles(16, 32, 1, 4, 6),
)
MOST_FEW = 64
"""Small tiles are tried for at most this many rows."""
_UNMEASURED = Tiles(128, 128, 1, 8, 4), FEW_ROWS[0]
"""Tiles of many and of few rows without measurements."""

_BAND = 8  # tiles of rows that run together and share the L2 cache


@triton.jit
def _act_quant(x, q, step, rows, channels, x_row, q_row, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    inside = row < rows
    far = row.to(tl.int64)[:, None]
    v = tl.load(x + far * x_row + column[None, :], inside[:, None] & (column < channels)[None, :], 0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(v), 1), _LEVELS), _TINY)
    scale += tl.sum(v * 0.0, 1)  # NaN for NaN and Inf: a maximum ignores NaN
    whole = (tl.clamp(v * tl.div_rn(1.0, scale)[:, None], -_LEVELS, _LEVELS) + _ROUNDING) - _ROUNDING
    tl.store(q + far * q_row + column[None, :], whole.to(tl.int8), inside[:, None] & (column < q_row)[None, :])
    tl.store(step + group.to(tl.int64) * rows + row, scale, inside)


@triton.jit
def _int8_gemm(
    q, step, weight, scale, bias, y, rows, outputs, channels, step_row, step_group, scale_row,
    GROUP: tl.constexpr, BY_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STRIP: tl.constexpr, STRIPS: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    high, wide = tl.cdiv(rows, BLOCK), tl.cdiv(outputs, STRIP * STRIPS)
    tile = tl.program_id(0)
    first = tile // (BAND * wide) * BAND
    in_band = tile % (BAND * wide)
    size = min(high - first, BAND)
    top, left = (first + in_band % size) * BLOCK, in_band // size * STRIP * STRIPS
    row, column = top + tl.arange(0, BLOCK), left + tl.arange(0, STRIP)
    inside = row < rows
    step_at = step + row.to(tl.int64) * step_row
    last = (outputs - 1) // GROUP
    total = tl.zeros((BLOCK, STRIP), tl.float32)
    second = tl.zeros((BLOCK, STRIP), tl.float32)
    for g in range(tl.cdiv(channels, GROUP)):
        a = q.load([top, g * GROUP])
        b = weight.load([left, g * GROUP])
        c = b
        if STRIPS == 2:
            c = weight.load([left + STRIP, g * GROUP])
        of_rows = tl.load(step_at, inside, 0.0)
        step_at += step_group
        factor = of_rows
        if BY_BLOCK:
            factor = of_rows * tl.load(scale + left // GROUP * scale_row + g)
        total += tl.dot(a, b.T, out_dtype=tl.int32).to(tl.float32) * factor[:, None]
        if STRIPS == 2:
            if BY_BLOCK:
                factor = of_rows * tl.load(scale + min((left + STRIP) // GROUP, last) * scale_row + g)
            second += tl.dot(a, c.T, out_dtype=tl.int32).to(tl.float32) * factor[:, None]
    _finish(total, scale, bias, y, row, column, rows, outputs, BY_BLOCK)
    if STRIPS == 2:
        _finish(second, scale, bias, y, row, column + STRIP, rows, outputs, BY_BLOCK)


@triton.jit
def _finish(total, scale, bias, y, row, column, rows, outputs, BY_BLOCK: tl.constexpr):
    there = column < outputs
    if not BY_BLOCK:
        total *= tl.load(scale + column, there, 0.0)[None, :]
    if bias is not None:
        total += tl.load(bias + column, there, 0.0).to(tl.float32)[None, :]
    at = y + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, total.to(y.dtype.element_ty), (row < rows)[:, None] & there[None, :])


@triton.jit
def _weight_dequant(
    stored, scale, y, outputs, channels, scale_row,
    GROUP: tl.constexpr, BY_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    inside = row < outputs
    at = row.to(tl.int64)[:, None] * channels + column[None, :]
    there = inside[:, None] & (column < channels)[None, :]
    w = tl.load(stored + at, there, 0).to(tl.float32)
    step = tl.load(scale + (row // GROUP * scale_row + group if BY_BLOCK else row), inside, 0.0)
    tl.store(y + at, (w * step[:, None]).to(y.dtype.element_ty), there)


def _untyped(of_triton: Any) -> Any:
    """Returns a Triton kernel without its type, which lacks options of launches such as the number of warps."""
    return of_triton


def act_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """`groups.act_quant` on a GPU. Its INT8 rows begin at multiples of 16 bytes, and scales of a group lie beside each other."""
    rows, channels = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    pitch = channels + -channels % _ALIGNED
    q = torch.empty(rows, pitch, dtype=torch.int8, device=x.device)
    step = torch.empty(group_count(channels), rows, dtype=torch.float32, device=x.device)
    if step.numel():
        block = 32 if rows > MOST_FEW else 4
        grid = (triton.cdiv(rows, block), len(step))
        _untyped(_act_quant)[grid](
            x, q, step, rows, channels, x.stride(0), pitch, GROUP=GROUP, BLOCK=block, num_warps=4
        )
    return q[:, :channels], step.T


def weight_dequant(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`trtconvert.weights.blocks.dequantise` of a matrix on a GPU, with scales of blocks or of channels."""
    outputs, channels = stored.shape
    stored, scale = stored.contiguous(), scale.contiguous()
    y = torch.empty(outputs, channels, dtype=dtype, device=stored.device)
    if y.numel():
        grid = (triton.cdiv(outputs, 32), group_count(channels))
        by_block = scale.dim() == 2
        _untyped(_weight_dequant)[grid](
            stored, scale, y, outputs, channels, scale.shape[-1], GROUP=GROUP, BY_BLOCK=by_block, BLOCK=32, num_warps=4
        )
    return y


def int8_gemm(
    q: Tensor,
    step: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """`groups.int8_gemm` on a GPU.

    Args:
        tiles: by default the fastest ones, measured at the first call of a size. While a CUDA graph is recorded nothing is
            measured.
    """
    rows, outputs, channels = len(q), *weight.shape
    y = torch.empty(rows, outputs, dtype=dtype, device=q.device)
    if not y.numel():
        return y
    q, weight, scale = _aligned(q), _aligned(weight), scale.contiguous()

    def launch(tiles: Tiles, warmup: bool = False) -> None:
        grid = (triton.cdiv(rows, tiles.rows) * triton.cdiv(outputs, tiles.strip * tiles.strips),)
        _untyped(_int8_gemm).run(
            TensorDescriptor(q, [rows, channels], list(q.stride()), [tiles.rows, GROUP]),
            step,
            TensorDescriptor(weight, [outputs, channels], list(weight.stride()), [tiles.strip, GROUP]),
            scale, bias, y, rows, outputs, channels, *step.stride(), scale.shape[-1],
            GROUP=GROUP, BY_BLOCK=scale.dim() == 2, BLOCK=tiles.rows, STRIP=tiles.strip, STRIPS=tiles.strips,
            BAND=_BAND, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True, grid=grid, warmup=warmup,
        )  # fmt: skip

    if tiles is None:
        key = (size_class(rows), outputs, channels, dtype, scale.dim(), q.device)
        if key not in _fastest and not torch.cuda.is_current_stream_capturing():
            tried = MANY_ROWS if rows > MOST_FEW else FEW_ROWS
            _fastest[key] = fastest(tried, lambda one: launch(one, warmup=True), launch)
        tiles = _fastest.get(key, _UNMEASURED[rows <= MOST_FEW])
    launch(tiles)
    return y


_fastest: dict[tuple, Tiles] = {}


def size_class(rows: int) -> int:
    """Returns the class of rows that share a measurement: the next power of two, at most 8,192."""
    return min(1 << (rows - 1).bit_length(), 8192)


def fastest(tried: Sequence[Kind], compiled: Callable[[Kind], object], launch: Callable[[Kind], object]) -> Kind:
    """Returns the tiles with the fastest launch.

    Args:
        compiled: compiles the kernel of tiles (a launch with warmup=True). launch: runs it.
    """
    # Triton releases the GIL while it compiles. Errors occur again in the measurement.
    threads = ThreadPoolExecutor(min(len(tried), os.cpu_count() or 1))
    with threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for one in tried:
            compiled(one)
    return min(tried, key=lambda one: milliseconds(lambda: launch(one)))


def milliseconds(call: Callable[[], object]) -> float:
    """Returns the median time of a call, infinite if its tiles do not fit the GPU."""
    try:
        return statistics.median(_untyped(do_bench)(call, warmup=2, rep=10, return_mode="all"))
    except (OutOfResources, PTXASError, CompileTimeAssertionFailure):
        return math.inf


def _aligned(x: Tensor) -> Tensor:
    """Returns the matrix, or a view of a copy, with aligned rows for descriptors."""
    if x.stride(-1) == 1 and x.stride(0) % _ALIGNED == 0 and x.data_ptr() % _ALIGNED == 0:
        return x
    return F.pad(x, (0, -x.shape[1] % _ALIGNED))[:, : x.shape[1]]
