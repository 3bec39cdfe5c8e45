"""Modulations: rows of the sum of a block's own table and an embedding that all blocks are given.

The blocks of PixArt, Sana, LTX-Video and Wan add a table [1, 6, C] to the embedding of the timestep [B, 6, C], and take the six
rows of the sum apart: shifts, scales and gates. TensorRT fuses the addition and the slices into the kernels that norm and
modulate the tokens. Those are slow: in a profile of Wan on an H200 they took 300 to 600 µs, and 70 where no slice was fused.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass

from trtconvert.export.matching import axes_of, constant_of, producer_of


def add_rows(model: ir.Model) -> int:
    """Turn rows of a sum with a constant into sums of rows, in place: (a + b)[i] to a[i] + b[i], the same numbers bit for bit.

    For optimised models, in which what all blocks are given is one value: its rows are then taken once for all of them.
    Constants keep their names, as inputs of the nodes that take their rows, so engines are refitted as before.

    Returns:
        How many sums are computed row by row.
    """
    count = 0
    for add in list(model.graph):
        axis = _axis_of_rows(add)
        if axis is not None:
            for user, _ in list(add.outputs[0].uses()):
                _add_rows(add, user, axis)
            count += 1
    if count:
        RemoveUnusedNodesPass()(model)
        CommonSubexpressionEliminationPass()(model)
    return count


def _axis_of_rows(add: ir.Node) -> int | None:
    """The axis along which single rows of a sum with a constant are taken, of which both summands have as many.

    None where the sum is of something else, or where anything else reads it.
    """
    total = add.outputs[0]
    if add.op_type != "Add" or add.domain or total.shape is None or total.is_graph_output():
        return None
    axes = {_axis_of_row(user, total) for user, _ in total.uses()}
    axis = axes.pop() if len(axes) == 1 else None
    rank = len(total.shape)
    # Along the last axis the constant is a linear layer's bias, which the kernel of its product adds at no cost.
    if axis is None or axis == rank - 1 or not any(_is_constant(x) for x in add.inputs):
        return None
    shapes = [x.shape for x in add.inputs if x is not None]
    alike = all(s is not None and len(s) == rank and s[axis] == total.shape[axis] for s in shapes)
    return axis if alike else None


def _axis_of_row(node: ir.Node, of: ir.Value) -> int | None:
    """The axis along which each output of a node is a single element of a value; None for other nodes."""
    assert of.shape is not None
    rank = len(of.shape)
    if node.domain or node.inputs[0] is not of:
        return None
    if node.op_type == "Gather":
        index = constant_of(node.inputs[1])
        return node.attributes.get_int("axis", 0) % rank if index is not None and not index.ndim else None
    axes = None
    if node.op_type == "Split":
        axes = [node.attributes.get_int("axis", 0) % rank]
    elif node.op_type == "Slice" and len(node.inputs) > 3:  # without axes: all of them
        axes = axes_of(node.inputs[3], rank)
    if axes is None or len(axes) != 1:
        return None
    return axes[0] if all(x.shape is not None and x.shape[axes[0]] == 1 for x in node.outputs) else None


def _is_constant(value: ir.Value | None) -> bool:
    """Whether a value is a constant, perhaps of another type or with another axis: the exporter does not fold large ones."""
    while (same := producer_of(value, "Cast") or producer_of(value, "Unsqueeze")) is not None:
        value = same.inputs[0]
    return value is not None and ir.convenience.get_const_tensor(value) is not None


def _add_rows(add: ir.Node, user: ir.Node, axis: int) -> None:
    """Take the rows that a node takes of a sum from both summands, and add them."""
    graph = add.graph
    assert isinstance(graph, ir.Graph)
    of_each = [_rows(user, summand, axis) for summand in add.inputs if summand is not None]
    sums = [ir.node("Add", rows) for rows in zip(*(node.outputs for node in of_each), strict=True)]
    ir.convenience.replace_nodes_and_values(
        graph, user, [user], [*of_each, *sums], user.outputs, [node.outputs[0] for node in sums]
    )


def _rows(user: ir.Node, summand: ir.Value, axis: int) -> ir.Node:
    """What takes from a summand the rows that a node takes of the sum."""
    assert summand.shape is not None
    rows = ir.node(user.op_type, [summand, *user.inputs[1:]], user.attributes, num_outputs=len(user.outputs))
    sizes = list(summand.shape)
    sizes[axis : axis + 1] = [] if user.op_type == "Gather" else [1]
    for value in rows.outputs:
        value.type, value.shape = summand.type, ir.Shape(sizes)
    return rows
