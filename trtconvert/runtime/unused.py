"""Placeholders for results that the pipeline did not read during the conversion; they have a shape but no values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from trtconvert.errors import UserError

_SIZE_ONLY = {
    *("shape", "size", "numel", "dim", "ndim", "ndimension", "__len__"),
    *("dtype", "is_floating_point", "device", "is_meta", "is_cuda", "is_cpu", "requires_grad"),
}
"""Attributes and methods of a tensor that do not read its values."""

_MOVES = {"to", "cpu", "cuda"}
"""Methods that accelerate's hooks call on every result; a placeholder stays as it is."""


def looks_into(function: Callable[..., Any]) -> bool:
    """Return whether a function of `__torch_function__` reads the values of its tensors."""
    return _name(function) not in _SIZE_ONLY


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    return getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else name


class UnusedResult(Tensor):
    """A meta tensor that raises an error if its values are read.

    Attributes:
        component: name of the component; result: name of the result, such as "hidden_states.1".
    """

    component: str
    result: str

    @classmethod
    def of(cls, component: str, result: str, shape: Sequence[int]) -> UnusedResult:
        """Make a placeholder with a shape."""
        made = torch.empty(tuple(shape), device="meta").as_subclass(cls)
        made.component, made.result = component, result
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Apply a function, or raise UserError if it reads the values."""
        if _name(func) in _MOVES:
            return args[0]
        if not looks_into(func):
            return super().__torch_function__(func, types, args, kwargs)
        unused = next(x for x in tree_leaves((args, kwargs or {})) if isinstance(x, cls))
        raise UserError(
            f"the pipeline reads '{unused.result}' of {unused.component}, which it did not read during the conversion",
            expected="a call that reads the same results as in the conversion",
            got=f"'{_name(func)}' of a placeholder without values",
            remedy="call the pipeline as in the conversion, or set the argument that needs this result (for example clip_skip) "
            "under model.options.call in the recipe and build again",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}('{self.result}' of {self.component}, shape {list(self.shape)})"

    def __format__(self, format_spec: Any) -> str:
        return format(repr(self), format_spec)
