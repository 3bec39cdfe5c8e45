"""Quantisers of least squared error, for activations and for their changes from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trtconvert.modiff.reference import HIGH, LOW, SCALE, ZERO, quantiser

_SHARES = torch.logspace(0, -1.5, 41, 10.0)
"""Of the range that was seen, down to a thirtieth: with 3 bits the least error clips far below the largest change."""

VALUES = 4096
"""Numbers that are kept of what a layer reads in a bin."""


@dataclass
class Seen:
    """Some numbers of what a layer reads, drawn evenly from all its calls, and the range of all of them."""

    low: float = 0.0
    high: float = 0.0
    values: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, generator: torch.Generator, count: int) -> None:
        """Some numbers of a tensor."""
        flat = x.detach().float().reshape(-1)
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))
        chosen = torch.randint(flat.numel(), (min(count, flat.numel()),), generator=generator)
        self.values.append(flat[chosen.to(flat.device)].cpu())

    def sample(self, generator: torch.Generator) -> Tensor:
        """At most `VALUES` of the numbers."""
        every = torch.cat(self.values)
        return every[torch.randperm(len(every), generator=generator)[:VALUES]]


def least_error(
    seen: Seen, bits: int, symmetric: bool, begins: bool, feedback: bool, generator: torch.Generator
) -> Tensor:
    """The quantiser [6] whose squared error is the least of those that clip at a share of the range.

    Args:
        feedback: the numbers are changes, to each of which the rounding of the step before is added: the change that a layer
            quantises is that from what it knows, a_t − â. Taken as even over a step of the quantiser.
    """
    x = seen.sample(generator)
    noise = torch.rand(len(x), generator=generator) - 0.5 if feedback else torch.zeros(len(x))
    low, high = seen.low * _SHARES, seen.high * _SHARES
    tried = quantiser(low, high, bits, symmetric, begins)
    scale = tried[:, SCALE, None]
    change = x + noise * scale
    codes = ((change / scale).round() + tried[:, ZERO, None]).clamp(tried[:, LOW, None], tried[:, HIGH, None])
    error = ((codes - tried[:, ZERO, None]) * scale - change).square().mean(1)
    return tried[int(error.argmin())]
