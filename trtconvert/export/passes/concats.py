"""Concats of mixed types, which ONNX refuses, and Concats that rejoin the parts of a tensor."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import cleaned
from trtconvert.export.matching import cuts_of, producer_of

_TO_THE_END = np.iinfo(np.int64).max
"""The exporter's end of `x[n:]`."""


def promote_concats(model: ir.Model) -> int:
    """Casts the inputs of each Concat to the type of its output. The exporter omits torch's promotion in `concat` and `stack`.

    Returns:
        The number of casts.
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
    """Returns the type of a value, or of the tensor before its Unsqueeze: `torch.stack` leaves the type open."""
    unsqueeze = producer_of(x, "Unsqueeze")
    source = unsqueeze.inputs[0] if unsqueeze is not None else None
    return source.dtype if x.dtype is None and source is not None else x.dtype


def drop_rejoins(model: ir.Model) -> int:
    """Replaces each Concat of all parts of one tensor, in order, by the tensor. For optimised models with constant positions.

    Each single block of Flux splits text and image, and the next block joins them: two copies per block.

    Returns:
        The number of removed Concats.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type != "Concat" or node.domain:
            continue
        whole = _rejoined(node)
        if whole is not None and not node.outputs[0].is_graph_output():
            ir.convenience.replace_all_uses_with(node.outputs[0], whole)
            count += 1
    return cleaned(model, count)


def _rejoined(concat: ir.Node) -> ir.Value | None:
    """Returns the tensor if a Concat joins all of its parts, else None."""
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
    # Two parts may meet anywhere. Of more parts the positions must ascend.
    numbers = [start for start in starts if isinstance(start, int)]
    return whole if len(cuts) == 2 or (len(numbers) == len(cuts) and numbers == sorted(numbers)) else None
