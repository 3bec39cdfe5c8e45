"""Concatenations: of tensors of several types, which torch promotes to one and ONNX refuses, and of the parts of one tensor."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trtconvert.export.matching import cuts_of, producer_of

_TO_THE_END = np.iinfo(np.int64).max
"""Where the exporter lets `x[n:]` end."""


def promote_concats(model: ir.Model) -> int:
    """Cast the inputs of every Concat to the type of its output, as torch does; of `torch.concat` and `torch.stack` the exporter
    leaves that out.

    Returns:
        How many inputs were cast.
    """
    count = 0
    for node in list(model.graph):
        dtype = node.outputs[0].dtype
        if node.op_type != "Concat" or node.domain or dtype is None:
            continue
        for index, x in enumerate(node.inputs):
            if x is not None and _dtype(x) not in (None, dtype):
                cast = ir.node("Cast", [x], {"to": dtype.value})
                cast.outputs[0].shape, cast.outputs[0].type = x.shape, ir.TensorType(dtype)
                model.graph.insert_before(node, cast)
                node.replace_input_with(index, cast.outputs[0])
                count += 1
    return count


def _dtype(x: ir.Value) -> ir.DataType | None:
    """A value's type. What `torch.stack` joins has none yet: it is that of the tensor that was given another axis."""
    unsqueeze = producer_of(x, "Unsqueeze")
    source = unsqueeze.inputs[0] if unsqueeze is not None else None
    return source.dtype if x.dtype is None and source is not None else x.dtype


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
        whole = _rejoined(node)
        if whole is not None and not node.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(node.outputs[0], whole)
            count += 1
    if count:
        RemoveUnusedNodesPass()(model)
    return count


def _rejoined(concat: ir.Node) -> ir.Value | None:
    """The tensor that was cut along an axis into what a node joins, none of it left out."""
    parts, joined = [x for x in concat.inputs if x is not None], concat.outputs[0]
    if joined.shape is None:
        return None
    axis = concat.attributes["axis"].as_int() % len(joined.shape)
    split = producer_of(parts[0], "Split")
    if split is not None:
        along = split.attributes.get_int("axis", 0) % len(joined.shape)
        return split.inputs[0] if list(split.outputs) == parts and along == axis else None
    cuts = cuts_of(parts, axis)
    if not cuts:
        return None
    whole, starts, end = cuts[0][0], [start for _, start, _ in cuts], cuts[-1][2]
    if starts[0] != 0 or whole.shape is None or end not in (whole.shape[axis], _TO_THE_END):
        return None
    # Cut at one position, wherever it is, both parts are the whole. At several, these have to be in order.
    numbers = [start for start in starts if isinstance(start, int)]
    return whole if len(cuts) == 2 or (len(numbers) == len(cuts) and numbers == sorted(numbers)) else None
