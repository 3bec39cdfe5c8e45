"""Batches of any size for a component whose engine takes some: for those who draw as many samples as they were asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.guidance import guidance_of
from trtconvert.reuse.schedule import reuse_of
from trtconvert.runtime.component import Component
from trtconvert.runtime.trajectory import Apart, apart, begin


class AnyBatch:
    """A denoiser of any batch: what its component does not take at once goes in parts, and a part that is too small is filled up
    with its last sample, whose outputs are dropped.

    Args:
        component: its first input begins with the dimension of samples; inputs that do not are the same for all parts.
    """

    def __init__(self, component: Component | Apart) -> None:
        self._component, self.device = component, component.device
        self.guidance, self.reuse = guidance_of(component), reuse_of(component)
        self._parts: dict[int, Component | Apart] = {}

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """
        Raises:
            UserError: see the component, of any part.
        """
        signature = self._component.signature
        tensors = signature.ordered(inputs, named)
        of_samples = signature.of_samples()
        counts = {len(x) for x, is_one in zip(tensors, of_samples, strict=True) if is_one and x.dim()}
        taken = signature.batches(tensors)
        if len(counts) != 1 or taken is None or taken[0] <= min(counts) <= taken[1]:
            return self._component(*tensors)  # which refuses what is no batch at all
        (count,), (low, high), parts = counts, taken, list[Tensor]()
        for start in range(0, count, high):
            # Each part is of the same samples from call to call, and has caches of its own.
            if start not in self._parts:
                self._parts[start] = apart(self._component)
            size = min(high, count - start)
            rows = torch.arange(start, start + max(size, low)).clamp_max(start + size - 1)
            part = (_rows(x, rows) if is_one else x for x, is_one in zip(tensors, of_samples, strict=True))
            parts.append(_first(self._parts[start](*part), size))
        return torch.cat(parts)

    def reset_cache(self) -> None:
        """All samples begin anew in the next call."""
        for component in (self._component, *self._parts.values()):
            begin(component)

    def apart(self) -> AnyBatch:
        """Another one, with caches of its own."""
        return AnyBatch(apart(self._component))


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows.to(x.device))


def _first(output: Tensor | Sequence[Tensor], size: int) -> Tensor:
    if not isinstance(output, Tensor):
        raise UserError(
            "the component has several outputs, and a batch that it does not take at once",
            expected="a denoiser, which has one",
            got=f"{len(output)} outputs",
            remedy="call it with the batches of its signature",
        )
    return output[:size]
