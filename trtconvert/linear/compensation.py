"""INT8 weights whose rounding errors cancel along the main directions of a layer's inputs.

The error δ of a row adds δ · x to an output. Inputs x have few main directions: outputs of SiLU and GELU have a mean far
from zero, and tokens of an image are alike. Along such directions errors of rounding to the nearest add up, in all tokens and in
all steps. Here a row is rounded column by column, and later columns make up for the errors of earlier ones, as in GPTQ (Frantar
et al. 2023, arXiv:2210.17323). Second moments of inputs have a factor model, K channels and R directions:

    E[xᵢ xⱼ] ≈ Σᵣ Dᵣᵢ Dᵣⱼ + [i = j] dᵢ

The expected squared error of an output is then ‖D δ‖² + Σ dᵢ δᵢ². With c = D δ of the rounded columns, the best real errors of
the other columns are −dᵢ⁻¹ Dᵢᵀ M c, where M = (1 + Σ dⱼ⁻¹ Dⱼ Dⱼᵀ)⁻¹ over these columns. So a row keeps R numbers, and no K × K
matrix is inverted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from trtconvert.linear.reference import LEVELS, channel_scale

DIRECTIONS = 32
"""Most directions of a factor model."""

_ROWS_EACH = 4
"""Observed rows for each direction: fewer rows do not tell a direction from noise."""

_MOST_ROWS = 256
"""Most rows that determine the directions."""

_ITERATIONS = 3
"""Of subspace iteration: the directions need not be the eigenvectors of a few equal second moments."""

_FLOOR = 0.01
"""Part of the mean second moment that is added to each channel's own: rows that were not observed may have other directions."""

_COLUMNS = 32
"""Columns that are rounded at once. The errors of the last columns stay, so that the last blocks are narrower."""


@dataclass(frozen=True)
class Moments:
    """A factor model of the second moments of inputs, up to one factor.

    Attributes:
        directions: [R, K] FP16, the largest first. remainder: [K] FP32, positive.
    """

    directions: Tensor
    remainder: Tensor

    @property
    def remainder_share(self) -> Tensor:
        """[K] FP32 share of each channel's second moment outside of the directions."""
        return self.remainder / (self.remainder + self.directions.float().square().sum(0))

    def of_first(self) -> Moments:
        """Returns a model of the first direction alone."""
        others = self.directions[1:].float().square().sum(0)
        return Moments(self.directions[:1], self.remainder + others)


@torch.no_grad()
def moments_of(rows: Tensor) -> Moments | None:
    """Returns the moments of observed inputs [n, K] FP32; None for too few of them, or for zeros."""
    squares = rows.square().mean(0)
    mean = squares.mean()
    rows = rows[:: -(-len(rows) // _MOST_ROWS)] if len(rows) > _MOST_ROWS else rows
    count = min(DIRECTIONS, len(rows) // _ROWS_EACH, rows.shape[1])
    if not count or not 0 < mean < math.inf:
        return None
    # An orthonormal basis of the main left singular vectors: a matrix of rows by rows is small.
    products = rows @ rows.T / (mean * len(rows))
    basis = products[:, :: len(rows) // count][:, :count]
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(products @ basis).Q
    directions = basis.T @ rows / (mean * len(rows)).sqrt()
    directions = directions.half()
    squares = squares / mean
    remainder = (squares - directions.float().square().sum(0)).clamp_min(0) + _FLOOR
    return Moments(directions, remainder)


@torch.no_grad()
def compensated_weight(weight: Tensor, x_factor: Tensor, moments: Moments) -> tuple[Tensor, Tensor]:
    """Returns a layer's INT8 weight and scales as `layer_weight` does, with compensated rounding errors.

    A weight that INT8 represents exactly keeps its numbers. Equal moments give equal numbers on all devices. At a convolution
    with a kernel, the taps have the first direction in common, which is mostly the mean. Neighbouring pixels are not alike
    enough in the others.

    Args:
        weight: [N, K, *kernel] FP32 of the layer. x_factor: [K].
        moments: of the layer's input.
    """
    taps = weight[0, 0].numel()
    scale = channel_scale(weight.flatten(1) / x_factor.repeat_interleave(taps))
    if taps > 1:
        moments = moments.of_first()
    # FP64: a column that another order of sums rounds otherwise would change all later columns of its row.
    factor = x_factor.double()[:, None].expand(-1, taps).flatten()
    directions = moments.directions.to(weight.device).double().repeat_interleave(taps, 1) * factor
    remainder = moments.remainder.to(weight.device).repeat_interleave(taps) * factor.square()
    rows = weight.double().flatten(1) / factor / scale[:, None]
    return _rounded(rows, directions, remainder).view(weight.shape), scale


def _rounded(rows: Tensor, directions: Tensor, remainder: Tensor) -> Tensor:
    """Returns INT8 rows [N, K'] of FP64 rows in units of their steps.

    Args:
        directions: [R, K'] FP64. remainder: [K'] FP64, positive.
    """
    # Columns of small second moments come last, where errors stay.
    order = (directions.square().sum(0) + remainder).argsort(descending=True, stable=True)
    rows, directions, remainder = rows[:, order], directions[:, order], remainder[order]
    blocks = list(pairwise(_starts(rows.shape[1])))
    gains = _gains(directions, remainder, blocks)
    rounded, carried = torch.empty_like(rows, dtype=torch.int8), rows.new_zeros(len(rows), len(directions))
    for (start, end), gain in zip(blocks, gains, strict=True):
        block = rows[:, start:end]
        found = torch.addmm(block, carried, gain[:, : end - start], alpha=-1).round_().clamp_(-LEVELS, LEVELS)
        carried.addmm_(found - block, directions[:, start:end].T)
        rounded[:, start:end] = found
    return torch.empty_like(rounded).index_copy_(1, order, rounded)


def _starts(columns: int) -> list[int]:
    """Returns the starts of the blocks, and their end."""
    starts = [0]
    while (left := columns - starts[-1]) > 0:
        starts.append(starts[-1] + min(_COLUMNS, max(1, left // 4)))
    return starts


def _gains(directions: Tensor, remainder: Tensor, blocks: list[tuple[int, int]]) -> Tensor:
    """[blocks, R, _COLUMNS] what a unit of each carried error moves the columns of a block by, negated; zeros beyond its end."""
    weighed = directions / remainder
    width = torch.arange(_COLUMNS, device=directions.device)
    starts, ends = torch.tensor(blocks, device=directions.device).T
    places = starts[:, None] + width
    inside = places < ends[:, None]
    places = places.clamp_max(directions.shape[1] - 1)
    own = directions[:, places].movedim(1, 0) * inside[:, None]  # [blocks, R, columns]
    theirs = weighed[:, places].movedim(1, 0) * inside[:, None]
    of_rest = (own @ theirs.mT).flip(0).cumsum(0).flip(0)
    of_rest += torch.eye(len(directions), dtype=torch.float64, device=directions.device)
    return torch.linalg.solve(of_rest, theirs)
