"""Modulated layers on a GPU in Triton: `trtconvert.modiff.reference` is the specification.

Import this module only with a GPU: Triton comes with torch for CUDA. One kernel reads the input and â, and writes â and codes. A
second kernel reads codes and ô, and writes ô; convolutions gather patches inside.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trtconvert.linear.triton_kernels import fastest
from trtconvert.modiff.reference import COLUMNS, HIGH, LOW, PRODUCT, RESET, SCALE, ZERO, Geometry, Weight
from trtconvert.modiff.tiles import TILES, Choices, Tiles, candidates

__all__ = ["TILES", "Tiles", "add_product", "delta_bounds", "quantise_delta"]

_SCALE, _LOW, _HIGH, _ZERO = tl.constexpr(SCALE), tl.constexpr(LOW), tl.constexpr(HIGH), tl.constexpr(ZERO)
_RESET, _PRODUCT, _COLUMNS = tl.constexpr(RESET), tl.constexpr(PRODUCT), tl.constexpr(COLUMNS)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting this rounds FP32 to integers, ties to even."""
_BEYOND = tl.constexpr(1024.0)
"""Steps beyond this are clipped for any zero point."""

_ELEMENTS, _WIDEST = 4096, 256  # elements and columns of a tile
_INT32 = 2**31


_UNMEASURED = Tiles(128, 128, 64, 8, 3)
_BAND = 8  # tiles of rows that run together and share the L2 cache


# Triton specialises kernels for integers that are 1 or multiples of 16. Numbers that only bound loops and masks are excluded.
_ANY = ("count", "per_group", "groups")
_ANY_IMAGE = (
    "pixels",
    "height",
    "width",
    "out_height",
    "out_width",
    "per_group",
    "groups",
    "sy",
    "sx",
    "py",
    "px",
    "dy",
    "dx",
)


