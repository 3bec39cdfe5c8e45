"""Token pruning: the keys that least attention goes to are left out, so that attention computes less."""

from __future__ import annotations

import torch
from torch import Tensor

from trtconvert.errors import UserError

SAMPLED_QUERIES = 256
"""Queries that tell how much attention each key gets, at most: a larger sample changes few of the keys that are dropped."""


@torch.no_grad()
def key_importance(q: Tensor, k: Tensor, *, stride: int = 64, softmax_scale: float | None = None) -> Tensor:
    """The share of attention that each key gets, estimated on every `stride`-th query, in 16 bits where q has them.

    Costs a `stride`-th of QKᵀ, at most `SAMPLED_QUERIES` / Nq of it.

    Args:
        q, k: [B, H, Nq, D], [B, Hkv, Nk, D].
        stride: between the queries that are asked.
        softmax_scale: factor of the logits; 1/√D when absent.
    Returns:
        [B, Hkv, Nk] FP32, mean softmax weight over the sampled queries and the query heads that share a key head; sums to one.
    """
    (batch, _, queries, dim), kv_heads = q.shape, k.shape[1]
    stride = max(1, min(stride, queries), -(-queries // SAMPLED_QUERIES))
    sampled = q[:, :, stride // 2 :: stride].reshape(batch, kv_heads, -1, dim)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    logits = (sampled * scale) @ k.transpose(2, 3)
    return logits.softmax(-1, dtype=torch.float32).mean(2)


def most_important(importance: Tensor, kept: int) -> Tensor:
    """The `kept` most important keys of each head: [B, Hkv, kept] INT32, the operator's `key_index`."""
    return importance.topk(kept, dim=-1, sorted=False).indices.int()


def kept_keys(keys: int, ratio: float) -> int:
    """How many keys are left when a share of them is dropped; at least one.

    Raises:
        UserError: the share is not in [0, 1).
    """
    check_ratio(ratio)
    return max(1, keys - int(keys * ratio))


def kept_mask(key_index: Tensor, heads: int, keys: int) -> Tensor:
    """[B, H, Nk] boolean, true for keys that are kept. Key heads are repeated for the query heads that share them."""
    batch, kv_heads, _ = key_index.shape
    mask = torch.zeros(batch, kv_heads, keys, dtype=torch.bool, device=key_index.device)
    return mask.scatter(2, key_index.long(), True).repeat_interleave(heads // kv_heads, 1)


def check_ratio(ratio: float) -> None:
    """
    Raises:
        UserError: not in [0, 1).
    """
    if not 0 <= ratio < 1:  # written so that NaN fails
        raise UserError(
            "attention cannot be pruned by such a share",
            expected="a pruning_ratio of 0 or more and less than 1",
            got=str(ratio),
            remedy="0.2 drops a fifth of the keys; 1 would drop all of them",
        )
