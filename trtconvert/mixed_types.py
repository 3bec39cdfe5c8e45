"""Types under `torch.autocast`; and products and norms of tensors of several types, in models with 16-bit weights, as
`torch.autocast` computes them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")

WITH_AUTOCAST = ("cpu", "cuda")
"""Types of devices with `torch.autocast`. torch.compile of torch 2.11 cannot trace `torch.amp.is_autocast_available`."""


def autocast_type(x: Tensor) -> torch.dtype:
    """Returns the type in which a product takes a tensor: that of `torch.autocast`, where it is on. FP64 stays."""
    kind = x.device.type
    stays = not x.is_floating_point() or x.dtype == torch.float64
    if stays or kind not in WITH_AUTOCAST or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


def as_autocast(x: Tensor) -> Tensor:
    """Returns a tensor in its `autocast_type`."""
    return x.to(autocast_type(x))


def without_autocast(
    function: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """Makes a function compute in the types of its tensors: `torch.autocast` would round its products to 16 bits."""

    @functools.wraps(function)
    def exact(x: Tensor, *args: P.args, **named: P.kwargs) -> R:
        if x.device.type not in WITH_AUTOCAST:
            return function(x, *args, **named)
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args, **named)

    return exact


OF_WEIGHTS = frozenset(
    (
        functional.linear,
        functional.conv1d,
        functional.conv2d,
        functional.conv3d,
        functional.conv_transpose1d,
        functional.conv_transpose2d,
        functional.conv_transpose3d,
        functional.multi_head_attention_forward,
        scaled_dot_product_attention,
        torch.addmm,
        Tensor.addmm,
    )
)
"""Functions whose tensors are converted to the 16-bit type among them."""

_PRODUCTS = frozenset(
    (
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        torch.mm,
        Tensor.mm,
        torch.bmm,
        Tensor.bmm,
        torch.baddbmm,
        Tensor.baddbmm,
        torch.einsum,
    )
)
"""Functions whose tensors are converted to the wider type, as one of them may be a table of positions; products with a matrix of
a layer are converted to its type."""

_NORMS = frozenset(
    (
        functional.layer_norm,
        functional.rms_norm,
        functional.group_norm,
        functional.instance_norm,
        functional.batch_norm,
    )
)
"""Functions whose weights are converted to the type of their input."""


class OneType(TorchFunctionMode):
    """Converts the tensors of products and norms to one type, where a model with 16-bit weights computes some of them in FP32.

    Models compute features of timesteps and of positions in FP32, and run with `torch.autocast`, which converts them. Other
    functions either convert tensors themselves or refuse them.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        named = kwargs or {}
        wanted = None
        if func in OF_WEIGHTS:
            wanted = _narrowest(tensors_in([*args, *named.values()]))
        elif func in _PRODUCTS:
            found = [*tensors_in([*args, *named.values()])]
            wanted = found[1].dtype if is_matrix_product(func, found) else _widest(found)
        elif func in _NORMS and (x := args[0] if args else named["input"]).dtype == torch.float32:
            wanted = x.dtype
        if wanted is not None:
            args, named = (
                [_converted(x, wanted) for x in args],
                {name: _converted(x, wanted) for name, x in named.items()},
            )
        return func(*args, **named)


_FEWEST = 16
"""Least rows of a matrix for a layer in INT8; one of fewer rows may hold the frequencies of features."""


def is_matrix_product(func: Callable[..., Any], tensors: Sequence[Tensor]) -> bool:
    """Returns whether a call multiplies by a matrix of a layer."""
    matrix = len(tensors) == 2 and tensors[1].dim() == 2 and tensors[1].shape[0] >= _FEWEST
    return matrix and func in _PRODUCTS and func is not torch.einsum


def compute_in_one_type(module: nn.Module) -> None:
    """Makes each forward of a module compute within `OneType`."""
    running = threading.local()

    def begin(_module: nn.Module, _inputs: Any) -> None:
        mode = OneType()
        running.modes = [*getattr(running, "modes", ()), mode]
        mode.__enter__()

    def end(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        running.modes.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


def tensors_in(values: Iterable[Any], floating: bool = True) -> Iterable[Tensor]:
    """Yields the tensors among values and their lists. floating: those of floating point alone."""
    for x in values:
        if isinstance(x, (list, tuple)):
            yield from tensors_in(x, floating)
        elif isinstance(x, Tensor) and (x.is_floating_point() or not floating):
            yield x


_OPERATORS = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "matmul",
    "and",
    "or",
    "xor",
    "lshift",
    "rshift",
)
_IN_PLACE = frozenset(("__setitem__", *(f"__i{name}__" for name in _OPERATORS)))


def writes_in_place(func: Callable[..., Any]) -> bool:
    """Returns whether a function of torch writes into its first argument. torch passes most operators by their method: `add_`."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _narrowest(tensors: Iterable[Tensor]) -> torch.dtype | None:
    return min((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize, default=None)


def _widest(tensors: Iterable[Tensor]) -> torch.dtype | None:
    return max((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize, default=None)


def _converted(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_converted(entry, dtype) for entry in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype else x
