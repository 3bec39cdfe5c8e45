"""Packs q, k and v into one tensor for the plugin.

TensorRT computes projections of one tensor as one product, and copies its parts for a plugin with three inputs: plugins have no
strides (TensorRT's issue 4345). The plugin takes the product [B, N, 3, H, D] itself. Joint attention has products of text and
image: the plugin takes both (`fuse_in_parts`), or they are concatenated.
"""

from __future__ import annotations

import onnx_ir as ir

from trtconvert.export.building import cleaned
from trtconvert.export.lowering.layout import output_tokens_first
from trtconvert.export.lowering.parts import fuse_in_parts
from trtconvert.export.lowering.projections import Projection, join, projection
from trtconvert.export.lowering.tokens import one_after_another, runs_of
from trtconvert.export.matching import element_of, perm_of, producer_of
from trtconvert.export.nodes.attention import attention_nodes

PARTS = 3


def pack_projections(model: ir.Model) -> int:
    """Gives nodes one tensor [B, N, 3, H, D] for q, k and v if these are parts of one product, or products of one tensor (or of
    runs of tokens) with constant weights.

    The weights of three products are joined and renamed: not for refittable engines.

    Returns:
        The number of packed nodes.
    """
    count = 0
    for node in attention_nodes(model).values():
        packed = _source_of_parts(node)
        if packed is None and (runs := _projections(node)):
            products = [join(run, [PARTS, run[0].heads, run[0].head_dim], before=node) for run in runs]
            if fuse_in_parts(node, products):
                count += 1
                continue
            packed = one_after_another(products, axis=1, before=node)
        if packed is None:
            continue
        for index in range(PARTS):
            node.replace_input_with(index, packed)
        if node.attributes["layout"].as_string() == "BHND":
            node.attributes["layout"] = ir.AttrString("layout", "BNHD")
            output_tokens_first(node)
        count += 1
    return cleaned(model, count)


# One projection, cut into parts -----------------------------------------------------------------------------------------


def _source_of_parts(node: ir.Node) -> ir.Value | None:
    """Returns the tensor with q, k and v as its parts 0, 1, 2, else None."""
    if node.attributes["layout"].as_string() != "BHND":
        return None
    found = [part for value in node.inputs[:PARTS] if (part := element_of(value)) is not None]
    if [(axis, index) for _, axis, index in found] != [(0, 0), (0, 1), (0, 2)] or len({x for x, _, _ in found}) > 1:
        return None
    transpose = producer_of(found[0][0], "Transpose")
    # [B, N, 3, H, D] to [3, B, H, N, D]
    if transpose is None or perm_of(transpose) != [2, 0, 3, 1, 4]:
        return None
    packed = transpose.inputs[0]
    return packed if packed is not None and packed.shape is not None and packed.shape[2] == PARTS else None


# Three projections ------------------------------------------------------------------------------------------------------


def _projections(node: ir.Node) -> list[list[Projection]]:
    """Returns the projections of each run of tokens of a BNHD node, all of one size, else []."""
    if node.attributes["layout"].as_string() != "BNHD":
        return []
    values = [runs_of(value, axis=1) for value in node.inputs[:PARTS]]
    if len({len(runs) for runs in values}) > 1:
        return []
    found = [[part for value in run if (part := projection(value)) is not None] for run in zip(*values, strict=True)]
    kinds = [{(p.x, p.heads, p.head_dim, p.weight.dtype, p.bias is None) for p in run} for run in found]
    whole = all(len(run) == PARTS and len(kind) == 1 for run, kind in zip(found, kinds, strict=True))
    sizes = {(p.heads, p.head_dim, p.weight.dtype) for run in found for p in run}
    return found if whole and len(sizes) == 1 else []
