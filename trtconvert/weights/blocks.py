"""Symmetric INT8 of weights with a scale per block of 128 × 128, per output channel or per tensor, in torch: the specification.

    s = max |w| / 127            of the block, the channel or the tensor
    q = round(w / s)             −127 … 127
    ŵ = q · s

Scales follow the weights down to FP32's smallest number. A block of zeros has an arbitrary scale.

Blocks are those of DeepSeek-V3 (arXiv 2412.19437, section 3.3) and Jetfire (arXiv 2403.12422, section 4), with INT8 in place of
FP8. Scales of channels are those of INT8 layers in engines, `trtconvert.linear.reference.quantise_weight`, from 2⁻²⁰ on:
engines, whose scales are FP16, have no smaller ones. A weight of more than two dimensions is the matrix [N, all others]. Blocks
at the ends of a matrix are smaller.

All functions go through a matrix by tiles of whole blocks, which need little memory and stay in the cache.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from trtconvert.linear.reference import LEVELS, TINY_SCALE, short_scale

BLOCK = 128
"""Rows and columns of a block."""

Granularity = Literal["block", "channel", "tensor"]

OUTLIER = 4.0
"""Times the root mean square of its block, above which a number is an outlier: 0.006 % of normally distributed weights, 0.35 % of
Laplace's, and at most 1/16 of any block."""

OCTAVES = 16
"""Octaves of a histogram of magnitudes, from the largest number's down; smaller numbers count in the last."""

_TILE = 2**19  # elements
_WIDE = 2**13  # columns of a tile at most
_NORMS = (1e-12, 1e15)  # of a tile: FP32 holds squares and sums of values in this range
_LEAST_SHORT = 2.0**-20  # of `short_scale`
_LEAST_NORMAL, _LEAST = 2.0**-126, 2.0**-149  # of FP32
# FP32 holds 127 times this scale.
_MOST = float(np.nextafter(np.float32(torch.finfo(torch.float32).max / LEVELS), np.float32(0)))


@dataclass(frozen=True)
class Measured:
    """The result of one pass over a matrix [N, K].

    Attributes:
        blocks: [⌈N/128⌉, ⌈K/128⌉] FP32 largest magnitude; rows: [N] likewise.
        squares: of the blocks, FP64 sums; outliers: of the blocks, INT64 counts.
        histogram: elements by octaves of magnitude, the largest's first.
        nonfinite: how many are NaN or Inf. With any, the other figures mean nothing.
    """

    blocks: Tensor
    rows: Tensor
    squares: Tensor
    outliers: Tensor
    histogram: list[int]
    nonfinite: int

    @property
    def amax(self) -> float:
        return float(self.rows.amax()) if self.rows.numel() else 0.0


_threads = 1  # for tiles
_one_at_a_time = threading.Lock()  # torch has one number of threads for the process
_MOST_THREADS = 4  # each keeps some tens of megabytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 2**26


def _keep_memory() -> None:
    """Let malloc keep the memory of tiles. By default it returns megabytes to the system, which fills them with zeros page by
    page at the next use, and that took longer than the arithmetic."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the most that it takes
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@contextmanager
def threads_by_tile() -> Iterator[None]:
    """Run as many threads as torch has, up to four, each on tiles of its own. An operator on a tile takes a tenth of a
    millisecond: torch's own threads, which wait for each other after each operator, were six times as slow
    (`bench/weights.py`). One block runs at a time: others would take the number of threads in it for the program's."""
    global _threads
    _keep_memory()
    # A new thread has the program's number. This thread may have begun while another one was in such a block.
    with _one_at_a_time, ThreadPoolExecutor(1) as new:
        before = new.submit(torch.get_num_threads).result()
        torch.set_num_threads(1)
        _threads = min(before, _MOST_THREADS)
        try:
            yield
        finally:
            _threads = 1
            torch.set_num_threads(before)


def as_matrix(x: Tensor) -> Tensor:
    """[N, K] of a weight [N, …]; [1, K] of a vector."""
    return x.reshape(x.shape[0], -1) if x.dim() > 1 and x.shape[0] else x.reshape(1, -1)


