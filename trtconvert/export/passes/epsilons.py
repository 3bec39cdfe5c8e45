"""Keeps ε of x / (y + ε) and √(x + ε), which the exporter's optimisation would remove as 0."""

from __future__ import annotations

import onnx_ir as ir

from trtconvert.export.building import NewNodes
from trtconvert.export.matching import constant_of, producer_of

_TAKEN_FOR_ZERO = 1e-8
"""Absolute tolerance below which onnxscript's rewriter treats scalars, but not tensors with an axis, as 0."""


def keep_epsilons(model: ir.Model) -> int:
    """Gives tiny scalar terms of sums an axis, in place, before the optimisation. Without its 1e-15 Sana's attention is 0/0.

    Returns:
        The number of kept terms.
    """
    count = 0
    for node in list(model.graph):
        if node.op_type not in ("Add", "Sub") or node.domain:
            continue
        for index, (term, tensor) in enumerate(zip(node.inputs, reversed(node.inputs), strict=True)):
            if term is None or tensor is None or not tensor.shape or not _is_epsilon(term):
                continue
            new = NewNodes()
            node.replace_input_with(index, new.add("Unsqueeze", [term, new.constant([0])], term, [1]))
            model.graph.insert_before(node, new.nodes)
            count += 1
    return count


def _is_epsilon(term: ir.Value) -> bool:
    cast = producer_of(term, "Cast")
    number = constant_of(term if cast is None else cast.inputs[0])
    return number is not None and number.ndim == 0 and 0 < abs(number.item()) <= _TAKEN_FOR_ZERO
