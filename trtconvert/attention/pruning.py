"""Token pruning drops the keys that receive the least attention. Also derives pruning ratios and block masks from data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from trtconvert.attention.reference import BLOCK, timestep_bin
from trtconvert.errors import UserError
from trtconvert.mixed_types import without_autocast

SAMPLED_QUERIES = 256
"""Largest number of queries that are sampled to estimate each key's attention: more change few of the dropped keys."""


@torch.no_grad()
@without_autocast
def key_importance(q: Tensor, k: Tensor, *, stride: int = 64, softmax_scale: float | None = None) -> Tensor:
    """Estimates the share of attention that each key receives, from every `stride`-th query, in 16 bits if q has 16.

    Costs 1 / `stride` of QKᵀ, at most `SAMPLED_QUERIES` / Nq.

    Args:
        q, k: [B, H, Nq, D], [B, Hkv, Nk, D].
        stride: distance of the sampled queries.
        softmax_scale: factor of the logits; None: 1/√D.
    Returns:
        [B, Hkv, Nk] FP32, mean softmax weight over the sampled queries and the query heads that share a key head; sums to one.
        Queries with NaN or ±Inf are ignored; a key with NaN gives NaN in its head.
    Raises:
        UserError: softmax_scale is not a positive finite number.
    """
    check_softmax_scale(softmax_scale)
    (batch, _, queries, dim), kv_heads = q.shape, k.shape[1]
    stride = max(1, min(stride, queries), -(-queries // SAMPLED_QUERIES))
    sampled = q[:, :, stride // 2 :: stride].reshape(batch, kv_heads, -1, dim)
    sampled = sampled.masked_fill(~sampled.isfinite().all(-1, keepdim=True), 0)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    logits = (sampled * scale) @ k.transpose(2, 3)
    return logits.softmax(-1, dtype=torch.float32).mean(2)


def broken_first(importance: Tensor, k: Tensor) -> Tensor:
    """Ranks keys [B, Hkv, Nk, D] with NaN or ±Inf first in the importance [B, Hkv, Nk]: dropping them would hide the fault."""
    broken = ~k.sum(-1, dtype=torch.float32).isfinite()
    return importance.nan_to_num(0).masked_fill(broken, math.inf)


def most_important(importance: Tensor, kept: int) -> Tensor:
    """Returns the `kept` most important keys of each head: [B, Hkv, kept] INT32, the operator's `key_index`."""
    return importance.topk(kept, dim=-1, sorted=False).indices.int()


def kept_keys(keys: int, ratio: float) -> int:
    """Returns the number of keys that remain after a share in [0, 1) of them is dropped; at least one."""
    check_ratio(ratio)
    return max(1, keys - int(keys * ratio))


def kept_mask(key_index: Tensor, heads: int, keys: int) -> Tensor:
    """Returns [B, H, Nk] boolean, true for kept keys. Key heads are repeated for the query heads that share them."""
    batch, kv_heads, _ = key_index.shape
    mask = torch.zeros(batch, kv_heads, keys, dtype=torch.bool, device=key_index.device)
    return mask.scatter(2, key_index.long(), True).repeat_interleave(heads // kv_heads, 1)


def check_softmax_scale(softmax_scale: float | None) -> None:
    """Raises a UserError if a factor of the logits is given, but not a positive finite number."""
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:  # NaN fails both comparisons
        raise UserError(
            "softmax_scale is not valid",
            expected="a softmax_scale that is positive and finite",
            got=str(softmax_scale),
            remedy="leave it out for 1/√D",
        )


def check_ratio(ratio: float) -> None:
    """Raises a UserError if a share of keys to drop is not in [0, 1)."""
    _check_share("the pruning ratio", "a pruning_ratio", ratio, "use 0.2 to drop a fifth of the keys, for example")


def _check_share(what: str, name: str, share: float, remedy: str) -> None:
    if not 0 <= share < 1:  # NaN fails both comparisons
        expected = f"{name} of 0 or more and less than 1"
        raise UserError(f"{what} is not valid", expected=expected, got=str(share), remedy=remedy)


@torch.no_grad()
def pruning_schedule(
    data: Iterable[tuple[Tensor, Tensor, Tensor, int | float | Tensor]],
    lost: float = 0.01,
    *,
    bins: int = 10,
    num_timesteps: int = 1000,
    stride: int = 64,
    softmax_scale: float | None = None,
) -> tuple[float, ...]:
    """Returns the `pruning_ratio` that data allows: in each part of the schedule the largest share of keys that together receive
    at most a share `lost` of the attention in every head, sample and call.

    Args:
        data: (Q, K, V, timestep) of calls, as in `Int8Attention.calibrate`.
        lost: share of the attention, in [0, 1).
        bins: parts of the schedule; parts without a call are not pruned.
        num_timesteps: end of the last part; stride, softmax_scale: see `key_importance`.
    Raises:
        UserError: no data, or `lost` or softmax_scale is not valid.
    """
    _check_lost(lost)
    found: list[float | None] = [None] * bins
    for q, k, _, timestep in data:
        steps = torch.as_tensor(timestep, dtype=torch.float32).cpu().reshape(-1).expand(len(q))
        mass = key_importance(q, k, stride=stride, softmax_scale=softmax_scale).sort(-1).values.cumsum(-1)
        shares = ((mass <= lost).sum(-1).amin(1) / k.shape[2]).tolist()
        for place, share in zip(timestep_bin(steps, float(num_timesteps), bins).tolist(), shares, strict=True):
            known = found[place]
            found[place] = share if known is None else min(known, share)
    if all(share is None for share in found):
        raise no_calls("to find it from")
    return tuple(min(share or 0.0, 1 - 1e-6) for share in found)


@torch.no_grad()
def block_mask_of_data(
    data: Iterable[tuple[Tensor, Tensor, Tensor, int | float | Tensor]],
    lost: float = 0.01,
    *,
    softmax_scale: float | None = None,
) -> Tensor:
    """Makes a block mask without the blocks that receive almost no attention in the data.

    Each block of queries drops the least blocks of keys that together receive at most a share `lost` of its attention. A block
    that any sample or call needs stays. Attention is computed exactly, a block of queries at a time.

    Args:
        data: (Q, K, V, timestep) of calls with equal numbers of tokens.
        lost: in [0, 1); softmax_scale: factor of the logits, None: 1/√D.
    Returns:
        [1, H, ⌈Nq / BLOCK⌉, ⌈Nk / BLOCK⌉] boolean, on the CPU.
    Raises:
        UserError: no data, an invalid `lost` or softmax_scale, or calls with different numbers of heads or tokens.
    """
    _check_lost(lost)
    check_softmax_scale(softmax_scale)
    seen: Tensor | None = None
    for q, k, _, _ in data:
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        found = needed_blocks(q, k, [lost], scale)[:, 0].any(0, keepdim=True).cpu()
        if seen is not None and seen.shape != found.shape:
            raise UserError(
                "the calls need different block masks",
                expected=f"heads and blocks of tokens {list(seen.shape[1:])}, as in the first call",
                got=str(list(found.shape[1:])),
                remedy="make a mask for each size of image",
            )
        seen = found if seen is None else seen | found
    if seen is None:
        raise no_calls("to find it from")
    return seen


@without_autocast
def needed_blocks(q: Tensor, k: Tensor, shares: Sequence[float], softmax_scale: float) -> Tensor:
    """Finds the blocks that remain when each block of queries drops the least blocks of keys that together receive at most a
    share of its attention. Attention is computed exactly, in FP32, a block of queries at a time.

    Args:
        q, k: [B, H, Nq, D], [B, Hkv, Nk, D].
        shares: shares of attention that may be lost, in [0, 1).
        softmax_scale: factor of the logits.
    Returns:
        [B, len(shares), H, ⌈Nq / BLOCK⌉, ⌈Nk / BLOCK⌉] boolean, on q's device. No row is empty. Blocks with a NaN share stay.
    """
    if len(q) > 1:  # element by element: the weights of all heads of a block of queries are in memory at once
        each = zip(q.split(1), k.split(1), strict=True)
        return torch.cat([needed_blocks(*element, shares, softmax_scale) for element in each])
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1).float().transpose(2, 3)
    rows = []
    for queries in q.float().split(BLOCK, 2):
        weights = ((queries * softmax_scale) @ keys).softmax(-1).mean(2)  # [B, H, Nk]
        mass = pad(weights, (0, -weights.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1)
        least, order = mass.sort(-1)
        lost = least.cumsum(-1)
        # The largest block stays, even if rounding makes the sum of all less than the share.
        kept = torch.stack([~(lost <= share) for share in shares], 1).index_fill(
            -1, torch.tensor([mass.shape[-1] - 1], device=q.device), True
        )
        rows.append(torch.zeros_like(kept).scatter(-1, order[:, None].expand_as(kept), kept))
    return torch.stack(rows, 3)


def _check_lost(lost: float) -> None:
    remedy = "use 0.01 to leave out a hundredth of the attention, for example"
    _check_share("the share of lost attention", "a share", lost, remedy)


def no_calls(purpose: str) -> UserError:
    """Returns the error for data without calls; purpose: what the calls are for."""
    return UserError(
        f"there is nothing {purpose}",
        expected="(Q, K, V, timestep) of one call or more",
        got="none",
        remedy="collect the tensors that the model passes to attention at several timesteps",
    )
