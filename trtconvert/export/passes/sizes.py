"""Folds known sizes of tensors."""

from __future__ import annotations

import onnx_ir as ir

from trtconvert.export.building import NewNodes, replace_nodes
from trtconvert.export.matching import constant_of, producer_of


def fold_sizes(model: ir.Model) -> int:
    """Replaces each Gather of one fixed size of a shape by a constant.

    The exporter folds only Gathers with indices of rank 1. It goes on from the new constants: positions of `out[..., 0::2] = x`.

    Returns:
        The number of folded sizes.
    """
    count = 0
    for node in list(model.graph):
        size = _size(node)
        if size is not None:
            new = NewNodes()
            new.constant(size)
            replace_nodes([node], new.nodes)
            count += 1
    return count


def _size(node: ir.Node) -> int | None:
    """Returns the fixed size that a node computes, else None."""
    shape = producer_of(node.inputs[0], "Shape") if node.op_type == "Gather" and not node.domain else None
    index = constant_of(node.inputs[1]) if shape is not None else None
    of = shape.inputs[0].shape if shape is not None and shape.inputs[0] is not None else None
    if shape is None or of is None or index is None or index.ndim:
        return None
    size = of[shape.attributes.get_int("start", 0) : shape.attributes.get_int("end", None)][int(index)]
    return size if isinstance(size, int) else None
