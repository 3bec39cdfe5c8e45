"""The lowering of layers that quantise changes to Q/DQ around ordinary products, for runtimes that host none of our nodes.

A Q has one scale, which the runtime wants to know when it builds; the scale of a change follows the timestep. So changes are
multiplied by S / s before they are quantised with S, and products and codes by s / S behind it. S is the largest of the scales:
products stay as large as those of whole activations, and so within FP16.
"""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass
from onnx_ir.tape import Tape

from trtconvert.export.lowering.initializers import changed_initializer
from trtconvert.export.nodes.changes import LARGEST, QUANTISE, change_nodes, inputs_of, sizes_of
from trtconvert.export.nodes.layers import table_of


def lower_changes(model: ir.Model) -> int:
    """Replace the nodes, in place. All is computed in the type of the caches.

    Returns:
        How many layers were lowered.
    """
    codes: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    count = 0
    for node in change_nodes(model):
        tape, inputs = Tape(), inputs_of(node)
        if node.op_type == QUANTISE:
            new = _quantised(tape, node, inputs, codes)
        else:
            new, count = [_added(tape, node, inputs, codes)], count + 1
        assert node.graph is not None
        for value, old in zip(new, node.outputs, strict=True):
            value.name, value.type, value.shape = old.name, old.type, old.shape
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], tape.nodes, node.outputs, new)
    if codes:
        for clean in (RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass()):
            clean(model)
    return count


def _quantised(
    tape: Tape, node: ir.Node, inputs: dict[str, ir.Value], codes: dict[ir.Value, tuple[ir.Value, ir.Value]]
) -> list[ir.Value]:
    x, a_hat = inputs["x"], inputs["a_hat"]
    dtype = _dtype(a_hat)
    rank = _rank(a_hat)
    largest = float(node.metadata_props[LARGEST])
    factor = table_of(inputs["x_factor"])
    moved = x if (factor == 1).all() else tape.op("Mul", [x, _constant(tape, factor.astype(_dtype(x).numpy()))])
    if x.dtype != dtype:
        moved = tape.op("Cast", [moved], {"to": dtype})
    if _rank(x) != rank:
        moved = tape.op("Reshape", [moved, tape.op("Shape", [a_hat])])
    anew = _by_sample(tape, inputs["begins"], rank)
    known = tape.op("Where", [anew, _constant(tape, np.array(0, dtype.numpy())), a_hat])
    scale = inputs["scale"]
    at_most = _constant(tape, np.array(largest, np.float32))
    ratio, inverse = (
        _by_sample(tape, tape.op("Cast", [tape.op("Div", pair)], {"to": dtype}), rank)
        for pair in ([scale, at_most], [at_most, scale])
    )
    over = tape.op("Mul", [tape.op("Sub", [moved, known]), inverse])
    of_scale, zero = _constant(tape, np.array(largest, dtype.numpy())), _constant(tape, np.array(0, np.int8))
    q = tape.op("QuantizeLinear", [over, of_scale, zero])
    stands_for = tape.op("DequantizeLinear", [q, of_scale, zero])
    a_new = tape.op("Add", [known, tape.op("Mul", [stands_for, ratio])])
    shaped = q if _rank(x) == rank else tape.op("Reshape", [q, tape.op("Shape", [x])])
    codes[shaped] = (of_scale, tape.op("Div", [scale, at_most]))
    return [shaped, a_new]


def _added(
    tape: Tape, node: ir.Node, inputs: dict[str, ir.Value], codes: dict[ir.Value, tuple[ir.Value, ir.Value]]
) -> ir.Value:
    q, o_hat, sizes = inputs["q"], inputs["o_hat"], sizes_of(node)
    dtype, rank = _dtype(o_hat), _rank(o_hat)
    of_scale, ratio = codes[q]
    weight_scale, bias = (table_of(inputs[name]) for name in ("weight_scale", "bias"))
    x = tape.op("DequantizeLinear", [q, of_scale, _constant(tape, np.array(0, np.int8))])
    per_output = [_constant(tape, weight_scale.astype(dtype.numpy())), _constant(tape, np.zeros(len(bias), np.int8))]
    weight = inputs["weight"]
    if sizes:
        shape = weight.shape
        assert shape is not None
        product = tape.op(
            "Conv",
            [x, tape.op("DequantizeLinear", [weight, *per_output], {"axis": 0})],
            {
                "strides": node.attributes["strides"].as_ints(),
                "pads": node.attributes["pads"].as_ints(),
                "kernel_shape": list(shape.numpy()[2:]),
            },
        )
        bias = bias.reshape(1, -1, *[1] * sizes)
    else:
        # Without a Transpose between a DQ and a product TensorRT would have to move it.
        turned = _turned(node, weight)
        product = tape.op("MatMul", [x, tape.op("DequantizeLinear", [turned, *per_output], {"axis": 1})])
    if _rank(q) != rank:
        product = tape.op("Reshape", [product, tape.op("Shape", [o_hat])])
        if sizes:
            bias = bias[0]
    anew = _by_sample(tape, inputs["begins"], rank)
    known = tape.op("Where", [anew, _constant(tape, bias.astype(dtype.numpy())), o_hat])
    return tape.op(
        "Add", [known, tape.op("Mul", [product, _by_sample(tape, tape.op("Cast", [ratio], {"to": dtype}), rank)])]
    )


def _turned(node: ir.Node, weight: ir.Value) -> ir.Value:
    """A weight [K, N] of one [N, K], once for all layers that have it."""
    graph, shape = node.graph, weight.shape
    assert isinstance(graph, ir.Graph) and shape is not None
    outputs, channels = shape.numpy()
    return changed_initializer(graph, weight, "turned", (channels, outputs), np.transpose)


def _by_sample(tape: Tape, value: ir.Value, rank: int) -> ir.Value:
    """[B] or [B, 1] numbers as [B, 1, …]."""
    return tape.op("Reshape", [value, _constant(tape, np.array([-1, *[1] * (rank - 1)]))])


def _constant(tape: Tape, array: np.ndarray) -> ir.Value:
    return tape.op("Constant", [], {"value": ir.tensor(array)})


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None  # the exporter types every value
    return copy.copy(value.dtype)


def _rank(value: ir.Value) -> int:
    assert value.shape is not None
    return len(value.shape)
