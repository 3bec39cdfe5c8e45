"""INT8 attention in plain torch: the specification that the CUDA kernels and the ONNX function body follow.

Integer products are exact in `compute_dtype`: a product of INT8 vectors of at most 256 elements, and a tile sum of u8·s8 over
128 keys, stay under 2**22, which FP32 and float64 represent exactly. Tests compare the kernels with this file in float64, and
this file with unquantised attention (signal-to-noise ratio). `torch.autocast` changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, TypedDict, TypeGuard, Unpack, overload

import torch
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.mixed_types import without_autocast

TILE = 128
"""Keys per tile. u8 weights are relative to the row's maximum within one tile, so the tile is part of the numerics."""

BLOCK = 128
"""Queries and keys of one entry of a block mask."""

MIN_TOKEN_SCALE = 2.0**-20
"""Floor of a value token's scale. The weights are multiplied by the scale, so its logarithm must be finite."""

SMALL_TOKEN = 2.0**-3
"""Limit of a small value token: its largest channel, in units of the calibrated largest. `Mode.AGGRESSIVE` gives a scale to each
token of a tile with a small token. The calibrated scale would round most of a small value away, and an attention sink, whose
value is small in trained models, has a large weight in every row. Offsets are not subtracted: the values of other tokens may lie
around an offset that the sink's value does not share."""

TINY_SCALE = 2.0**-100
"""Scale of a token or tile of zeros; its codes are zeros with any scale."""

LOG2_E = math.log2(math.e)

FP8_TOP = 448.0
"""Largest number of E4M3; larger numbers saturate."""

FP8_EXPONENT = 5
"""FP8 scales a row's largest weight to (2**4, 2**5]. E4M3 is subnormal below 2**-6: weights down to 2**-11 of the largest keep
three bits of fraction, and the largest stays below `FP8_TOP`."""


@dataclass(frozen=True)
class AttentionTables:
    """Calibrated tables of one attention site. T timestep bins, H query heads, Hkv key/value heads, D head_dim.

    Attributes:
        q_scale: [T, H] FP32, calibrated amax / 127 of the queries.
        k_scale: [T, Hkv] FP32, calibrated amax / 127 of the keys minus `k_offset`.
        v_scale: [T, Hkv, D] FP32, calibrated amax / 127 of the values minus `v_offset`, per channel.
        k_offset: [T, Hkv, D] FP32, mean key. Softmax is invariant to it.
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
        """Returns the same tables with one mode for every bin, or with another [T] table of modes."""
        modes = mode if isinstance(mode, Tensor) else torch.full_like(self.modes, int(mode))
        return AttentionTables(**{f.name: getattr(self, f.name) for f in fields(self)} | {"modes": modes})


def tables_from_data(q: Tensor, k: Tensor, v: Tensor, mode: Mode, *, layout: str = "BHND") -> AttentionTables:
    """Returns one-bin tables of the tensors' absolute maxima and means, for use without a calibration."""
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
    """Returns the bin of each timestep: floor(t · bins / timestep_max) in FP32, clamped to valid bins; NaN gives bin 0.

    The multiplication comes before the division so that the edges are exact for integer timesteps, as in the kernels.

    Args:
        timestep: [B] in the denoiser's units, from low noise (0) up, as in diffusers.
    Returns:
        [B] int64.
    """
    scaled = torch.nan_to_num(timestep.float() * bins / timestep_max, nan=0.0)
    return scaled.floor().clamp(0, bins - 1).long()


