"""Scatters that overwrite, written as TensorRT's parser takes them."""

from __future__ import annotations

import onnx_ir as ir


def leave_out_default_reductions(model: ir.Model) -> int:
    """Drop `reduction` from every ScatterND and ScatterElements whose value is the default, none.

    TensorRT 10.6's parser refuses the attribute whatever it says.

    Returns:
        How many nodes said it.
    """
    count = 0
    for node in model.graph:
        scatters = node.op_type in ("ScatterND", "ScatterElements") and not node.domain
        if scatters and node.attributes.get_string("reduction") == "none":
            del node.attributes["reduction"]
            count += 1
    return count
