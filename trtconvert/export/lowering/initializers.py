"""Constants that lowerings add to a graph."""

from __future__ import annotations

import onnx_ir as ir


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """A tensor as an initializer of its name, which no other may have."""
    assert isinstance(tensor.shape, ir.Shape)
    value = ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
    graph.register_initializer(value)
    return value


def rows_of(graph: ir.Graph, weight: ir.Value, start: int, count: int) -> ir.Value:
    """Rows of a matrix, or numbers of a vector, as an initializer, where these lie: in the model's files, or in memory."""
    tensor = weight.const_value
    assert tensor is not None and tensor.dtype is not None
    name = f"{weight.name}, {count} rows from {start}"
    if name in graph.initializers:  # a module that is called twice
        return graph.initializers[name]
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