class _Options(TypedDict, total=False):
    layout: str
    softmax_scale: float | None
    timestep_max: float
    scaling: str
    smooth_k: bool
    mask: Tensor | None
    key_lengths: Tensor | None
    block_mask: Tensor | None
    key_index: Tensor | None
    compute_dtype: torch.dtype


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, timestep: Tensor, tables: AttentionTables,
    *, return_lse: Literal[False] = ..., **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, timestep: Tensor, tables: AttentionTables,
    *, return_lse: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@without_autocast
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
    """Computes attention in the precision mode that each batch element's timestep selects.

    Args:
        q: [B, H, Nq, D] (`layout` "BHND") or [B, Nq, H, D] ("BNHD"), any floating-point type.
        k, v: [B, Hkv, Nk, D] or [B, Nk, Hkv, D]; Hkv divides H.
        timestep: [B], the denoiser's timesteps.
        tables: see `AttentionTables`.
        softmax_scale: factor of the logits; None: 1/√D.
        timestep_max: the end of the last bin.
        scaling: "calibrated": q_scale and k_scale come from the tables. "dynamic": modes 1, 2 and 4 measure these scales, per
            query token and per tile of keys; mode 3 takes them from the tables.
        smooth_k: subtract `k_offset` from the keys.
        mask: broadcastable to [B, H, Nq, Nk]; boolean (true attends) or additive. A row without a visible key is zero. A boolean
            mask of shape [B or 1, 1, 1, Nk] leaves hidden keys out, unless there is an index or a block mask: tiles then hold the
            visible keys, in their order. Kernels with layers before attention, and ONNX functions, keep tiles of all keys.
        key_lengths: [B] int; keys from this length on are ignored, whatever their memory holds.
        block_mask: [B or 1, H or 1, ⌈Nq/BLOCK⌉, ⌈Nk/BLOCK⌉] bool; queries attend only to keys in blocks that are true. The
            kernels skip the other blocks.
        key_index: [B, Hkv, K] int32, the rows of k and v to attend to, in any order; other rows are ignored. In `mask`,
            `key_lengths`, `block_mask` and tiles, Nk then means K. On a GPU indices outside k are clamped.
        return_lse: also return the logarithm of each row's sum of exponentials.
        compute_dtype: type of all arithmetic.
    Returns:
        The output in q's shape and type. NaN for an element whose timestep is NaN or whose mode is not one of `Mode`,
        and for heads whose tables hold values that their mode cannot use. NaN and ±Inf in tensors give NaN:
        - in a query: its row. In an additive mask NaN or +Inf: the row.
        - in a key: all rows of its heads. A mask does not hide it, as in torch, where NaN - ∞ is NaN.
        - in a value: the channel in all these rows, as in torch; in modes 2 and 3, where channels share weights, whole rows.
          In modes 0 and 1 the kernels give ±Inf for some infinite values.
        Keys that `key_lengths`, `key_index` or a mask of keys leave out do not matter, nor do keys in blocks that `block_mask`
        skips, for the queries of those blocks. All other rows are unaffected.
        With `return_lse` also [B, H, Nq] FP32, the natural logarithm of the sum of exp(scaled logits) over the visible keys: the
        sum that divides the output, so that outputs for disjoint keys can be merged. -inf for a row without a visible key, NaN
        if the whole row of the output is NaN. Smoothing does not change it.
    Raises:
        ValueError: on a CPU, a row of `block_mask` without a block, or a `key_index` outside k.
    Source: design of trtconvert; SageAttention (arXiv 2410.02367) for smoothing keys, SageAttention2 (2411.10958) for
        per-token scales. Folding the value token's scale into the weights is trtconvert's.
    """
    out_dtype = q.dtype
    q, k, v = (_heads_first(x, layout) for x in (q, k, v))
    if is_key_mask(mask, q.shape[2]) and key_index is None and block_mask is None:
        key_index, key_lengths = visible_keys(mask, key_lengths, k)
        mask = None
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
    exists, blocks = visible, None
    if block_mask is not None:
        _check_rows(block_mask)
        blocks = expand_blocks(block_mask.to(q.device), queries, n_keys)
    # Non-finite elements are replaced by 0 so that maxima and rounding never see them; the affected rows become NaN at the end.
    broken_q, broken_k, broken_v = (~x.isfinite() for x in (q, k, v))
    q, k, v = (x.masked_fill(broken, 0) for x, broken in ((q, broken_q), (k, broken_k), (v, broken_v)))
    k_offset = rows(tables.k_offset)[:, :, None] * (1 if smooth_k else 0)
    k_centred = (k - k_offset).masked_fill(~visible.transpose(2, 3), 0)

    # First product. Mode 0 multiplies the inputs, the other modes their INT8 codes; one product serves both.
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
    token_scale = equalised.abs().amax(-1, keepdim=True) / 127
    small = ((v / v_scale).abs().amax(-1, keepdim=True) / 127 < SMALL_TOKEN) & exists.transpose(2, 3)
    small_in_tile = _tiles(small[..., 0], False).any(-1, keepdim=True).expand(-1, -1, -1, TILE)
    has_scale = small_in_tile.flatten(2)[..., :n_keys, None] & (mode == Mode.AGGRESSIVE) | (mode == Mode.BALANCED)
    token_scale = torch.where(has_scale, token_scale.clamp_min(MIN_TOKEN_SCALE), 1.0)
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
    reference = row_max  # weights and their sums are relative to exp(reference)
    weights, values = torch.where(int8_values, p8, p), torch.where(int8_values, _int8(equalised, token_scale), v)
    if fp8_values.any():  # skipped otherwise: E4M3 is slow on a CPU and took a third of the other modes' time
        # FP8 weights are relative to a power of two. A kernel that iterates over the keys starts with a lower power, but rounds
        # to the same fractions, except for the smallest weights, which are subnormals of E4M3.
        fp8_reference = (row_max * LOG2_E).ceil() - FP8_EXPONENT
        weights = torch.where(fp8_values, _fp8((w * LOG2_E - fp8_reference).exp2()), weights)
        values = torch.where(fp8_values, _fp8(equalised), values)
        reference = torch.where(fp8_values, fp8_reference / LOG2_E, reference)
    # AGGRESSIVE and FP8 sum the rounded weights, except of tokens with a scale: the weights of a row then add up to one.
    is_rounded = (mode >= Mode.AGGRESSIVE) & ~has_scale.transpose(2, 3)
    row_sum = torch.where(is_rounded, weights, p / token_scale.transpose(2, 3)).sum(-1, keepdim=True)
    out = weights @ values
    none = row_sum == 0  # no visible key; a NaN sum is not 0
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
    if smooth_k:  # smoothing subtracted this constant from the logits of each row
        lse = lse + torch.where(quantised, (q * k_offset).sum(-1, keepdim=True) * scale, 0.0)
    return out, lse.masked_fill(bad, math.nan)[..., 0].float()


