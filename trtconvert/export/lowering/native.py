"""The `native` lowering: plain attention in the model's precision, for runtimes without plugins."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from trtconvert.attention.reference import BLOCK
from trtconvert.export.building import NewNodes, remove_unused, replace_nodes
from trtconvert.export.matching import constant_of, producer_of
from trtconvert.export.nodes.attention import block_mask_of, key_index_of, mask_of, require_attention_nodes


def lower_to_native(model: ir.Model, sites: Collection[str] | None = None) -> int:
    """Replaces nodes by MatMul, Softmax and MatMul. Scales, offsets and modes are dropped.

    Args:
        sites: to lower. None: all.
    Returns:
        The number of lowered nodes.
    Raises:
        UserError: the model has no `Int8Attention` node, or lacks a site.
    """
    nodes = require_attention_nodes(model, sites)
    for node in nodes.values():
        tape, old = NewNodes(), node.outputs[0]
        _attention(tape, node)
        if old.shape is not None and (own := _filled_from(node)):
            old.shape = ir.Shape([*old.shape[:3], own[0].shape[3]])  # type: ignore[index]  # `_filled_from` has seen it
        replace_nodes([node], tape.nodes)
    remove_unused(model)
    return len(nodes)


def _filled_from(node: ir.Node) -> list[ir.Value]:
    """Returns q, k and v before their head_dim was padded for our kernels, else []. The Slice behind the node then has no
    effect."""
    found = []
    for x in node.inputs[:3]:
        pad = producer_of(x, "Pad")
        ends = constant_of(pad.inputs[1]) if pad is not None else None
        if pad is None or ends is None or pad.attributes.get_string("mode", "constant") != "constant":
            return []
        value = constant_of(pad.inputs[2]) if len(pad.inputs) > 2 and pad.inputs[2] is not None else np.zeros(1)
        if ends.size != 8 or ends[:7].any() or value is None or value.any():
            return []
        found.append(pad.inputs[0])
    sizes = {x.shape[3] if x.shape is not None else None for x in found}
    return found if len(sizes) == 1 and None not in sizes else []


def _attention(tape: NewNodes, node: ir.Node) -> None:
    q, k, v = _filled_from(node) or [x for x in node.inputs[:3] if x is not None]
    assert q.dtype is not None  # the exporter types every value
    dtype = q.dtype.numpy()
    heads_last, constant = node.attributes["layout"].as_string() == "BNHD", tape.constant
    if heads_last:
        q, k, v = (tape.op("Transpose", [x], {"perm": [0, 2, 1, 3]}) for x in (q, k, v))
    index = key_index_of(node)
    if index is not None:
        places = tape.op("Unsqueeze", [tape.op("Cast", [index], {"to": ir.DataType.INT64}), constant([-1])])
        k, v = (tape.op("GatherND", [x, places], {"batch_dims": 2}) for x in (k, v))
    # √scale on both sides keeps FP16 logits in range, as in torch.
    scale = node.attributes["softmax_scale"].as_float()
    root = constant(np.array(abs(scale) ** 0.5, dtype))
    signed = constant(np.array(np.copysign(abs(scale) ** 0.5, scale), dtype))

    # [B, Hkv, G, N, D]: G query heads share a key and value head.
    query_shape = tape.op("Shape", [q])
    batch_kv_heads = tape.op("Shape", [k], {"start": 0, "end": 2})
    queries_dim = tape.op("Shape", [q], {"start": 2, "end": 4})
    grouped_shape = tape.op("Concat", [batch_kv_heads, constant([-1]), queries_dim], {"axis": 0})
    grouped = tape.op("Reshape", [tape.op("Mul", [q, signed]), grouped_shape])
    axis = constant([2])
    keys = tape.op("Unsqueeze", [tape.op("Mul", [k, root]), axis])
    values = tape.op("Unsqueeze", [v, axis])
    logits = tape.op("MatMul", [grouped, tape.op("Transpose", [keys], {"perm": [0, 1, 2, 4, 3]})])

    def grouped_mask(mask: ir.Value) -> ir.Value:
        sizes = [tape.op("Shape", [q], {"end": 3}), tape.op("Shape", [k], {"start": 2, "end": 3})]
        rows = tape.op("Expand", [mask, tape.op("Concat", sizes, {"axis": 0})])
        return tape.op("Reshape", [rows, tape.op("Shape", [logits])])

    mask, blocks = mask_of(node), block_mask_of(node)
    visible = [grouped_mask(mask)] if mask is not None and mask.dtype == ir.DataType.BOOL else []
    if mask is not None and not visible:
        logits = tape.op("Add", [logits, tape.op("CastLike", [grouped_mask(mask), logits])])
    if blocks is not None:
        for axis, tokens in ((2, q), (3, k)):
            count = tape.op("Squeeze", [tape.op("Shape", [tokens], {"start": 2, "end": 3})])
            places = tape.op("Range", [constant(0), count, constant(1)])
            places = tape.op("Div", [places, constant(BLOCK)])
            blocks = tape.op("Gather", [blocks, places], {"axis": axis})
        visible.append(grouped_mask(blocks))
    for shown in visible:
        logits = tape.op("Where", [shown, logits, constant(np.array(-np.inf, dtype))])
    weights = tape.op("Softmax", [logits], {"axis": -1})
    for shown in visible:
        # A fully masked row is 0/0 in Softmax and 0 in torch.
        weights = tape.op("Where", [shown, weights, constant(np.array(0, dtype))])
    out = tape.op("Reshape", [tape.op("MatMul", [weights, values]), query_shape])
    if heads_last:
        tape.op("Transpose", [out], {"perm": [0, 2, 1, 3]})
