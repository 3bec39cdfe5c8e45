"""Linear layers between plugins, and gated MLPs (GEGLU), for a plugin that computes them.

TensorRT's products have costs of their own where a plugin comes behind them: for 2,048 tokens of SDXL's 1,280 channels it zeroes
memory in front of most, and takes 16 µs and 5 beside, the plugin's kernel 13 (H200, kernels of an engine). What TensorRT could
fuse with them it cannot there: all that reads them are plugins. GEGLU takes it two products that each read the same tensor, and a
multiplication besides where a plugin reads what it gives: 89 to 102 µs of 2,048 tokens, 135 of 8,192 with 640 channels. The
plugin's kernel takes 78 and 88.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trtconvert.export.lowering.initializers import changed_initializer
from trtconvert.export.lowering.int8_layers import INT8_LINEAR, INT8_RESIDUAL_NORM, QUANTISE_ROWS
from trtconvert.export.lowering.int8_weights import int8_weight_of
from trtconvert.export.lowering.projections import is_weight
from trtconvert.export.lowering.residual_norms import RESIDUAL_NORM
from trtconvert.export.matching import only_reader
from trtconvert.export.nodes.attention import is_attention
from trtconvert.export.nodes.common import DOMAIN, HALF, PLUGIN

LINEAR = "Linear"
"""Operator of the plugin: x [..., K], weight [N, K], and perhaps bias [N] → x @ weightᵀ + bias. With the attribute `geglu` weight
[2, N, K] and bias [2, N] are of two such layers: the first one's result times the GELU of the second's."""

_MOST_CHANNELS = 65536  # of linear.h
_VECTOR = 8  # channels that the kernel wants rows in whole numbers of
_FEWEST_ROWS = 1024
_FEWEST_OUTPUTS = 2**21
"""With fewer the kernel leaves multiprocessors idle, as it does not split the depth."""
_MOST_OUTPUTS = 6 * 132 * 128 * 160
"""Six tiles of the kernel for each multiprocessor of an H100 or H200. In larger products there is little beside the sums, for
which TensorRT has many kernels to choose from."""


@dataclass(frozen=True)
class _Layer:
    """x @ weight (+ bias), or GEGLU of it.

    Attributes:
        x: [..., K]; weight: [K, N] and bias: [N], constants of x's type; with geglu of 2 N columns.
        nodes: what computes it, the last one last.
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
    """Replace GEGLU, and linear layers that only plugins read, by nodes `Linear`, in place.

    Only those of 16 bits that read what a plugin gives, or a layer norm: what TensorRT fuses with products it no longer does once
    a plugin reads the result. And only of sizes at which the kernel is no slower. The weights get another name, and lie the other
    way round: not for engines whose weights are to be replaced. Comes behind `fuse_residual_norms`, whose nodes are plugins too.

    Args:
        profiles: sizes of the dimensions that vary, for each optimisation profile, at which the engine is to be fast.
        beside_int8: take those with INT8 weights too, which `fuse_int8_layers` has left in 16 bits.
    Returns:
        How many nodes the graph has got.
    """
    count = 0
    for find in (_geglu, _alone):  # the latter may read the former
        candidates = [layer for node in model.graph if (layer := find(node, beside_int8)) is not None]
        found = [layer for layer in candidates if _pays(layer, profiles)]
        for layer in found:
            _replace(layer)
        count += len(found)
    for node in model.graph:
        if node.op_type == RESIDUAL_NORM and any(_is_linear(value) for value in node.inputs[:2]):
            node.attributes["starts_early"] = ir.AttrInt64(
                "starts_early", 1
            )  # that layer's kernel leaves it little room
    if count:
        RemoveUnusedNodesPass()(model)  # weights that nothing reads any more
    return count


def _alone(matmul: ir.Node, beside_int8: bool) -> _Layer | None:
    """A linear layer that only plugins read."""
    layer = _layer(matmul, beside_int8)
    readers = list(_readers(layer.result)) if layer is not None else []
    return layer if readers and all(_is_plugin(node) for node in readers) else None


