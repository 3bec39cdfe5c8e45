"""Constants that lowerings add to a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from trtconvert.export.lowering.int8_weights import Activation, Int8Weight
from trtconvert.export.storage import numbers_of, row_major


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Adds a tensor as an initializer of its name, which must be new."""
    assert isinstance(tensor.shape, ir.Shape)
    value = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
    graph.register_initializer(value)
    return value


def named_constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Returns the initializer of a name of ours, or adds one. Names are reused: a module may be called twice."""
    name = f"trtconvert/{name}"
    if name in graph.initializers:
        return graph.initializers[name]
    return add_initializer(graph, ir.Tensor(np.asarray(array, order="C"), name=name))


def lazy_initializer(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int] | ir.Shape, numbers: Callable[[], np.ndarray]
) -> ir.Value:
    """Returns the initializer of a name, or adds one. A new one computes its numbers when they are written.

    Names are reused: a module may be called twice.
    """
    if name in graph.initializers:
        return graph.initializers[name]

    def computed() -> ir.Tensor:
        return ir.Tensor(row_major(numbers()), dtype=dtype)

    return add_initializer(graph, ir.LazyTensor(computed, dtype, ir.Shape(shape), name=name))


def concatenated(graph: ir.Graph, name: str, tensors: Sequence[ir.TensorProtocol], axis: int) -> ir.Value:
    """Returns tensors one behind the other along an axis, as the initializer of a name, see `lazy_initializer`."""
    shape = [int(size) for size in tensors[0].shape]  # type: ignore[arg-type]
    shape[axis] = sum(int(tensor.shape[axis]) for tensor in tensors)  # type: ignore[arg-type]
    return lazy_initializer(
        graph, name, tensors[0].dtype, shape, lambda: np.concatenate([*map(numbers_of, tensors)], axis)
    )


def packed(graph: ir.Graph, name: str, shape: Sequence[int], integers: Callable[[], np.ndarray]) -> ir.Value:
    """Returns INT8 numbers as the initializer of a name, INT32 of a shape: four neighbours in each."""
    return lazy_initializer(
        graph, name, ir.DataType.INT32, shape, lambda: row_major(integers()).view(np.int32).reshape(shape)
    )


def scales_of_bins(graph: ir.Graph, activation: Activation) -> list[ir.Value]:
    """Returns the timestep and the scales of the timestep bins, or one scale alone if all are equal."""
    timed = len(set(activation.scales)) > 1
    scales = np.array(activation.scales if timed else activation.scales[:1], np.float32)
    table = named_constant(graph, f"{activation.input_group}: scales of {len(scales)} bins", scales)
    if not timed:
        return [table]
    assert activation.timestep is not None
    return [activation.timestep, table]


def rows_of(graph: ir.Graph, weight: ir.Value, start: int, count: int) -> ir.Value:
    """Returns rows of a matrix or vector as an initializer. External rows stay in their file."""
    tensor = weight.const_value
    assert tensor is not None and tensor.dtype is not None
    name = f"{weight.name}, {count} rows from {start}"
    if name in graph.initializers:
        return graph.initializers[name]
    if isinstance(tensor, Int8Weight):
        return add_initializer(graph, tensor.part(name, 0, start, count))
    shape = ir.Shape([count, *tensor.shape[1:]])  # type: ignore[arg-type]
    if not isinstance(tensor, ir.ExternalTensor):
        return lazy_initializer(graph, name, tensor.dtype, shape, lambda: numbers_of(tensor)[start : start + count])
    row = tensor.nbytes // tensor.shape.numpy()[0]
    offset = (tensor.offset or 0) + start * row
    rows = ir.ExternalTensor(
        tensor.location, offset, count * row, tensor.dtype, shape=shape, name=name, base_dir=tensor.base_dir
    )
    return add_initializer(graph, rows)


def columns_of(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    """Returns a convolution's weight [O, C, *patch] as the matrix [C·patch, O]."""
    tensor = weight.const_value
    assert tensor is not None
    out = int(tensor.shape[0])  # type: ignore[arg-type]
    shape = (tensor.size // out, out)
    return changed_initializer(graph, weight, "as columns", shape, lambda kernel: kernel.reshape(out, -1).T, axis=1)


def changed_initializer(
    graph: ir.Graph,
    value: ir.Value,
    how: str,
    shape: tuple[int, ...],
    change: Callable[[np.ndarray], np.ndarray],
    dtype: ir.DataType | None = None,
    axis: int | None = None,
) -> ir.Value:
    """Returns a changed constant as an initializer, see `lazy_initializer`.

    Args:
        how: describes the change, for the name.
        shape: of the result.
        dtype: of the result, if it differs.
        axis: output channels of the result. If given, weights of INT8 layers stay `Int8Weight`.
    """
    tensor = value.const_value
    assert tensor is not None and tensor.dtype is not None
    dtype = dtype or tensor.dtype
    name = f"{value.name}, {how}"
    if axis is not None and isinstance(tensor, Int8Weight) and name not in graph.initializers:
        return add_initializer(graph, tensor.changed(name, change, shape, axis))

    return lazy_initializer(graph, name, dtype, shape, lambda: change(numbers_of(tensor)).reshape(shape))
