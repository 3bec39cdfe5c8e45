"""Runs of tokens, such as text and image, that are concatenated along the token axis."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from trtconvert.export.matching import producer_of


def runs_of(value: ir.Value | None, axis: int) -> list[ir.Value | None]:
    """Returns the inputs of a Concat of rank 4 along an axis, or the value itself."""
    join = producer_of(value, "Concat")
    return list(join.inputs) if join is not None and join.attributes["axis"].as_int() % 4 == axis else [value]


def one_after_another(runs: Sequence[ir.Value], axis: int, before: ir.Node) -> ir.Value:
    """Concatenates tensors along an axis, in front of a node. A single tensor is returned as it is."""
    if len(runs) == 1:
        return runs[0]
    join = ir.node("Concat", runs, {"axis": axis})
    joined, shapes = join.outputs[0], [run.shape for run in runs]
    joined.type = runs[0].type
    known = [shape for shape in shapes if shape is not None]
    if len(known) == len(runs):
        counts = [shape[axis] for shape in known]
        numbers = [count for count in counts if isinstance(count, int)]
        joined.shape = ir.Shape(known[0])
        joined.shape[axis] = sum(numbers) if len(numbers) == len(counts) else None
    assert before.graph is not None
    before.graph.insert_before(before, join)
    return joined
