"""Tokens that follow each other: text and image that attend to each other, joined along one axis."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from trtconvert.export.matching import producer_of


def runs_of(value: ir.Value | None, axis: int) -> list[ir.Value | None]:
    """The tensors of four axes that a value joins along one of them, which is counted from the first: itself, if none."""
    join = producer_of(value, "Concat")
    return list(join.inputs) if join is not None and join.attributes["axis"].as_int() % 4 == axis else [value]


def one_after_another(runs: Sequence[ir.Value], axis: int, before: ir.Node) -> ir.Value:
    """Tensors joined along an axis, counted from the first, in front of a node: the tensor itself, if there is one."""
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
