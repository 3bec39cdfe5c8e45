"""Interleaves of two tensors, as rotary embeddings write them: `out[..., 0::2] = a; out[..., 1::2] = b`.

The exporter scatters each half along the first axis between transposes: two slow copies, and another layout before attention.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import NewNodes, cleaned, graph_of
from trtconvert.export.matching import constant_of, perm_of


def join_interleaves(model: ir.Model) -> int:
    """Replaces each pair of ScatterND that writes even and odd positions of the last axis by a Concat, in place.

    For optimised models, with constant positions and cancelled transposes.

    Returns:
        The number of joined pairs.
    """
    count = 0
    for node in list(model.graph):
        halves = _halves(node)
        if halves is not None:
            _join(node, *halves)
            count += 1
    return cleaned(model, count)


def _halves(last: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Returns the transposes of the even and odd halves if a scatter completes an interleave."""
    first = _producer(last, 0)
    if first is None or any(node.op_type != "ScatterND" or node.domain for node in (first, last)):
        return None
    # Only between transposes from the last axis to the first and back.
    users = last.outputs[0].uses()
    if last.outputs[0].is_graph_output() or any(user.op_type != "Transpose" for user, _ in users):
        return None
    data, halves = first.inputs[0], dict[int, ir.Node]()
    for scatter in (first, last):
        half, start = _producer(scatter, 2), _start(scatter, data)
        if half is None or half.op_type != "Transpose" or start is None:
            return None
        halves[start] = half
    if len(halves) < 2:
        return None
    perms = [perm_of(half) for half in halves.values()]
    return (halves[0], halves[1]) if perms[0] == perms[1] and perms[0][0] == len(perms[0]) - 1 else None


def _producer(node: ir.Node, index: int) -> ir.Node | None:
    value = node.inputs[index] if index < len(node.inputs) else None
    producer = value.producer() if value is not None else None
    return _producer(producer, 0) if producer is not None and producer.op_type == "Identity" else producer


def _start(scatter: ir.Node, data: ir.Value | None) -> int | None:
    """Returns 0 or 1 if a scatter writes exactly the even or the odd positions of the first axis."""
    written = constant_of(scatter.inputs[1])
    if data is None or data.shape is None or written is None or scatter.attributes.get_string("reduction") != "none":
        return None
    size = data.shape[0]
    if not isinstance(size, int) or size % 2 or written.shape != (size // 2, 1):
        return None
    return next((start for start in (0, 1) if (written[:, 0] == np.arange(start, size, 2)).all()), None)


def _join(scatter: ir.Node, even: ir.Node, odd: ir.Node) -> None:
    """Joins the halves before their transposes, and redirects the readers of the scatter."""
    scattered, perm, new = scatter.outputs[0], perm_of(even), NewNodes()
    shape = [scattered.shape[perm.index(axis)] if scattered.shape is not None else None for axis in range(len(perm))]
    unknown, last_axis = [None] * (len(perm) + 1), new.constant([-1])
    columns = [new.add("Unsqueeze", [half.inputs[0], last_axis], scattered, unknown) for half in (even, odd)]
    pairs = new.add("Concat", columns, scattered, unknown, {"axis": -1})
    out = new.reshaped(pairs, [0] * (len(perm) - 1) + [-1], shape)
    graph_of(scatter).insert_after(scatter, new.nodes)
    for user, _ in list(scattered.uses()):
        user.attributes["perm"] = ir.AttrInt64s("perm", [perm[axis] for axis in perm_of(user)])
        user.replace_input_with(0, out)
