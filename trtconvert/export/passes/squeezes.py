"""Squeezes of dimensions that are not 1, which torch leaves as they are and ONNX refuses."""

from __future__ import annotations

import onnx_ir as ir

from trtconvert.export.matching import constant_of


def drop_idle_squeezes(model: ir.Model) -> int:
    """Remove every Squeeze whose axes are all known to differ from 1; torch.export has told them apart already.

    `x.squeeze(1)` on a dimension of another size is no operation in torch; the exporter emits it all the same.

    Returns:
        How many nodes were removed.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "Squeeze" or node.domain or len(node.inputs) < 2:
            continue
        x, axes = node.inputs[0], constant_of(node.inputs[1])
        if x is None or x.shape is None or axes is None:
            continue
        # A symbolic dimension is not 1 either: torch.export makes a constant of one that is.
        if all(x.shape[axis] != 1 for axis in axes.flatten().tolist()):
            ir.convenience.replace_all_uses_with(node.outputs[0], x, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
            count += 1
    return count
