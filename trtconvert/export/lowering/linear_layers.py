"""Fuses linear layers between plugins, and gated MLPs (GEGLU), into plugins.

Between plugins TensorRT's products have nothing to fuse with, and zero memory before most of them. GEGLU becomes two products of
one tensor and a multiplication. The plugin's kernels are faster there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import cleaned, graph_of, replace_nodes
from trtconvert.export.lowering.initializers import changed_initializer
from trtconvert.export.lowering.int8_layers import INT8_LINEAR, INT8_RESIDUAL_NORM, QUANTISE_ROWS
from trtconvert.export.lowering.int8_weights import int8_weight_of
from trtconvert.export.lowering.projections import bias_behind, is_weight
from trtconvert.export.lowering.residual_norms import RESIDUAL_NORM
from trtconvert.export.matching import geglu_behind, producer_behind_reshapes
from trtconvert.export.nodes.attention import is_attention
from trtconvert.export.nodes.common import DOMAIN, HALF, PLUGIN

LINEAR = "Linear"
"""Operator of the plugin: x [..., K], weight [N, K], optional bias [N] → x @ weightᵀ + bias. With the attribute `geglu`: weight
[2, N, K], optional bias [2, N] → the first layer's result times the GELU of the second's."""

_MOST_CHANNELS = 65536  # of linear.h
_VECTOR = 8  # the kernel wants multiples of so many channels
_FEWEST_ROWS = 1024
_FEWEST_OUTPUTS = 2**21
"""Below these limits the kernel, which does not split the depth, leaves multiprocessors idle."""
_MOST_OUTPUTS = 6 * 132 * 128 * 160
"""Six tiles of the kernel for each multiprocessor of an H100 or H200. For larger products TensorRT's choice of kernels wins."""


@dataclass(frozen=True)
class _Layer:
    """x @ weight (+ bias), or GEGLU of it.

    Attributes:
        x: [..., K]; weight: [K, N] and bias: [N], constants of x's type; with geglu of 2 N columns.
        nodes: that compute the result, the last one last.
    """

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    nodes: tuple[ir.Node, ...]
    geglu: bool = False

    @property
    def result(self) -> ir.Value:
        return self.nodes[-1].outputs[0]


def fuse_linear_layers(model: ir.Model, profiles: Sequence[Mapping[str, int]], *, beside_int8: bool = False) -> int:
    """Replaces GEGLU, and linear layers that only plugins read, by nodes `Linear`, in place.

    Replaces 16-bit layers behind a plugin or a layer norm, because TensorRT does not fuse these, if the kernel is no slower at
    their size. Weights are transposed and renamed: not for refittable engines. Runs after `fuse_residual_norms`.

    Args:
        profiles: opt sizes of the dynamic dimensions in each optimisation profile.
        beside_int8: also take layers with INT8 weights, which `fuse_int8_layers` left in 16 bits.
    Returns:
        The number of new nodes.
    """
    count = 0
    for find in (_geglu, _alone):  # layers may read GEGLU
        candidates = [layer for node in model.graph if (layer := find(node, beside_int8)) is not None]
        found = [layer for layer in candidates if _pays(layer, profiles)]
        for layer in found:
            _replace(layer)
        count += len(found)
    for node in model.graph:
        if node.op_type == RESIDUAL_NORM and any(_is_linear(value) for value in node.inputs[:2]):
            # The layer's kernel leaves little room on the GPU.
            node.attributes["starts_early"] = ir.AttrInt64("starts_early", 1)
    return cleaned(model, count)


def _alone(matmul: ir.Node, beside_int8: bool) -> _Layer | None:
    layer = _layer(matmul, beside_int8)
    readers = list(_readers(layer.result)) if layer is not None else []
    return layer if readers and all(_is_plugin(node) for node in readers) else None


def _geglu(matmul: ir.Node, beside_int8: bool) -> _Layer | None:
    layer = _layer(matmul, beside_int8)
    geglu = geglu_behind(layer.result) if layer is not None else None
    if layer is None or geglu is None:
        return None
    split, _, product = geglu
    value, gate = split.outputs
    shape = product.outputs[0].shape
    half = shape[-1] if shape is not None else None
    if product.outputs[0].is_graph_output() or value.shape != gate.shape or not isinstance(half, int) or half % _VECTOR:
        return None
    return replace(layer, nodes=(*layer.nodes, *geglu), geglu=True)


