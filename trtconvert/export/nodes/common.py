"""What is common to the nodes of our own domain, whichever kind."""

from __future__ import annotations

import onnx_ir as ir

DOMAIN, VERSION = "trtconvert", 1
PLUGIN = {"plugin_version": str(VERSION), "plugin_namespace": ""}
"""Attributes by which TensorRT's parser finds the plugin of a node of our domain."""

OPSET = 20
"""Standard opset of the bodies and of exported models: the newest that TensorRT 10.6 reads."""

SITE_METADATA = "trtconvert.site"
"""Metadata key of a node: the name of the attention site it stands for."""
HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Types that kernels take."""


def has_own_nodes(model: ir.Model) -> bool:
    """Whether the graph has a node of our domain: attention, or another that is a plugin."""
    return any(node.domain == DOMAIN for node in ir.traversal.RecursiveGraphIterator(model.graph))
