"""Weights of 4 and 8 bits for exact products with INT8 codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.linear.reference import TINY_SCALE

_SHARES = torch.linspace(1.0, 0.5, 26).tolist()
"""Of a channel's largest weight, for scales that are searched: with 4 bits the least error has some weights clipped."""


@dataclass(frozen=True)
class Grid:
    """The numbers that a weight may become: s · (w − z), low ≤ w ≤ high.

    Attributes:
        scale: [P, N] FP32, of each part of the inputs and output channel; zero: [P, N] FP32, whole numbers.
        low, high: of w. Codes are w − z, which INT8 holds.
    """

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    def spread(self, values: Tensor, weight: Tensor, widths: Sequence[int]) -> Tensor:
        """[P, N] values for each element of a weight [N, C, …], or [N, 1, …] where there is one part."""
        of_channels = values.T
        if len(widths) > 1:
            # Not repeat_interleave, which has to ask a GPU how long its result is.
            parts = zip(values, widths, strict=True)
            of_channels = torch.cat([part[:, None].expand(-1, width) for part, width in parts], 1)
        return of_channels.reshape(*of_channels.shape, *[1] * (weight.dim() - 2))

    def position(self, weight: Tensor, widths: Sequence[int]) -> Tensor:
        """Where weights [N, C, …] lie on the grid before they are rounded, as codes with fractions."""
        return weight.float() / self.spread(self.scale, weight, widths)

    def codes(self, position: Tensor, widths: Sequence[int]) -> Tensor:
        """INT8 codes of rounded positions, clipped to the grid."""
        zero = self.spread(self.zero, position, widths)
        return torch.clamp(position, self.low - zero, self.high - zero).to(torch.int8)

    def values(self, codes: Tensor, widths: Sequence[int]) -> Tensor:
        """FP32 weights of codes; of codes with fractions as well."""
        return codes.float() * self.spread(self.scale, codes, widths)


def search_grid(
    weight: Tensor, widths: Sequence[int], bits: int, *, symmetric: bool = True, by_channel: bool = True
) -> Grid:
    """The scales of least squared error; of 8 bits those that clip nothing, which are as close.

    Args:
        weight: [N, C, …], finite; widths: of the parts that C consists of, each with scales of its own.
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
    """INT8 codes [N, C, …] of a weight."""
    return grid.codes(grid.position(weight, widths).round(), widths)
