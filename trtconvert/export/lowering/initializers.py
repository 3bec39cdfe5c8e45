"""Constants that lowerings add to a graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from trtconvert.export.lowering.int8_weights import Int8Weight


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """A tensor as an initializer of its name, which no other may have."""
    assert isinstance(tensor.shape, ir.Shape)
    value = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
    graph.register_initializer(value)
    return value


def named_constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Numbers as an initializer of a name of ours. One of that name is taken again: a module may be called twice."""
    name = f"trtconvert/{name}"
    if name in graph.initializers:
        return graph.initializers[name]
    return add_initializer(graph, ir.Tensor(np.asarray(array, order="C"), name=name))


def rows_of(graph: ir.Graph, weight: ir.Value, start: int, count: int) -> ir.Value:
    """Rows of a matrix, or numbers of a vector, as an initializer, where these lie: in the model's files, or in memory."""
    tensor = weight.const_value
    assert tensor is not None and tensor.dtype is not None
    name = f"{weight.name}, {count} rows from {start}"
    if name in graph.initializers:  # a module that is called twice
        return graph.initializers[name]
    if isinstance(tensor, Int8Weight):
        return add_initializer(graph, tensor.part(name, 0, start, count))
    shape = ir.Shape([count, *tensor.shape[1:]])  # type: ignore[arg-type]
    if isinstance(tensor, ir.ExternalTensor):
        row = tensor.nbytes // tensor.shape.numpy()[0]
        offset = (tensor.offset or 0) + start * row
        rows: ir.TensorProtocol = ir.ExternalTensor(
            tensor.location, offset, count * row, tensor.dtype, shape=shape, name=name, base_dir=tensor.base_dir
        )
    else:
        rows = ir.LazyTensor(
            lambda: ir.Tensor(tensor.numpy()[start : start + count], dtype=tensor.dtype),
            tensor.dtype,
            shape,
            name=name,
        )
    return add_initializer(graph, rows)


def columns_of(graph: ir.Graph, weight: ir.Value) -> ir.Value:
    """A convolution's weight [O, C, *patch] as the matrix [C·patch, O]."""
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
    """What a constant is changed to, seen in a shape, as an initializer that is computed when it is written.

    Args:
        how: it is changed, for the initializer's name. One of that name is taken again: a module may be called twice.
        dtype: of what it is changed to, where that is another.
        axis: of the output channels then, where a weight of an INT8 layer is to stay one.
    """
    tensor = value.const_value
    assert tensor is not None and tensor.dtype is not None
    dtype = dtype or tensor.dtype
    name = f"{value.name}, {how}"
    if name in graph.initializers:
        return graph.initializers[name]
    if axis is not None and isinstance(tensor, Int8Weight):
        return add_initializer(graph, tensor.changed(name, change, shape, axis))

    def changed() -> ir.Tensor:
        # A copy: the file is let go.
        result = np.array(change(tensor.numpy()), order="C").reshape(shape)
        if isinstance(tensor, ir.ExternalTensor):
            tensor.release()
        return ir.Tensor(result, dtype=dtype)

    return add_initializer(graph, ir.LazyTensor(changed, dtype, ir.Shape(shape), name=name))
