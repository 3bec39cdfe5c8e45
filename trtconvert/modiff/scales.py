"""Quantisers of least squared error, for activations and for their deltas from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtconvert.modiff.reference import HIGH, LOW, SCALE, ZERO, quantiser

_SHARES = torch.logspace(0, -1.5, 41, 10.0)
"""Of the range that was seen, down to a thirtieth: with 3 bits the least error clips far below the largest delta."""

VALUES = 4096
"""Numbers that are kept of what a layer reads in a bin."""

_STEPS = 6
"""Of one direction, after which errors of deltas are compared."""


@dataclass
class Seen:
    """Some numbers of what a layer reads, drawn evenly from all its calls, and the range of all of them and 0.

    Adding waits for no GPU; `settle` does.
    """

    low: Tensor = field(default_factory=lambda: torch.zeros(()))
    high: Tensor = field(default_factory=lambda: torch.zeros(()))
    values: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, generator: torch.Generator, count: int) -> Tensor:
        """Some numbers of a tensor. Gives its least and its largest, [2], on its device; both are NaN where it holds NaN."""
        flat = x.detach().float().reshape(-1)
        least, most = flat.aminmax()
        self.low = torch.minimum(self.low.to(x.device), least)
        self.high = torch.maximum(self.high.to(x.device), most)
        chosen = torch.randint(flat.numel(), (min(count, flat.numel()),), generator=generator)
        self.values.append(flat[chosen.to(flat.device)])
        return torch.stack([least, most])

    def settle(self) -> None:
        """Brings to the CPU what was added."""
        self.low, self.high, self.values = self.low.cpu(), self.high.cpu(), [torch.cat(self.values).cpu()]

    def sample(self, generator: torch.Generator) -> Tensor:
        """At most `VALUES` of the numbers."""
        self.settle()
        every = self.values[0]
        return every[torch.randperm(len(every), generator=generator)[:VALUES]]


def least_error(
    seen: Seen, bits: int, symmetric: bool, reset: bool, feedback: bool, generator: torch.Generator
) -> Tensor:
    """The quantiser [6] whose squared error is the least of those that clip at a share of the range.

    Args:
        feedback: the numbers are deltas, and a layer quantises each together with the error of the step before: a_t − â. The
            error is that after some steps, each of which changes a number by as much: trajectories are smooth, so that what is
            clipped in one step falls further behind in the next.
    """
    x = seen.sample(generator)
    tried = quantiser(seen.low * _SHARES, seen.high * _SHARES, bits, symmetric, reset)
    scale, low, high, zero = (tried[:, column, None] for column in (SCALE, LOW, HIGH, ZERO))
    error = torch.zeros(len(_SHARES), len(x))
    for _ in range(_STEPS if feedback else 1):
        delta = x + error
        error = delta - ((delta / scale).round_().add_(zero).clamp_(low, high) - zero) * scale
    return tried[int(error.square().mean(1).argmin())]
