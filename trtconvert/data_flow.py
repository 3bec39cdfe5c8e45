"""Follows which calls of a forward have a share in its result."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATTENTION, LAYER = "attention", "layer"
"""Kinds of calls, which are named as (kind, name)."""

UNUSED = "the prediction does not depend on its result"
"""The reason to leave a call that exporters drop."""

_MOVES = {torch.ops.aten.cat, torch.ops.aten.clone, torch.ops.aten._to_copy}
"""Operators that copy elements, beside views."""


class DataFlow(TorchDispatchMode):
    """Follows the results of named calls through the operators inside its block.

    Tensors of one storage count as one tensor, so that views and operators in place are followed. A call that is reported as
    unused is unused; a call whose result is read and then multiplied by zero counts as used.

    Attributes:
        unused: names of the calls that the result of the last forward does not depend on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused: set[Hashable] = set()
        self._bits: dict[Hashable, int] = {}
        self._shares: dict[int, int] = {}  # names whose results are in a storage, as bits
        self._attention: set[int] = set()  # storages with results of attention, perhaps moved or copied

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {key: self._shares.get(key, 0) for key in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        share = 0
        for of_input in read.values():
            share |= of_input
        copies = func.overloadpacket in _MOVES and not self._attention.isdisjoint(read)
        for key in _storages(result):
            self._shares[key] = share
            if key not in read:
                (self._attention.add if copies else self._attention.discard)(key)
        if func._schema.is_mutable:
            self._attention.difference_update(read)
            for key in read:
                self._shares[key] = share
        return result

    def name(self, name: tuple[str, str], result: Tensor) -> None:
        """Names the call that computed a tensor."""
        bit = self._bits.setdefault(name, 1 << len(self._bits))
        for key in _storages(result):
            self._shares[key] = self._shares.get(key, 0) | bit
            if name[0] == ATTENTION:
                self._attention.add(key)

    def is_of_attention(self, x: Tensor) -> bool:
        """Returns whether a tensor holds results of attention that were moved or copied, and not computed with."""
        return not self._attention.isdisjoint(_storages(x))

    def end(self, result: Tensor) -> None:
        """Finds the unused calls. result: of the forward."""
        (key,) = _storages(result)
        share = self._shares.get(key, 0)
        self.unused = {name for name, bit in self._bits.items() if not share & bit}
        self._shares.clear()
        self._attention.clear()


def _storages(tree: Any) -> Iterator[int]:
    return (x.untyped_storage()._cdata for x in tree_leaves(tree) if isinstance(x, Tensor))
