"""Where of booleans, which ONNX Runtime lacks."""

from __future__ import annotations

import onnx_ir as ir

from trtconvert.export.building import NewNodes, replace_nodes


def choose_by_logic(model: ir.Model) -> int:
    """Replaces each Where of booleans by And, Or and Not, in place. HunyuanVideo masks masks with `masked_fill`.

    Returns:
        The number of replaced nodes.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "Where" or node.domain or node.outputs[0].dtype != ir.DataType.BOOL:
            continue
        condition, chosen, other = node.inputs
        new = NewNodes()
        first = new.op("And", [condition, chosen])
        second = new.op("And", [new.op("Not", [condition]), other])
        new.op("Or", [first, second])
        for made in new.nodes:  # without shapes: operands are broadcast
            made.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
        replace_nodes([node], new.nodes)
        count += 1
    return count
