"""Layers of engines that quantise the deltas of their input between steps, in plain torch: the specification of their nodes.

    x̂ = x · x_factor                                        per input channel, as in `trtconvert.linear.reference`
    q = clip(round((x̂ − â) · (1 / s)), −127, 127)           s of the timestep bin, per sample
    â ← â + s · q        ô ← ô + (q · Wᵀ) · weight_scale · s        y = ô

In the first step of a sample â is 0, ô is the bias, and s is the scale of whole activations; later s is the scale of deltas.
Errors of rounding and clipping are part of the next step's x̂ − â, and do not accumulate. Source: MoDiff, equations 13 to 20;
`trtconvert.modiff.reference` has the arithmetic for any number of bits.

A sample is reset when its timestep goes back to more noise, without a call by the sampler: the timestep of the last step is a
cache too, −∞ before the first step.

If x̂ − â is NaN or ±Inf, q is the reserved code `BROKEN`, and â becomes NaN, as do the rows and windows of ô with this code. They
stay NaN until the sample is reset.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trtconvert.attention.reference import timestep_bin
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS, LayerTables

BROKEN = -LEVELS - 1
"""Code of NaN and ±Inf. Kernels mark such rows by their scale instead."""


class Steps(NamedTuple):
    """Results of a call's timesteps.

    Attributes:
        reset: [B] bool, samples that start anew. last: [B] FP32, the new cache of timesteps.
    """

    reset: Tensor
    last: Tensor


def steps_of(timestep: Tensor, last: Tensor, falls: bool) -> Steps:
    """Finds the samples to reset.

    Args:
        timestep: [B]. last: [B] FP32 of the last call, −∞ before the first one.
        falls: whether timesteps fall during a trajectory. The cache negates rising ones.
    """
    now = timestep.float() if falls else -timestep.float()
    # A NaN timestep makes attention NaN, and leads to a reset in the next step.
    return Steps(now > last, torch.where(now.isnan(), torch.full_like(now, -math.inf), now))


def scales_of(reset: Tensor, timestep: Tensor, first: Tensor, deltas: Tensor, timestep_max: float) -> Tensor:
    """Returns the FP32 scales [B, S] of S input groups.

    Args:
        reset, timestep: [B]. first, deltas: [T, S] FP32 scales of whole activations and of deltas.
    """
    index = timestep_bin(timestep, timestep_max, len(first))
    return torch.where(reset[:, None], first[index], deltas[index])


def quantise_delta(x: Tensor, x_factor: Tensor, a_hat: Tensor, reset: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns q and the new â.

    Args:
        x: [B · n, …]. x_factor: FP32, broadcasts to x. a_hat: [B, …] with the elements of x, FP32 or FP16.
        reset: [B]; scale: [B, 1] FP32.
    Returns:
        INT8 of x's shape, and â of a_hat's shape and type.
    """
    batch = len(reset)
    known = torch.where(reset[:, None], 0.0, _by_sample(a_hat.float(), batch))
    moved = _by_sample(x.float() * x_factor, batch)
    delta = moved - known
    broken = ~delta.isfinite()
    q = (delta * (1 / scale)).round().clamp(-LEVELS, LEVELS)
    a_next = (known + q * scale).masked_fill(broken, math.nan)
    q = q.masked_fill(broken, BROKEN)
    return q.to(torch.int8).view(x.shape), a_next.view(a_hat.shape).to(a_hat.dtype)


def add_product(
    q: Tensor,
    scale: Tensor,
    reset: Tensor,
    tables: LayerTables,
    o_hat: Tensor | None,
    dtype: torch.dtype,
    *,
    stride: Sequence[int] = (),
    padding: Sequence[int] = (),
) -> Tensor:
    """Returns the new ô in the shape of the old one, or of the output.

    Args:
        q: [B · n, …, K], of a convolution [B · n, K, *sizes]. scale, reset: see `quantise_delta`.
        o_hat: [B, …] with the elements of the output; None if all samples are reset.
        dtype: of the new ô, FP32 or FP16.
        stride, padding: of a convolution, see `trtconvert.linear.reference.conv`.
    """
    batch, weight = len(reset), tables.weight.to(q.device).double()  # FP64 holds all integer sums exactly
    if stride:
        convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[q.dim() - 3]
        codes = q.double().masked_fill(q == BROKEN, math.nan)
        sums = convolve(codes, weight, None, list(stride), list(padding)).float()
        of_outputs = (1, -1, *[1] * (q.dim() - 2))
    else:
        codes = q.double().masked_fill((q == BROKEN).any(-1, keepdim=True), math.nan)
        sums, of_outputs = (codes @ weight.T).float(), (-1,)
    weighed = _by_sample(sums * tables.weight_scale.to(q.device).view(of_outputs), batch)
    bias = _by_sample(tables.bias.to(q.device).view(of_outputs).expand(sums.shape), batch)
    known = bias if o_hat is None else torch.where(reset[:, None], bias, _by_sample(o_hat.float(), batch))
    return (known + weighed * scale).view(sums.shape if o_hat is None else o_hat.shape).to(dtype)


def _by_sample(x: Tensor, batch: int) -> Tensor:
    """[B · n, …] -> [B, elements of a sample], also for B = 0, where reshape takes no -1."""
    return x.reshape(batch, x.numel() // max(1, batch))


def cache_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of caches in a model of a type. BF16 has too few bits for sums over many steps."""
    return torch.float16 if dtype == torch.float16 else torch.float32


def can_be_modulated(modes: Sequence[int]) -> bool:
    """Returns whether a layer with these modes by bin can have caches: every step must add to them."""
    return bool(modes) and all(mode == LayerMode.STATIC for mode in modes)
