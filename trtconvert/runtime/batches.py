"""Splits batches of any size into batches that a component's engine takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.guidance import guidance_of
from trtconvert.reuse.schedule import reuse_of
from trtconvert.runtime.component import Component
from trtconvert.runtime.trajectory import Apart
from trtconvert.wrapped import apart, begin


class AnyBatch:
    """A denoiser for batches of any size.

    Runs a batch in parts that the component takes. A part that is too small is padded with copies of its last sample, whose
    outputs are dropped.

    Args:
        component: the first dimension of its first input is that of samples; inputs without this dimension go to all parts.
    """

    def __init__(self, component: Component | Apart) -> None:
        self._component, self.device = component, component.device
        self.guidance, self.reuse = guidance_of(component), reuse_of(component)
        self._parts: dict[int, Component | Apart] = {}

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Predict. For errors see the component."""
        signature = self._component.signature
        tensors = signature.ordered(inputs, named)
        of_samples = signature.of_samples()
        counts = {len(x) for x, is_one in zip(tensors, of_samples, strict=True) if is_one and x.dim()}
        taken = signature.batches(tensors)
        if len(counts) != 1 or counts == {0} or taken is None or taken[0] <= min(counts) <= taken[1]:
            return self._component(*tensors)  # refuses inputs that do not form a batch
        (count,), (low, high), parts = counts, taken, list[Tensor]()
        for rows, own in parts_of(count, low, high):
            # A part has the same samples in every call, and its own caches.
            start, chosen = rows[0], torch.tensor(rows)
            if start not in self._parts:
                self._parts[start] = apart(self._component)
            part = (_rows(x, chosen) if is_one else x for x, is_one in zip(tensors, of_samples, strict=True))
            parts.append(_first(self._parts[start](*part), own))
        return torch.cat(parts)

    def reset_cache(self) -> None:
        """All samples begin anew in the next call."""
        for component in (self._component, *self._parts.values()):
            begin(component)

    def apart(self) -> AnyBatch:
        """Return a copy with its own caches."""
        return AnyBatch(apart(self._component))


def parts_of(count: int, least: int, most: int) -> Iterator[tuple[list[int], int]]:
    """Yields the rows of each part of a batch, and how many of them are the part's own: a part of fewer than `least` rows is
    filled up with copies of its last row."""
    for start in range(0, count, most):
        own = min(most, count - start)
        yield [start + min(row, own - 1) for row in range(max(own, least))], own


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows.to(x.device))


def _first(output: Tensor | Sequence[Tensor], size: int) -> Tensor:
    if not isinstance(output, Tensor):
        raise UserError(
            "a component with several outputs cannot run a batch in parts",
            expected="a denoiser, with one output",
            got=f"{len(output)} outputs",
            remedy="call the component with batches of its signature",
        )
    return output[:size]
