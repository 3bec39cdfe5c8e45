"""Results of a model that its pipeline did not look into when it was converted: they have a shape and nothing in them."""

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
"""Attributes and methods of a tensor that do not look into it."""


_MOVES = {"to", "cpu", "cuda"}
"""Methods that accelerate's hooks call on every result, and that leave nothing as it is."""


def looks_into(function: Callable[..., Any]) -> bool:
    """Whether a function, as `__torch_function__` gets it, looks into the tensors that it is called with."""
    return _name(function) not in _SIZE_ONLY


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "")
    return getattr(getattr(function, "__self__", None), "__name__", "") if name == "__get__" else name


class UnusedResult(Tensor):
    """A tensor of the meta device that says what it is when it is looked into.

    Attributes:
        component: what gives it; result: its name among the results, "hidden_states.1".
    """

    component: str
    result: str

    @classmethod
    def of(cls, component: str, result: str, shape: Sequence[int]) -> UnusedResult:
        """One of this shape."""
        made = torch.empty(tuple(shape), device="meta").as_subclass(cls)
        made.component, made.result = component, result
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """
        Raises:
            UserError: the function looks into the tensor.
        """
        if _name(func) in _MOVES:
            return args[0]
        if not looks_into(func):
            return super().__torch_function__(func, types, args, kwargs)
        unused = next(x for x in tree_leaves((args, kwargs or {})) if isinstance(x, cls))
        raise UserError(
            f"the pipeline did not look into '{unused.result}' of {unused.component} when it was converted, and does now",
            expected="a call that asks for the same of its models",
            got=f"'{_name(func)}' of a tensor with nothing in it",
            remedy="call the pipeline as it was called for the conversion, or set what asks for it (for example clip_skip) under "
            "model.options.call in the recipe and build again",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}('{self.result}' of {self.component}, shape {list(self.shape)})"

    def __format__(self, format_spec: Any) -> str:
        return format(repr(self), format_spec)
