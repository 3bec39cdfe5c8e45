"""`Int8Attention`: the attention operator as a torch module with its scales, precision modes, pruning and block masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trtconvert.attention import kernel, measured
from trtconvert.attention.masks import check_block_mask, check_block_size, check_mask, neighbourhood_mask, window_mask
from trtconvert.attention.modes import PRECISION_MODES, Mode
from trtconvert.attention.pruning import (
    broken_first,
    check_ratio,
    check_softmax_scale,
    kept_keys,
    kept_mask,
    key_importance,
    most_important,
    no_calls,
)
from trtconvert.attention.ranges import (
    RangeObserver,
    nearest_bins,
    offsets,
    ranges_of_maxima,
    seen_bins,
    tables_of_ranges,
)
from trtconvert.attention.reference import AttentionTables, timestep_bin
from trtconvert.attention.schedules import compute_sigma_schedule, sigma_rule_modes
from trtconvert.attention.sites import HEAD_DIMS, SiteCall
from trtconvert.attention.tables import NAMES
from trtconvert.errors import UserError
from trtconvert.mixed_types import as_autocast

ATTENTION_TYPES = ("dense", "block_sparse")

Timestep = int | float | Tensor

Sample = tuple[Tensor, Tensor, Tensor, Timestep]
"""Q, K, V and the timestep of one call."""


class GuidedOutputs(tuple[Tensor, Tensor]):
    """The conditional and the unconditional output of `fused_cfg`; unpacks like a pair.

    Attributes:
        guidance_scale: the argument of `fused_cfg`, or None.
    """

    guidance_scale: float | None

    def __new__(cls, cond: Tensor, uncond: Tensor, guidance_scale: float | None) -> GuidedOutputs:
        made = super().__new__(cls, (cond, uncond))
        made.guidance_scale = guidance_scale
        return made

    @property
    def guided(self) -> Tensor:
        """The guided output, uncond + scale · (cond - uncond) (Ho and Salimans 2022, arXiv 2207.12598).

        Raises:
            UserError: `fused_cfg` was called without a guidance_scale.
        """
        if self.guidance_scale is None:
            raise UserError(
                "the outputs cannot be guided",
                expected="a guidance_scale in the call of fused_cfg",
                got="none",
                remedy="fused_cfg(Q_cond, Q_uncond, K, V, timestep, guidance_scale=7.5)",
            )
        cond, uncond = self
        return torch.lerp(uncond, cond, self.guidance_scale)


class Int8Attention(nn.Module):
    """Multi-head attention with INT8 products; precision and scales depend on the denoising timestep.

    A GPU runs the CUDA kernels. A CPU runs their specification, which is slow and meant for checking. Without a calibration,
    scales are measured on the device in each call. `calibrate` fixes the scales, which saves these measurements. Timesteps count
    from low noise (0) up, as in diffusers. No call synchronises with the device, so that CUDA graphs and torch.compile can
    capture the module. Gradients are straight-through, see `trtconvert.attention.kernel.int8_attention`.

    The tables of scales stay FP32 when the module is cast.

    Args:
        num_heads: H, the number of query heads.
        head_dim: D, 32 to 256 in steps of 8. None: taken from the first calibration, or from each call.
        num_timesteps: length of the schedule; timesteps lie in [0, num_timesteps].
        use_adaptive_scaling: True: `timestep_bins` sets of scales, and precision_mode "auto" depends on the noise. False: one set
            of scales for all timesteps, and "auto" means "balanced".
        timestep_scales: [num_timesteps] factors of the scales over the noise, as `compute_adaptive_scales` returns them.
            `calibrate` uses the factors to fill bins that its data does not reach. Measured scales do not use the factors.
        num_kv_heads: Hkv, the number of key and value heads; divides H. None: H.
        precision_mode: "fp16", "precision", "balanced", "aggressive" or "fp8" (see `Mode`), or "auto": a mode for each timestep
            bin by its noise (`sigma_rule_modes`), aggressive at high noise, precision at low noise.
        sigmas: [num_timesteps] noise of each timestep for "auto"; None: the Karras schedule.
        timestep_bins: number of equal parts of the schedule; each part has its own scales and mode.
        block_q: stride of the queries that pruning samples, see `key_importance`.
        block_k: no effect; accepted for code that was written for other kernels. `block_q` does not change tiles either: tiles
            are always 128 × 128, as keys are quantised tile by tile.
        softmax_eps: ε of exp(z) / (Σ exp(z) + ε) over scaled logits z. Sums are relative to each row's largest term, so 0 is
            safe and costs nothing.
        softmax_scale: factor of the logits; None: 1/√D.
        enable_pruning: drop the keys that receive the least attention.
        pruning_ratio: share of the keys to drop; or one share for each of several equal parts of the schedule, from low noise up,
            such as (0, 0, 0.1, 0.3) to prune in early steps only.
        attention_type: "dense", or "block_sparse", which is restricted to `window_size`.
        block_size: block size of block-sparse windows, see `check_block_size`; None: 128, the kernels' size.
        window_size: block-sparse: number of tokens around each query that the query sees; with `grid` one number per direction.
        grid: (height, width) or (frames, height, width) of the tokens in raster order; None: a plain sequence.
        sink_tokens, text_tokens, text: block-sparse: tokens that every query sees, see `neighbourhood_mask`.
        enable_cfg_fusion: allow `fused_cfg`, and calls whose query batch is twice the batch of keys and values.

    Raises:
        UserError: an option has an invalid value, or has no effect with the other options.
    """

    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_offset: Tensor | None
    v_offset: Tensor | None
    modes: Tensor
    block_mask: Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int | None = None,
        num_timesteps: int = 1000,
        use_adaptive_scaling: bool = True,
        timestep_scales: Tensor | None = None,
        *,
        num_kv_heads: int | None = None,
        precision_mode: str = "auto",
        sigmas: Tensor | None = None,
        timestep_bins: int = 10,
        block_q: int = 64,
        block_k: int = 64,
        softmax_eps: float = 0.0,
        softmax_scale: float | None = None,
        enable_pruning: bool = False,
        pruning_ratio: float | Sequence[float] = 0.2,
        attention_type: str = "dense",
        block_size: int | None = None,
        window_size: int | Sequence[int] | None = None,
        grid: Sequence[int] | None = None,
        sink_tokens: int = 0,
        text_tokens: int = 0,
        text: Literal["first", "last"] = "last",
        enable_cfg_fusion: bool = False,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _require(num_heads >= 1, "num_heads", "at least 1", num_heads)
        _require(kv_heads >= 1 and num_heads % kv_heads == 0, "num_kv_heads", f"a divisor of {num_heads}", kv_heads)
        _require(head_dim is None or head_dim in HEAD_DIMS, "head_dim", "32, 40, 48, …, 256", head_dim)
        _require(num_timesteps >= 1, "num_timesteps", "at least 1", num_timesteps)
        _require(precision_mode in PRECISION_MODES, "precision_mode", " or ".join(PRECISION_MODES), precision_mode)
        _require(timestep_bins >= 1, "timestep_bins", "at least 1", timestep_bins)
        for name, block in (("block_q", block_q), ("block_k", block_k)):
            _require(block in (16, 32, 64, 128, 256), name, "16, 32, 64, 128 or 256", block)
        check_softmax_scale(softmax_scale)
        _require(0 <= softmax_eps < math.inf, "softmax_eps", "0 or a small positive number", softmax_eps)
        _require(attention_type in ATTENTION_TYPES, "attention_type", " or ".join(ATTENTION_TYPES), attention_type)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.num_timesteps, self.use_adaptive_scaling = num_timesteps, use_adaptive_scaling
        self.block_q, self.block_k = block_q, block_k
        self.softmax_eps, self.softmax_scale = softmax_eps, softmax_scale
        self.enable_pruning, self.enable_cfg_fusion = enable_pruning, enable_cfg_fusion
        self.pruning_ratio = _checked_ratios(pruning_ratio)
        self.precision_mode, self.attention_type = precision_mode, attention_type
        self.bins = min(timestep_bins, num_timesteps) if use_adaptive_scaling else 1
        self._lut = self._checked_lut(timestep_scales)

        modes = self._modes(sigmas)
        self.present = frozenset(Mode(mode) for mode in modes.tolist())
        self.register_buffer("modes", modes, persistent=False)
        for name in NAMES:
            self.register_buffer(name, None)

        self.block_size = 128 if block_size is None else block_size
        self.window_size, self.sink_tokens = window_size, sink_tokens
        mask = None
        if attention_type == "dense":
            given = {"block_size": block_size, "window_size": window_size, "grid": grid}
            given |= {"sink_tokens": sink_tokens or None, "text_tokens": text_tokens or None}
            for name, value in given.items():
                _require(value is None, name, "none in dense attention", value, 'attention_type="block_sparse"')
        else:
            mask = self._checked_windows(grid, text_tokens, text)
        self._grid_tokens = 0 if mask is None else math.prod(grid or ()) + text_tokens
        self.register_buffer("block_mask", mask, persistent=False)

    def _checked_windows(
        self, grid: Sequence[int] | None, text_tokens: int, text: Literal["first", "last"]
    ) -> Tensor | None:
        """Checks the options of block-sparse attention and returns the block mask of a grid; None without a grid."""
        window = self.window_size
        if window is None:
            raise _misfit("window_size", "a number of tokens for block-sparse attention", None, "window_size=512")
        check_block_size(self.block_size)
        _require(not self.enable_pruning, "enable_pruning", "dense attention", "block_sparse", "leave one out")
        if grid is None:
            _require(isinstance(window, int), "window_size", "one number without a grid", window)
            _require(text_tokens == 0, "text_tokens", "none without a grid", text_tokens, "grid=(height, width)")
            return None
        return neighbourhood_mask(
            grid,
            window if isinstance(window, int) else tuple(window),  # type: ignore[arg-type]
            block_size=self.block_size,
            text_tokens=text_tokens,
            text=text,
            sink_tokens=self.sink_tokens,
        )

    def extra_repr(self) -> str:
        sparse = f", window_size={self.window_size}" if self.attention_type == "block_sparse" else ""
        pruned = f", pruning_ratio={self.pruning_ratio}" if self.enable_pruning else ""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, precision_mode={self.precision_mode!r}, "
            f"calibrated={self.calibrated}{sparse}{pruned}"
        )

    @property
    def calibrated(self) -> bool:
        """True if the scales are fixed, by `calibrate` or `load_state_dict`."""
        return self.q_scale is not None

    @property
    def tables(self) -> AttentionTables | None:
        """The calibrated tables, by timestep bin; None before `calibrate`."""
        found = {name: getattr(self, name) for name in NAMES}
        return AttentionTables(**found, modes=self.modes) if self.calibrated else None

    # Calling ----------------------------------------------------------------------------------------------------------

    def forward(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        timestep: Timestep,
        *,
        mask: Tensor | None = None,
        block_mask: Tensor | None = None,
        return_mask: bool | None = None,
        enable_pruning: bool | None = None,
        pruning_ratio: float | Sequence[float] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes attention.

        Args:
            Q: [B, H, Nq, D] FP16 or BF16; on a CPU also FP32. K, V: [B, Hkv, Nk, D], of Q's type and on Q's device. Under
                `torch.autocast` all are cast to its type, as torch's attention does.
            timestep: in [0, num_timesteps], one for all samples or [B]. The host does not read a tensor on a GPU: there, values
                outside the schedule are clamped to its ends.
            mask: broadcastable to [B, H, Nq, Nk], boolean (true attends) or additive.
            block_mask: [1 or B, 1 or H, ⌈Nq/128⌉, ⌈Nk/128⌉] boolean, the blocks to compute; replaces the module's own.
            return_mask: return the mask of kept keys, too; needs pruning. None: true if `enable_pruning` is given here as True.
            enable_pruning, pruning_ratio: replace the module's own for this call.
        Returns:
            [B, H, Nq, D] in Q's type; with `return_mask` also kept_mask [B, H, Nk] boolean, true for keys that were kept.
        Raises:
            UserError: tensors, a timestep or options do not fit the module or each other.
        """
        Q, K, V = (as_autocast(x) for x in (Q, K, V))
        prune = self.enable_pruning if enable_pruning is None else enable_pruning
        if return_mask is None:
            return_mask = bool(enable_pruning)
        if return_mask and not prune:
            raise _misfit("return_mask", "pruning, as all keys are kept without it", "none", "enable_pruning=True")
        if pruning_ratio is not None and not prune:
            raise _misfit("pruning_ratio", "none without pruning", pruning_ratio, "enable_pruning=True")
        ratios = self.pruning_ratio if pruning_ratio is None else _checked_ratios(pruning_ratio)
        if self.enable_cfg_fusion and Q.dim() == 4 and K.dim() == 4 and Q.shape[0] == 2 * K.shape[0]:
            self.check(Q[: K.shape[0]], K, V)
            if mask is not None or block_mask is not None:
                raise _misfit("mask", "none where two halves of a batch share keys", "one")
            first, second = Q.chunk(2)
            out, kept = self._fused(first, second, K, V, timestep, ratios if prune else None)
            out = torch.cat(out.chunk(2, 2))
            kept = None if kept is None else torch.cat([kept, kept])
        else:
            out, kept = self._attend(Q, K, V, timestep, ratios if prune else None, mask, block_mask)
        if not return_mask:
            return out
        assert kept is not None
        return out, kept

    def fused_cfg(
        self,
        Q_cond: Tensor,
        Q_uncond: Tensor,
        K: Tensor,
        V: Tensor,
        timestep: Timestep,
        guidance_scale: float | None = None,
    ) -> GuidedOutputs:
        """Computes attention of conditional and unconditional queries to the same keys, which are read and quantised once.

        Args:
            Q_cond, Q_uncond: [B, H, N, D] each; K, V, timestep: as in `forward`.
            guidance_scale: for the property `guided` of the result.
        Returns:
            (output_cond, output_uncond), [B, H, N, D] each, with the property `guided`.
        Raises:
            UserError: as in `forward`; or the module lacks enable_cfg_fusion.
        """
        if not self.enable_cfg_fusion:
            raise _misfit("fused_cfg", "a module with enable_cfg_fusion", "one without", "enable_cfg_fusion=True")
        if Q_cond.shape != Q_uncond.shape or Q_cond.dtype != Q_uncond.dtype or Q_cond.device != Q_uncond.device:
            raise UserError(
                "conditional and unconditional queries do not fit each other",
                expected=f"{list(Q_cond.shape)} {Q_cond.dtype} on {Q_cond.device} both",
                got=f"{list(Q_uncond.shape)} {Q_uncond.dtype} on {Q_uncond.device}",
                remedy="pass the queries of the two halves of a guided batch",
            )
        Q_cond, Q_uncond, K, V = (as_autocast(x) for x in (Q_cond, Q_uncond, K, V))
        self.check(Q_cond, K, V)
        out, _ = self._fused(Q_cond, Q_uncond, K, V, timestep, self.pruning_ratio if self.enable_pruning else None)
        cond, uncond = out.chunk(2, 2)
        return GuidedOutputs(cond, uncond, guidance_scale)

    def _fused(
        self, first: Tensor, second: Tensor, K: Tensor, V: Tensor, timestep: Timestep, ratios: Sequence[float] | None
    ) -> tuple[Tensor, Tensor | None]:
        blocks = None
        if self.attention_type == "block_sparse":
            queries = first.shape[2]
            if queries % 128:
                raise _misfit("fused_cfg", "a multiple of 128 queries in block-sparse attention", queries)
            blocks = self.blocks(first, K).repeat(1, 1, 2, 1)
        return self._attend(torch.cat([first, second], 2), K, V, timestep, ratios, None, blocks)

    def _attend(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        timestep: Timestep,
        ratios: Sequence[float] | None,
        mask: Tensor | None,
        blocks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self.check(Q, K, V)
        steps, present = self.timesteps(timestep, Q)
        for name, given in (("mask", mask), ("block_mask", blocks)):
            if given is not None and given.device != Q.device:
                raise _misfit(name, f"a tensor on {Q.device}", str(given.device), f"{name}.to(Q.device)")
        options: dict[str, Any] = {}
        if mask is not None:
            check_mask(mask, (*Q.shape[:3], K.shape[2]), "Int8Attention")
            options["mask"] = mask
        if blocks is not None:
            check_block_mask(blocks, Q.shape[2], K.shape[2], Q.shape[0], Q.shape[1])
            options["block_mask"] = blocks
        elif self.attention_type == "block_sparse":
            options["block_mask"] = self.blocks(Q, K)
        kept = None
        if ratios is not None:
            if mask is not None or "block_mask" in options:
                raise _misfit("pruning", "no mask, as pruning renumbers the keys", "one")
            pruned, kept = self._pruned(Q, K, timestep, steps, ratios)
            options |= pruned
        return self.attend(Q, K, V, steps, present, **options), kept

    def attend(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        timestep: Tensor,
        present: frozenset[Mode] | None = None,
        *,
        part: tuple[int, int] = (0, 1),
        **options: Any,
    ) -> Any:
        """Runs the operator with the calibrated tables, or with measured scales. Checks nothing.

        Args:
            timestep: [B] FP32.
            present: the modes that the timesteps may select; None: all of the module's.
            part: (i, n) if Q, K and V hold the i-th of n equal parts of the heads.
            options: of `kernel.attention`, except `softmax_scale` and `timestep_max`.
        """
        with_lse = bool(options.pop("return_lse", False))
        options |= {"timestep_max": float(self.num_timesteps), "softmax_scale": self.softmax_scale}
        if with_lse or self.softmax_eps:
            options["return_lse"] = True
        if (tables := self.tables) is not None:
            index, count = part
            if count > 1:
                of_part = {name: getattr(tables, name).chunk(count, 1)[index] for name in NAMES}
                tables = AttentionTables(**of_part, modes=tables.modes)
            got = kernel.attention(Q, K, V, timestep, tables, **options)
        else:
            modes = self.present if present is None else present
            got = measured.attention(Q, K, V, timestep, self.modes, modes, **options)
        if isinstance(got, Tensor):
            return got
        out, lse = got
        if self.softmax_eps:
            log_eps = math.log(self.softmax_eps)
            out = out * torch.sigmoid(lse - log_eps)[..., None].to(out.dtype)
            lse = torch.logaddexp(lse, torch.full_like(lse, log_eps))
        return (out, lse) if with_lse else out

    def blocks(self, Q: Tensor, K: Tensor) -> Tensor:
        """Returns the block mask of a block-sparse call; UserError if the window or the grid has other numbers of tokens."""
        queries, keys = Q.shape[2], K.shape[2]
        if self.block_mask is None:
            assert isinstance(self.window_size, int)
            return window_mask(
                queries,
                keys,
                self.window_size,
                block_size=self.block_size,
                sink_tokens=self.sink_tokens,
                device=Q.device,
            )
        if queries != self._grid_tokens or keys != self._grid_tokens:
            raise _misfit("grid", f"{self._grid_tokens} queries and keys", f"{queries} and {keys}")
        return self.block_mask

    def _pruned(
        self, Q: Tensor, K: Tensor, timestep: Timestep, steps: Tensor, ratios: Sequence[float]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the operator's options that select the kept keys, and the mask of kept keys."""
        batch, heads, keys = Q.shape[0], Q.shape[1], K.shape[2]
        counts = [kept_keys(keys, ratio) for ratio in ratios]
        if len(counts) > 1 and not isinstance(timestep, Tensor):
            place = timestep_bin(torch.tensor([float(timestep)]), float(self.num_timesteps), len(counts))
            counts = [counts[int(place)]]
        if max(counts) == keys and len(counts) == 1:
            return {}, torch.ones(batch, heads, keys, dtype=torch.bool, device=Q.device)
        importance = key_importance(Q, K, stride=self.block_q, softmax_scale=self.softmax_scale)
        importance = broken_first(importance, K)
        if len(counts) == 1:
            index = most_important(importance, counts[0])
            return {"key_index": index}, kept_mask(index, heads, keys)
        # The host does not know the timestep: keys are sorted by importance, and `key_lengths` cuts each sample's list.
        index = importance.topk(max(counts), dim=-1).indices.int()
        lengths = _on_device(counts, Q.device)[timestep_bin(steps, float(self.num_timesteps), len(counts))]
        rank = torch.arange(index.shape[2], device=Q.device)
        within = (rank < lengths[:, None])[:, None].expand_as(index)
        mask = torch.zeros(batch, index.shape[1], keys, dtype=torch.bool, device=Q.device)
        mask = mask.scatter(2, index.long(), within).repeat_interleave(heads // index.shape[1], 1)
        return {"key_index": index, "key_lengths": lengths}, mask

    def timesteps(self, timestep: Timestep, Q: Tensor) -> tuple[Tensor, frozenset[Mode]]:
        """Returns [B] FP32 on Q's device, and the modes that these timesteps may select."""
        batch, top = Q.shape[0], self.num_timesteps
        if not isinstance(timestep, Tensor):
            if not isinstance(timestep, (int, float)):
                raise _misfit("timestep", "a number or a tensor", type(timestep).__name__)
            if not 0 <= timestep <= top:  # NaN fails both comparisons
                raise _misfit("timestep", f"0 to {top}, from low noise up", timestep, "num_timesteps=… of the schedule")
            # The device finds the bin in FP32: near an edge it may be either of two bins.
            near = (int(timestep * self.bins / top + nudge) for nudge in (-1e-3, 1e-3))
            modes = frozenset(self._mode_list[min(place, self.bins - 1)] for place in near)
            return torch.full((batch,), float(timestep), device=Q.device), modes
        if timestep.numel() not in (1, batch) or timestep.dim() > 1:
            raise _misfit("timestep", f"one, or one for each of {batch} samples", f"shape {list(timestep.shape)}")
        if timestep.device.type == "cpu" and not torch.compiler.is_compiling():
            outside = timestep[~((timestep >= 0) & (timestep <= top))]
            if len(outside.reshape(-1)):
                found = outside.reshape(-1)[0].item()
                raise _misfit("timestep", f"0 to {top}, from low noise up", found, "num_timesteps=… of the schedule")
        steps = timestep.detach().to(Q.device, torch.float32).reshape(-1).expand(batch)
        return steps, self.present

    def check(self, Q: Tensor, K: Tensor, V: Tensor) -> None:
        """Raises a UserError if Q, K or V has another shape, type or device than the module takes, or the three do not fit."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        dim = self.head_dim if self.head_dim is not None else (Q.shape[-1] if Q.dim() == 4 else 0)
        for name, x, count in (("Q", Q, heads), ("K", K, kv_heads), ("V", V, kv_heads)):
            if x.dim() != 4 or x.shape[1] != count or x.shape[3] != dim:
                raise _misfit(name, f"[batch, {count}, tokens, {dim or 'head_dim'}]", list(x.shape))
        if dim not in HEAD_DIMS:
            raise _misfit("head_dim", "32, 40, 48, …, 256", dim)
        if K.shape != V.shape or K.shape[0] != Q.shape[0]:
            raise _misfit("K and V", f"batch {Q.shape[0]}, and one shape", f"{list(K.shape)} and {list(V.shape)}")
        if not Q.shape[0] or not Q.shape[2] or not K.shape[2]:
            raise _misfit("Q and K", "at least one sample and one token", f"{list(Q.shape)} and {list(K.shape)}")
        types = (torch.float16, torch.bfloat16) if Q.is_cuda else (torch.float16, torch.bfloat16, torch.float32)
        if Q.dtype not in types or K.dtype != Q.dtype or V.dtype != Q.dtype:
            wanted = "float16 or bfloat16" if Q.is_cuda else "float16, bfloat16 or float32"
            raise _misfit(
                "Q, K and V", f"{wanted}, all alike", f"{Q.dtype}, {K.dtype}, {V.dtype}", "cast them with .to()"
            )
        if K.device != Q.device or V.device != Q.device or self.modes.device != Q.device:
            got = f"{Q.device}, {K.device}, {V.device}, the module on {self.modes.device}"
            raise _misfit("Q, K, V and the module", "one device", got, "move them with .to()")

    # Calibration ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def calibrate(self, data: Iterable[Sample], *, percentile: float = 100.0) -> Int8Attention:
        """Fixes the scales to those of the data; replaces an earlier calibration.

        Args:
            data: (Q, K, V, timestep) of calls as in `forward`, spread over the schedule. A bin without data takes the scales of
                the nearest bin, times the ratio of their `timestep_scales` if these were given.
            percentile: of the calls' largest magnitudes in each bin; below 100 the largest magnitudes saturate.
        Returns:
            The module itself.
        Raises:
            UserError: no data, tensors that do not fit, or NaN or Inf in a tensor; the module stays unchanged.
        """
        _require(0 < percentile <= 100, "percentile", "more than 0, at most 100", percentile)
        observer = RangeObserver(["attention"], float(self.num_timesteps), self.bins)
        for call in data:
            if not isinstance(call, (tuple, list)) or len(call) != 4:
                got = f"{len(call)} values" if isinstance(call, (tuple, list)) else type(call).__name__
                raise _misfit("data", "a list of (Q, K, V, timestep)", got, "calibrate([(Q, K, V, timestep), …])")
            Q, K, V, timestep = call
            self.check(Q, K, V)
            steps, _ = self.timesteps(timestep, Q)
            scale = Q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
            observer(SiteCall("attention", Q, K, V, None, scale, steps, "", lambda Q=Q: Q))
        rows = observer.finish()
        if not rows:
            raise no_calls("to calibrate on")
        seen = rows["attention"]
        means = offsets(rows, self.bins)["attention"]
        tables = tables_of_ranges(ranges_of_maxima(seen, means, percentile / 100, self.bins), means)
        factors = self._carried(seen_bins(seen))
        for name, x in tables.items():
            factor = factors.view(-1, *[1] * (x.dim() - 1))
            self.register_buffer(name, (x * factor).float().to(self.modes.device))
        self.head_dim = tables["v_scale"].shape[2]
        return self

    def _carried(self, seen: Sequence[int]) -> Tensor:
        """[T] factors of each bin's scales and offsets, relative to the bin that they are copied from."""
        if self._lut is None:
            return torch.ones(self.bins)
        return self._lut / self._lut[nearest_bins(seen, self.bins)]

    def _checked_lut(self, scales: Tensor | None) -> Tensor | None:
        """[T] FP32, the largest factor of each bin."""
        if scales is None:
            return None
        scales = torch.as_tensor(scales)
        _require(self.use_adaptive_scaling, "timestep_scales", "none without use_adaptive_scaling", list(scales.shape))
        if tuple(scales.shape) != (self.num_timesteps,):
            raise _misfit("timestep_scales", f"[{self.num_timesteps}], one for each timestep", list(scales.shape))
        scales = scales.detach().cpu().float()
        _require(bool((scales.isfinite() & (scales > 0)).all()), "timestep_scales", "finite positive factors", "others")
        index = timestep_bin(torch.arange(self.num_timesteps), float(self.num_timesteps), self.bins)
        return torch.zeros(self.bins).scatter_reduce(0, index, scales, "amax")

    def _modes(self, sigmas: Tensor | None) -> Tensor:
        if sigmas is not None:
            used = self.precision_mode == "auto" and self.use_adaptive_scaling
            _require(used, "sigmas", 'none except for precision_mode="auto" with use_adaptive_scaling', "a schedule")
            _require(
                tuple(sigmas.shape) == (self.num_timesteps,), "sigmas", f"[{self.num_timesteps}]", list(sigmas.shape)
            )
        if self.precision_mode != "auto":
            modes = torch.full((self.bins,), int(Mode[self.precision_mode.upper()]), dtype=torch.int32)
        elif not self.use_adaptive_scaling:
            modes = torch.full((1,), int(Mode.BALANCED), dtype=torch.int32)
        else:
            noise = compute_sigma_schedule(self.num_timesteps) if sigmas is None else sigmas.detach().cpu().double()
            modes = sigma_rule_modes(noise, self.bins)
        self._mode_list = [Mode(mode) for mode in modes.tolist()]
        return modes

    # Hooks of torch.nn.Module -----------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Int8Attention:
        """Moves the tables but keeps them FP32: half precision lacks range and bits for scales."""
        kept = {name: table for name in NAMES if (table := getattr(self, name)) is not None}
        super()._apply(fn, recurse)
        for name, table in kept.items():
            moved = getattr(self, name)
            if moved.dtype != torch.float32:
                setattr(self, name, table.to(moved.device))
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in NAMES:
            saved = state_dict.get(prefix + name)
            if saved is not None:
                shape = (self.bins, self.num_heads if name == "q_scale" else self.num_kv_heads)
                if name not in ("q_scale", "k_scale"):
                    shape = (*shape, self.head_dim or saved.shape[-1])
                if tuple(saved.shape) == shape or getattr(self, name) is None:  # torch reports other shapes
                    setattr(self, name, torch.empty(shape, device=self.modes.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if self.v_scale is not None:
            self.head_dim = self.v_scale.shape[-1]


def fused_cfg(
    Q_cond: Tensor,
    Q_uncond: Tensor,
    K: Tensor,
    V: Tensor,
    timestep: Timestep,
    guidance_scale: float | None = None,
    **options: Any,
) -> GuidedOutputs:
    """Runs `Int8Attention.fused_cfg` with measured scales, without a module.

    Args:
        options: of `Int8Attention`, such as num_timesteps and precision_mode.
    """
    for name, x in (("Q_cond", Q_cond), ("K", K)):
        if x.dim() != 4:
            raise _misfit(name, "[batch, heads, tokens, head_dim]", list(x.shape))
    made = Int8Attention(
        Q_cond.shape[1], Q_cond.shape[3], num_kv_heads=K.shape[1], enable_cfg_fusion=True, **options
    ).to(Q_cond.device)
    return made.fused_cfg(Q_cond, Q_uncond, K, V, timestep, guidance_scale)


def _checked_ratios(ratio: float | Sequence[float]) -> tuple[float, ...]:
    if isinstance(ratio, str):
        raise _misfit("pruning_ratio", "a share, or one for each part of the schedule", repr(ratio))
    ratios = tuple(float(each) for each in ratio) if isinstance(ratio, Sequence) else (float(ratio),)
    _require(len(ratios) > 0, "pruning_ratio", "one share, or one for each part of the schedule", "none")
    for each in ratios:
        check_ratio(each)
    return ratios


def _on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """[len] INT32, made on the device: a CUDA graph cannot record a copy from pageable host memory."""
    return torch.stack([torch.full((), number, dtype=torch.int32, device=device) for number in numbers])


def _require(holds: bool, what: str, expected: str, got: object, remedy: str = "") -> None:
    if not holds:
        raise _misfit(what, expected, got, remedy)


def _misfit(what: str, expected: str, got: object, remedy: str = "") -> UserError:
    return UserError(
        f"Int8Attention: {what} does not fit", expected=expected, got=str(got), remedy=remedy or f"correct {what}"
    )
