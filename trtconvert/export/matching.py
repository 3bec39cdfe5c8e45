"""Queries of graphs for rewrites."""

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
"""Lossless casts: (from, to)."""
_FLOATS = {dtype for pair in _WIDENING for dtype in pair}


def producer_of(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Returns the producer of a value if it is the given standard operator."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def producer_behind_reshapes(value: ir.Value | None) -> ir.Node | None:
    """Returns the producer of a value before reshapes."""
    while (reshape := producer_of(value, "Reshape")) is not None:
        value = reshape.inputs[0]
    return value.producer() if value is not None else None


def is_read_once(value: ir.Value) -> bool:
    """Return whether a value has exactly one use."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """Returns the only reader of a value if it is the given standard operator."""
    if not is_read_once(value):
        return None
    ((reader, _),) = value.uses()
    return reader if reader.op_type == op_type and not reader.domain else None


def perm_of(transpose: ir.Node) -> list[int]:
    """Returns the permutation of a Transpose."""
    return list(transpose.attributes["perm"].as_ints())


def constant_of(value: ir.Value | None) -> np.ndarray | None:
    """Returns the numbers of a constant value, else None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return tensor.numpy() if tensor is not None else None


def without_casts(value: ir.Value | None) -> ir.Value | None:
    """Returns a value before casts between floating-point types."""
    while (cast := producer_of(value, "Cast")) is not None and {cast.inputs[0].dtype, value.dtype} <= _FLOATS:  # type: ignore[union-attr]
        value = cast.inputs[0]
    return value


def before_widening(value: ir.Value | None) -> ir.Value | None:
    """Returns a value before lossless casts."""
    while (cast := producer_of(value, "Cast")) is not None and (cast.inputs[0].dtype, value.dtype) in _WIDENING:  # type: ignore[union-attr]
        value = cast.inputs[0]
    return value


def is_same_shape(
    a: Sequence[int | ir.SymbolicDim] | ir.Shape | None, b: Sequence[int | ir.SymbolicDim] | ir.Shape | None
) -> bool:
    """Return whether two shapes are known and equal. Symbolic dimensions compare by name."""
    if a is None or b is None or any(isinstance(size, ir.SymbolicDim) and size.value is None for size in a):
        return False
    return list(a) == list(b)


def axes_of(value: ir.Value | None, rank: int) -> list[int] | None:
    """Returns the non-negative axes of a constant value, else None."""
    axes = constant_of(value)
    return None if axes is None else [int(axis) % rank for axis in axes.ravel()]


def element_of(value: ir.Value | None) -> tuple[ir.Value, int, int] | None:
    """Returns (tensor, axis, index) if a value is `tensor.select(axis, index)`."""
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
    if len(cut.inputs) < 4:  # no axes: all axes
        return None
    rank = len(source.shape)
    axes, squeezed = axes_of(cut.inputs[3], rank), axes_of(squeeze.inputs[1], rank)
    start, end = constant_of(cut.inputs[1]), constant_of(cut.inputs[2])
    if axes is None or len(axes) != 1 or squeezed != axes or start is None or end is None or end[0] != start[0] + 1:
        return None
    return source, axes[0], int(start[0])


Run = tuple[ir.Value, int | ir.Value | None, int | ir.Value | None]
"""A slice of a tensor along an axis: the tensor, start and stop. Bounds are numbers or values."""


def cuts_of(parts: Sequence[ir.Value], axis: int) -> list[Run]:
    """Returns the slices if the parts are consecutive slices of one tensor along an axis, else [].

    Positions are non-negative if the size is known, else as in the Slice nodes.
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
    """Yields the two factors of a product in both orders, nothing for other values."""
    product = producer_of(without_casts(value), "Mul")
    for a, b in itertools.permutations(product.inputs if product is not None else (), 2):
        if a is not None and b is not None:
            yield a, b


def geglu_behind(joined: ir.Value) -> tuple[ir.Node, ir.Node, ir.Node] | None:
    """Returns Split, Gelu and Mul of a GEGLU if a value [..., 2 N] holds both halves of its input."""
    split = only_reader(joined, "Split")
    if split is None or len(split.outputs) != 2:
        return None
    value, gate = split.outputs
    gelu, product = only_reader(gate, "Gelu"), only_reader(value, "Mul")
    if gelu is None or product is None or gelu.attributes.get_string("approximate", "none") != "none":
        return None
    whole, half = joined.shape, product.outputs[0].shape
    if only_reader(gelu.outputs[0], "Mul") is not product or whole is None or half is None:
        return None
    if split.attributes.get_int("axis", 0) % len(whole) != len(whole) - 1 or whole[-1] != 2 * half[-1]:
        return None
    return split, gelu, product
