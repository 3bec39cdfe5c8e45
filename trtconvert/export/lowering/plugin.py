"""The `plugin` lowering: TensorRT's parser maps every node to our plugin by its name."""

from __future__ import annotations

import onnx_ir as ir

from trtconvert.export.function_body import DOMAIN, OP, VERSION
from trtconvert.export.nodes import require_attention_nodes


def lower_to_plugin(model: ir.Model) -> int:
    """Strip the bodies, which the parser would prefer to a plugin, and name the plugin on each node.

    Returns:
        How many nodes were lowered.
    Raises:
        UserError: the model has no `Int8Attention` node.
    """
    nodes = require_attention_nodes(model)
    for node in nodes.values():
        node.overload = ""
        node.attributes["plugin_version"] = ir.AttrString("plugin_version", str(VERSION))
        node.attributes["plugin_namespace"] = ir.AttrString("plugin_namespace", "")
    for key in [key for key in model.functions if key[:2] == (DOMAIN, OP)]:
        del model.functions[key]
    return len(nodes)
