"""Arithmetic on sizes: computes a graph's steps on shapes, in numbers that are known while the graph is traced.

A value of few numbers is a numpy array of Python objects: int, float, bool, or torch.export's symbols. The rules are those of
ONNX's operators, on at most one axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from trtconvert.models.onnx.steps import Step

MOST = 256
"""Largest count of numbers in an array; more become a tensor."""

Numbers = np.ndarray
"""An array of objects, of at most one axis."""


def numbers(values: Any, shape: Sequence[int] | None = None) -> Numbers:
    """Returns an array of objects. `np.array` would ask symbols for their length."""
    flat = list(values)
    array = np.empty(len(flat), dtype=object)
    for place, value in enumerate(flat):
        array[place] = value
    return array if shape is None else array.reshape(shape)


def compute(step: Step, inputs: Sequence[Numbers | None]) -> Numbers | list[Numbers] | None:
    """Computes a step on numbers; None if it is not known here, and needs tensors."""
    function = _OPERATORS.get(step.op)
    return None if function is None else function(step, *inputs)


def listed(array: Numbers) -> list[Any]:
    return list(array.ravel())


def _each(function: Callable[..., Any]) -> Callable[..., Numbers]:
    def computed(_: Step, *arrays: Numbers) -> Numbers:
        broadcast = np.broadcast_arrays(*arrays)
        return numbers(map(function, *(x.ravel() for x in broadcast)), broadcast[0].shape)

    return computed


def _divided(a: Any, b: Any) -> Any:
    if isinstance(a, (float, torch.SymFloat)) or isinstance(b, (float, torch.SymFloat)):
        return a / b
    negative = isinstance(a, int) and isinstance(b, int) and (a < 0) != (b < 0)
    return -(-a // b) if negative else a // b  # ONNX rounds towards zero; symbols are not negative


def _root(x: Any) -> Any:
    return torch.sym_sqrt(x) if isinstance(x, (torch.SymInt, torch.SymFloat)) else math.sqrt(x)  # pyright: ignore


def _cast(step: Step, x: Numbers) -> Numbers | None:
    kind = step.attributes["to"]
    to = {
        1: torch.sym_float,
        10: torch.sym_float,
        11: torch.sym_float,
        16: torch.sym_float,
        6: _whole,
        7: _whole,
        9: bool,
    }
    return numbers(map(to[kind], listed(x)), x.shape) if kind in to else None


def _whole(x: Any) -> Any:
    return torch.sym_int(x) if isinstance(x, (bool, float, torch.SymFloat)) else x


def _gather(step: Step, x: Numbers, index: Numbers) -> Numbers:
    return numbers([x[int(i)] for i in listed(index)], index.shape)


def _slice(_: Step, x: Numbers, *bounds: Numbers | None) -> Numbers | None:
    start, end, _axes, stride = (*bounds, None, None)[:4]
    given = [None if b is None else listed(b)[0] for b in (start, end, stride)]
    if x.ndim != 1 or not all(b is None or isinstance(b, int) for b in given):
        return None
    return x[slice(given[0], given[1], given[2])] if given[2] is None or given[2] > 0 else _reversed(x, *given)


def _reversed(x: Numbers, start: Any, end: Any, stride: Any) -> Numbers:
    # An end before the first element is a large negative number in ONNX, which Python would count from the end.
    low = len(x)
    return x[slice(start, None if end < -low else end, stride)]


def _concatenated(_: Step, *parts: Numbers) -> Numbers:
    return numbers([value for part in parts for value in listed(part)])


def _unsqueezed(_: Step, x: Numbers, axes: Numbers | None = None) -> Numbers | None:
    return x.reshape(1) if x.ndim == 0 else None


def _squeezed(_: Step, x: Numbers, axes: Numbers | None = None) -> Numbers | None:
    return x.reshape(()) if x.size == 1 else x if axes is None else None


def _reshaped(_: Step, x: Numbers, shape: Numbers) -> Numbers | None:
    wanted = listed(shape)
    if len(wanted) > 1 or not all(isinstance(size, int) for size in wanted):
        return None
    return x.reshape(wanted)


def _chosen(_: Step, condition: Numbers, a: Numbers, b: Numbers) -> Numbers:
    broadcast = np.broadcast_arrays(condition, a, b)
    pairs = zip(*(x.ravel() for x in broadcast), strict=True)
    return numbers([x if bool(c) else y for c, x, y in pairs], broadcast[0].shape)


def _filled(step: Step, shape: Numbers) -> Numbers | None:
    sizes, value = listed(shape), step.attributes.get("value")
    if len(sizes) > 1 or not all(isinstance(size, int) and size <= MOST for size in sizes):
        return None
    number = 0.0 if value is None else value.ravel()[0].item()
    return numbers([number] * math.prod(sizes), sizes) if isinstance(number, int) else None


def _product(step: Step, x: Numbers, axes: Numbers | None = None) -> Numbers | None:
    return numbers([math.prod(listed(x))], [1] * x.ndim if step.attributes.get("keepdims", 1) else [])


def _split(step: Step, x: Numbers, parts: Numbers | None = None) -> list[Numbers] | None:
    lengths = step.attributes.get("split") if parts is None else listed(parts)
    if lengths is None:
        even = -(-len(x) // len(step.outputs))
        lengths = [min(even, len(x) - even * i) for i in range(len(step.outputs))]
    if not all(isinstance(length, int) for length in lengths):
        return None
    ends = np.cumsum(lengths)
    return [x[end - length : end] for end, length in zip(ends, lengths, strict=True)]


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Add": _each(operator.add),
    "Sub": _each(operator.sub),
    "Mul": _each(operator.mul),
    "Div": _each(_divided),
    "Mod": _each(operator.mod),
    "Pow": _each(operator.pow),
    "Neg": _each(operator.neg),
    "Abs": _each(abs),
    "Floor": _each(math.floor),
    "Ceil": _each(math.ceil),
    "Sqrt": _each(_root),
    "Reciprocal": _each(lambda x: 1 / x),
    "Min": _each(lambda *values: reduce(torch.sym_min, values)),
    "Max": _each(lambda *values: reduce(torch.sym_max, values)),
    "Equal": _each(operator.eq),
    "Less": _each(operator.lt),
    "LessOrEqual": _each(operator.le),
    "Greater": _each(operator.gt),
    "GreaterOrEqual": _each(operator.ge),
    "Not": _each(operator.not_),
    "And": _each(lambda a, b: bool(a) and bool(b)),
    "Or": _each(lambda a, b: bool(a) or bool(b)),
    "Identity": _each(lambda x: x),
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concatenated,
    "Unsqueeze": _unsqueezed,
    "Squeeze": _squeezed,
    "Reshape": _reshaped,
    "Where": _chosen,
    "ConstantOfShape": _filled,
    "ReduceProd": _product,
    "Split": _split,
}
