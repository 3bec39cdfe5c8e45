"""Compares the arguments of a sample in a call of two samples with those of the sample alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_SAME = 1e-3
"""Largest relative difference between the arguments of one sample in calls of different batches."""


def is_second_of(both: Mapping[str, Any], alone: Mapping[str, Any]) -> bool:
    """Returns whether the second of two samples gets the arguments that the sample gets alone. See `changed_argument`."""
    pairs = [(x, one) for _, x, one in _pairs(both, alone)]
    if not _holds_both(both, alone):
        return False
    samples = len(pairs[0][1])
    if any(len(x) == len(one) == samples > 1 for x, one in pairs):
        return False  # rows for the halves of guidance alone, which two samples cannot share
    return not changed_argument(both, alone)


def changed_argument(both: Mapping[str, Any], alone: Mapping[str, Any]) -> str:
    """Returns an argument that is another one for a sample in a call of two than for the sample alone; "" for none.

    Tensors of as many rows must have the rows of the two samples in one order: Panorama's noisy samples are in the order of
    samples and its prompts in the order of guidance, so that each sample meets prompts of the other.

    Args:
        both, alone: arguments of a model's call, by parameter; the sample is the second of both.
    """
    if not _holds_both(both, alone):
        return ""  # a call of some frames, for example
    orders: dict[int, set[int]] = {}
    for name, x, one in _pairs(both, alone):
        if len(x) == 2 * len(one):
            found = _orders(x, one)
            orders[len(one)] = orders.get(len(one), found) & found
            if not orders[len(one)]:
                return name
    return ""


def _holds_both(both: Mapping[str, Any], alone: Mapping[str, Any]) -> bool:
    """Returns whether there are twice as many noisy samples in the call of two."""
    _, x, one = next(_pairs(both, alone), ("", (), ()))
    return len(x) == 2 * len(one) > 0


def _pairs(both: Mapping[str, Any], alone: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the tensors with rows in both calls, with the names of their arguments."""
    for name, one in alone.items():
        x = both.get(name)
        if isinstance(x, list) and isinstance(one, list) and len(x) == 2 * len(one) > 0:  # a list of samples
            rows = [*x, *one]
            if not all(isinstance(row, Tensor) and row.shape == x[0].shape for row in rows):
                continue
            x, one = torch.stack(x), torch.stack(one)
        for of_both, of_one in zip(tree_leaves(x), tree_leaves(one), strict=False):
            tensors = isinstance(of_both, Tensor) and isinstance(of_one, Tensor)
            if tensors and of_one.dim() and of_both.shape[1:] == of_one.shape[1:]:
                yield name, of_both, of_one


def _orders(both: Tensor, alone: Tensor) -> set[int]:
    """Returns the numbers of blocks of rows for which the second sample's rows equal those of the sample alone. Guidance makes a
    block for each half. A sample of several frames has one row for each frame in every block."""
    rows, own = len(alone), alone.double()

    def second(blocks: int) -> Tensor:
        return both.unflatten(0, (blocks, 2, -1))[:, 1].flatten(0, 1).double()

    def same(x: Tensor) -> bool:
        apart = (x != own) & ~(x.isnan() & own.isnan())  # a mask may have -Inf, whose difference from itself is NaN
        return bool((x - own)[apart].norm() <= _SAME * own[own.isfinite()].norm())

    return {blocks for blocks in range(1, rows + 1) if not rows % blocks and same(second(blocks))}
