"""Squeezes of dimensions other than 1: no-ops in torch, errors in ONNX."""

from __future__ import annotations

import onnx_ir as ir

from trtconvert.export.matching import constant_of


def drop_idle_squeezes(model: ir.Model) -> int:
    """Removes each Squeeze if all its axes differ from 1: `x.squeeze(1)` is a no-op in torch, but is exported.

    Returns:
        The number of removed nodes.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "Squeeze" or node.domain or len(node.inputs) < 2:
            continue
        x, axes = node.inputs[0], constant_of(node.inputs[1])
        if x is None or x.shape is None or axes is None:
            continue
        # A symbolic dimension is not 1: torch.export would have made it constant.
        if all(x.shape[axis] != 1 for axis in axes.flatten().tolist()):
            ir.convenience.replace_all_uses_with(node.outputs[0], x, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
            count += 1
    return count
