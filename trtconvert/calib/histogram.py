"""Histograms of magnitudes: elementwise percentiles and the range of least squared error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtconvert.attention.ranges import LEVELS
from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.sites import SiteCall

OCTAVES = range(-24, 17)
"""Range of the histograms, 2**-24 to 2**17; smaller and larger magnitudes count in the first and the last step."""

HEAD_BITS, CHANNEL_BITS = 6, 4
"""An octave has 2**bits equal steps: at most 1.6 % wide for heads, 6.3 % for values, which have many more channels."""

_MANTISSA_BITS, _EXPONENT_BIAS = 23, 127  # of FP32


class Histogram:
    """Counts of magnitudes per row on a grid with equal steps within an octave, which double from octave to octave.

    The step of a number is a shift of its bits, and the grid is the same for all data. Histograms therefore merge exactly, in
    any order, by adding their counts.

    Args:
        rows: number of histograms.
        bits: log2 of the steps per octave.
    """

    def __init__(self, rows: int, bits: int) -> None:
        self.bits = bits
        self.counts = torch.zeros(rows, len(OCTAVES) << bits, dtype=torch.int64)
        # INT32 halves the memory traffic where it can number all counts.
        self._index_type = torch.int32 if self.counts.numel() < 2**31 else torch.int64
        self._one = torch.ones(1, dtype=torch.int64)

    def add(self, x: Tensor, row: Tensor, offset: Tensor | None = None) -> None:
        """Counts |x|, or |x - offset|. The counts move to the device of x.

        Args:
            x: any shape.
            row: the row of each element, INT64, broadcastable to x.
            offset: FP32, broadcastable to x.
        """
        steps, first = self.counts.shape[1], self._first_step
        if self.counts.device != x.device:
            self.counts, self._one = self.counts.to(x.device), self._one.to(x.device)
        magnitude = x.float().abs() if offset is None else (x - offset).float().abs_()
        step = magnitude.view(torch.int32).bitwise_right_shift_(_MANTISSA_BITS - self.bits)
        index = step.clamp_(first, first + steps - 1).to(self._index_type)
        index += (row * steps - first).to(self._index_type)
        # The order does not matter: flattening in memory order avoids a copy, whatever the layout of x.
        index = index.permute(sorted(range(index.dim()), key=index.stride, reverse=True)).flatten()
        # bincount would synchronise with the device and allocate all counts in every call.
        self.counts.view(-1).index_add_(0, index, self._one.expand_as(index))

    @property
    def _first_step(self) -> int:
        return (_EXPONENT_BIAS + OCTAVES.start) << self.bits

    def edges(self) -> Tensor:
        """[steps + 1] FP64 limits of the steps; the first is 0, as everything smaller counts in the first step."""
        bits = torch.arange(self.counts.shape[1] + 1, dtype=torch.int32, device=self.counts.device) + self._first_step
        edges = (bits << (_MANTISSA_BITS - self.bits)).view(torch.float32).double()
        edges[0] = 0
        return edges

    def percentile(self, percent: float) -> Tensor:
        """[rows] FP32 magnitude that `percent` % of the elements do not exceed, interpolated in its step. 0 for an empty row."""
        wanted = self.counts.sum(1, keepdim=True) * (percent / 100)
        reached = self.counts.cumsum(1).double()
        step = (reached < wanted).sum(1, keepdim=True).clamp_max(self.counts.shape[1] - 1)
        count = self.counts.gather(1, step).double()
        part = 1 - (reached.gather(1, step) - wanted) / count.clamp_min(1)
        edges = self.edges()
        low, high = edges[step], edges[step + 1]
        return torch.where(count > 0, low + (high - low) * part, 0).squeeze(1).float()

    def least_error_range(self) -> Tensor:
        """[rows] FP32 range r of least squared error if magnitudes are rounded to multiples of r/127 and clipped at r.

        Magnitudes below half a step become 0; above r the error is the distance to r; in between, rounding errors are uniform:
        step²/12. All limits of the grid from 1/16 of the largest magnitude up are tried; the range is the best up to a step of
        the grid. 0 for an empty row.
        Source: the clipping and rounding terms of Banner et al. 2019 (arXiv 1810.05723, equation 5), over the observed
            magnitudes instead of a fitted distribution.
        """
        counts, edges = self.counts.double(), self.edges()
        centre = (edges[:-1] + edges[1:]) / 2
        # Sums of 1, x and x² over magnitudes up to each limit, so that the error of a range needs no further pass.
        up_to = [torch.nn.functional.pad((counts * centre**power).cumsum(1), (1, 0)) for power in range(3)]
        # The first limit that no magnitude exceeds, and the limits below it; [rows, candidates] from here on.
        last = (self.counts > 0).long().mul(torch.arange(1, len(edges), device=counts.device)).amax(1, keepdim=True)
        limit = (last - torch.arange(4 << self.bits, device=counts.device)).clamp_min(1)
        zero = torch.searchsorted(edges, edges / LEVELS / 2, right=True).sub(1).clamp_min(0)[limit]
        r = edges[limit]
        step = r / LEVELS
        rounded = (up_to[0].gather(1, limit) - up_to[0].gather(1, zero)) * step**2 / 12
        beyond = [sums[:, -1:] - sums.gather(1, limit) for sums in up_to]
        clipped = beyond[2] - 2 * r * beyond[1] + r**2 * beyond[0]
        error = up_to[2].gather(1, zero) + rounded + clipped
        # Limits descend and argmin takes the first: of equally good ranges the largest.
        best = r.gather(1, error.argmin(1, keepdim=True))
        return torch.where(last > 0, best, 0).squeeze(1).float()


@dataclass(frozen=True)
class SiteHistograms:
    """Histograms of |q|, |k - offset| and |v - offset| at one site: rows are timestep bin × head, for values × channel."""

    q: Histogram
    k: Histogram
    v: Histogram

    @staticmethod
    def empty(bins: int, heads: int, kv_heads: int, dim: int) -> SiteHistograms:
        return SiteHistograms(
            Histogram(bins * heads, HEAD_BITS),
            Histogram(bins * kv_heads, HEAD_BITS),
            Histogram(bins * kv_heads * dim, CHANNEL_BITS),
        )


Histograms = Mapping[str, SiteHistograms]
"""Histograms by site."""


class Offsets(Protocol):
    """Tables of a site: at least `k_offset` and `v_offset`, [T, Hkv, D]."""

    def __getitem__(self, name: str, /) -> Tensor: ...


class HistogramObserver:
    """A handler that counts magnitudes at sites with offsets and runs the model's own attention.

    Args:
        offsets: of each site, subtracted from keys and values.
        heads: number of query heads of each site.
        timestep_max: see `timestep_bin`.
    """

    def __init__(self, offsets: Mapping[str, Offsets], heads: Mapping[str, int], timestep_max: float) -> None:
        self._timestep_max = timestep_max
        self._offsets = {site: (tables["k_offset"], tables["v_offset"]) for site, tables in offsets.items()}
        self.histograms = {
            site: SiteHistograms.empty(len(k_offset), heads[site], *k_offset.shape[1:])
            for site, (k_offset, _) in self._offsets.items()
        }
        self._forward: _Forward | None = None

    def __call__(self, call: SiteCall) -> Tensor:
        if call.name in self._offsets:
            device = call.q.device
            k_offset, v_offset = (x.to(device) for x in self._offsets[call.name])
            self._offsets[call.name] = k_offset, v_offset
            bins, kv_heads, dim = k_offset.shape
            forward = self._forward
            if forward is None or forward.timestep is not call.timestep or forward.index.device != device:
                index = timestep_bin(call.timestep, self._timestep_max, bins).to(device)
                self._forward = forward = _Forward(call.timestep, index)
            index, rows, into = forward.index, forward.rows, self.histograms[call.name]
            into.q.add(call.q, rows(call.q.shape[1]))
            into.k.add(call.k, rows(kv_heads), k_offset[index, :, None])
            into.v.add(call.v, rows(kv_heads, dim), v_offset[index, :, None])
        return call.exact()


class _Forward:
    """Results that the sites of one forward on one device share, because all sites receive the same timestep tensor [B]."""

    def __init__(self, timestep: Tensor, index: Tensor) -> None:
        self.timestep, self.index = timestep, index
        self._rows: dict[tuple[int, int], Tensor] = {}

    def rows(self, heads: int, channels: int = 1) -> Tensor:
        """See `rows_of`; cached."""
        if (heads, channels) not in self._rows:
            self._rows[heads, channels] = rows_of(self.index, heads, channels)
        return self._rows[heads, channels]


def rows_of(index: Tensor, heads: int, channels: int = 1) -> Tensor:
    """[B, heads, 1, channels] rows of a call's elements in a histogram of timestep bin × head × channel; index: [B] INT64
    timestep bins."""
    of_bin = torch.arange(heads * channels, device=index.device).view(heads, 1, channels)
    return of_bin + (index * (heads * channels))[:, None, None, None]
