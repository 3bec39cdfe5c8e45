"""Weights of 4 and 8 bits for exact products with INT8 codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.linear.reference import TINY_SCALE

_SHARES = torch.linspace(1.0, 0.5, 26).tolist()
"""Tried shares of a channel's largest weight: with 4 bits the least error clips some weights."""


@dataclass(frozen=True)
class Grid:
    """The values of a quantised weight: s · (w − z), low ≤ w ≤ high.

    Attributes:
        scale: [P, N] FP32, by part of the inputs and output channel. zero: [P, N] FP32 whole numbers.
        low, high: of w. Codes are w − z, in INT8.
    """

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    def spread(self, values: Tensor, weight: Tensor, widths: Sequence[int]) -> Tensor:
        """Expands [P, N] values to the elements of a weight [N, C, …], or to [N, 1, …] for one part."""
        of_channels = values.T
        if len(widths) > 1:
            # Not repeat_interleave, which waits for the GPU.
            parts = zip(values, widths, strict=True)
            of_channels = torch.cat([part[:, None].expand(-1, width) for part, width in parts], 1)
        return of_channels.reshape(*of_channels.shape, *[1] * (weight.dim() - 2))

    def position(self, weight: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns the unrounded codes of weights [N, C, …]."""
        return weight.float() / self.spread(self.scale, weight, widths)

    def codes(self, position: Tensor, widths: Sequence[int]) -> Tensor:
        """Clips rounded positions to the grid, and returns INT8 codes."""
        zero = self.spread(self.zero, position, widths)
        return torch.clamp(position, self.low - zero, self.high - zero).to(torch.int8)

    def values(self, codes: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns the FP32 weights of codes, which may have fractions."""
        return codes.float() * self.spread(self.scale, codes, widths)


def search_grid(
    weight: Tensor, widths: Sequence[int], bits: int, *, symmetric: bool = True, by_channel: bool = True
) -> Grid:
    """Finds the scales of least squared error. With 8 bits nothing is clipped.

    Args:
        weight: [N, C, …], finite. widths: channels of the parts of C, each with scales of its own.
    """
    half = 1 << (bits - 1)
    low, high = (1 - half, half - 1) if symmetric else (0, 2 * half - 1)
    scales, zeros = [], []
    for part in weight.float().split(list(widths), 1):
        rows = part.flatten(1) if by_channel else part.reshape(1, -1)
        bottom, top = rows.amin(1).clamp_max(0), rows.amax(1).clamp_min(0)
        best = torch.full_like(top, torch.inf)
        scale, zero = torch.ones_like(top), torch.zeros_like(top)
        for share in _SHARES if bits < 8 else [1.0]:
            if symmetric:
                tried = torch.maximum(top, -bottom) * share / high
                z = torch.zeros_like(tried)
            else:
                tried = (top - bottom) * share / high
                z = (-bottom * share / tried.clamp_min(TINY_SCALE)).round().clamp(low, high)
            tried = tried.clamp_min(TINY_SCALE)
            rounded = torch.clamp((rows / tried[:, None]).round(), (low - z)[:, None], (high - z)[:, None])
            error = (rounded * tried[:, None] - rows).square().sum(1)
            better = error < best
            best, scale, zero = (torch.where(better, *both) for both in ((error, best), (tried, scale), (z, zero)))
        scales.append(scale.expand(len(weight)))
        zeros.append(zero.expand(len(weight)))
    return Grid(torch.stack(scales), torch.stack(zeros), low, high)


def round_to_nearest(weight: Tensor, grid: Grid, widths: Sequence[int]) -> Tensor:
    """Returns the INT8 codes [N, C, …] of a weight, rounded to the nearest."""
    return grid.codes(grid.position(weight, widths).round(), widths)
