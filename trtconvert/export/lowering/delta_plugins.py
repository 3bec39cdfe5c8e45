"""Lowers linear layers that quantise deltas to plugins: one kernel quantises rows and writes the new â, another adds to ô.

Q/DQ needs further kernels that scale, add and write. Here each number of a cache is read and written once, and the output is ô.
A negative scale means reset: the kernels do not read the caches of such samples.
"""

from __future__ import annotations

import copy

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import NewNodes, graph_of, remove_unused
from trtconvert.export.lowering.initializers import changed_initializer, named_constant
from trtconvert.export.lowering.int8_layers import INT8_LINEAR
from trtconvert.export.matching import is_read_once, producer_of
from trtconvert.export.nodes.common import DOMAIN, PLUGIN
from trtconvert.export.nodes.deltas import LINEAR, QUANTISE, cache_of, delta_nodes, inputs_of
from trtconvert.export.nodes.layers import INPUT_GROUP_METADATA, LAYER_METADATA, table_of
from trtconvert.linear.modes import LayerMode

QUANTISE_DELTAS = "QuantiseChangedRows"
"""Operator of the plugin."""

_GELUS = {"none": 2, "tanh": 3}  # TrtConvertActivation of activation.h


def fuse_deltas(model: ir.Model) -> int:
    """Replaces linear layers that quantise deltas and have FP16 caches, in place.

    Layers that read one tensor are replaced together, unless a convolution reads the tensor too. `lower_deltas` lowers the other
    layers.

    Returns:
        The number of replaced layers.
    """
    taken = _taken(model)
    if not taken:
        return 0
    new, (first, *_) = NewNodes(), taken
    scales = _signed(new, inputs_of(first)["scales"], inputs_of(first)["begins"])
    graph = graph_of(first)
    graph.insert_before(first, new.nodes)
    for quantise, layers in taken.items():
        payload, row_scale = _quantised(quantise, scales)
        for layer in layers:
            _add_product(layer, payload, row_scale)
        graph.remove(quantise, safe=True)
    remove_unused(model)
    return sum(map(len, taken.values()))


def can_fuse_deltas(model: ir.Model) -> bool:
    """Return whether `fuse_deltas` would replace a layer."""
    return bool(_taken(model))


def _taken(model: ir.Model) -> dict[ir.Node, list[ir.Node]]:
    """Returns each quantising node with the layers that read it, if all of the layers are supported."""
    found: dict[ir.Node, list[ir.Node]] = {}
    for node in delta_nodes(model):
        if node.op_type != QUANTISE or {inputs_of(node)["x"].dtype, cache_of(node).dtype} != {ir.DataType.FLOAT16}:
            continue
        layers = [reader for reader, _ in node.outputs[0].uses()]
        if layers and all(layer.op_type == LINEAR and layer.domain == DOMAIN for layer in layers):
            found[node] = layers
    return found


def _signed(new: NewNodes, scales: ir.Value, reset: ir.Value) -> ir.Value:
    """Returns the scales [B, S], negative where a sample is reset."""
    anew = new.reshaped(reset, [-1, 1], [None, 1])
    return new.add("Where", [anew, new.add("Neg", [scales], scales), scales], scales)


def _quantised(node: ir.Node, scales: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Replaces a quantising node, and returns the payload and the scales of rows."""
    graph, inputs = graph_of(node), inputs_of(node)
    x, activation = _before_gelu(inputs["x"])
    factor = table_of(inputs["x_factor"])
    input_group = node.metadata_props[INPUT_GROUP_METADATA]
    tape, shape = NewNodes(), x.shape
    assert shape is not None and isinstance(shape[-1], int)
    rows = [x, _shaped(tape, inputs["a_hat"], shape), scales]
    if equalised := bool((factor != 1).any()):
        rows.append(named_constant(graph, f"{input_group}: factor of changes", factor.astype(np.float32).reshape(-1)))
    attributes = {"factor": int(equalised), "activation": activation, "place": node.attributes["place"].as_int()}
    new = ir.node(QUANTISE_DELTAS, rows, attributes | PLUGIN, domain=DOMAIN, num_outputs=3)
    payload, row_scale, a_next = new.outputs
    payload.type, payload.shape = ir.TensorType(ir.DataType.INT32), ir.Shape([*shape[:-1], shape[-1] // 4])
    row_scale.type, row_scale.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([*shape[:-1], 1])
    a_next.type, a_next.shape = copy.copy(x.type), shape
    _insert(node, tape, new, a_next, node.outputs[1])
    return payload, row_scale


def _add_product(node: ir.Node, payload: ir.Value, row_scale: ir.Value) -> None:
    graph, inputs, o_hat = graph_of(node), inputs_of(node), inputs_of(node)["o_hat"]
    weight, layer = inputs["weight"], node.metadata_props[LAYER_METADATA]
    assert weight.shape is not None and payload.shape is not None
    outputs, channels = weight.shape.numpy()
    packed = changed_initializer(
        graph, weight, "packed", (outputs, channels // 4), lambda integers: integers.view(np.int32), ir.DataType.INT32
    )
    tables = [
        named_constant(graph, f"{layer}: {name} of changes", table_of(inputs[name]))
        for name in ("weight_scale", "bias")
    ]
    tape = NewNodes()
    shape = ir.Shape([*payload.shape[:-1], outputs])
    residual = _shaped(tape, o_hat, shape)
    attributes = {
        "mode_set": 1 << LayerMode.STATIC, "activation": 0, "bias": 1, "residual": 1, "bfloat16": 0, "changes": 1
    }  # fmt: skip
    new = ir.node(INT8_LINEAR, [payload, row_scale, packed, *tables, residual], attributes | PLUGIN, domain=DOMAIN)
    new.outputs[0].type, new.outputs[0].shape = copy.copy(o_hat.type), shape
    _insert(node, tape, new, new.outputs[0], node.outputs[0])
    graph.remove(node, safe=True)


def _before_gelu(x: ir.Value) -> tuple[ir.Value, int]:
    """Returns the input of a GELU that only this node reads, and the kernel's code of it, else the value and 0."""
    gelu = producer_of(x, "Gelu")
    if gelu is None or not is_read_once(x) or gelu.inputs[0] is None or gelu.inputs[0].shape is None:
        return x, 0
    activation = _GELUS.get(gelu.attributes.get_string("approximate", "none"))
    return (gelu.inputs[0], activation) if activation else (x, 0)


def _shaped(tape: NewNodes, cache: ir.Value, shape: ir.Shape) -> ir.Value:
    """Reshapes a cache [B, n, …, C] to the shape of rows, [B · n, …, C]."""
    assert cache.shape is not None
    if len(cache.shape) == len(shape):
        return cache
    sizes = [size for size in shape[1:] if isinstance(size, int)]
    assert len(sizes) == len(shape) - 1
    return tape.reshaped(cache, [-1, *sizes], shape)


def _insert(node: ir.Node, before: NewNodes, new: ir.Node, result: ir.Value, old: ir.Value) -> None:
    """Inserts a node in front of another, and replaces one of its outputs."""
    assert old.shape is not None and result.shape is not None
    nodes = [*before.nodes, new]
    if len(old.shape) != len(result.shape):
        tape = NewNodes()
        result = tape.op("Reshape", [result, tape.op("Shape", [cache_of(node)])])
        nodes += tape.nodes
    graph_of(node).insert_before(node, nodes)
    name, result.type, result.shape = old.name, copy.copy(old.type), old.shape
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    old.name, result.name = f"{name}, before", name
