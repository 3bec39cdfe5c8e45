"""Splits batches of any size into batches that a component's engine takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.guidance import guidance_of
from trtconvert.reuse.schedule import reuse_of
from trtconvert.runtime.component import Component
from trtconvert.runtime.signature import rows_each
from trtconvert.runtime.trajectory import Apart
from trtconvert.wrapped import apart, begin


class AnyBatch:
    """A denoiser for batches of any size.

    Runs a batch in parts that the component takes. A part that is too small is padded with copies of its last sample, whose
    outputs are dropped.

    Args:
        component: the first dimension of its first input is that of samples; inputs without rows for samples go to all parts.
    """

    def __init__(self, component: Component | Apart) -> None:
        self._component, self.device = component, component.device
        self.guidance, self.reuse = guidance_of(component), reuse_of(component)
        self._parts: dict[int, Component | Apart] = {}

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """Predict. For errors see the component."""
        signature = self._component.signature
        tensors = signature.ordered(inputs, named)
        taken, count = signature.batches(tensors), len(tensors[0]) if tensors[0].dim() else 0
        if not count or taken is None or taken[0] <= count <= taken[1]:
            return self._component(*tensors)  # refuses inputs that do not form a batch
        of_samples = zip(signature.names, tensors, signature.of_samples(), strict=True)
        each = [rows_each(name, x, count) if own else 0 for name, x, own in of_samples]
        (low, high), parts = taken, list[Tensor]()
        for rows, size in parts_of(count, low, high):
            # A part has the same samples in every call, and its own caches.
            start, chosen = rows[0], torch.tensor(rows)
            if start not in self._parts:
                self._parts[start] = apart(self._component)
            part = (_rows(x, chosen, n) if n else x for x, n in zip(tensors, each, strict=True))
            parts.append(_first(self._parts[start](*part), size))
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


def _rows(x: Tensor, samples: Tensor, each: int) -> Tensor:
    """Take samples, which have `each` rows."""
    return x.unflatten(0, (-1, each)).index_select(0, samples.to(x.device)).flatten(0, 1)


def _first(output: Tensor | Sequence[Tensor], size: int) -> Tensor:
    if not isinstance(output, Tensor):
        raise UserError(
            "a component with several outputs cannot run a batch in parts",
            expected="a denoiser, with one output",
            got=f"{len(output)} outputs",
            remedy="call the component with batches of its signature",
        )
    return output[:size]
