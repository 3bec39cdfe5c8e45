"""Quantisers of least squared error for activations and deltas."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtconvert.modiff.reference import HIGH, LOW, SCALE, ZERO, quantiser

_SHARES = torch.logspace(0, -1.5, 41, 10.0)
"""Tried shares of the range, down to a thirtieth: with 3 bits the least error clips far below the largest delta."""

VALUES = 4096
"""Kept numbers of a layer's input in a bin."""

_STEPS = 6
"""Errors of deltas are compared after this number of steps in one direction."""


@dataclass
class Seen:
    """A sample of a layer's input, drawn evenly from all calls, and the range of all numbers and 0.

    `add` does not wait for a GPU; `settle` does.
    """

    low: Tensor = field(default_factory=lambda: torch.zeros(()))
    high: Tensor = field(default_factory=lambda: torch.zeros(()))
    values: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, generator: torch.Generator, count: int) -> Tensor:
        """Adds a sample of a tensor, and returns its least and largest number [2] on its device, NaN if it has NaN."""
        flat = x.detach().float().reshape(-1)
        least, most = flat.aminmax()
        self.low = torch.minimum(self.low.to(x.device), least)
        self.high = torch.maximum(self.high.to(x.device), most)
        chosen = torch.randint(flat.numel(), (min(count, flat.numel()),), generator=generator)
        self.values.append(flat[chosen.to(flat.device)])
        return torch.stack([least, most])

    def settle(self) -> None:
        """Moves the sample to the CPU."""
        self.low, self.high, self.values = self.low.cpu(), self.high.cpu(), [torch.cat(self.values).cpu()]

    def sample(self, generator: torch.Generator) -> Tensor:
        """Returns at most `VALUES` of the numbers."""
        self.settle()
        every = self.values[0]
        return every[torch.randperm(len(every), generator=generator)[:VALUES]]


def least_error(
    seen: Seen, bits: int, symmetric: bool, reset: bool, feedback: bool, generator: torch.Generator
) -> Tensor:
    """Returns the quantiser [6] of least squared error among those that clip at a share of the range.

    Args:
        feedback: the numbers are deltas, and a layer quantises a_t − â, which includes the error of the step before. The error
            is taken after some steps with the same delta: trajectories are smooth, and clipped parts accumulate.
    """
    x = seen.sample(generator)
    tried = quantiser(seen.low * _SHARES, seen.high * _SHARES, bits, symmetric, reset)
    scale, low, high, zero = (tried[:, column, None] for column in (SCALE, LOW, HIGH, ZERO))
    error = torch.zeros(len(_SHARES), len(x))
    for _ in range(_STEPS if feedback else 1):
        delta = x + error
        error = delta - ((delta / scale).round_().add_(zero).clamp_(low, high) - zero) * scale
    return tried[int(error.square().mean(1).argmin())]
