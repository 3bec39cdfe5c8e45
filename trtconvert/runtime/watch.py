"""Watches a denoiser's inputs for values far outside of the calibration, and for timesteps beyond the schedule."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.attention.reference import timestep_bin
from trtconvert.bundle import ComponentRecord
from trtconvert.errors import warn
from trtconvert.noise_input import place_of

FAR = 3.0
"""Inputs this many times larger than the calibration's largest magnitude are far outside of it. The maxima of different samples
differ by less."""

_PENDING = 64
"""Number of calls with figures that may be pending on the device."""


@dataclass(frozen=True)
class _Figures:
    """Figures of a call: the lowest and the highest timestep, and the ratio of each input to its range.

    Attributes:
        values: on the host, after `event`; event: None if the values are ready.
    """

    values: Tensor
    event: torch.cuda.Event | None

    @property
    def arrived(self) -> bool:
        return self.event is None or self.event.query()


class InputWatch:
    """Warns once for each input, and once for timesteps.

    A call costs one reduction over each floating-point input and does not wait for a GPU: a later call, or `close`, reads the
    figures. Calls that the caller captures into CUDA graphs are not watched.

    Args:
        component: the denoiser's signature, with the ranges of the calibration.
    """

    def __init__(self, component: ComponentRecord) -> None:
        names = [spec.name for spec in component.inputs]
        self._timestep, self._timestep_max = names.index(component.timestep_input), component.timestep_max
        self._noise_input = component.noise_input
        self._ranges = {
            names.index(name): torch.tensor(rows, dtype=torch.float32).clamp_min(torch.finfo(torch.float32).tiny)
            for name, rows in component.input_ranges.items()
        }
        self._names = names
        self._told: set[str] = set()
        self._pending: deque[_Figures] = deque(maxlen=_PENDING)
        self._lock = threading.Lock()

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        """Watch the inputs of a call, in the signature's order and with checked shapes."""
        on_gpu = any(x.is_cuda for x in tensors)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return  # a capture does not allow event queries
        self._look(wait=False)
        if len(self._told) > len(self._ranges):
            return  # all warnings were issued
        timestep = tensors[self._timestep].detach().float().reshape(-1)
        found = [timestep.amin(), timestep.amax()]
        noise = place_of(self._noise_input, timestep)
        for place, ranges in self._ranges.items():
            x = tensors[place].detach()
            of_samples = x.dim() > 0 and len(x) == len(timestep)
            largest = x.abs().flatten(1).amax(1) if of_samples and x.dim() > 1 else x.abs().amax()
            limits = ranges.to(timestep.device)[timestep_bin(noise, self._timestep_max, len(ranges))]
            found.append((largest.to(limits) / (limits if largest.dim() else limits.amax())).amax())
        values = torch.stack([x.to(timestep.device) for x in found])
        event = None
        if values.is_cuda:
            values = torch.empty(len(values), pin_memory=True).copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(timestep.device))
        with self._lock:
            self._pending.append(_Figures(values, event))
        self._look(wait=False)

    def close(self) -> None:
        """Wait for pending figures and issue their warnings."""
        self._look(wait=True)

    def _look(self, *, wait: bool) -> None:
        while True:
            with self._lock:
                if not self._pending or not (wait or self._pending[0].arrived):
                    return
                figures = self._pending.popleft()
            if figures.event is not None:
                figures.event.synchronize()
            low, high, *shares = figures.values.tolist()
            if not self._covers(low, high):
                told = self._noise_input
                least, most = (0, self._timestep_max) if told is None else (told.low, told.high)
                self._tell(
                    "",
                    f"a denoiser got timesteps from {low:g} to {high:g}, but its schedule has {least:g} to {most:g}: the scales "
                    "and modes of the nearest timestep are used; remedy: use the schedule and the units of timesteps of the "
                    "conversion",
                )
            for place, share in zip(self._ranges, shares, strict=True):
                if not share <= FAR:
                    name = self._names[place]
                    self._tell(
                        name,
                        f"a denoiser got '{name}' {share:.3g} times as large as in its calibration at such a timestep: the error "
                        "of INT8 was not measured there; remedy: calibrate on similar data (calibration.data in the recipe), use "
                        "attention.scaling: dynamic, or check the input",
                    )

    def _covers(self, low: float, high: float) -> bool:
        """Return whether the schedule covers the least and the largest timestep of a call."""
        if self._noise_input is not None:
            return bool(self._noise_input.covers(torch.tensor([low, high])).all())
        return low >= 0 and high <= self._timestep_max

    def _tell(self, kind: str, text: str) -> None:
        with self._lock:
            told = kind in self._told
            self._told.add(kind)
        if not told:
            warn(text)
