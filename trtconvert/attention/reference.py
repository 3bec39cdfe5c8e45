"""INT8 attention in plain torch: the specification that the CUDA kernels and the ONNX function body follow.

Exact integer products are computed in `compute_dtype`: a product of INT8 vectors of at most 256 elements, and a tile sum
of u8·s8 over 128 keys, stay under 2**22 and are therefore exact in FP32 as well as in float64. Tests compare the kernels
with this file in float64 (near exact), and this file with unquantised attention (signal-to-noise ratio).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, overload

import torch
from torch import Tensor

from trtconvert.attention.modes import Mode

TILE = 128
"""Keys per tile. u8 weights are relative to the row's maximum within one tile, so the tile is part of the numerics."""

BLOCK = 128
"""Queries and keys of one entry of a block mask."""

MIN_TOKEN_SCALE = 2.0**-20
"""Floor of a value token's scale. The token's weight carries the scale, so its logarithm must stay finite."""

TINY_SCALE = 2.0**-100
"""Scale of a token or tile of zeros, which quantises to zeros whatever the scale is."""

LOG2_E = math.log2(math.e)

FP8_TOP = 448.0
"""Largest number of E4M3, at which FP8 saturates."""

FP8_EXPONENT = 5
"""FP8 lifts a row's largest weight to (2**4, 2**5]. E4M3 is subnormal below 2**-6, so weights down to 2**-11 of the largest keep
all three bits of their fraction, and there is room below `FP8_TOP`."""


