"""Concatenations: of tensors of several types, which torch promotes to one and ONNX refuses, and of the parts of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trtconvert.export.matching import axes_of, constant_of, producer_of

_TO_THE_END = np.iinfo(np.int64).max
"""Where the exporter lets `x[n:]` end."""


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


def drop_rejoins(model: ir.Model) -> int:
    """Give what reads a Concat of all parts of one tensor, in their order, the tensor itself.

    Each single block of Flux cuts text from image, which the next one puts together again: in the engine with the plugin two
    copies, 47 of the 2,200 µs that such a block takes on an H200 at 1024². For optimised models, in which positions are
    constants.

    Returns:
        How many nodes were removed.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "Concat" or node.domain:
            continue
        whole = _rejoined([x for x in node.inputs if x is not None], node.attributes["axis"].as_int())
        if whole is not None and not node.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(node.outputs[0], whole)
            count += 1
    if count:
        RemoveUnusedNodesPass()(model)
    return count


def _rejoined(parts: Sequence[ir.Value], axis: int) -> ir.Value | None:
    """The tensor that was cut along an axis into these parts, none of them left out."""
    split = producer_of(parts[0], "Split")
    if split is not None and list(split.outputs) == list(parts):
        whole = split.inputs[0]
        along = split.attributes.get_int("axis", 0)
        same = whole is not None and whole.shape is not None and (along - axis) % len(whole.shape) == 0
        return whole if same else None
    cuts = [_cut(part) for part in parts]
    known = [cut for cut in cuts if cut is not None]
    whole = known[0].source if len(known) == len(parts) > 1 else None
    if whole is None or whole.shape is None or any(cut.source is not whole for cut in known):
        return None
    size = whole.shape[axis]
    first, last = constant_of(known[0].start), constant_of(known[-1].end)
    if any(cut.axis != axis % len(whole.shape) for cut in known) or first is None or first.item() != 0:
        return None
    if last is None or not (last.item() == _TO_THE_END or (isinstance(size, int) and last.item() >= size)):
        return None
    # Cut at one position, wherever it is, both parts are the whole. At several, these have to be in order.
    if not all(_is_same(cut.end, following.start) for cut, following in zip(known, known[1:], strict=False)):
        return None
    positions = [constant_of(cut.start) for cut in known]
    at = [int(position.item()) for position in positions if position is not None]
    return whole if len(known) == 2 or (len(at) == len(known) and at == sorted(at)) else None


@dataclass(frozen=True)
class _Cut:
    """source[start:end] along an axis, counted from the first."""

    source: ir.Value
    start: ir.Value
    end: ir.Value
    axis: int


def _cut(value: ir.Value) -> _Cut | None:
    node = producer_of(value, "Slice")
    if node is None or len(node.inputs) < 4:
        return None
    source, start, end, axes = node.inputs[:4]
    if source is None or source.shape is None or start is None or end is None:
        return None
    along = axes_of(axes, len(source.shape))
    step = constant_of(node.inputs[4]) if len(node.inputs) > 4 else np.array([1])
    if along is None or len(along) != 1 or step is None or step.item() != 1:
        return None
    return _Cut(source, start, end, along[0])


def _is_same(a: ir.Value, b: ir.Value) -> bool:
    """Whether two positions are one value, or the same number."""
    of_a, of_b = constant_of(a), constant_of(b)
    return a is b or (of_a is not None and of_b is not None and of_a.item() == of_b.item())
