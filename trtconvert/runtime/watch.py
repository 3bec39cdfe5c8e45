"""A cheap watch over what a denoiser is given: inputs far outside of its calibration, and timesteps beyond its schedule."""

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
"""Times the largest magnitude of a calibration from which inputs are far outside of it: the maxima of a few samples and of all
others differ by less."""

_PENDING = 64
"""Calls whose figures may still be on their way from the device."""


@dataclass(frozen=True)
class _Figures:
    """What came of a call: the lowest and the highest timestep, and for each input how many times its range it came to.

    Attributes:
        values: on the host, once `event` is done; None where they lie there already.
    """

    values: Tensor
    event: torch.cuda.Event | None

    @property
    def arrived(self) -> bool:
        return self.event is None or self.event.query()


class InputWatch:
    """Warns once for each input, and once for timesteps.

    A call costs one reduction over each floating-point input. Nothing waits for a GPU: what came of a call is looked at when a
    later one comes, or by `close`. Calls that are recorded into CUDA graphs of the caller's are not watched.

    Args:
        component: the denoiser's signature, with the ranges of its calibration.
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
        """Look at the inputs of a call, in the signature's order, whose shapes were checked."""
        on_gpu = any(x.is_cuda for x in tensors)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return  # in which not even an event may be asked for
        self._look(wait=False)
        if len(self._told) > len(self._ranges):
            return  # nothing is left to tell
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
        """Tell what is still on its way."""
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
                    f"a denoiser was given timesteps from {low:g} to {high:g}, where its schedule has {least:g} to "
                    f"{most:g}: it computes them with the scales and modes of the nearest; remedy: use the "
                    "schedule, and the units of timesteps, that the model was converted with",
                )
            for place, share in zip(self._ranges, shares, strict=True):
                if not share <= FAR:
                    name = self._names[place]
                    self._tell(
                        name,
                        f"a denoiser was given '{name}' {share:.3g} times as large as anything that it was calibrated on at "
                        "such a timestep: what INT8 clips or rounds there, nobody has measured; remedy: calibrate on data "
                        "like this (calibration.data in the recipe), with attention.scaling: dynamic, or check what is passed",
                    )

    def _covers(self, low: float, high: float) -> bool:
        """Whether the schedule has the least and the largest timestep of a call."""
        if self._noise_input is not None:
            return bool(self._noise_input.covers(torch.tensor([low, high])).all())
        return low >= 0 and high <= self._timestep_max

    def _tell(self, kind: str, text: str) -> None:
        with self._lock:
            told = kind in self._told
            self._told.add(kind)
        if not told:
            warn(text)
