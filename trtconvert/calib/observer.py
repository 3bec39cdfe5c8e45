"""Observation: ranges of q, k and v at every site, per batch, in each timestep bin.

One pass records, per batch, what every choice of scale by maxima needs: the largest |q| per head, and the smallest, the
largest and the mean k and v per channel. The range of k or v about any offset follows from its extremes, so the offset can
be chosen afterwards. Records only ever grow, so those of several runs or machines merge by concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.errors import UserError
from trtconvert.models.base import Denoiser, DiffusionModel, intercepted


@dataclass
class BinRecords:
    """What was seen at one site in one timestep bin; one row per batch.

    Attributes:
        q_amax: rows [H].
        low, high, total: rows [Hkv, D] of smallest, largest and summed values, for "k" and "v".
        tokens: values summed in each row of `total`.
    """

    q_amax: list[Tensor] = field(default_factory=list)
    low: dict[str, list[Tensor]] = field(default_factory=lambda: {"k": [], "v": []})
    high: dict[str, list[Tensor]] = field(default_factory=lambda: {"k": [], "v": []})
    total: dict[str, list[Tensor]] = field(default_factory=lambda: {"k": [], "v": []})
    tokens: list[int] = field(default_factory=list)

    def add(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Record a batch: q [B, H, Nq, D], k and v [B, Hkv, Nk, D]."""
        self.q_amax.append(q.abs().amax((0, 2, 3)).float().cpu())
        for name, x in (("k", k), ("v", v)):
            self.low[name].append(x.amin((0, 2)).float().cpu())
            self.high[name].append(x.amax((0, 2)).float().cpu())
            self.total[name].append(x.double().sum((0, 2)).cpu())
        self.tokens.append(k.shape[0] * k.shape[2])

    def merge(self, other: BinRecords) -> None:
        self.q_amax += other.q_amax
        self.tokens += other.tokens
        for name in ("k", "v"):
            self.low[name] += other.low[name]
            self.high[name] += other.high[name]
            self.total[name] += other.total[name]

    def mean(self, name: str) -> Tensor:
        """[Hkv, D] FP32 mean of k or v over everything seen."""
        return (torch.stack(self.total[name]).sum(0) / sum(self.tokens)).float()

    def amax(self, name: str, offset: Tensor) -> Tensor:
        """[batches, Hkv, D] largest magnitude of k or v less an offset [Hkv, D], per batch."""
        return torch.maximum(torch.stack(self.high[name]) - offset, offset - torch.stack(self.low[name]))


OCTAVES, STEPS_PER_OCTAVE = range(-24, 17), 64
"""Histograms span 2**-24 to 2**17 in steps of 2**(1/64), 1.1 %; smaller and larger magnitudes count in the end bins."""


class Histogram:
    """Counts of magnitudes per head on a fixed logarithmic grid, so that two of them merge exactly by addition.

    Args:
        heads: histograms side by side.
    """

    def __init__(self, heads: int) -> None:
        self.counts = torch.zeros(heads, len(OCTAVES) * STEPS_PER_OCTAVE, dtype=torch.int64)

    def add(self, x: Tensor) -> None:
        """Count |x|; x: [B, heads, N, D]."""
        heads, bins = self.counts.shape
        index = ((x.abs().float().log2() - OCTAVES.start) * STEPS_PER_OCTAVE).floor().clamp(0, bins - 1).long()
        index = index.transpose(0, 1).reshape(heads, -1) + torch.arange(heads, device=x.device)[:, None] * bins
        self.counts += torch.bincount(index.flatten(), minlength=heads * bins).view(heads, bins).cpu()

    def percentile(self, percent: float) -> Tensor:
        """[heads] smallest magnitude that at least `percent` % do not exceed, up to the width of a step (1.1 %)."""
        reached = self.counts.cumsum(1).double() >= self.counts.sum(1, keepdim=True) * (percent / 100)
        edge = reached.long().argmax(1) + 1
        return torch.exp2(edge / STEPS_PER_OCTAVE + OCTAVES.start).float()


Records = dict[str, list[BinRecords]]
"""Site: records per timestep bin."""


Drive = Callable[[Denoiser], None]
"""Calls a denoiser on all of the calibration data."""


def observe(model: DiffusionModel, drive: Drive, *, sites: Sequence[str], bins: int) -> Records:
    """Record the ranges at the named sites while `drive` runs the model.

    Raises:
        UserError: no call was made, or NaN or Inf at a site; the message names the first.
    """
    records: Records = {name: [BinRecords() for _ in range(bins)] for name in sites}

    def handler(call: SiteCall) -> Tensor:
        if call.name in records:
            _refuse_non_finite(call)
            for index, rows in _rows_by_bin(call.timestep, model.timestep_max, bins):
                records[call.name][index].add(call.q[rows], call.k[rows], call.v[rows])
        return call.exact()

    with torch.no_grad():
        drive(intercepted(model, handler))
    if not any(record.tokens for per_bin in records.values() for record in per_bin):
        raise UserError(
            "there is nothing to calibrate on",
            expected="at least one batch of denoiser inputs",
            got="none",
            remedy="raise calibration.samples, or point calibration.data at a file with inputs",
        )
    return records


def observe_histograms(model: DiffusionModel, drive: Drive, records: Records) -> dict[str, list[dict[str, Histogram]]]:
    """A second pass: histograms of |q| and |k - mean k| per head and of |v - mean v| per channel, at each site and bin.

    The means are those of `records`; bins that it did not see stay empty.
    """
    histograms: dict[str, list[dict[str, Histogram]]] = {}
    for name, per_bin in records.items():
        seen = next(r for r in per_bin if r.tokens)
        heads, (kv_heads, dim) = len(seen.q_amax[0]), seen.low["k"][0].shape
        histograms[name] = [
            {"q": Histogram(heads), "k": Histogram(kv_heads), "v": Histogram(kv_heads * dim)} for _ in per_bin
        ]

    def handler(call: SiteCall) -> Tensor:
        if call.name in records:
            for index, rows in _rows_by_bin(call.timestep, model.timestep_max, len(records[call.name])):
                record, into = records[call.name][index], histograms[call.name][index]
                k_mean, v_mean = (record.mean(x).to(call.q.device)[:, None] for x in ("k", "v"))
                into["q"].add(call.q[rows])
                into["k"].add(call.k[rows] - k_mean)
                channels = (call.v[rows] - v_mean).transpose(2, 3).flatten(1, 2)
                into["v"].add(channels[..., None])
        return call.exact()

    with torch.no_grad():
        drive(intercepted(model, handler))
    return histograms


def _rows_by_bin(timestep: Tensor, timestep_max: float, bins: int) -> list[tuple[int, Tensor]]:
    index = timestep_bin(timestep, timestep_max, bins)
    return [(int(i), index == i) for i in index.unique()]


def _refuse_non_finite(call: SiteCall) -> None:
    for name, x in (("queries", call.q), ("keys", call.k), ("values", call.v)):
        if not math.isfinite(float(x.detach().abs().amax())):
            raise UserError(
                f"NaN or Inf among the {name} of {call.name} at timestep {call.timestep[0].item():g}",
                expected="finite activations",
                got=f"{int((~x.isfinite()).sum())} of {x.numel()} are not",
                remedy="check the weights and the calibration data; FP16 models often need bfloat16 or float32 here",
            )
