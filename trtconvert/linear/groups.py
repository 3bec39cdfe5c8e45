"""INT8 products with a scale per group of 128 channels of a token, in plain torch: specifies the Triton kernels.

    s = max |x| / 127            of a token's group of 128 input channels
    q = round(x · (1 / s))       −127 … 127
    y = Σ_g s_g · v_g · (q_g · W_gᵀ) + bias

g are the groups, W an INT8 weight, v its scales: per block of 128 × 128, or per output channel. The product of a group is an
exact integer, and sums of groups are FP32. Groups as in DeepSeek-V3 (arXiv 2412.19437, section 3.3), with INT8 instead of FP8.
`trtconvert.weights.blocks` defines the weight's scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtconvert.linear.reference import LEVELS, TINY_SCALE
from trtconvert.mixed_types import without_autocast

GROUP = 128
"""Input channels that share a scale; rows and columns of a weight's block."""


def group_count(channels: int) -> int:
    """Returns the number of groups. The last group may be smaller."""
    return -(-channels // GROUP)


def act_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises tokens by groups of channels.

    Args:
        x: [M, K] of any floating-point type.
    Returns:
        INT8 [M, K], and FP32 scales [M, ⌈K / 128⌉]: NaN of a group with NaN or Inf.
    """
    rows, channels = x.shape
    groups = group_count(channels)
    grouped = torch.nn.functional.pad(x.float(), (0, groups * GROUP - channels)).view(rows, groups, GROUP)
    largest = grouped.abs().amax(-1)
    levels = torch.full(
        (), float(LEVELS), device=x.device
    )  # a tensor: by a Python number torch divides on a GPU inexactly
    step = (largest / levels).clamp_min(TINY_SCALE).masked_fill(~largest.isfinite(), torch.nan)
    whole = (grouped * (1 / step)[..., None]).nan_to_num(0).round().clamp(-LEVELS, LEVELS)
    return whole.to(torch.int8).view(rows, groups * GROUP)[:, :channels].contiguous(), step


@without_autocast
def int8_gemm(
    q: Tensor, step: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiplies quantised tokens and an INT8 weight.

    Args:
        q, step: see `act_quant`. weight: INT8 [N, K]; scale: FP32, [⌈N / 128⌉, ⌈K / 128⌉] of blocks or [N] of channels.
        bias: [N] or None; dtype: of the result.
    Returns:
        [M, N].
    """
    x = q.float() * step.repeat_interleave(GROUP, 1)[:, : q.shape[1]]
    y = x @ weight.float().T * scale if scale.dim() == 1 else x @ weight_dequant(weight, scale, torch.float32).T
    return (y if bias is None else y + bias.float()).to(dtype)


def weight_dequant(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ŵ [N, K] in another type, in operations that all exporters support. Arguments as in `int8_gemm`."""
    outputs, channels = weight.shape
    if scale.dim() == 1:
        return (weight.float() * scale[:, None]).to(dtype)
    high, wide = scale.shape
    of_each = scale[:, None, :, None].expand(high, GROUP, wide, GROUP).reshape(high * GROUP, wide * GROUP)
    return (weight.float() * of_each[:outputs, :channels]).to(dtype)
