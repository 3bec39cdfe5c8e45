"""Gives the plugin text and image of joint attention as two tensors.

Text and image have projections of their own before and after the attention. For a plugin with one tensor TensorRT copies both in
front of the plugin, and out of its result.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import onnx_ir as ir

from trtconvert.attention.reference import TILE
from trtconvert.export.building import NewNodes, graph_of
from trtconvert.export.matching import constant_of, cuts_of, is_same_shape
from trtconvert.export.nodes.attention import key_index_of

TOKENS = 1
"""Token axis of [B, N, H, D] and [B, N, H·D]."""
_ENDLESS = 2**31 - 1
"""Least end of a slice of all remaining tokens of a dynamic number."""


def fuse_in_parts(node: ir.Node, products: Sequence[ir.Value]) -> bool:
    """Gives a node two packed inputs and two outputs if the model splits its output at the same token.

    The first run must have a multiple of 128 tokens: a tile of the kernels must not span both. Gathered keys are not supported.

    Args:
        node: in layout BNHD, with one output.
        products: packed q, k and v of runs of tokens, [B, Ni, 3, H, D] each.
    Returns:
        True if the node was changed.
    """
    count = products[0].shape[TOKENS] if products[0].shape is not None else None
    if len(products) != 2 or not isinstance(count, int) or count % TILE or key_index_of(node) is not None:
        return False
    whole = node.outputs[0]
    kind = whole.type
    readers = _parts_of_output(whole, count)
    if not readers:
        return False
    node.resize_outputs(2)
    for output, product in zip(node.outputs, products, strict=True):
        assert product.shape is not None
        output.type = copy.copy(kind)
        output.shape = ir.Shape([*product.shape[:2], *product.shape[3:]])
    node.outputs[1].name = f"{whole.name}_second"
    for index, product in enumerate((products[0], products[1], products[1])):
        node.replace_input_with(index, product)
    node.attributes["parts"] = ir.AttrInt64("parts", 2)
    merged: dict[int, ir.Value] = {}
    for value, part in readers:
        source = node.outputs[part]
        if value.shape is not None and len(value.shape) == 3:
            if part not in merged:
                merged[part] = _heads_merged(node, source)
            source = merged[part]
        ir.convenience.replace_all_uses_with(value, source)
    return True


def _parts_of_output(whole: ir.Value, count: int) -> list[tuple[ir.Value, int]]:
    """Returns the readers' slices before (0) and from (1) a token on, or [] if there are other readers."""
    views = [whole]
    for user, _ in whole.uses():
        if user.op_type == "Reshape" and not user.domain and _merges_heads(user):
            views.append(user.outputs[0])
    found: list[tuple[ir.Value, int]] = []
    for view in views:
        if view.is_graph_output():
            return []
        for user, _ in view.uses():
            if any(user.outputs[0] is other for other in views):
                continue
            parts = _cut(user, view, count)
            if not parts or any(value.is_graph_output() for value, _ in parts):
                return []
            found += parts
    return found


def _merges_heads(reshape: ir.Node) -> bool:
    """Return whether a Reshape maps [B, N, H, D] to [B, N, H·D]."""
    heads, merged = (value.shape if value is not None else None for value in (reshape.inputs[0], reshape.outputs[0]))
    if heads is None or merged is None or len(merged) != 3 or not all(isinstance(size, int) for size in heads[2:]):
        return False
    # Equal numbers of elements: if two axes are equal, so is the third.
    return merged[2] == heads[2] * heads[3] and any(is_same_shape([heads[i]], [merged[i]]) for i in (0, TOKENS))


def _cut(user: ir.Node, view: ir.Value, count: int) -> list[tuple[ir.Value, int]]:
    """Returns the outputs of a Split or Slice at a token, each with 0 (before) or 1 (from), else []."""
    assert view.shape is not None
    if user.op_type == "Split" and not user.domain:
        sizes = constant_of(user.inputs[1]) if len(user.inputs) > 1 else None
        along_tokens = user.attributes.get_int("axis", 0) % len(view.shape) == TOKENS
        if not along_tokens or sizes is None or len(sizes) != 2 or sizes[0] != count:
            return []
        return [(value, part) for part, value in enumerate(user.outputs)]
    for data, start, stop in cuts_of(user.outputs[:1], TOKENS):
        if data is not view:
            break
        if (start, stop) == (0, count):
            return [(user.outputs[0], 0)]
        size = view.shape[TOKENS]
        to_the_end = stop == size if isinstance(size, int) else isinstance(stop, int) and stop >= _ENDLESS
        if start == count and to_the_end:
            return [(user.outputs[0], 1)]
    return []


def _heads_merged(node: ir.Node, output: ir.Value) -> ir.Value:
    """Reshapes an output [B, N, H, D] to [B, N, H·D]."""
    assert output.shape is not None
    heads, head_dim = output.shape[2:]
    assert isinstance(heads, int) and isinstance(head_dim, int)
    new, width = NewNodes(), heads * head_dim
    merged = new.reshaped(output, [0, 0, width], [*output.shape[:2], width])
    graph_of(node).insert_after(node, new.nodes)
    return merged