def _geglu(matmul: ir.Node, beside_int8: bool) -> _Layer | None:
    """Two layers in one product, and what GEGLU does with them."""
    layer = _layer(matmul, beside_int8)
    split = only_reader(layer.result, "Split") if layer is not None else None
    if layer is None or split is None or len(split.outputs) != 2:
        return None
    value, gate = split.outputs
    gelu = only_reader(gate, "Gelu")
    product = only_reader(value, "Mul")
    if gelu is None or product is None or gelu.attributes.get_string("approximate", "none") != "none":
        return None
    joined, half = layer.result.shape, product.outputs[0].shape
    if only_reader(gelu.outputs[0], "Mul") is not product or product.outputs[0].is_graph_output():
        return None
    if joined is None or half is None:
        return None
    if split.attributes.get_int("axis", 0) % len(joined) != len(joined) - 1 or value.shape != gate.shape:
        return None
    if not isinstance(half[-1], int) or half[-1] % _VECTOR or joined[-1] != 2 * half[-1]:
        return None
    return replace(layer, nodes=(*layer.nodes, split, gelu, product), geglu=True)


def _layer(matmul: ir.Node, beside_int8: bool) -> _Layer | None:
    """A linear layer of sizes that the kernel takes, whose input TensorRT does not fuse with what makes it."""
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
    bias, add = _bias(product, width)
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
    """Whether a plugin or a layer norm makes a value."""
    producer = value.producer()
    while producer is not None and producer.op_type == "Reshape" and not producer.domain:
        source = producer.inputs[0]
        producer = source.producer() if source is not None else None
    return _is_plugin(producer) or (producer is not None and producer.op_type == "LayerNormalization")


def _bias(product: ir.Value, width: int) -> tuple[ir.Value, ir.Node] | tuple[None, None]:
    """A constant [N] that is all that is done with a product, and the node that adds it."""
    add = only_reader(product, "Add")
    if add is None:
        return None, None
    bias = next((x for x in add.inputs if is_weight(x, 1, width)), None)
    return (bias, add) if bias is not None and bias.dtype == product.dtype else (None, None)


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Of a value, through views of it. A result of the graph has none that are known."""
    if value.is_graph_output():
        return
    for reader, _ in value.uses():
        if reader.op_type == "Reshape" and not reader.domain:
            yield from _readers(reader.outputs[0])
        else:
            yield reader


def _pays(layer: _Layer, profiles: Sequence[Mapping[str, int]]) -> bool:
    """Whether the sizes are known, and in each profile such that the kernel is no slower."""
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
    last, old = layer.nodes[-1], layer.result
    graph = last.graph
    assert isinstance(graph, ir.Graph)
    inputs = [layer.x, _turned(graph, layer.weight, layer.geglu)]
    if layer.bias is not None:
        inputs.append(_in_two(graph, layer.bias) if layer.geglu else layer.bias)
    attributes = {"geglu": int(layer.geglu)} | PLUGIN
    node = ir.node(LINEAR, inputs, attributes, domain=DOMAIN)
    node.outputs[0].type, node.outputs[0].shape = copy.copy(old.type), old.shape
    ir.convenience.replace_nodes_and_values(graph, last, layer.nodes, [node], [old], node.outputs)


def _turned(graph: ir.Graph, weight: ir.Value, in_two: bool) -> ir.Value:
    """A matrix [K, N] as [N, K], or [K, 2 N] as [2, N, K]."""
    assert weight.const_value is not None
    depth, width = weight.const_value.shape.numpy()  # type: ignore[union-attr]
    shape = (2, width // 2, depth) if in_two else (width, depth)
    return changed_initializer(graph, weight, "transposed in two" if in_two else "transposed", shape, np.transpose)


def _in_two(graph: ir.Graph, bias: ir.Value) -> ir.Value:
    """A vector [2 N] as [2, N]."""
    assert bias.const_value is not None
    return changed_initializer(graph, bias, "in two", (2, bias.const_value.shape.numpy()[0] // 2), np.ravel)  # type: ignore[union-attr]
