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


def marked_windows(result: str) -> str:
    """Lines of a convolution's body: `result` is 1 or more where a window has a channel that is marked.

    The body has `marked`, 1 or 0 for each channel of the input, and `one_i`, which is 1.
    """
    return f"""
        marked_pixels = ReduceMax<keepdims = 1>(marked, one_i)
        kernel = Shape<start = 2>(weight)
        of_window = Concat<axis = 0>(one_i, one_i, kernel)
        window = ConstantOfShape<value = float[1] {{1.0}}>(of_window)
        {result} = Conv<strides: ints = @strides, pads: ints = @pads>(marked_pixels, window)
"""