@dataclass(frozen=True)
class AttentionTables:
    """What calibration knows of one attention site. T timestep bins, H query heads, Hkv key/value heads, D head_dim.

    Attributes:
        q_scale: [T, H] FP32, calibrated amax / 127 of the queries.
        k_scale: [T, Hkv] FP32, calibrated amax / 127 of the keys minus `k_offset`.
        v_scale: [T, Hkv, D] FP32, calibrated amax / 127 of the values minus `v_offset`, per channel.
        k_offset: [T, Hkv, D] FP32, mean key. Softmax does not see it.
        v_offset: [T, Hkv, D] FP32, mean value. The epilogue adds it back.
        modes: [T] INT32, `Mode` per timestep bin.
    """

    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    k_offset: Tensor
    v_offset: Tensor
    modes: Tensor

    def to(self, device: torch.device | str) -> AttentionTables:
        return AttentionTables(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def with_modes(self, mode: Mode | Tensor) -> AttentionTables:
        """The same tables with another mode for every bin, or another [T] table of modes."""
        modes = mode if isinstance(mode, Tensor) else torch.full_like(self.modes, int(mode))
        return AttentionTables(**{f.name: getattr(self, f.name) for f in fields(self)} | {"modes": modes})


def tables_from_data(q: Tensor, k: Tensor, v: Tensor, mode: Mode, *, layout: str = "BHND") -> AttentionTables:
    """One-bin tables measured on the given tensors (their absolute maxima and means), for use without a calibration."""
    q, k, v = (_heads_first(x.float(), layout) for x in (q, k, v))
    k_offset, v_offset = k.mean((0, 2)), v.mean((0, 2))
    floor = 1e-12
    return AttentionTables(
        q_scale=(q.abs().amax((0, 2, 3)) / 127).clamp_min(floor)[None],
        k_scale=((k - k_offset[:, None]).abs().amax((0, 2, 3)) / 127).clamp_min(floor)[None],
        v_scale=((v - v_offset[:, None]).abs().amax((0, 2)) / 127).clamp_min(floor)[None],
        k_offset=k_offset[None],
        v_offset=v_offset[None],
        modes=torch.full((1,), int(mode), dtype=torch.int32, device=q.device),
    )


def timestep_bin(timestep: Tensor, timestep_max: float, bins: int) -> Tensor:
    """Bin of each timestep: floor(t · bins / timestep_max) in FP32, clamped to the first and the last bin; NaN gives bin 0.

    The product before the quotient makes the edges exact for integer timesteps, here as in the kernels.

    Args:
        timestep: [B] in the denoiser's own units, from low noise (0) up, as diffusers counts.
    Returns:
        [B] int64.
    """
    scaled = torch.nan_to_num(timestep.float() * bins / timestep_max, nan=0.0)
    return scaled.floor().clamp(0, bins - 1).long()


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    timestep: Tensor,
    tables: AttentionTables,
    *,
    layout: str = ...,
    softmax_scale: float | None = ...,
    timestep_max: float = ...,
    scaling: str = ...,
    smooth_k: bool = ...,
    mask: Tensor | None = ...,
    key_lengths: Tensor | None = ...,
    block_mask: Tensor | None = ...,
    key_index: Tensor | None = ...,
    return_lse: Literal[False] = ...,
    compute_dtype: torch.dtype = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    timestep: Tensor,
    tables: AttentionTables,
    *,
    layout: str = ...,
    softmax_scale: float | None = ...,
    timestep_max: float = ...,
    scaling: str = ...,
    smooth_k: bool = ...,
    mask: Tensor | None = ...,
    key_lengths: Tensor | None = ...,
    block_mask: Tensor | None = ...,
    key_index: Tensor | None = ...,
    return_lse: Literal[True],
    compute_dtype: torch.dtype = ...,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    timestep: Tensor,
    tables: AttentionTables,
    *,
    layout: str = "BHND",
    softmax_scale: float | None = None,
    timestep_max: float = 1000.0,
    scaling: str = "calibrated",
    smooth_k: bool = True,
    mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    block_mask: Tensor | None = None,
    key_index: Tensor | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in the precision mode that each batch element's timestep selects.

    Args:
        q: [B, H, Nq, D] (`layout` "BHND") or [B, Nq, H, D] ("BNHD"), any floating-point type.
        k, v: [B, Hkv, Nk, D] or [B, Nk, Hkv, D]; Hkv divides H.
        timestep: [B], what the denoiser is given.
        tables: see `AttentionTables`.
        softmax_scale: factor of the logits; 1/√D when absent.
        timestep_max: the timestep at which the last bin ends.
        scaling: "calibrated" takes q_scale and k_scale from the tables. "dynamic" measures them: per query token and per
            tile of keys, in modes 1, 2 and 4; mode 3 never reduces over the data.
        smooth_k: subtract `k_offset` from the keys.
        mask: broadcastable to [B, H, Nq, Nk]; boolean (true attends) or additive. A row without a visible key is zero.
        key_lengths: [B] int; keys at and after the length do not exist, whatever their memory holds.
        block_mask: [B or 1, H or 1, ⌈Nq/BLOCK⌉, ⌈Nk/BLOCK⌉] bool; queries attend to keys in the blocks that are true only. The
            kernels neither read nor compute the others.
        key_index: [B, Hkv, K] int32, the rows of k and v to attend to, in any order; the others do not exist. Everything else
            counts these: Nk of `mask`, `key_lengths`, `block_mask` and of the tiles is K. On a GPU what lies outside k is
            clamped.
        return_lse: return the logarithm of each row's sum of exponentials as well.
        compute_dtype: type of all arithmetic.
    Returns:
        The output in q's shape and type. NaN for an element whose timestep is NaN or whose mode is not one of `Mode`,
        and for heads whose tables hold values that their mode cannot use. NaN and ±Inf in tensors give NaN:
        - in a query, its row; in an additive mask NaN or +Inf, the row.
        - in a key, all rows of its heads. A mask does not hide it, as it does not in torch, where NaN - ∞ is NaN.
        - in a value, that channel of all these rows, as in torch; in modes 2 and 3, where channels have weights in common, whole
          rows. In modes 0 and 1 the kernels give ±Inf for some infinite values.
        Keys that do not exist (`key_lengths`, `key_index`) count for nothing, nor do those in blocks that `block_mask` leaves
        out, for the queries that it leaves them out for. All other rows are what they are without.
        With `return_lse` also [B, H, Nq] FP32, the natural logarithm of the sum of exp(scaled logits) over the visible keys: that
        of the weights which the output was divided by, so that outputs for disjoint keys can be merged; -inf for a row without a
        visible key, NaN where the whole row of the output is. Smoothing does not show in it.
    Raises:
        ValueError: on a CPU, a row of `block_mask` without a block, or a `key_index` outside k.
    Source: design of trtconvert; SageAttention (arXiv 2410.02367) for smoothing keys, SageAttention2 (2411.10958) for
        per-token scales. Folding the value token's scale into the weights is ours.
    """
    out_dtype = q.dtype
    q, k, v = (_heads_first(x, layout) for x in (q, k, v))
    if key_index is not None:
        k, v = gather_keys(k, v, key_index)
    q, k, v = (x.to(compute_dtype) for x in (q, k, v))
    batch, heads, queries, dim = q.shape
    kv_heads, n_keys = k.shape[1:3]
    group = heads // kv_heads
    scale = dim**-0.5 if softmax_scale is None else softmax_scale

    bins = tables.modes.shape[0]
    index = timestep_bin(timestep, timestep_max, bins)
    mode = tables.modes.to(q.device)[index].view(batch, 1, 1, 1)

    def rows(table: Tensor) -> Tensor:  # [T, heads or kv heads, …] -> [B, H, …]
        rows = table.to(q.device, compute_dtype)[index]
        return rows if table.shape[1] == heads else rows.repeat_interleave(group, 1)

    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    visible = torch.ones(batch, 1, 1, n_keys, dtype=torch.bool, device=q.device)
    if key_lengths is not None:
        visible = (torch.arange(n_keys, device=q.device) < key_lengths.to(q.device)[:, None])[:, None, None]
        hidden = ~visible.transpose(2, 3)
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    blocks = None
    if block_mask is not None:
        _check_rows(block_mask)
        blocks = expand_blocks(block_mask.to(q.device), queries, n_keys)
    # What is not finite is taken out, and the rows that it reaches are NaN at the end: no maximum or rounding meets it.
    broken_q, broken_k, broken_v = (~x.isfinite() for x in (q, k, v))
    q, k, v = (x.masked_fill(broken, 0) for x, broken in ((q, broken_q), (k, broken_k), (v, broken_v)))
    k_offset = rows(tables.k_offset)[:, :, None] * (1 if smooth_k else 0)
    k_centred = (k - k_offset).masked_fill(~visible.transpose(2, 3), 0)

    # First product. Mode 0 multiplies the inputs, the others their INT8 images; one product serves both.
    q_static, k_static = rows(tables.q_scale)[..., None, None], rows(tables.k_scale)[..., None, None]
    q_scale, k_scale = q_static.expand(*q.shape[:3], 1), k_static.expand(*k.shape[:3], 1)
    if scaling == "dynamic":
        careful = mode != Mode.AGGRESSIVE
        q_scale = torch.where(careful, (q.abs().amax(-1, keepdim=True) / 127).clamp_min(TINY_SCALE), q_scale)
        tile_amax = _tiles(k_centred.abs().amax(-1), 0.0).amax(-1, keepdim=True)
        per_tile = tile_amax.expand(*tile_amax.shape[:3], TILE).flatten(2)[..., :n_keys, None] / 127
        k_scale = torch.where(careful, per_tile.clamp_min(TINY_SCALE), k_scale)
    quantised = mode != Mode.FP16
    q_used = torch.where(quantised, _int8(q, q_scale), q)
    k_used = torch.where(quantised, _int8(k_centred, k_scale), k)
    logit_scale = torch.where(quantised, q_scale * k_scale.transpose(2, 3), 1.0) * scale
    z = (q_used @ k_used.transpose(2, 3)) * logit_scale
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask.to(q.device)
    elif mask is not None:
        z = z + mask.to(q.device, compute_dtype)
    if blocks is not None:
        visible = visible & blocks
    z = z.masked_fill(~visible, -math.inf)

    # Second product. Modes 2 and 3 multiply u8 weights by INT8 values, tile by tile; mode 4 multiplies E4M3 by E4M3.
    v_scale, v_offset = rows(tables.v_scale)[:, :, None], rows(tables.v_offset)[:, :, None]
    equalised = (v - v_offset) / v_scale
    token_scale = (equalised.abs().amax(-1, keepdim=True) / 127).clamp_min(MIN_TOKEN_SCALE)
    token_scale = torch.where(mode == Mode.BALANCED, token_scale, torch.ones_like(token_scale))
    int8_values, fp8_values = (mode == Mode.BALANCED) | (mode == Mode.AGGRESSIVE), mode == Mode.FP8
    w = torch.where(int8_values, z + token_scale.log().transpose(2, 3), z)
    row_max = w.amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -math.inf, 0)
    p = (w - row_max).exp()
    tiled = _tiles(w, -math.inf)
    tile_max = tiled.amax(-1, keepdim=True)
    empty = tile_max == -math.inf
    p8 = (255 * (tiled - tile_max.masked_fill(empty, 0)).exp()).round()
    tile_weight = (tile_max - row_max[..., None]).exp() / 255
    p8 = (p8 * tile_weight).flatten(3)[..., :n_keys]
    reference = row_max  # the logarithm that weights and their sums are relative to
    weights, values = torch.where(int8_values, p8, p), torch.where(int8_values, _int8(equalised, token_scale), v)
    if fp8_values.any():  # torch is slow at E4M3 on a CPU: the other modes would wait for it a third of their time
        # FP8 weights are relative to a whole power of two. A kernel that goes through the keys has a lower one at first, and
        # rounds to the same fractions all the same. Only the smallest weights, subnormals of E4M3, tell the two apart.
        fp8_reference = (row_max * LOG2_E).ceil() - FP8_EXPONENT
        weights = torch.where(fp8_values, _fp8((w * LOG2_E - fp8_reference).exp2()), weights)
        values = torch.where(fp8_values, _fp8(equalised), values)
        reference = torch.where(fp8_values, fp8_reference / LOG2_E, reference)
    # AGGRESSIVE and FP8 sum the rounded weights: the weights of a row then add up to one.
    exact_sum = (p / token_scale.transpose(2, 3)).sum(-1, keepdim=True)
    row_sum = torch.where(mode >= Mode.AGGRESSIVE, weights.sum(-1, keepdim=True), exact_sum)
    out = weights @ values
    none = row_sum == 0  # of visible keys; a sum that is NaN is not
    out = out / row_sum.masked_fill(none, 1)
    out = torch.where(int8_values | fp8_values, out * v_scale + v_offset, out).masked_fill(none, 0)

    bad = _unusable(rows, tables, mode, smooth_k, scaling) | timestep.to(q.device).isnan().view(-1, 1, 1, 1)
    broken_tokens = broken_k.any(-1, keepdim=True) | int8_values & broken_v.any(-1, keepdim=True)
    bad = bad | broken_q.any(-1, keepdim=True) | _reached(broken_tokens, blocks)
    out = out.masked_fill(bad | _reached(broken_v, blocks), math.nan).to(out_dtype)
    out = out if layout == "BHND" else out.transpose(1, 2).contiguous()
    if not return_lse:
        return out
    lse = reference + row_sum.log()
    if smooth_k:  # what was taken from the logits of a row, all alike
        lse = lse + torch.where(quantised, (q * k_offset).sum(-1, keepdim=True) * scale, 0.0)
    return out, lse.masked_fill(bad, math.nan)[..., 0].float()


def expand_blocks(block_mask: Tensor, queries: int, keys: int) -> Tensor:
    """A block mask as a mask: [..., ⌈queries/BLOCK⌉, ⌈keys/BLOCK⌉] bool -> [..., queries, keys] bool."""
    rows = block_mask.repeat_interleave(BLOCK, -2)[..., :queries, :]
    return rows.repeat_interleave(BLOCK, -1)[..., :keys]


def _reached(broken: Tensor, blocks: Tensor | None) -> Tensor:
    """Where queries compute with keys that are broken: [B, H, Nk, C], `blocks` [..., Nq, Nk] → [B, H, Nq or 1, C], all bool."""
    if blocks is None:
        return broken.any(2, keepdim=True)
    return blocks.float().expand(*broken.shape[:2], -1, -1) @ broken.float() > 0


def _check_rows(block_mask: Tensor) -> None:
    if block_mask.device.type != "cpu" or (some := block_mask.any(-1)).all():
        return
    row = (~some).nonzero()[0].tolist()
    raise ValueError(
        f"block_mask: expected at least one block of keys for every block of queries, got none at {row}; keep the diagonal, or a "
        "block of tokens that all attend to"
    )


def gather_keys(k: Tensor, v: Tensor, key_index: Tensor) -> tuple[Tensor, Tensor]:
    """The rows [B, Hkv, K] of k and v [B, Hkv, N, D], in their order.

    Raises:
        ValueError: the index is on a CPU and lies outside k. On a GPU, where nobody waits for it, it is clamped.
    """
    tokens = k.shape[2]
    if key_index.device.type == "cpu" and key_index.numel() and not 0 <= key_index.min() <= key_index.max() < tokens:
        low, high = key_index.min().item(), key_index.max().item()
        raise ValueError(
            f"key_index: expected rows of k, 0 to {tokens - 1}, got {low} to {high}; clamp them, or leave them out"
        )
    rows = key_index.to(k.device).long().clamp(0, tokens - 1)[..., None].expand(-1, -1, -1, k.shape[3])
    return k.gather(2, rows), v.gather(2, rows)


def _heads_first(x: Tensor, layout: str) -> Tensor:
    return x if layout == "BHND" else x.transpose(1, 2)


def _int8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-127, 127)


def _fp8(x: Tensor) -> Tensor:
    """x rounded to E4M3: to the nearest, ties to even; saturating; NaN stays."""
    return x.clamp(-FP8_TOP, FP8_TOP).to(torch.float8_e4m3fn).to(x.dtype)


def _tiles(x: Tensor, fill: float) -> Tensor:
    """[..., N] -> [..., ⌈N/TILE⌉, TILE], the last tile filled up."""
    missing = -x.shape[-1] % TILE
    return torch.nn.functional.pad(x, (0, missing), value=fill).unflatten(-1, (-1, TILE))


def _unusable(rows, tables: AttentionTables, mode: Tensor, smooth_k: bool, scaling: str) -> Tensor:
    """[B, H, 1, 1] true where the mode is unknown or a table entry it uses is not finite, or a scale not positive."""

    def scale_bad(table: Tensor) -> Tensor:
        entries = rows(table)
        bad = ~(entries.isfinite() & (entries > 0))
        return (bad.any(-1) if bad.dim() == 3 else bad)[..., None, None]

    def offset_bad(table: Tensor) -> Tensor:
        return (~rows(table).isfinite()).any(-1)[..., None, None]

    int8_logits, scaled_values = mode != Mode.FP16, mode >= Mode.BALANCED
    bad = (mode < Mode.FP16) | (mode > Mode.FP8)
    # These take no scale of queries and keys from a table.
    measured = (mode != Mode.AGGRESSIVE) & (scaling == "dynamic")
    bad = bad | int8_logits & ~measured & (scale_bad(tables.q_scale) | scale_bad(tables.k_scale))
    if smooth_k:
        bad = bad | int8_logits & offset_bad(tables.k_offset)
    return bad | scaled_values & (scale_bad(tables.v_scale) | offset_bad(tables.v_offset))
