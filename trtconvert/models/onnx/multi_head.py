"""ONNX's operators of attention, and ours, which patterns become."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trtconvert.models.onnx.call import Call, Table, Value, as_weight, in_narrowest_type, require_one_output
from trtconvert.unfused.steps import Mark, Scores


def _attended(call: Call, a: Tensor, b: Tensor, v: Tensor, *masks: Value) -> Tensor:
    """Computes `trtconvert::attention`, made by `attention`: the two factors of its scores, values, and tensors of its marks."""
    a, b, v = in_narrowest_type([a, b, v])
    marks = [Mark(kind, call.tensor(x), *of) for (kind, *of), x in zip(call.get("marks"), masks, strict=True)]
    scores = Scores((a, b), call.get("of"), "", marks=tuple(marks))
    layout = call.get("layout").at(scores)
    q, k, v = layout.tensors(scores, v)
    return layout.as_written(_heads_attended(call, q, k, v, layout.mask(marks, q.dtype), False))


def _mask_beside(call: Call, q: Tensor, mask: Value | None) -> Tensor | None:
    if mask is None:
        return None
    tensor = call.tensor(mask)
    while tensor.dim() < q.dim():
        tensor = tensor.unsqueeze(0)
    return tensor.to(q.dtype) if tensor.is_floating_point() else tensor


def _attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Value | None = None, past_key: Value | None = None,
    past_value: Value | None = None, lengths: Value | None = None,
) -> Tensor:  # fmt: skip
    """Computes ONNX's Attention, since opset 23. [B, H, N, D], or [B, N, H·D]."""
    require_one_output(call)
    if past_key is not None or past_value is not None:
        raise call.refused("past keys and values", "Attention to all keys at once: export the model without a cache")
    if lengths is not None:
        raise call.refused("lengths of keys (nonpad_kv_seqlen)", "a mask of keys (attn_mask) in their place")
    if call.get("softcap", 0.0):
        raise call.refused(
            f"a softcap of {call.get('softcap'):g}", "scores without softcap, which INT8 attention lacks"
        )
    flat = q.dim() == 3
    if flat:
        heads, of_keys = call.get("q_num_heads"), call.get("kv_num_heads")
        q, k, v = _split_heads(q, heads), _split_heads(k, of_keys), _split_heads(v, of_keys)
    given, causal = _mask_beside(call, q, mask), bool(call.get("is_causal", 0))
    if given is not None and given.shape[-1] != k.shape[2] and given.shape[-1] != 1:
        hides = "false" if given.dtype == torch.bool else "-inf"
        raise call.refused(
            f"a mask of {given.shape[-1]} keys", f"one of all {k.shape[2]} keys, with {hides} for the others"
        )
    if given is not None and causal:  # torch takes one of them
        hidden: Any = False if given.dtype == torch.bool else -torch.inf
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        given, causal = torch.where(visible, given, hidden), False
    found = _heads_attended(call, q, k, v, given, causal)
    return found.transpose(1, 2).flatten(2) if flat else found


def _heads_attended(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    q, k, v = in_narrowest_type([q, k, v])
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=call.get("scale") or None, **grouped)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, H·D] → [B, H, N, D]."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def _multi_head(
    call: Call, q: Tensor, k: Value | None = None, v: Value | None = None, bias: Value | None = None,
    padding: Value | None = None, added: Value | None = None, *past: Value | None,
) -> Tensor:  # fmt: skip
    """Computes com.microsoft's MultiHeadAttention of queries, keys and values [B, N, H·D], or packed ones [B, N, H, 3, D]."""
    require_one_output(call)
    heads = call.get("num_heads")
    if any(x is not None for x in past) or padding is not None:
        raise call.refused("MultiHeadAttention with a cache or a key_padding_mask", "without")
    if q.dim() == 5 and k is None:
        queries, keys, values = (x.transpose(1, 2) for x in q.unbind(3))
    elif isinstance(k, Tensor) and k.dim() == 3 and isinstance(v, Tensor):
        parts = [q, k, v]
        if bias is not None:
            whole = call.tensor(bias).to(q.dtype)
            parts = [x + part for x, part in zip(parts, whole.split([x.shape[-1] for x in parts]), strict=True)]
        queries, keys, values = (_split_heads(x, heads) for x in parts)
    elif isinstance(k, Tensor) and k.dim() == 5 and v is None:  # packed keys and values
        queries = _split_heads(q, heads)
        keys, values = (x.transpose(1, 2) for x in k.unbind(3))
    else:
        raise call.refused("MultiHeadAttention of other shapes", "queries, keys and values [B, N, H·D]")
    found = _heads_attended(
        call, queries, keys, values, _mask_beside(call, queries, added), bool(call.get("unidirectional", 0))
    )
    return found.transpose(1, 2).flatten(2)


def _packed_attention(call: Call, x: Tensor, weight: Tensor, bias: Value | None = None, *more: Value | None) -> Tensor:
    """Computes com.microsoft's Attention, which includes the projections. weight [K, 3·N]."""
    require_one_output(call)
    if any(value is not None for value in more):
        raise call.refused("com.microsoft's Attention with a mask or a cache", "without")
    projected = F.linear(x.to(weight.dtype), weight.T, as_weight(weight, call, bias))
    sizes = call.get("qkv_hidden_sizes") or [projected.shape[-1] // 3] * 3
    q, k, v = (_split_heads(part, call.get("num_heads")) for part in projected.split(sizes, -1))
    return _heads_attended(call, q, k, v, None, bool(call.get("unidirectional", 0))).transpose(1, 2).flatten(2)


def _rotary(call: Call, x: Tensor, cosines: Value, sines: Value, positions: Value | None = None) -> Tensor:
    """Computes ONNX's RotaryEmbedding, since opset 23. [B, H, N, D], or [B, N, H·D]."""
    flat = x.dim() == 3
    heads = x.unflatten(2, (call.get("num_heads"), -1)) if flat else x.transpose(1, 2)  # [B, N, H, D]
    cos, sin = (call.tensor(value).to(x.dtype) for value in (cosines, sines))
    if positions is not None:
        cos, sin = (F.embedding(call.tensor(positions).long(), table) for table in (cos, sin))
    size = call.get("rotary_embedding_dim", 0) or heads.shape[-1]
    turned, left = heads[..., :size], heads[..., size:]
    cos, sin = cos[..., None, : size // 2], sin[..., None, : size // 2]
    if call.get("interleaved", 0):
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    found = torch.cat([turned, left], -1) if left.shape[-1] else turned
    return found.flatten(2) if flat else found.transpose(1, 2)


ATTENTIONS: Table = {
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
    "com.microsoft::Attention": _packed_attention,
    "com.microsoft::MultiHeadAttention": _multi_head,
    "trtconvert::attention": _attended,  # made by `attention`
}