def is_key_mask(mask: Tensor | None, queries: int) -> TypeGuard[Tensor]:
    """Whether a mask is boolean and the same for all heads and for several queries."""
    return (
        mask is not None and mask.dtype == torch.bool and queries > 1 and all(size == 1 for size in mask.shape[-3:-1])
    )


def visible_keys(mask: Tensor, key_lengths: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a key mask's visible keys as `key_index` [B, Hkv, Nk] and `key_lengths` [B]. k: [B, Hkv, Nk, D]."""
    batch, kv_heads, keys = k.shape[:3]
    visible = mask.to(k.device).expand(batch, 1, 1, keys)[:, 0, 0]
    if key_lengths is not None:
        visible = visible & (torch.arange(keys, device=k.device) < key_lengths.to(k.device)[:, None])
    order = visible.byte().argsort(dim=-1, descending=True, stable=True)
    return order[:, None].expand(-1, kv_heads, -1), visible.sum(-1)


def expand_blocks(block_mask: Tensor, queries: int, keys: int) -> Tensor:
    """Expands a block mask to tokens: [..., ⌈queries/BLOCK⌉, ⌈keys/BLOCK⌉] bool → [..., queries, keys] bool."""
    rows = block_mask.repeat_interleave(BLOCK, -2)[..., :queries, :]
    return rows.repeat_interleave(BLOCK, -1)[..., :keys]


def _reached(broken: Tensor, blocks: Tensor | None) -> Tensor:
    """True for queries that compute with broken keys: [B, H, Nk, C], `blocks` [..., Nq, Nk] → [B, H, Nq or 1, C], all bool."""
    if blocks is None:
        return broken.any(2, keepdim=True)
    return blocks.float().expand(*broken.shape[:2], -1, -1) @ broken.float() > 0


def _check_rows(block_mask: Tensor) -> None:
    if block_mask.device.type != "cpu" or (some := block_mask.any(-1)).all():
        return
    row = (~some).nonzero()[0].tolist()
    raise ValueError(
        f"block_mask: expected at least one block of keys for every block of queries, got none at {row}; keep the diagonal, "
        "or a block of tokens that all queries attend to"
    )


def gather_keys(k: Tensor, v: Tensor, key_index: Tensor) -> tuple[Tensor, Tensor]:
    """Gathers the rows `key_index` [B, Hkv, K] of k and v [B, Hkv, N, D], in this order.

    Raises:
        ValueError: the index is on a CPU and lies outside k. On a GPU it is clamped, as a check would synchronise.
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
    """Rounds to E4M3: to nearest, ties to even, saturating; NaN stays NaN."""
    return x.clamp(-FP8_TOP, FP8_TOP).to(torch.float8_e4m3fn).to(x.dtype)


def _tiles(x: Tensor, fill: float) -> Tensor:
    """[..., N] → [..., ⌈N/TILE⌉, TILE], the last tile padded."""
    missing = -x.shape[-1] % TILE
    return torch.nn.functional.pad(x, (0, missing), value=fill).unflatten(-1, (-1, TILE))


def _unusable(rows, tables: AttentionTables, mode: Tensor, smooth_k: bool, scaling: str) -> Tensor:
    """[B, H, 1, 1] true if the mode is unknown, or uses a table entry that is not finite or a scale that is not positive."""

    def scale_bad(table: Tensor) -> Tensor:
        entries = rows(table)
        bad = ~(entries.isfinite() & (entries > 0))
        return (bad.any(-1) if bad.dim() == 3 else bad)[..., None, None]

    def offset_bad(table: Tensor) -> Tensor:
        return (~rows(table).isfinite()).any(-1)[..., None, None]

    int8_logits, scaled_values = mode != Mode.FP16, mode >= Mode.BALANCED
    bad = (mode < Mode.FP16) | (mode > Mode.FP8)
    # Measured modes take no scale of queries and keys from a table.
    measured = (mode != Mode.AGGRESSIVE) & (scaling == "dynamic")
    bad = bad | int8_logits & ~measured & (scale_bad(tables.q_scale) | scale_bad(tables.k_scale))
    if smooth_k:
        bad = bad | int8_logits & offset_bad(tables.k_offset)
    return bad | scaled_values & (scale_bad(tables.v_scale) | offset_bad(tables.v_offset))
