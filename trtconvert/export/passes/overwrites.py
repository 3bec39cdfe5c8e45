"""Overwritten rows, `x[:, n:] = y`, as CogVideoX and CogView4 write rotated tokens back.

The exporter scatters the rows along the first axis between transposes: three copies with an index for each row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import NewNodes, cleaned
from trtconvert.export.matching import constant_of, perm_of, producer_of


def join_overwritten(model: ir.Model) -> int:
    """Replaces each ScatterND of consecutive rows by a Concat with the rows before and after, in place.

    For optimised models, with constant positions and cancelled transposes. Equal transposes of both inputs are dropped together
    with the inverse of the output.

    Returns:
        The number of replaced scatters.
    """
    count = 0
    for node in list(model.graph):
        write = _write(node)
        if write is not None:
            _join(model.graph, node, write)
            count += 1
    return cleaned(model, count)


@dataclass(frozen=True)
class _Write:
    """`result` is `data` with `rows` at positions `start` to `stop` - 1 of an axis."""

    data: ir.Value
    rows: ir.Value
    result: ir.Value
    axis: int
    start: int
    stop: int


def _write(scatter: ir.Node) -> _Write | None:
    """Returns the write of a scatter of consecutive rows, else None."""
    if scatter.op_type != "ScatterND" or scatter.domain or scatter.attributes.get_string("reduction", "none") != "none":
        return None
    data, positions, rows = scatter.inputs
    written = constant_of(positions)
    if data is None or data.shape is None or rows is None or written is None or written.shape[1:] != (1,):
        return None
    count = len(written)
    start = int(written[0, 0]) if count else -1
    if start < 0 or (written[:, 0] != np.arange(start, start + count)).any():
        return None
    untransposed = _untransposed(data, rows, scatter.outputs[0])
    return _Write(*(untransposed or (data, rows, scatter.outputs[0], 0)), start, start + count)


def _untransposed(data: ir.Value, rows: ir.Value, result: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, int] | None:
    """Returns data, rows and result without matching transposes, and the axis that these move to the front."""
    of_data, of_rows = producer_of(data, "Transpose"), producer_of(rows, "Transpose")
    uses = [user for user, _ in result.uses()]
    if (
        of_data is None
        or of_rows is None
        or [user.op_type for user in uses] != ["Transpose"]
        or result.is_graph_output()
    ):
        return None
    perm, other, back = (perm_of(node) for node in (of_data, of_rows, uses[0]))
    if perm != other or [perm[axis] for axis in back] != sorted(perm):
        return None
    before, written = of_data.inputs[0], of_rows.inputs[0]
    return (before, written, uses[0].outputs[0], perm[0]) if before is not None and written is not None else None


def _join(graph: ir.Graph, scatter: ir.Node, write: _Write) -> None:
    assert write.data.shape is not None
    size = write.data.shape[write.axis]
    new, parts = NewNodes(), list[ir.Value]()
    if write.start > 0:
        parts.append(_cut(new, write, 0, write.start, write.start))
    parts.append(write.rows)
    if size != write.stop:
        left = size - write.stop if isinstance(size, int) else ir.SymbolicDim(None)
        parts.append(_cut(new, write, write.stop, np.iinfo(np.int64).max, left))
    joined = new.op("Concat", parts, {"axis": write.axis})
    ir.convenience.replace_nodes_and_values(graph, scatter, [], new.nodes, [write.result], [joined])


def _cut(new: NewNodes, write: _Write, start: int, end: int, count: int | ir.SymbolicDim) -> ir.Value:
    """Returns rows of the data that stay."""
    assert write.data.shape is not None
    bounds = [new.constant([bound]) for bound in (start, end, write.axis)]
    sizes = list(write.data.shape)
    sizes[write.axis] = count
    return new.add("Slice", [write.data, *bounds], write.data, sizes)
