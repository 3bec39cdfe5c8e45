"""What rewrites ask of a graph: what made a value, which number it is, which tensor it is a part of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

_WIDENING = {
    (ir.DataType.FLOAT16, ir.DataType.FLOAT),
    (ir.DataType.FLOAT16, ir.DataType.DOUBLE),
    (ir.DataType.BFLOAT16, ir.DataType.FLOAT),
    (ir.DataType.BFLOAT16, ir.DataType.DOUBLE),
    (ir.DataType.FLOAT, ir.DataType.DOUBLE),
}
"""Casts, from and to, that change no number."""
_FLOATS = {dtype for pair in _WIDENING for dtype in pair}


def producer_of(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that computes a value, if it is of one of ONNX's own operators."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def is_read_once(value: ir.Value) -> bool:
    """Whether one input of one node is all that needs a value."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """What is done with a value, if that is one operator of ONNX's own."""
    if not is_read_once(value):
        return None
    ((reader, _),) = value.uses()
    return reader if reader.op_type == op_type and not reader.domain else None


def perm_of(transpose: ir.Node) -> list[int]:
    """The axes of a Transpose's input, in the order of its output."""
    return list(transpose.attributes["perm"].as_ints())


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """A value's numbers, if they are known."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return tensor.numpy() if tensor is not None else None


def without_casts(value: ir.Value | None) -> ir.Value | None:
    """A value before casts from one floating-point type to another."""
    while (cast := producer_of(value, "Cast")) is not None and {cast.inputs[0].dtype, value.dtype} <= _FLOATS:  # type: ignore[union-attr]
        value = cast.inputs[0]
    return value


def before_widening(value: ir.Value | None) -> ir.Value | None:
    """A value before casts that change no number."""
    while (cast := producer_of(value, "Cast")) is not None and (cast.inputs[0].dtype, value.dtype) in _WIDENING:  # type: ignore[union-attr]
        value = cast.inputs[0]
    return value


def is_same_shape(
    a: Sequence[int | ir.SymbolicDim] | ir.Shape | None, b: Sequence[int | ir.SymbolicDim] | ir.Shape | None
) -> bool:
    """Whether two shapes are known, and the same. Dimensions that vary are known by their names."""
    if a is None or b is None or any(isinstance(size, ir.SymbolicDim) and size.value is None for size in a):
        return False
    return list(a) == list(b)


def axes_of(value: ir.Value | None, rank: int) -> list[int] | None:
    """Axes that a value names, if it is known, counted from the first of as many as the rank."""
    axes = constant_of(value)
    return None if axes is None else [int(axis) % rank for axis in axes.ravel()]


def element_of(value: ir.Value | None) -> tuple[ir.Value, int, int] | None:
    """The tensor that a value is an element of, along which axis, and which: `tensor.select(axis, index)`."""
    gather, squeeze = producer_of(value, "Gather"), producer_of(value, "Squeeze")
    if gather is not None:
        source, index = gather.inputs[0], constant_of(gather.inputs[1])
        if source is None or source.shape is None or index is None or index.ndim:
            return None
        return source, gather.attributes.get_int("axis", 0) % len(source.shape), int(index)
    cut = producer_of(squeeze.inputs[0], "Slice") if squeeze is not None else None
    source = cut.inputs[0] if cut is not None else None
    if squeeze is None or cut is None or source is None or source.shape is None or len(squeeze.inputs) < 2:
        return None
    if len(cut.inputs) < 4:  # without axes: all of them
        return None
    rank = len(source.shape)
    axes, squeezed = axes_of(cut.inputs[3], rank), axes_of(squeeze.inputs[1], rank)
    start, end = constant_of(cut.inputs[1]), constant_of(cut.inputs[2])
    if axes is None or len(axes) != 1 or squeezed != axes or start is None or end is None or end[0] != start[0] + 1:
        return None
    return source, axes[0], int(start[0])


Run = tuple[ir.Value, int | ir.Value | None, int | ir.Value | None]
"""Of a tensor, neighbours along an axis, and between which positions they lie: a number, or what computes it."""


def cuts_of(parts: Sequence[ir.Value], axis: int) -> list[Run]:
    """What parts are of one tensor if they are slices of it along an axis, each beginning where the one before ends; else none.

    Positions are counted from the first where it is known how many there are, else as the slices say them.
    """
    runs = [_run(part, axis) for part in parts]
    known = [run for run in runs if run is not None]
    follow = all(a[0] is b[0] and a[2] == b[1] for a, b in itertools.pairwise(known))
    return known if len(known) == len(runs) and follow else []


def _run(value: ir.Value, axis: int) -> Run | None:
    cut = producer_of(value, "Slice")
    data = cut.inputs[0] if cut is not None else None
    if cut is None or data is None or data.shape is None or len(cut.inputs) < 4:  # without axes: all of them
        return None
    step = constant_of(cut.inputs[4]) if len(cut.inputs) > 4 else np.ones(1)
    if axes_of(cut.inputs[3], len(data.shape)) != [axis] or step is None or step.item() != 1:
        return None
    start, stop = (_position(bound, data.shape[axis]) for bound in cut.inputs[1:3])
    return data, start, stop


def _position(bound: ir.Value | None, size: int | ir.SymbolicDim) -> int | ir.Value | None:
    number = constant_of(bound)
    if number is None:
        return bound
    return slice(number.item()).indices(size)[1] if isinstance(size, int) else int(number.item())


def factors_of(value: ir.Value | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The two factors of a product, in both orders; nothing for other values."""
    product = producer_of(without_casts(value), "Mul")
    for a, b in itertools.permutations(product.inputs if product is not None else (), 2):
        if a is not None and b is not None:
            yield a, b
