"""Modulated layers in plain torch: the arithmetic that kernels follow.

    â ← â + Q(a − â)          ô ← ô + Ŵ · Q(a − â)          â = 0, ô = bias before a sample's first step

a is a layer's input in a step, â and ô are its caches. The error of Q in a step is part of the next step's a − â, so that errors
of activations do not accumulate. Source: MoDiff, equations 13 to 20. The first step has the same form: Q(a − 0), with bits of its
own.

    Q(r) = s · (c − z),   c = clip(round(r · (1 / s)) + z, low, high)           Ŵ = s_w · w

c and w are INT8 (fewer bits use a part of the range). Ŵ · Q(r) is an exact integer product times s · s_w. Concatenated inputs (a
U-Net's skip connection) are two parts with scales of their own, for activations and weights: Q-Diff (Li et al. 2023,
arXiv 2302.04304, section 3.3).

A quantiser is a row of numbers for each part and group of rows, with the columns below. Groups are samples, or single rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from trtconvert.linear.reference import TINY_SCALE
from trtconvert.mixed_types import without_autocast

SCALE, LOW, HIGH, ZERO, RESET, PRODUCT = range(6)
"""Columns of a quantiser: s; the least and the largest c; z; reset (1 or 0); and s again, which becomes NaN if `quantise_delta`
meets NaN or Inf in the rows, so that their products are NaN."""
COLUMNS = 6

_EXACT = 2**24
"""FP32 holds integers up to this exactly."""


@dataclass(frozen=True)
class Geometry:
    """The geometry of a convolution without groups."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width of the result."""
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        h, w = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return h, w


class Weight(NamedTuple):
    """A weight for exact products.

    Attributes:
        codes: [N, KH, KW, C] INT8; a linear layer's has a kernel of 1 × 1.
        scale: [P, N] FP32. sums: [P, N] INT32 sums of the codes of each part, which kernels subtract z times.
        bias: [N] FP32, or None.
    """

    codes: Tensor
    scale: Tensor
    sums: Tensor
    bias: Tensor | None


def code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    """Returns the least and the largest code."""
    half = 1 << (bits - 1)
    return (1 - half if symmetric else -half), half - 1


def quantiser(low: Tensor, high: Tensor, bits: int, symmetric: bool, reset: bool) -> Tensor:
    """Returns quantisers whose codes reach from `low` to `high`, symmetric ones to the larger magnitude on both sides.

    Args:
        low, high: […] FP32, finite; low ≤ 0 ≤ high.
    Returns:
        […, 6] FP32. Zero is always a code.
    """
    least, most, begin = (torch.full_like(low, float(value)) for value in (*code_range(bits, symmetric), reset))
    return _reaching(low, high, least, most, begin, symmetric)


def _reaching(low: Tensor, high: Tensor, least: Tensor, most: Tensor, reset: Tensor, symmetric: bool) -> Tensor:
    """Returns quantisers [..., 6] whose codes `least` to `most` reach from `low` to `high`."""
    if symmetric:
        scale, zero = torch.maximum(high, -low) / most, torch.zeros_like(low)
    else:
        scale = (high - low) / (most - least)
        zero = torch.clamp((least - low / scale.clamp_min(TINY_SCALE)).round(), least, most)
    scale = scale.clamp_min(TINY_SCALE)
    return torch.stack([scale, least, most, zero, reset, scale], -1)


def measured(
    x: Tensor, a_hat: Tensor | None, rows: Tensor, widths: Sequence[int], together: bool, symmetric: bool
) -> Tensor:
    """Returns dynamic quantisers: their range is that of a − â.

    Args:
        x, a_hat, rows, widths: see `quantise_delta`. Of the rows, the range of codes and `RESET` are read.
        together: the groups that are reset share a scale, and so do the others.
    Returns:
        [P, G, 6] FP32.
    """
    delta = _delta(x, a_hat, rows)
    groups = rows.shape[1]
    bounds = []
    for part in delta.split(list(widths), 1):
        grouped = part.reshape(groups, -1)
        if grouped.shape[1]:
            bounds.append(torch.stack([grouped.amin(1).clamp_max(0), grouped.amax(1).clamp_min(0)]))
        else:
            bounds.append(torch.zeros(2, groups, device=x.device))
    return of_bounds(torch.stack(bounds, 1), rows, together, symmetric)


def of_bounds(bounds: Tensor, rows: Tensor, together: bool, symmetric: bool) -> Tensor:
    """Returns quantisers for deltas within `bounds` [2, P, G], with codes and `RESET` of `rows` [P, G, 6], see `measured`."""
    low, high = bounds.nan_to_num(0, 0, 0)
    reset = rows[..., RESET] > 0
    if together:
        for mask in (reset, ~reset):
            low = torch.where(mask, low.masked_fill(~mask, 0).amin(1, keepdim=True), low)
            high = torch.where(mask, high.masked_fill(~mask, 0).amax(1, keepdim=True), high)
    return _reaching(low, high, rows[..., LOW], rows[..., HIGH], rows[..., RESET], symmetric)


