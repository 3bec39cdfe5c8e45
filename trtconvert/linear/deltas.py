"""Layers of engines that quantise the deltas of their input between steps, in plain torch: what nodes and lowerings follow.

    x̂ = x · x_factor                                        per input channel, as in `trtconvert.linear.reference`
    q = clip(round((x̂ − â) · (1 / s)), −127, 127)           s of the timestep bin, per sample
    â ← â + s · q        ô ← ô + (q · Wᵀ) · weight_scale · s        y = ô

Before the first step of a sample â is 0 and ô the bias, and s is the scale of whole activations; then s is that of deltas. What
rounding and clipping leave out of a step is in the next one's x̂ − â, so that it does not add up. Source: MoDiff, equations 13 to
20; `trtconvert.modiff.reference` has the same arithmetic for any number of bits.

A sample is reset where its timestep goes back to more noise, so that whoever samples need not say so: the timestep of the step
before is a cache too, −∞ before the first step.

Where x̂ − â is NaN or ±Inf, q is `BROKEN`, a code that no number has, â becomes NaN, and so do the rows and windows of ô that
have such a code. They stay so until the sample is reset: what was added is not known.
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
"""Code of what is NaN or ±Inf. Kernels mark such rows by their scale, and do not look at the code."""


class Steps(NamedTuple):
    """What the layers of a call need to know of its timesteps.

    Attributes:
        reset: [B] bool. last: [B] FP32, the cache of timesteps from now on.
    """

    reset: Tensor
    last: Tensor


def steps_of(timestep: Tensor, last: Tensor, falls: bool) -> Steps:
    """Which samples begin.

    Args:
        timestep: [B]; last: [B] FP32 of the call before, −∞ before the first one.
        falls: timesteps fall while a sample is denoised; else they rise. The cache holds them so that they fall.
    """
    now = timestep.float() if falls else -timestep.float()
    # A timestep that is NaN, which attention answers with NaN, is followed by a beginning.
    return Steps(now > last, torch.where(now.isnan(), torch.full_like(now, -math.inf), now))


def scales_of(reset: Tensor, timestep: Tensor, first: Tensor, deltas: Tensor, timestep_max: float) -> Tensor:
    """[B, S] FP32 scales of S inputs for each sample.

    Args:
        reset, timestep: [B]. first, deltas: [T, S] FP32, of whole activations and of deltas.
    """
    index = timestep_bin(timestep, timestep_max, len(first))
    return torch.where(reset[:, None], first[index], deltas[index])


def quantise_delta(x: Tensor, x_factor: Tensor, a_hat: Tensor, reset: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """q and the new â.

    Args:
        x: [B · n, …]; x_factor: FP32, of a shape that is broadcast to x's; a_hat: [B, …] of as many numbers, FP32 or FP16.
        reset: [B]; scale: [B, 1] FP32.
    Returns:
        INT8 of x's shape, and â of a_hat's shape and type.
    """
    batch = len(reset)
    known = torch.where(reset[:, None], 0.0, a_hat.float().reshape(batch, -1))
    moved = (x.float() * x_factor).reshape(batch, -1)
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
    """The new ô, of the shape that the layer gives or of the one before.

    Args:
        q: [B · n, …, K], of a convolution [B · n, K, *sizes]; scale, reset: see `quantise_delta`.
        o_hat: [B, …] of as many numbers as the layer gives; None where all samples begin.
        dtype: of the new ô, FP32 or FP16.
        stride, padding: of a convolution's sizes, see `trtconvert.linear.reference.conv`.
    """
    batch, weight = len(reset), tables.weight.to(q.device).double()  # FP64 holds all sums of integers
    if stride:
        convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[q.dim() - 3]
        codes = q.double().masked_fill(q == BROKEN, math.nan)
        sums = convolve(codes, weight, None, list(stride), list(padding)).float()
        of_outputs = (1, -1, *[1] * (q.dim() - 2))
    else:
        codes = q.double().masked_fill((q == BROKEN).any(-1, keepdim=True), math.nan)
        sums, of_outputs = (codes @ weight.T).float(), (-1,)
    weighed = (sums * tables.weight_scale.to(q.device).view(of_outputs)).reshape(batch, -1)
    bias = tables.bias.to(q.device).view(of_outputs).expand(sums.shape).reshape(batch, -1)
    known = bias if o_hat is None else torch.where(reset[:, None], bias, o_hat.float().reshape(batch, -1))
    return (known + weighed * scale).view(sums.shape if o_hat is None else o_hat.shape).to(dtype)


def cache_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the caches of a model in some type. BF16 has too few bits for sums over many steps."""
    return torch.float16 if dtype == torch.float16 else torch.float32


def can_be_modulated(modes: Sequence[int]) -> bool:
    """Whether a layer of such modes in the timestep bins can have caches, which are good only where every step adds to them."""
    return bool(modes) and all(mode == LayerMode.STATIC for mode in modes)
