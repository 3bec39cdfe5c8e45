"""Widens 16-bit models to FP32: ONNX Runtime has no BF16 on a CPU, and rounds FP16 at every operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from trtconvert.export import storage
from trtconvert.export.nodes.common import HALF
from trtconvert.files import temporary_folder

_FP32 = ir.DataType.FLOAT
_OF_TYPES = ("to", "dtype")
"""Attributes that name a type."""


@contextmanager
def in_float32(path: Path) -> Iterator[Path]:
    """Yields a temporary copy of a model in FP32: weights keep their values, and intermediate results are not rounded."""
    model = ir.load(path)
    widen(model)
    with temporary_folder() as folder:
        copy = folder / path.name
        storage.save(model, copy)
        yield copy


def holds_bfloat16(model: ir.Model) -> bool:
    """Returns whether a model has BF16 values. FP32 and FP16 models may compute attention or an autocast region in BF16."""
    return any(
        value.dtype == ir.DataType.BFLOAT16
        for graph in _graphs(model)
        for values in ((*graph.inputs, *graph.initializers.values()), *(node.outputs for node in _nodes(graph)))
        for value in values
    )


def widen(model: ir.Model) -> None:
    """Widens all 16-bit values to FP32, in place. Weights are read when they are written."""
    for graph in _graphs(model):
        for value in (*graph.inputs, *graph.initializers.values()):
            _widen_value(value)
        for node in _nodes(graph):
            for value in node.outputs:
                _widen_value(value)
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.INT and name in _OF_TYPES and attribute.as_int() in HALF:
                    node.attributes[name] = ir.AttrInt64(name, int(_FP32))
                elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALF:
                    node.attributes[name] = ir.AttrTensor(name, _widened(attribute.as_tensor()))


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    yield model.graph
    yield from (function.graph for function in model.functions.values())


def _nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    return iter(ir.traversal.RecursiveGraphIterator(graph))


def _widen_value(value: ir.Value) -> None:
    if value.const_value is not None and value.const_value.dtype in HALF:
        value.const_value = _widened(value.const_value)
    if value.dtype in HALF:
        value.dtype = _FP32


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    def numbers() -> ir.Tensor:
        return ir.Tensor(storage.numbers_of(tensor).astype(np.float32), dtype=_FP32, name=tensor.name)

    return ir.LazyTensor(numbers, _FP32, ir.Shape(tensor.shape.numpy()), name=tensor.name)  # type: ignore[union-attr]