def quantise_delta(x: Tensor, a_hat: Tensor | None, rows: Tensor, widths: Sequence[int]) -> Tensor:
    """Returns the codes of a − â. Updates `a_hat` and the last column of `rows` in place.

    Args:
        x: [R, C] of any floating-point type; a_hat: [R, C] FP32 or FP16, or None: without modulation.
        rows: [P, G, 6] FP32 quantisers, each for R / G rows; widths: channels of each of the P parts.
    Returns:
        [R, C] INT8.
    """
    delta = _delta(x, a_hat, rows)
    scale, low, high, zero = (spread(rows[..., i], x.shape, widths) for i in (SCALE, LOW, HIGH, ZERO))
    codes = torch.clamp((delta.nan_to_num(0) * (1 / scale)).round() + zero, low, high)
    if a_hat is not None:
        before = torch.where(spread(rows[..., RESET], x.shape, widths) > 0, 0.0, a_hat.float())
        # NaN stays in the cache, see `Modulated.check_caches`.
        a_hat.copy_(before + (codes - zero) * scale + delta * 0.0)
    finite = delta.isfinite().view(rows.shape[1], x.numel() // rows.shape[1]).all(1)
    rows[..., PRODUCT].masked_fill_(~finite, torch.nan)
    return codes.to(torch.int8)


def _delta(x: Tensor, a_hat: Tensor | None, rows: Tensor) -> Tensor:
    if a_hat is None:
        return x.float()
    reset = rows[0, :, RESET].repeat_interleave(x.shape[0] // rows.shape[1])[:, None] > 0
    return x.float() - torch.where(reset, 0.0, a_hat.float())


def spread(values: Tensor, shape: torch.Size, widths: Sequence[int]) -> Tensor:
    """Expands [P, G] values to elements [R, C], or to [R, 1] for one part."""
    of_rows = values.repeat_interleave(shape[0] // values.shape[1], 1).T
    if len(widths) == 1:
        return of_rows
    return of_rows.repeat_interleave(torch.tensor(widths, device=values.device), 1)


def add_product(
    codes: Tensor, rows: Tensor, widths: Sequence[int], weight: Weight, o_hat: Tensor | None, y: Tensor | None,
    geometry: Geometry, shifted: bool,
) -> None:  # fmt: skip
    """Computes ô ← ô + Ŵ · Q in place, and ô ← bias + Ŵ · Q after a reset. y ← ô, or without a cache y ← bias + Ŵ · Q.

    Args:
        codes: [B, H, W, C] INT8; rows, widths: see `quantise_delta`; rows of pixels of the images.
        o_hat, y: [B, H', W', N] of a floating-point type, at least one of them.
        shifted: whether a quantiser may have z ≠ 0.
    """
    like = o_hat if o_hat is not None else y
    assert like is not None
    total = torch.zeros_like(like, dtype=torch.float32)
    if weight.bias is not None:
        total = total + weight.bias
    if o_hat is not None and o_hat.numel():
        total = torch.where(_by_pixels(rows[0, :, RESET], o_hat) > 0, total, o_hat.float())
    ends = torch.tensor(widths).cumsum(0).tolist()
    for part, (end, width) in enumerate(zip(ends, widths, strict=True)):
        channels = slice(end - width, end)
        products = _convolve(codes[..., channels], rows[part, :, ZERO], weight.codes[..., channels], geometry, shifted)
        total = total + products.float() * (_by_pixels(rows[part, :, PRODUCT], like) * weight.scale[part])
    for result in (o_hat, y):
        if result is not None:
            result.copy_(total)


def _by_pixels(values: Tensor, like: Tensor) -> Tensor:
    """Expands [G] values to pixels [B, H, W, 1]."""
    pixels = like.shape[0] * like.shape[1] * like.shape[2]
    return values.repeat_interleave(pixels // len(values)).view(*like.shape[:3], 1)


@without_autocast
def _convolve(codes: Tensor, zero: Tensor, weight: Tensor, geometry: Geometry, shifted: bool) -> Tensor:
    """The exact sums of w · (c − z), [B, H', W', N], in FP32 where it holds them all, else in FP64.

    On a GPU always in FP64: convolutions in FP32 may use Winograd's algorithm there, which leaves the integers.
    """
    most = (255 if shifted else 127) * 127
    fits = weight[0].numel() * most <= _EXACT and not codes.is_cuda
    dtype = torch.float32 if fits else torch.float64
    values = codes.to(dtype)
    if shifted:
        values = values - _by_pixels(zero.to(dtype), codes)
    if geometry == Geometry():
        return values @ weight[:, 0, 0].to(dtype).T
    x, w = values.permute(0, 3, 1, 2), weight.to(dtype).permute(0, 3, 1, 2)
    return F.conv2d(x, w, None, geometry.stride, geometry.padding, geometry.dilation).permute(0, 2, 3, 1)
