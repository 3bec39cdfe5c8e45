"""Scatters in the form that TensorRT's parser supports."""

from __future__ import annotations

import onnx_ir as ir


def leave_out_default_reductions(model: ir.Model) -> int:
    """Removes the default `reduction` of ScatterND and ScatterElements: TensorRT 10.6's parser refuses the attribute.

    Returns:
        The number of changed nodes.
    """
    count = 0
    for node in model.graph:
        scatters = node.op_type in ("ScatterND", "ScatterElements") and not node.domain
        if scatters and node.attributes.get_string("reduction") == "none":
            del node.attributes["reduction"]
            count += 1
    return count
