"""Experimental: attention with a 4-bit first product, QKᵀ, emulated in plain torch on every device.

Tensor cores of sm_80, 86 and 89 multiply 4-bit integers (mma.sync s4) at twice the rate of INT8; Hopper's do not. There is no
kernel: this module measures what 4 bits cost in quality.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtconvert.attention.masks import check_mask
from trtconvert.attention.pruning import check_softmax_scale
from trtconvert.attention.reference import BLOCK, TINY_SCALE
from trtconvert.errors import UserError
from trtconvert.mixed_types import without_autocast

TOP = 7
"""Codes are -7 to 7, symmetric about 0."""

_QUERIES = 1024
"""Approximate number of queries per chunk of logits."""


@dataclass(frozen=True)
class Int4:
    """Tokens as 4-bit integers. N tokens of D channels, in G groups of channels.

    Attributes:
        codes: [B, H, N, D], whole numbers from -7 to 7 in a floating-point type; NaN where the tensor was NaN or infinite.
        scale: [B, H, N, G], the value of code 1 for each token and group.
    """

    codes: Tensor
    scale: Tensor


def quantise_int4(x: Tensor, *, tokens: int = 1, channels: int | None = None) -> Int4:
    """Rounds to 4 bits, to nearest, ties to even; scales are the largest magnitude / 7.

    Args:
        x: [B, H, N, D] FP32 or float64.
        tokens: number of adjacent tokens that share a scale; the last group may be smaller.
        channels: number of channels that share a scale, a divisor of D; None: D.
    """
    batch, heads, count, dim = x.shape
    tokens = min(tokens, count)
    groups = 1 if channels is None else dim // channels
    blocks = pad(x, (0, 0, 0, -count % tokens)).view(batch, heads, -1, tokens, groups, dim // groups)
    scale = (blocks.abs().amax((3, 5)) / TOP).clamp_min(TINY_SCALE).repeat_interleave(tokens, 2)[:, :, :count]
    codes = (x.unflatten(-1, (groups, -1)) / scale[..., None]).round().clamp(-TOP, TOP)
    return Int4(codes.flatten(3), scale)


def int4_product(q: Int4, k: Int4) -> Tensor:
    """Multiplies q kᵀ: products of integers, group by group, times the scales. [B, H, Nq, Nk].

    The sums of a group stay below 49·256 < 2**14, so that FP32, TF32 and the tensor cores' INT32 are exact.
    """
    groups = q.scale.shape[-1]
    q_codes, k_codes = (x.codes.unflatten(-1, (groups, -1)) for x in (q, k))
    product = torch.zeros((), dtype=q.codes.dtype, device=q.codes.device)
    for g in range(groups):
        integers = q_codes[..., g, :] @ k_codes[..., g, :].transpose(2, 3)
        product = product + integers * q.scale[..., g, None] * k.scale[..., g].unsqueeze(2)
    return product


def int4_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    mask: Tensor | None = None,
    query_block: int = BLOCK,
    key_block: int = 1,
    group_size: int | None = None,
) -> Tensor:
    """Computes attention with INT4 QKᵀ and exact softmax and PV. Experimental, emulated on every device, without gradients.

    Before quantisation the mean key is subtracted from the keys, and from each block of queries their mean; the product of this
    mean and the keys is added unquantised, one row per block. Both reduce rounding. Memory is linear in the tokens.

    Args:
        q: [B, H, Nq, D], any floating-point type; k, v: [B, Hkv, Nk, D] in q's type, Hkv divides H.
        softmax_scale: factor of the logits; None: 1/√D.
        mask: broadcastable to [B, H, Nq, Nk], boolean (true attends) or additive. A row without a visible key is zero.
        query_block: number of adjacent queries whose mean is subtracted; 0: none is.
        key_block: number of adjacent keys that share a scale; each query has its own scale.
        group_size: number of channels that share a scale, a divisor of D; None: D. Smaller groups are more exact: half of 64
            saves a tenth of the error, but costs a kernel another conversion of all sums to FP32.
    Returns:
        [B, H, Nq, D] in q's type. NaN and infinities spread as in other attention, and also to all queries of their block or
        head.
    Raises:
        UserError: tensors or options do not fit each other, or a tensor requires gradients.
    Source: SageAttention2 (arXiv 2411.10958), sections 3.1 and 3.2, with a scale for each token instead of each thread's tokens.
    """
    _check(q, k, v, mask, query_block, key_block, group_size)
    check_softmax_scale(softmax_scale)
    out_type, compute = q.dtype, torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(compute) for x in (q, k, v))
    return _attend(q, k, v, softmax_scale, mask, query_block, key_block, group_size).to(out_type)


@without_autocast
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    mask: Tensor | None,
    query_block: int,
    key_block: int,
    group_size: int | None,
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (k - k.mean(2, keepdim=True)).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    queries, scale = q.shape[2], q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    keys = quantise_int4(k, tokens=key_block, channels=group_size)
    mask = None if mask is None else mask.view(*[1] * (4 - mask.dim()), *mask.shape)
    block = min(query_block, queries) or 1
    means = _block_means(q, block) if query_block else None
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for first in range(0, queries, _QUERIES):
        end = min(first + _QUERIES, queries)
        here, added = q[:, :, first:end], None
        if means is not None:
            blocks = means[:, :, first // block : (end - 1) // block + 1]
            place = torch.arange(first, end, device=q.device) // block - first // block
            here = here - blocks[:, :, place]
            added = (blocks @ k.transpose(2, 3))[:, :, place]
        logits = int4_product(quantise_int4(here, channels=group_size), keys)
        logits = (logits if added is None else logits + added) * scale
        if mask is not None:
            part = mask if mask.shape[2] == 1 else mask[:, :, first:end]
            hides = part.dtype == torch.bool
            logits = logits.masked_fill(~part, -torch.inf) if hides else logits + part.to(logits.dtype)
        unseen = (logits == -torch.inf).all(-1, keepdim=True)
        out[:, :, first:end] = logits.softmax(-1).masked_fill(unseen, 0) @ v
    return out


def _block_means(x: Tensor, block: int) -> Tensor:
    """[B, H, N, D] -> [B, H, ⌈N / block⌉, D]."""
    missing = -x.shape[2] % block
    sums = pad(x, (0, 0, 0, missing)).unflatten(2, (-1, block)).sum(3)
    sizes = torch.full((sums.shape[2], 1), block, dtype=x.dtype, device=x.device)
    sizes[-1] -= missing
    return sums / sizes


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, query_block: int, key_block: int, group_size: int | None
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape or not x.is_floating_point():
            wanted = "floating-point [batch, heads, tokens, head_dim], none of them 0"
            raise _misfit(name, wanted, f"{list(x.shape)} {x.dtype}")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or q.shape[1] % k.shape[1]:
        wanted = f"[{q.shape[0]}, a divisor of {q.shape[1]}, tokens, {q.shape[3]}] both"
        raise _misfit("k and v", wanted, f"{list(k.shape)} and {list(v.shape)}")
    if len({x.dtype for x in (q, k, v)}) > 1:
        raise _misfit("q, k and v", "one type", f"{q.dtype}, {k.dtype}, {v.dtype}", "cast them with .to()")
    places = {x.device for x in (q, k, v, mask) if x is not None}
    if len(places) > 1:
        raise _misfit("q, k, v and mask", "one device", ", ".join(sorted(map(str, places))), "move them with .to()")
    if mask is not None:
        check_mask(mask, (*q.shape[:3], k.shape[2]), "int4_attention")
    for name, size, least in (("query_block", query_block, 0), ("key_block", key_block, 1)):
        if not isinstance(size, int) or size < least:
            raise _misfit(name, f"a whole number of tokens from {least}", repr(size))
    if group_size is not None and (not isinstance(group_size, int) or group_size < 1 or q.shape[3] % group_size):
        wanted = f"a divisor of head_dim, {q.shape[3]}"
        raise _misfit("group_size", wanted, repr(group_size), "leave it out for all channels")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise _misfit("q, k or v", "tensors without gradients", "requires_grad", "call it under torch.no_grad()")


def _misfit(what: str, expected: str, got: str, remedy: str = "") -> UserError:
    return UserError(
        f"int4_attention: {what} does not fit", expected=expected, got=got, remedy=remedy or f"correct {what}"
    )