def _layer(matmul: ir.Node, beside_int8: bool) -> _Layer | None:
    """Matches a linear layer of supported sizes behind a plugin or a layer norm."""
    if matmul.op_type != "MatMul" or matmul.domain:
        return None
    x, weight = matmul.inputs
    product = matmul.outputs[0]
    if x is None or weight is None or x.dtype not in HALF or weight.dtype != x.dtype:
        return None
    width = product.shape[-1] if product.shape is not None else None
    if not isinstance(width, int) or not is_weight(weight, 2, width) or not _is_border(x):
        return None
    if not beside_int8 and (in_int8 := int8_weight_of(weight)) is not None and in_int8.activation.is_int8:
        return None
    assert weight.const_value is not None
    depth = weight.const_value.shape[0]
    if any(not isinstance(size, int) or size % _VECTOR or size > _MOST_CHANNELS for size in (width, depth)):
        return None
    bias, add = bias_behind(product, width)
    return _Layer(x, weight, bias, (matmul,) if add is None else (matmul, add))


def _is_plugin(node: ir.Node | None) -> bool:
    return is_attention(node) or (
        node is not None
        and node.domain == DOMAIN
        and node.op_type in (LINEAR, RESIDUAL_NORM, INT8_LINEAR, INT8_RESIDUAL_NORM, QUANTISE_ROWS)
    )


def _is_linear(value: ir.Value | None) -> bool:
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == LINEAR


def _is_border(value: ir.Value) -> bool:
    """Return whether a plugin or a layer norm computes a value."""
    producer = producer_behind_reshapes(value)
    return _is_plugin(producer) or (producer is not None and producer.op_type == "LayerNormalization")


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Yields the readers of a value through reshapes; none for outputs of the graph."""
    if value.is_graph_output():
        return
    for reader, _ in value.uses():
        if reader.op_type == "Reshape" and not reader.domain:
            yield from _readers(reader.outputs[0])
        else:
            yield reader


def _pays(layer: _Layer, profiles: Sequence[Mapping[str, int]]) -> bool:
    """Return whether the kernel is no slower in each profile."""
    shape = layer.result.shape
    assert shape is not None
    for sizes in profiles:
        known = shape.evaluate(sizes)
        if not known.is_static():
            return False
        *leading, width = known.numpy()
        rows, outputs = math.prod(leading), math.prod(leading) * width
        if rows < _FEWEST_ROWS or outputs < _FEWEST_OUTPUTS or (outputs > _MOST_OUTPUTS and not layer.geglu):
            return False
    return True


def _replace(layer: _Layer) -> None:
    graph = graph_of(layer.nodes[-1])
    inputs = [layer.x, _turned(graph, layer.weight, layer.geglu)]
    if layer.bias is not None:
        inputs.append(_in_two(graph, layer.bias) if layer.geglu else layer.bias)
    attributes = {"geglu": int(layer.geglu)} | PLUGIN
    replace_nodes(layer.nodes, [ir.node(LINEAR, inputs, attributes, domain=DOMAIN)])


def _turned(graph: ir.Graph, weight: ir.Value, in_two: bool) -> ir.Value:
    """Returns a matrix [K, N] as [N, K], or [K, 2 N] as [2, N, K]."""
    assert weight.const_value is not None
    depth, width = weight.const_value.shape.numpy()  # type: ignore[union-attr]
    shape = (2, width // 2, depth) if in_two else (width, depth)
    return changed_initializer(graph, weight, "transposed in two" if in_two else "transposed", shape, np.transpose)


def _in_two(graph: ir.Graph, bias: ir.Value) -> ir.Value:
    """Returns a vector [2 N] as [2, N]."""
    assert bias.const_value is not None
    return changed_initializer(graph, bias, "in two", (2, bias.const_value.shape.numpy()[0] // 2), np.ravel)  # type: ignore[union-attr]
