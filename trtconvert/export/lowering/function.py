"""The `function` lowering: every node runs its body. Exact INT8 numerics, but slow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx
import onnx_ir as ir

from trtconvert.export.nodes.attention import attention_nodes, require_attention_nodes, variant_of
from trtconvert.export.nodes.attention_body import function_body
from trtconvert.export.nodes.common import DOMAIN, VERSION
from trtconvert.export.nodes.deltas import delta_body, delta_nodes, overload_of, sizes_of
from trtconvert.export.nodes.layers import layer_body, layer_nodes, variant_of_layer

OVERLOADS_SINCE = 10
"""First IR version with overloads of functions."""


def lower_to_function(model: ir.Model) -> int:
    """Adds the bodies of all attention nodes and layers to the model, and returns their number; UserError if there is none."""
    layers, deltas = layer_nodes(model), delta_nodes(model)
    nodes = attention_nodes(model) if layers or deltas else require_attention_nodes(model)
    for node in nodes.values():
        variant = variant_of(node)
        _call(model, node, variant.overload, partial(function_body, variant))
        for name in ("plugin_version", "plugin_namespace"):
            node.attributes.pop(name, None)
    for node in layers.values():
        of_layer = variant_of_layer(node)
        _call(model, node, of_layer.overload, partial(layer_body, of_layer))
    for node in deltas:
        _call(model, node, overload_of(node), partial(delta_body, node.op_type, sizes_of(node)))
    model.opset_imports[DOMAIN] = VERSION
    model.ir_version = max(model.ir_version or 0, OVERLOADS_SINCE)
    return len(nodes) + len(layers) + len(deltas)


def _call(model: ir.Model, node: ir.Node, overload: str, body: Callable[[], onnx.FunctionProto]) -> None:
    """Lets a node run the body of its overload, which is added to the model once."""
    node.overload = overload
    key = (DOMAIN, node.op_type, overload)
    if key not in model.functions:
        model.functions[key] = ir.serde.deserialize_function(body())
