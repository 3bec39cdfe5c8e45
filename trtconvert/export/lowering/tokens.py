"""Runs of tokens, such as text and image, that are concatenated along the token axis."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from trtconvert.export.building import NewNodes, graph_of
from trtconvert.export.matching import producer_of


def runs_of(value: ir.Value | None, axis: int) -> list[ir.Value | None]:
    """Returns the inputs of a Concat of rank 4 along an axis, or the value itself."""
    join = producer_of(value, "Concat")
    return list(join.inputs) if join is not None and join.attributes["axis"].as_int() % 4 == axis else [value]


def one_after_another(runs: Sequence[ir.Value], axis: int, before: ir.Node) -> ir.Value:
    """Concatenates tensors along an axis, in front of a node. A single tensor is returned as it is."""
    if len(runs) == 1:
        return runs[0]
    new = NewNodes()
    joined = new.add("Concat", runs, runs[0], attributes={"axis": axis})
    if joined.shape is not None:
        counts = [run.shape[axis] if run.shape is not None else None for run in runs]
        numbers = [count for count in counts if isinstance(count, int)]
        joined.shape[axis] = sum(numbers) if len(numbers) == len(counts) else None
    graph_of(before).insert_before(before, new.nodes)
    return joined
