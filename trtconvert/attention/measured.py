"""Attention without a calibration: scales and offsets are measured on the tensors of each call, on the device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from trtconvert.attention import kernel
from trtconvert.attention.modes import Mode
from trtconvert.attention.ranges import tables_of_ranges
from trtconvert.attention.reference import AttentionTables, timestep_bin


@torch.no_grad()
def measured_tables(q: Tensor, k: Tensor, v: Tensor, modes: Tensor, present: Collection[Mode]) -> AttentionTables:
    """Returns tables with one bin per sample of the batch, so that no sample depends on the others.

    A non-finite key makes its head's mean key non-finite, and so the whole head, even if a block mask excludes the key.

    Only tables that the modes need are measured. The mean key takes one pass over the keys, INT8 and FP8 values take two passes
    over the values. `Mode.AGGRESSIVE`, which takes all scales from tables, takes one more pass over queries and over keys.

    Args:
        q, k, v: [B, H, Nq, D], [B, Hkv, Nk, D] twice.
        modes: [B] INT32, of each sample; present: the modes that may occur among them.
    """
    batch, heads = q.shape[:2]
    kv_heads, dim = k.shape[1], k.shape[3]

    def constant(value: float, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=q.device)

    zero, one = constant(0.0, batch, kv_heads, dim), constant(1.0, batch, kv_heads, dim)
    ranges = {"q": constant(1.0, batch, heads), "k": constant(1.0, batch, kv_heads), "v": one}
    means = {"k_offset": zero, "v_offset": zero}
    if any(mode != Mode.FP16 for mode in present):
        means["k_offset"] = k.mean(2, dtype=torch.float32)
    if Mode.AGGRESSIVE in present:
        ranges["q"] = _largest_of_rows(q)
        ranges["k"] = _largest_about(k, means["k_offset"]).amax(-1)
    if any(mode >= Mode.BALANCED for mode in present):
        means["v_offset"] = v.mean(2, dtype=torch.float32)
        ranges["v"] = _largest_about(v, means["v_offset"])
    return AttentionTables(**tables_of_ranges(ranges, means), modes=modes)


def _largest_about(x: Tensor, offset: Tensor) -> Tensor:
    """[B, Hkv, D] largest |x - offset| over the tokens."""
    low, high = torch.aminmax(x, dim=2)
    return torch.maximum(high.float() - offset, offset - low.float())


def _largest_of_rows(q: Tensor) -> Tensor:
    """[B, H] largest magnitude of the finite queries: a non-finite query does not change the others."""
    low, high = torch.aminmax(q, dim=3)
    largest = torch.maximum(high.float(), -low.float())
    return largest.masked_fill(~largest.isfinite(), 0).amax(2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    timestep: Tensor,
    modes: Tensor,
    present: Collection[Mode],
    *,
    timestep_max: float = 1000.0,
    **options: Any,
) -> Any:
    """Runs `kernel.attention` with measured tables. Differentiable; compiles; does not synchronise with the device.

    Args:
        timestep: [B] FP32.
        modes: [T] INT32, of each timestep bin; present: the modes that may occur.
        options: of `kernel.int8_attention`, except the tables, `layout`, `scaling` and `smooth_k`.
    """
    batch = q.shape[0]
    each = modes[timestep_bin(timestep, timestep_max, modes.shape[0])]
    tables = measured_tables(q, k, v, each, present)
    # Sample b takes bin b of the measured tables; a NaN timestep stays NaN and gives a NaN sample.
    place = torch.arange(batch, dtype=torch.float32, device=q.device) + 0.5
    place = torch.where(timestep.isnan(), timestep, place)
    return kernel.attention(q, k, v, place, tables, timestep_max=float(batch), scaling="dynamic", **options)
