"""Lowers layers that quantise deltas to Q/DQ around ordinary products, for runtimes without our plugins.

A Q needs a constant scale, but the scale s of a delta follows the timestep. Deltas are multiplied by S / s, quantised with S, and
codes and products multiplied by s / S. S is the largest scale, which keeps products in the range of FP16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import NewNodes, graph_of, remove_unused
from trtconvert.export.lowering.initializers import changed_initializer
from trtconvert.export.nodes.deltas import LARGEST, QUANTISE, cache_of, delta_nodes, inputs_of, sizes_of
from trtconvert.export.nodes.layers import table_of


@dataclass(frozen=True)
class _Scales:
    """Scales of all input groups, in the type of the caches.

    Attributes:
        largest: S of each group.
        ratios, inverses: [B, S] s / S and S / s.
    """

    largest: list[float]
    ratios: ir.Value
    inverses: ir.Value


def has_deltas(model: ir.Model) -> bool:
    """Return whether layers of a model quantise deltas."""
    return bool(delta_nodes(model))


def lower_deltas(model: ir.Model) -> int:
    """Replaces the nodes, in place. Computes in the type of the caches.

    Returns:
        The number of lowered layers.
    """
    nodes, count = delta_nodes(model), 0
    if not nodes:
        return 0
    places = {_place(node): float(node.metadata_props[LARGEST]) for node in nodes if node.op_type == QUANTISE}
    tape, first = NewNodes(), nodes[0]
    scales = _scales(tape, inputs_of(first)["scales"], [places[place] for place in sorted(places)], _dtype(first))
    for node in nodes:
        inputs = inputs_of(node)
        if node.op_type == QUANTISE:
            new = _quantised(tape, node, inputs, scales)
        else:
            new, count = [_added(tape, node, inputs, scales)], count + 1
        ir.convenience.replace_nodes_and_values(graph_of(node), node, [node], tape.nodes, node.outputs, new)
        tape = NewNodes()
    remove_unused(model)
    return count


def _scales(tape: NewNodes, scales: ir.Value, largest: list[float], dtype: ir.DataType) -> _Scales:
    """Computes the ratios of all groups together, to save small kernels."""
    at_most = tape.constant(np.array(largest, np.float32))
    ratios, inverses = (
        tape.op("Cast", [tape.op("Div", pair)], {"to": dtype}) for pair in ([scales, at_most], [at_most, scales])
    )
    return _Scales(largest, ratios, inverses)


def _quantised(tape: NewNodes, node: ir.Node, inputs: Mapping[str, ir.Value], scales: _Scales) -> list[ir.Value]:
    x, a_hat, place = inputs["x"], inputs["a_hat"], _place(node)
    dtype, rank = _dtype(node), _rank(a_hat)
    factor = table_of(inputs["x_factor"])
    assert x.dtype is not None  # the exporter types every value
    moved = x if (factor == 1).all() else tape.op("Mul", [x, tape.constant(factor.astype(x.dtype.numpy()))])
    if x.dtype != dtype:
        moved = tape.op("Cast", [moved], {"to": dtype})
    if _rank(x) != rank:
        moved = tape.op("Reshape", [moved, tape.op("Shape", [a_hat])])
    anew = _by_sample(tape, inputs["begins"], rank)
    known = tape.op("Where", [anew, tape.constant(np.array(0, dtype.numpy())), a_hat])
    over = tape.op("Mul", [tape.op("Sub", [moved, known]), _column(tape, scales.inverses, place, rank)])
    q = tape.op("QuantizeLinear", [over, *_of_q(tape, scales, place, dtype)])
    stands_for = tape.op("DequantizeLinear", [q, *_of_q(tape, scales, place, dtype)])
    a_new = tape.op("Add", [known, tape.op("Mul", [stands_for, _column(tape, scales.ratios, place, rank)])])
    return [q if _rank(x) == rank else tape.op("Reshape", [q, tape.op("Shape", [x])]), a_new]


def _added(tape: NewNodes, node: ir.Node, inputs: Mapping[str, ir.Value], scales: _Scales) -> ir.Value:
    q, o_hat, sizes, place = inputs["q"], inputs["o_hat"], sizes_of(node), _place(node)
    dtype, rank, weight = _dtype(node), _rank(o_hat), inputs["weight"]
    weight_scale, bias = (table_of(inputs[name]) for name in ("weight_scale", "bias"))
    x = tape.op("DequantizeLinear", [q, *_of_q(tape, scales, place, dtype)])
    per_output = [tape.constant(weight_scale.astype(dtype.numpy())), tape.constant(np.zeros(len(bias), np.int8))]
    if sizes:
        assert weight.shape is not None
        attributes = {name: node.attributes[name].as_ints() for name in ("strides", "pads")}
        product = tape.op(
            "Conv",
            [x, tape.op("DequantizeLinear", [weight, *per_output], {"axis": 0})],
            attributes | {"kernel_shape": list(weight.shape.numpy()[2:])},
        )
    else:
        # Not a Transpose: TensorRT would have to move it between DQ and product.
        turned = tape.op("DequantizeLinear", [_turned(node, weight), *per_output], {"axis": 1})
        product = tape.op("MatMul", [x, turned])
    if _rank(q) != rank:
        product = tape.op("Reshape", [product, tape.op("Shape", [o_hat])])
    bias = bias.reshape(-1, *[1] * sizes)  # broadcasts over channels
    anew = _by_sample(tape, inputs["begins"], rank)
    known = tape.op("Where", [anew, tape.constant(bias.astype(dtype.numpy())), o_hat])
    return tape.op("Add", [known, tape.op("Mul", [product, _column(tape, scales.ratios, place, rank)])])


def _of_q(tape: NewNodes, scales: _Scales, place: int, dtype: ir.DataType) -> list[ir.Value]:
    """Returns the scale and the zero point of a group's codes."""
    scale = np.array(scales.largest[place], dtype.numpy())
    return [tape.constant(scale), tape.constant(np.array(0, np.int8))]


def _column(tape: NewNodes, of_all: ir.Value, place: int, rank: int) -> ir.Value:
    """Returns a column of [B, S] as [B, 1, …]."""
    return _by_sample(tape, tape.op("Gather", [of_all, tape.constant(np.array([place]))], {"axis": 1}), rank)


def _turned(node: ir.Node, weight: ir.Value) -> ir.Value:
    """Returns a weight [N, K] as [K, N], shared by tied layers."""
    assert weight.shape is not None
    outputs, channels = weight.shape.numpy()
    return changed_initializer(graph_of(node), weight, "turned", (channels, outputs), np.transpose)


def _by_sample(tape: NewNodes, value: ir.Value, rank: int) -> ir.Value:
    """Reshapes [B] or [B, 1] to [B, 1, …]."""
    return tape.op("Reshape", [value, tape.constant(np.array([-1, *[1] * (rank - 1)]))])


def _place(node: ir.Node) -> int:
    return node.attributes["place"].as_int()


def _dtype(node: ir.Node) -> ir.DataType:
    dtype = cache_of(node).dtype
    assert dtype is not None  # the exporter types every value
    return dtype


def _rank(value: ir.Value) -> int:
    assert value.shape is not None
    return len(value.shape)
