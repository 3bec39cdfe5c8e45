"""Observation of ranges: extremes and sums of q, k and v at every site, per denoiser call and timestep bin.

One pass records what every choice of scale by maxima needs: the range of k or v about any offset follows from its extremes, so
that the offset can be chosen afterwards. Rows are not reduced while they are observed. Rows of several batches, runs or machines
merge by concatenation in the order of the batches, so that the result is bit-identical whoever observed which batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.errors import UserError
from trtconvert.noted import Groups, GroupsOfCalls, Noted, Notes, TensorFields, in_calls, rows_of_groups, samples_of

LEVELS = 127
"""INT8 steps on either side of zero."""

CHANNEL_FLOOR = 1e-4
"""Smallest range of a value channel relative to the largest of its head; prevents a division by zero."""

RANGE_FLOOR = 1e-8
"""Smallest range of all: the range of a head of zeros."""


@dataclass(frozen=True)
class Rows(TensorFields):
    """Observations at one site: a row per denoiser call and timestep bin, in the order of the calls. On the CPU.

    Attributes:
        bin: [R] INT64 timestep bin.
        tokens: [R] INT64 keys (and values) summed in `k_total` and `v_total`.
        q_amax: [R, H] FP32 largest |q|.
        k_low, k_high, v_low, v_high: [R, Hkv, D] FP32 smallest and largest values.
        k_total, v_total: [R, Hkv, D] FP64 sums.
    """

    bin: Tensor
    tokens: Tensor
    q_amax: Tensor
    k_low: Tensor
    k_high: Tensor
    k_total: Tensor
    v_low: Tensor
    v_high: Tensor
    v_total: Tensor

    def by_bin(self) -> dict[int, Rows]:
        """Returns the rows of each bin that has some, in ascending order of the bins."""
        ordered = self.select(self.bin.argsort(stable=True))
        bins, counts = (found.tolist() for found in ordered.bin.unique_consecutive(return_counts=True))
        ends = accumulate(counts)
        return {
            index: ordered.select(slice(end - count, end)) for index, count, end in zip(bins, counts, ends, strict=True)
        }

    def mean(self, name: str) -> Tensor:
        """[Hkv, D] FP32 mean of "k" or "v" over all rows."""
        return (getattr(self, f"{name}_total").sum(0) / self.tokens.sum()).float()

    def amax(self, name: str, offset: Tensor) -> Tensor:
        """[R, Hkv, D] largest magnitude of "k" or "v" minus an offset [Hkv, D], per row."""
        return torch.maximum(getattr(self, f"{name}_high") - offset, offset - getattr(self, f"{name}_low"))


Records = Mapping[str, Rows]
"""Rows by site."""


@dataclass(frozen=True)
class _Extremes:
    """Reductions of one call over its tokens, on the device: timestep [B], tokens per sample, and [B, heads, D] by name."""

    timestep: Tensor
    tokens: int
    reduced: dict[str, Tensor]


class RangeObserver:
    """A handler that records `Rows` at the named sites and runs the model's own attention.

    A call costs eight reductions and does not synchronise with the device; `finish` does the rest at once.

    Args:
        sites: names of the sites to observe.
        timestep_max, bins: see `timestep_bin`.

    Attributes:
        notes: of the calls since the last `finish`.
    """

    def __init__(self, sites: Collection[str], timestep_max: float, bins: int) -> None:
        self._sites, self._timestep_max, self._bins = frozenset(sites), timestep_max, bins
        self.notes: Notes[_Extremes] = Notes()

    def __call__(self, call: SiteCall) -> Tensor:
        if call.name in self._sites:
            reduced = {"q_low": call.q.amin(2), "q_high": call.q.amax(2)}
            for name, x in (("k", call.k), ("v", call.v)):
                reduced |= {f"{name}_low": x.amin(2), f"{name}_high": x.amax(2)}
                reduced[f"{name}_total"] = x.sum(2, dtype=torch.float32)
            if call.folds > 1:  # there may be thousands of folds
                reduced = {name: _of_samples(x, name, call.folds) for name, x in reduced.items()}
            extremes = _Extremes(call.timestep[:: call.folds], call.folds * call.k.shape[2], reduced)
            self.notes.add(call.name, extremes)
        return call.exact()

    def finish(self) -> dict[str, Rows]:
        """Returns the rows of all calls since the last `finish`, by site.

        Raises:
            UserError: NaN or Inf at a site; the message names the first.
        """
        taken = self.notes.take()
        reduced = {
            site: {
                name: samples_of(seen, lambda entry, name=name: entry.reduced[name]).float()
                for name in seen[0].entry.reduced
            }
            for site, seen in taken.items()
        }
        # The extremes are NaN or Inf if any element is, and so is the largest of the extremes.
        finite = {
            site: torch.stack([x.abs().amax((1, 2)).isfinite() for x in of.values()]) for site, of in reduced.items()
        }

        def rows(site: str, seen: Sequence[Noted[_Extremes]], groups: Groups) -> Rows:
            return _rows(reduced[site], torch.tensor(in_calls(seen, lambda entry: entry.tokens)), groups)

        def refusal(site: str, sample: int, timestep: float) -> UserError:
            broken = (~finite[site][:, sample]).long().argmax()
            return _non_finite(site, list(reduced[site])[int(broken)], timestep)

        groups = GroupsOfCalls(lambda timestep: timestep_bin(timestep, self._timestep_max, self._bins), self._bins)
        return rows_of_groups(taken, {site: x.all(0) for site, x in finite.items()}, groups, rows, refusal)


def _of_samples(reduced: Tensor, name: str, folds: int) -> Tensor:
    """Reduces the folds of each sample: [B · folds, heads, D] → [B, heads, D]."""
    each = reduced.unflatten(0, (-1, folds))
    return each.sum(1) if name.endswith("total") else each.amin(1) if name.endswith("low") else each.amax(1)


def _rows(reduced: dict[str, Tensor], tokens: Tensor, groups: Groups) -> Rows:
    """One row per group of samples; tokens: keys of a sample, by call."""

    def over_group(x: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
        return groups.over(x, reduce).cpu()

    q_amax = torch.maximum(reduced["q_high"], -reduced["q_low"]).amax(-1)
    return Rows(
        bin=groups.bin,
        tokens=tokens[groups.call] * groups.counts,
        q_amax=over_group(q_amax, torch.amax),
        k_low=over_group(reduced["k_low"], torch.amin),
        k_high=over_group(reduced["k_high"], torch.amax),
        k_total=over_group(reduced["k_total"].double(), torch.sum),
        v_low=over_group(reduced["v_low"], torch.amin),
        v_high=over_group(reduced["v_high"], torch.amax),
        v_total=over_group(reduced["v_total"].double(), torch.sum),
    )


def _non_finite(site: str, reduced: str, timestep: float) -> UserError:
    tensor = {"q": "queries", "k": "keys", "v": "values"}[reduced[0]]
    return UserError(
        f"NaN or Inf among the {tensor} of {site} at timestep {timestep:g}",
        expected="finite activations",
        got="NaN, Inf, or values whose sum overflows FP32",
        remedy="check the weights and the calibration data; FP16 models often need bfloat16 or float32 here",
    )


def offsets(records: Records, bins: int) -> dict[str, dict[str, Tensor]]:
    """Returns `k_offset` and `v_offset` of every site: means [T, Hkv, D] of each bin, or of the nearest bin with rows."""
    found = {}
    for site, rows in records.items():
        by_bin = rows.by_bin()
        found[site] = {
            f"{name}_offset": spread({index: seen.mean(name) for index, seen in by_bin.items()}, bins)
            for name in ("k", "v")
        }
    return found


def ranges_of_maxima(rows: Rows, means: Mapping[str, Tensor], quantile: float, bins: int) -> dict[str, Tensor]:
    """Returns ranges about the means, a quantile of the calls' maxima: "q" [T, H], "k" [T, Hkv] and "v" [T, Hkv, D]."""
    by_bin: dict[str, dict[int, Tensor]] = {"q": {}, "k": {}, "v": {}}
    for index, seen in rows.by_bin().items():
        maxima = {
            "q": seen.q_amax,
            "k": seen.amax("k", means["k_offset"][index]).amax(-1),
            "v": seen.amax("v", means["v_offset"][index]),
        }
        for name, x in maxima.items():
            by_bin[name][index] = torch.quantile(x, quantile, dim=0)
    return {name: spread(ranges, bins) for name, ranges in by_bin.items()}


def tables_of_ranges(ranges: Mapping[str, Tensor], means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of `AttentionTables` except the modes, FP32, from ranges of "q", "k" and "v", the latter two about the
    means `k_offset` and `v_offset`."""
    floored = dict(ranges) | {"v": torch.maximum(ranges["v"], ranges["v"].amax(-1, keepdim=True) * CHANNEL_FLOOR)}
    return {f"{name}_scale": x.clamp_min(RANGE_FLOOR) / LEVELS for name, x in floored.items()} | dict(means)


def seen_bins(rows: Rows) -> list[int]:
    """Returns the bins that have rows."""
    return rows.bin.unique().tolist()


def spread(by_bin: Mapping[int, Tensor], bins: int) -> Tensor:
    """[T, ...]: each bin takes the entry of the nearest bin in `by_bin`."""
    return torch.stack([by_bin[index] for index in nearest_bins(list(by_bin), bins)])


def nearest_bins(seen: Sequence[int], bins: int) -> list[int]:
    """Returns the nearest of the seen bins for each bin."""
    return [min(seen, key=lambda j, i=i: abs(j - i)) for i in range(bins)]
