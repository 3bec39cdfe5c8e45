"""Concatenations of tensors of several types, which torch promotes to one and ONNX refuses."""

from __future__ import annotations

import onnx_ir as ir


def promote_concats(model: ir.Model) -> int:
    """Cast the inputs of every Concat to the type of its output, as torch does; of `torch.concat` the exporter leaves that out.

    Returns:
        How many inputs were cast.
    """
    count = 0
    for node in list(model.graph):
        dtype = node.outputs[0].dtype
        if node.op_type != "Concat" or node.domain or dtype is None:
            continue
        for index, x in enumerate(node.inputs):
            if x is not None and x.dtype not in (None, dtype):
                cast = ir.node("Cast", [x], {"to": dtype.value})
                cast.outputs[0].shape, cast.outputs[0].type = x.shape, ir.TensorType(dtype)
                model.graph.insert_before(node, cast)
                node.replace_input_with(index, cast.outputs[0])
                count += 1
    return count