def block_shape(rows: int, columns: int) -> tuple[int, int]:
    """Numbers of blocks of a matrix in each direction."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def measure(matrix: Tensor, *, histogram: bool = False) -> Measured:
    """
    Args:
        matrix: [N, K] of any floating-point type; histogram: count magnitudes too, which doubles the time.
    """
    grid = block_shape(*matrix.shape)
    blocks, squares = torch.zeros(grid), torch.zeros(grid, dtype=torch.float64)
    outliers, rows = torch.zeros(grid, dtype=torch.int64), torch.zeros(matrix.shape[0])
    nonfinite, octaves = 0, torch.zeros(256, dtype=torch.int64)
    for (height, width), found in _through(matrix, lambda tile, _: _measured(tile, histogram)):
        place = _blocks_of(height), _blocks_of(width)
        blocks[place] = found.peaks
        rows[height] = torch.maximum(rows[height], found.rows)
        nonfinite += found.nonfinite
        if not found.nonfinite:
            octaves += found.octaves
            outliers[place] = found.outliers
            squares[place] = found.squares
    return Measured(blocks, rows, squares, outliers, _from_largest(octaves), nonfinite)


@dataclass(frozen=True)
class _Tile:
    """`Measured` of a tile; with NaN or Inf only their number."""

    peaks: Tensor
    rows: Tensor
    nonfinite: int
    octaves: Tensor | int = 0
    outliers: Tensor | int = 0
    squares: Tensor | int = 0


def _measured(tile: Tensor, histogram: bool) -> _Tile:
    magnitude = _padded(tile).abs()  # [R, 128, C, 128]
    by_row = magnitude.amax(-1)
    peaks, rows = by_row.amax(1), by_row.amax(-1).flatten()[: tile.shape[0]]
    if not bool(peaks.isfinite().all()):
        return _Tile(peaks, rows, int((~tile.isfinite()).sum()))
    octaves = 0
    if histogram:
        octaves = torch.bincount(magnitude.view(torch.int32).bitwise_right_shift(23).flatten(), minlength=256)
        octaves[0] -= magnitude.numel() - tile.numel()  # the padding
    # Relative to the block's peak, so that squares neither overflow nor vanish.
    powers = magnitude.div_(peaks.masked_fill(peaks == 0, 1)[:, None, :, None]).square_()
    sums = powers.sum((1, 3))
    real = _padded(torch.ones(1, 1).expand(tile.shape)).sum((1, 3)) if tile.numel() < powers.numel() else BLOCK**2
    # FP32 holds a block's counts. Booleans, and sums over both dimensions at once, take far longer.
    beyond = powers.gt_((OUTLIER**2 * sums / real)[:, None, :, None])
    outliers = beyond.sum(-1).sum(1).long()
    return _Tile(peaks, rows, 0, octaves, outliers, sums.double() * peaks.double().square())


def _from_largest(octaves: Tensor) -> list[int]:
    """Counts by exponent as `OCTAVES` from the largest down."""
    used = octaves.nonzero().flatten()
    if not len(used):
        return [0] * OCTAVES
    counts = octaves[: int(used[-1]) + 1].flip(0).tolist()
    return [*(counts + [0] * OCTAVES)[: OCTAVES - 1], sum(counts[OCTAVES - 1 :])]


def scales(measured: Measured, granularity: Granularity) -> Tensor:
    """FP32 scales: [⌈N/128⌉, ⌈K/128⌉] of blocks, [N] of channels, [] of a tensor."""
    if granularity == "block":
        scale = _scale(measured.blocks)
    elif granularity == "channel":
        scale = _scale(measured.rows)
        scale = torch.where((scale < _LEAST_SHORT) & (measured.rows > 0), scale, short_scale(scale))
    else:
        scale = _scale(torch.tensor(measured.amax))
    return scale.clamp_max(_MOST)


def _scale(largest: Tensor) -> Tensor:
    """Scales for peaks.

    FP32's subnormal numbers lie far apart, and scales among them are rounded up: else a peak would have more than 127 steps.
    """
    scale = largest / LEVELS
    up = ((largest.double() / (LEVELS * _LEAST)).ceil() * _LEAST).float()
    return torch.where(scale < _LEAST_NORMAL, up, scale).masked_fill(largest == 0, TINY_SCALE)


def quantise(matrix: Tensor, scale: Tensor) -> tuple[Tensor, float]:
    """
    Args:
        matrix: [N, K], finite; scale: see `scales`.
    Returns:
        INT8 [N, K], and the relative error, see `relative_error`.
    """
    stored = torch.from_numpy(np.empty(matrix.shape, np.int8))  # in large pages; torch's own memory has small ones
    return stored, _go_through(matrix, scale, stored)


def relative_error(matrix: Tensor, scale: Tensor) -> float:
    """‖ŵ − w‖ / ‖w‖ of a matrix with scales; 0 for zeros."""
    return _go_through(matrix, scale, None)


def _go_through(matrix: Tensor, scale: Tensor, stored: Tensor | None) -> float:
    def rounded(tile: Tensor, place: tuple[slice, slice]) -> tuple[float, float]:
        """Squared norms of the errors and of the weights."""
        step = _of_tile(scale, *place)
        quantised = (_padded(tile) / step).round_() if scale.dim() == 2 else (tile / step).round_()
        quantised.clamp_(-LEVELS, LEVELS)
        if stored is not None:
            whole = quantised.to(torch.int8)
            stored[place] = _cut(whole, tile) if scale.dim() == 2 else whole
        quantised *= step
        restored = _cut(quantised, tile) if scale.dim() == 2 else quantised
        power = _squares(tile)
        return _squares(restored.sub_(tile)), power

    found = [of_tile for _, of_tile in _through(matrix, rounded)]
    errors, powers = (math.fsum(numbers) for numbers in zip(*found, strict=True)) if found else (0.0, 0.0)
    return math.sqrt(errors / powers) if powers else 0.0


def _squares(x: Tensor) -> float:
    """The sum of squares, in FP64 where FP32 does not hold them."""
    norm = float(torch.linalg.vector_norm(x))
    if not _NORMS[0] < norm < _NORMS[1]:
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return norm**2


def dequantise(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """ŵ in another type.

    Args:
        stored: INT8 or FP8, of two dimensions or more; scale: see `scales`.
    Returns:
        The shape of `stored`.
    """
    matrix = as_matrix(stored)
    restored = torch.empty(matrix.shape, dtype=dtype, device=stored.device)
    for height, width in _tiles(*matrix.shape):
        tile, step = matrix[height, width].float(), _of_tile(scale, height, width)
        restored[height, width] = (_cut(_padded(tile) * step, tile) if scale.dim() == 2 else tile * step).to(dtype)
    return restored.reshape(stored.shape)


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Whole blocks of rows and of columns that cover a matrix."""
    width = min(_WIDE, max(1, -(-columns // BLOCK)) * BLOCK)
    height = max(1, _TILE // width // BLOCK) * BLOCK
    for top in range(0, rows if columns else 0, height):
        for left in range(0, columns, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, columns))


_Found = TypeVar("_Found")


def _through(
    matrix: Tensor, work: Callable[[Tensor, tuple[slice, slice]], _Found]
) -> Iterator[tuple[tuple[slice, slice], _Found]]:
    """The result of `work` for each tile in FP32, in order, by the threads of `threads_by_tile`."""
    places = list(_tiles(*matrix.shape))

    def found(place: tuple[slice, slice]) -> _Found:
        return work(matrix[place].float(), place)

    if _threads == 1 or len(places) == 1:
        yield from zip(places, map(found, places), strict=True)
        return
    with ThreadPoolExecutor(min(_threads, len(places))) as pool:
        yield from zip(places, pool.map(found, places), strict=True)


def _blocks_of(size: slice) -> slice:
    """The blocks of a tile's rows or columns."""
    return slice(size.start // BLOCK, -(-size.stop // BLOCK))


def _padded(tile: Tensor) -> Tensor:
    """A tile as [R, 128, C, 128], with zeros at the ends."""
    rows, columns = (-size % BLOCK for size in tile.shape)
    if rows or columns:
        tile = torch.nn.functional.pad(tile, (0, columns, 0, rows))
    high, wide = block_shape(*tile.shape)
    return tile.reshape(high, BLOCK, wide, BLOCK)


def _cut(blocks: Tensor, tile: Tensor) -> Tensor:
    high, _, wide, _ = blocks.shape
    return blocks.reshape(high * BLOCK, wide * BLOCK)[: tile.shape[0], : tile.shape[1]]


def _of_tile(scale: Tensor, height: slice, width: slice) -> Tensor:
    """The scales of a tile, broadcastable to `_padded` for blocks, else to the tile."""
    if scale.dim() == 2:
        return scale[_blocks_of(height), _blocks_of(width)][:, None, :, None]
    return scale[height, None] if scale.dim() == 1 else scale