@triton.jit(do_not_specialize=_ANY)
def _quantise_delta(
    x, a_hat, rows, q, count, channels, per_group, groups, first_width,
    CACHED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = row < count
    there = inside[:, None] & (column < channels)[None, :]
    at = row.to(tl.int64)[:, None] * channels + column[None, :]
    quantiser = rows + (row // per_group) * _COLUMNS
    scale = tl.load(quantiser + _SCALE, inside, 1.0)[:, None]
    low = tl.load(quantiser + _LOW, inside, 0.0)[:, None]
    high = tl.load(quantiser + _HIGH, inside, 0.0)[:, None]
    zero = tl.load(quantiser + _ZERO, inside, 0.0)[:, None]
    reset = tl.load(quantiser + _RESET, inside, 1.0)
    inverse = tl.div_rn(1.0, scale)
    if PARTS == 2:
        second = quantiser + groups * _COLUMNS
        other = tl.load(second + _SCALE, inside, 1.0)[:, None]
        is_first = (column < first_width)[None, :]
        inverse = tl.where(is_first, inverse, tl.div_rn(1.0, other))
        scale = tl.where(is_first, scale, other)
        low = tl.where(is_first, low, tl.load(second + _LOW, inside, 0.0)[:, None])
        high = tl.where(is_first, high, tl.load(second + _HIGH, inside, 0.0)[:, None])
        zero = tl.where(is_first, zero, tl.load(second + _ZERO, inside, 0.0)[:, None])
    delta = tl.load(x + at, there, 0.0).to(tl.float32)
    before = tl.zeros_like(delta)
    if CACHED:
        before = tl.load(a_hat + at, there & (reset == 0.0)[:, None], 0.0).to(tl.float32)
        delta -= before
    known = tl.where(delta == delta, delta, 0.0)
    steps = tl.clamp(known * inverse, -_BEYOND, _BEYOND)
    code = tl.clamp(((steps + _ROUNDING) - _ROUNDING) + zero, low, high)
    tl.store(q + at, code.to(tl.int8), there)
    spoilt = delta * 0.0  # NaN for NaN and Inf
    if CACHED:
        tl.store(a_hat + at, (before + (code - zero) * scale + spoilt).to(a_hat.dtype.element_ty), there)
    bad = tl.sum(tl.where(there, spoilt, 0.0), 1)
    is_bad = inside & (bad != bad)
    tl.store(quantiser + _PRODUCT, bad, is_bad)
    if PARTS == 2:
        tl.store(quantiser + groups * _COLUMNS + _PRODUCT, bad, is_bad)


@triton.jit(do_not_specialize=_ANY)
def _bounds(
    x, a_hat, rows, bounds, count, channels, per_group, groups, first_width,
    CACHED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    start, end = 0, channels
    if PARTS == 2:
        start = tl.where(part == 0, 0, first_width)
        end = tl.where(part == 0, first_width, channels)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    group = row // per_group
    reset = tl.load(rows + group * _COLUMNS + _RESET, inside, 1.0)
    least = tl.zeros((ROWS,), tl.float32)
    most = tl.zeros((ROWS,), tl.float32)
    for left in range(start, end, WIDTH):
        column = left + tl.arange(0, WIDTH)
        there = inside[:, None] & (column < end)[None, :]
        at = row.to(tl.int64)[:, None] * channels + column[None, :]
        delta = tl.load(x + at, there, 0.0).to(tl.float32)
        if CACHED:
            delta -= tl.load(a_hat + at, there & (reset == 0.0)[:, None], 0.0).to(tl.float32)
        delta = tl.where(delta == delta, delta, 0.0)
        least = tl.minimum(least, tl.min(delta, 1))
        most = tl.maximum(most, tl.max(delta, 1))
    low = bounds + part * groups
    high = low + PARTS * groups
    if TOGETHER:  # all rows of the tile are in one group
        group = tl.program_id(0) * ROWS // per_group
        tl.atomic_min(low + group, tl.min(least, 0))
        tl.atomic_max(high + group, tl.max(most, 0))
    else:
        tl.atomic_min(low + group, least, inside)
        tl.atomic_max(high + group, most, inside)


@triton.jit(do_not_specialize=_ANY_IMAGE)
def _add_product(
    q, rows, weight, weight_scale, sums, bias, o_hat, y, pixels, outputs, height, width, channels, out_height, out_width,
    per_group, groups, first_width, sy, sx, py, px, dy, dx,
    KH: tl.constexpr, KW: tl.constexpr, PARTS: tl.constexpr, SHIFTED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, STRIP: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    tall, strips = tl.cdiv(pixels, BLOCK), tl.cdiv(outputs, STRIP)
    tile = tl.program_id(0)
    band = tile // (BAND * strips) * BAND
    in_band = tile % (BAND * strips)
    size = min(tall - band, BAND)
    row = (band + in_band % size) * BLOCK + tl.arange(0, BLOCK)
    output = in_band // size * STRIP + tl.arange(0, STRIP)
    inside, there = row < pixels, output < outputs
    image = row // (out_height * out_width)
    point = row % (out_height * out_width)
    top = point // out_width * sy - py
    left = point % out_width * sx - px
    corner = (image * height + top) * width + left
    if WIDE:
        corner = corner.to(tl.int64)
    quantiser = rows + (row // per_group) * _COLUMNS
    of_output = weight + output[None, :] * (KH * KW * channels)
    total = tl.zeros((BLOCK, STRIP), tl.float32)
    for part in tl.static_range(PARTS):  # type: ignore[attr-defined]
        start, end = 0, channels
        if PARTS == 2:
            if part == 0:
                end = first_width
            else:
                start = first_width
        of_part = quantiser + part * groups * _COLUMNS
        zero = tl.zeros((BLOCK,), tl.int32)
        if SHIFTED:
            zero = tl.load(of_part + _ZERO, inside, 0.0).to(tl.int32)
        deep = tl.cdiv(end - start, DEPTH)
        products = tl.zeros((BLOCK, STRIP), tl.int32)
        for k in range(KH * KW * deep):
            tap = k // deep
            channel = start + k % deep * DEPTH + tl.arange(0, DEPTH)
            down, right = tap // KW * dy, tap % KW * dx
            at_y, at_x = top + down, left + right
            within = inside & (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
            real = channel < end
            a = tl.load(
                q + (corner + (down * width + right))[:, None] * channels + channel[None, :],
                within[:, None] & real[None, :],
                0,
            )
            if SHIFTED:  # padding has the code of zero
                a = tl.where(within[:, None], a, zero.to(tl.int8)[:, None])
            b = tl.load(of_output + tap * channels + channel[:, None], real[:, None] & there[None, :], 0)
            products = tl.dot(a, b, products, out_dtype=tl.int32)
        if SHIFTED:
            products -= zero[:, None] * tl.load(sums + part * outputs + output, there, 0)[None, :]
        step = tl.load(of_part + _PRODUCT, inside, 0.0)
        of_weight = tl.load(weight_scale + part * outputs + output, there, 0.0)
        total += products.to(tl.float32) * (step[:, None] * of_weight[None, :])
    stored = inside[:, None] & there[None, :]
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    before = tl.zeros((BLOCK, STRIP), tl.float32)
    if bias is not None:
        before += tl.load(bias + output, there, 0.0).to(tl.float32)[None, :]
    if o_hat is not None:
        reset = tl.load(quantiser + _RESET, inside, 1.0)[:, None] != 0.0
        before = tl.where(reset, before, tl.load(o_hat + at, stored & (reset == 0), 0.0).to(tl.float32))
    total += before
    if o_hat is not None:
        tl.store(o_hat + at, total.to(o_hat.dtype.element_ty), stored)
    if y is not None:
        tl.store(y + at, total.to(y.dtype.element_ty), stored)


def _untyped(of_triton: Any) -> Any:
    """Drops Triton's incomplete types: launches take more arguments, such as numbers of warps."""
    return of_triton


def quantise_delta(x: Tensor, a_hat: Tensor | None, rows: Tensor, widths: Sequence[int]) -> Tensor:
    """Computes `reference.quantise_delta` in one pass, for one or two parts and contiguous `rows`."""
    count, channels = x.shape
    x = x.contiguous()
    q = torch.empty(count, channels, dtype=torch.int8, device=x.device)
    if q.numel():
        wide = min(_WIDEST, triton.next_power_of_2(channels))
        tall = _ELEMENTS // wide
        _untyped(_quantise_delta)[(triton.cdiv(count, tall), triton.cdiv(channels, wide))](
            x, a_hat, rows, q, count, channels, count // rows.shape[1], rows.shape[1], widths[0],
            CACHED=a_hat is not None, PARTS=len(widths), ROWS=tall, WIDTH=wide, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return q


def delta_bounds(x: Tensor, a_hat: Tensor | None, rows: Tensor, widths: Sequence[int]) -> Tensor:
    """Returns the least (≤ 0) and largest (≥ 0) a − â of each part and group, [2, P, G] FP32. Ignores NaN."""
    count, channels = x.shape
    x = x.contiguous()
    groups = rows.shape[1]
    bounds = torch.zeros(2, len(widths), groups, device=x.device)
    if x.numel():
        wide = min(_WIDEST, triton.next_power_of_2(channels))
        tall = _ELEMENTS // wide
        together = count // groups % tall == 0
        _untyped(_bounds)[(triton.cdiv(count, tall), len(widths))](
            x, a_hat, rows, bounds, count, channels, count // groups, groups, widths[0],
            CACHED=a_hat is not None, PARTS=len(widths), ROWS=tall, WIDTH=wide, TOGETHER=together, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return bounds


def add_product(
    codes: Tensor, rows: Tensor, widths: Sequence[int], weight: Weight, o_hat: Tensor | None, y: Tensor | None,
    geometry: Geometry, shifted: bool, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """Computes `reference.add_product` for one or two parts and contiguous tensors.

    Args:
        tiles: by default the fastest ones, measured at the first call of a size, but not while a CUDA graph is recorded.
    """
    batch, height, width, channels = codes.shape
    outputs = len(weight.codes)
    out_height, out_width = geometry.output(height, width)
    pixels = batch * out_height * out_width
    if not pixels:
        return

    def launch(tiles: Tiles, o_hat: Tensor | None, y: Tensor | None, warmup: bool = False) -> None:
        grid = (triton.cdiv(pixels, tiles.rows) * triton.cdiv(outputs, tiles.strip),)
        kh, kw = geometry.kernel
        _untyped(_add_product).run(
            codes, rows, weight.codes, weight.scale, weight.sums, weight.bias, o_hat, y, pixels, outputs, height, width,
            channels, out_height, out_width, pixels // rows.shape[1], rows.shape[1], widths[0],
            *geometry.stride, *geometry.padding, *geometry.dilation,
            KH=kh, KW=kw, PARTS=len(widths), SHIFTED=shifted, WIDE=codes.numel() >= _INT32,
            BLOCK=tiles.rows, STRIP=tiles.strip, DEPTH=tiles.depth, BAND=_BAND,
            num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True, grid=grid, warmup=warmup,
        )  # fmt: skip

    if tiles is None:
        stored = tuple(x.dtype for x in (o_hat, y) if x is not None)
        key = (pixels, outputs, tuple(widths), geometry, shifted, stored, codes.device)
        tiles = _fastest.get(key)
        if tiles is None and torch.cuda.is_current_stream_capturing():
            tiles = _UNMEASURED
        elif tiles is None:
            # Sizes up to the next power of two share a choice.
            size = f"{1 << (pixels - 1).bit_length()} {outputs} {[*widths]} {geometry} {shifted} {stored}"
            choices = _choices(codes.device)
            tiles = choices.get(size)
            if tiles is None:
                processors = torch.cuda.get_device_properties(codes.device).multi_processor_count
                tried = candidates(pixels, outputs, widths, processors)
                own = [
                    None if x is None else torch.empty_like(x) for x in (o_hat, y)
                ]  # the product would change caches
                tiles = fastest(
                    tried, lambda one: launch(one, o_hat, y, warmup=True), lambda one: launch(one, own[0], own[1])
                )
                choices.add(size, tiles)
            _fastest[key] = tiles
    launch(tiles, o_hat, y)


_fastest: dict[tuple, Tiles] = {}


@functools.cache
def _choices(device: torch.device) -> Choices:
    return Choices(torch.cuda.get_device_name(device), triton.__version__, _untyped(_add_product).cache_key)
