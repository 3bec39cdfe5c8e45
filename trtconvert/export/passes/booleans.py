"""Where of booleans, which ONNX Runtime lacks."""

from __future__ import annotations

import onnx_ir as ir


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
        first = ir.node("And", [condition, chosen])
        negation = ir.node("Not", [condition])
        second = ir.node("And", [negation.outputs[0], other])
        either = ir.node("Or", [first.outputs[0], second.outputs[0]])
        for new in (first, negation, second, either):
            new.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
        either.outputs[0].shape = node.outputs[0].shape
        model.graph.insert_before(node, [first, negation, second, either])
        ir.convenience.replace_all_uses_with(node.outputs[0], either.outputs[0], replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        count += 1
    return count
