"""Observation of layers: extremes of each input channel, and some rows, per denoiser call and timestep bin.

One pass records what every choice of scales needs. Extremes bound all rows; a few whole rows show how channels vary together and
what rounding and clipping cost. Both merge by concatenation in the order of the batches, like the rows of attention.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.attention.reference import timestep_bin
from trtconvert.errors import UserError
from trtconvert.linear.sites import LayerCall
from trtconvert.noted import Groups, GroupsOfCalls, Noted, Notes, TensorFields, in_calls, rows_of_groups, samples_of

ROWS = 2
"""Whole rows that are stored of each call and timestep bin."""

_STRIDE = 7919
"""A prime, so that rows of successive calls are far apart and spread over the image."""


@dataclass(frozen=True)
class LayerRows(TensorFields):
    """Observations of the input of one layer; an entry per denoiser call and timestep bin, in the order of the calls. On
    the CPU.

    Attributes:
        bin: [R] INT64 timestep bin.
        rows: [R] INT64 number of rows that the extremes cover.
        low, high: [R, K] FP32 smallest and largest values of each input channel.
        sample: [R, S, K] FP32 whole rows.
    """

    bin: Tensor
    rows: Tensor
    low: Tensor
    high: Tensor
    sample: Tensor

    def to(self, device: torch.device | str) -> LayerRows:
        return LayerRows(**{name: x.to(device) for name, x in self.tensors().items()})


def deltas_of(layer: str) -> str:
    """Returns the name of a layer's input deltas in the record."""
    return f"changes of {layer}"


@dataclass(frozen=True)
class _Seen:
    """Reductions of one call per sample, [B, K], and rows [B, S, K]. On the device until `finish`."""

    timestep: Tensor
    rows: int
    low: Tensor
    high: Tensor
    sample: Tensor


class LayerObserver:
    """A handler that records `LayerRows` at the named layers and runs the model's own layer.

    Args:
        layers: one layer of each input group to observe.
        timestep_max, bins: see `timestep_bin`.
        rows: S, whole rows to store of each call and timestep bin.
        deltas: layers among them whose deltas between denoising steps are recorded, too, under the name `deltas_of`.
        falls: true if timesteps fall during denoising. A call with other samples, or out of order, starts a new sequence.
    """

    def __init__(
        self,
        layers: Collection[str],
        timestep_max: float,
        bins: int,
        rows: int = ROWS,
        *,
        deltas: Collection[str] = (),
        falls: bool = True,
    ) -> None:
        self._layers, self._timestep_max, self._bins, self._rows = frozenset(layers), timestep_max, bins, rows
        self._deltas, self._direction = frozenset(deltas), 1 if falls else -1
        self.notes: Notes[_Seen] = Notes()
        self._turns: dict[str, Tensor] = {}
        self._before: dict[str, tuple[Tensor, Tensor]] = {}  # the last call's timesteps and input

    def __call__(self, call: LayerCall) -> Tensor:
        if call.name in self._layers:
            # A view: channels of a convolution's input stay in front in memory.
            x = call.x.flatten(2).transpose(1, 2) if call.kind == "conv" else call.x
            x = x.reshape(len(call.timestep), -1, x.shape[-1])  # [B, rows, K]
            self._add(call.name, call.timestep, x)
            if call.name in self._deltas:
                timestep, before = self._before.get(call.name, (call.timestep, None))
                if before is not None and before.shape == x.shape:
                    moved = (timestep - call.timestep) * self._direction
                    if bool((moved > 0).all()):
                        self._add(deltas_of(call.name), call.timestep, x - before)
                self._before[call.name] = call.timestep.clone(), x.clone()
        return call.exact()

    def _add(self, name: str, timestep: Tensor, x: Tensor) -> None:
        """Notes an input [B, rows, K]."""
        count = x.shape[1]
        if name not in self._turns or self._turns[name].device != x.device:
            self._turns[name] = torch.zeros((), dtype=torch.int64, device=x.device)
        turn = self._turns[name]  # on the device, so that each replay of a CUDA graph takes other rows
        places = (torch.arange(self._rows, device=x.device) * (count // self._rows) + turn * _STRIDE) % count
        turn += 1
        sample = x.index_select(1, places).float()
        low, high = torch.aminmax(x, dim=1)
        self.notes.add(name, _Seen(timestep, count, low.float(), high.float(), sample))

    def finish(self) -> dict[str, LayerRows]:
        """Returns the entries of all calls since the last `finish`, by layer.

        Raises:
            UserError: NaN or Inf at the input of a layer; the message names the first.
        """
        self._before.clear()
        for turn in self._turns.values():
            turn.zero_()
        taken = self.notes.take()
        low, high = (
            {layer: samples_of(seen, lambda entry, name=name: getattr(entry, name)) for layer, seen in taken.items()}
            for name in ("low", "high")
        )
        finite = {layer: (low[layer].isfinite() & high[layer].isfinite()).all(1) for layer in taken}

        def rows(layer: str, seen: Sequence[Noted[_Seen]], groups: Groups) -> LayerRows:
            counts = torch.tensor(in_calls(seen, lambda entry: entry.rows))
            sample = samples_of(seen, lambda entry: entry.sample)
            return self._entries(counts, groups, low[layer], high[layer], sample)

        groups = GroupsOfCalls(lambda timestep: timestep_bin(timestep, self._timestep_max, self._bins), self._bins)
        return rows_of_groups(taken, finite, groups, rows, _non_finite)

    def _entries(self, rows: Tensor, groups: Groups, low: Tensor, high: Tensor, sample: Tensor) -> LayerRows:
        """One entry per group of samples; rows: of a sample, by call; low, high: [samples, K]; sample: [samples, S, K]."""
        # Row i comes from the group's i-th sample; small groups repeat samples.
        each = torch.arange(self._rows)
        starts = groups.counts.cumsum(0) - groups.counts
        taken = groups.order[starts[:, None] + each % groups.counts[:, None]]
        return LayerRows(
            bin=groups.bin,
            rows=rows[groups.call] * groups.counts,
            low=groups.over(low, torch.amin).cpu(),
            high=groups.over(high, torch.amax).cpu(),
            sample=sample[taken.to(sample.device), each.to(sample.device)].cpu(),
        )


def _non_finite(layer: str, sample: int, timestep: float) -> UserError:
    return UserError(
        f"NaN or Inf at the input of {layer} at timestep {timestep:g}",
        expected="finite activations",
        got="NaN or Inf",
        remedy="check the weights and the calibration data; FP16 models often need bfloat16 or float32 here",
    )
