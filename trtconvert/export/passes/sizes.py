"""Sizes that a model asks of its tensors, where they are known."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtconvert.export.matching import constant_of, producer_of


def fold_sizes(model: ir.Model) -> int:
    """Turn every Gather of one size of a tensor into a constant where that size does not vary, though others do.

    The exporter's own folding looks at lists of sizes only (Gather with indices of rank 1). What is counted along an axis, such
    as the positions of `out[..., 0::2] = x`, is folded by it once the size is a constant.

    Returns:
        How many sizes were known.
    """
    count = 0
    for node in list(model.graph):
        size = _size(node)
        if size is not None:
            constant = ir.node("Constant", [], {"value": ir.tensor(np.array(size, np.int64))})
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], [constant], node.outputs, constant.outputs
            )
            count += 1
    return count


def _size(node: ir.Node) -> int | None:
    """The size that a node finds out, if it is the same for all inputs of the model."""
    shape = producer_of(node.inputs[0], "Shape") if node.op_type == "Gather" and not node.domain else None
    index = constant_of(node.inputs[1]) if shape is not None else None
    of = shape.inputs[0].shape if shape is not None and shape.inputs[0] is not None else None
    if shape is None or of is None or index is None or index.ndim:
        return None
    size = of[shape.attributes.get_int("start", 0) : shape.attributes.get_int("end", None)][int(index)]
    return size if isinstance(size, int) else None
