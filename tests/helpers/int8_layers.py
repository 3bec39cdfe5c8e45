"""INT8 layers for tests: their tables, and their arithmetic in float64, written out as the head of `linear.reference` has it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tiny_layers import random
from torch import Tensor

from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS, LayerTables, quantise_weight, short_scale


def tables_of(
    x: Tensor,
    kernel: Sequence[int] = (),
    *,
    outputs: int = 24,
    modes: Sequence[LayerMode] = (LayerMode.STATIC,),
    moved: bool = True,
    seed: int = 1,
) -> LayerTables:
    """Of a layer with random weights that reads x: [..., K], of a convolution [B, K, *sizes].

    Each bin has a scale of its own, the last one the whole range of x̂, the first two thirds of it, so that some is clipped.

    Args:
        moved: whether channels have factors, and of a linear layer offsets.
    """
    channels = x.shape[1 if kernel else -1]
    weight = random(outputs, channels, *kernel, seed=seed)
    factor = short_scale(random(channels, seed=seed + 1).exp()) if moved else torch.ones(channels)
    offset = random(channels, seed=seed + 2) if moved and not kernel else torch.zeros(channels)
    stored, weight_scale = quantise_weight(weight / factor.view(1, -1, *[1] * len(kernel)))
    by_channel = (1, -1, *[1] * len(kernel)) if kernel else (-1,)
    largest = ((x.float() - offset.view(by_channel)) * factor.view(by_channel)).nan_to_num().abs().amax()
    return LayerTables(
        weight=stored,
        weight_scale=weight_scale,
        bias=random(outputs, seed=seed + 3),
        x_factor=factor,
        x_offset=offset,
        x_scale=largest / LEVELS * torch.linspace(2 / 3 if len(modes) > 1 else 1, 1, len(modes)),
        modes=torch.tensor(modes, dtype=torch.int32),
    )


def linear_in_double(x: Tensor, tables: LayerTables, mode: LayerMode, scale: float = 1.0) -> Tensor:
    """One sample's [..., K] → [..., N] FP64.

    Args:
        scale: of x̂, in mode `STATIC`.
    """
    rows = x.double().numpy().reshape(-1, x.shape[-1])
    weight, weight_scale, bias, factor, offset = (
        getattr(tables, name).double().numpy() for name in ("weight", "weight_scale", "bias", "x_factor", "x_offset")
    )
    out = np.empty((len(rows), len(bias)))
    for index, row in enumerate(rows):
        moved = (row - offset) * factor
        if mode == LayerMode.WEIGHT_ONLY:
            step, q = 1.0, moved
        else:
            step = scale if mode == LayerMode.STATIC else np.abs(moved).max() / LEVELS or 1.0
            q = np.clip(np.rint(moved / step), -LEVELS, LEVELS)
        out[index] = (weight * q).sum(1) * step * weight_scale + bias
    return torch.from_numpy(out).view(*x.shape[:-1], -1)


def conv_in_double(
    x: Tensor,
    tables: LayerTables,
    mode: LayerMode,
    stride: Sequence[int],
    padding: Sequence[int],
    scale: float = 1.0,
) -> Tensor:
    """One sample's [B, K, *sizes] → [B, N, *sizes] FP64, place by place."""
    sizes = x.shape[2:]
    by_channel = (1, -1, *[1] * len(sizes))
    moved = x.double().numpy() * tables.x_factor.double().numpy().reshape(by_channel)
    q = np.clip(np.rint(moved / scale), -LEVELS, LEVELS) if mode == LayerMode.STATIC else moved
    step = scale if mode == LayerMode.STATIC else 1.0
    q = np.pad(q, [(0, 0), (0, 0), *((pad, pad) for pad in padding)])
    weight, kernel = tables.weight.double().numpy(), tables.weight.shape[2:]
    places = [(s + 2 * pad - k) // d + 1 for s, pad, k, d in zip(sizes, padding, kernel, stride, strict=True)]
    out = np.empty((len(x), len(weight), *places))
    for place in np.ndindex(*places):
        window = tuple(slice(p * d, p * d + k) for p, d, k in zip(place, stride, kernel, strict=True))
        patch = q[(slice(None), slice(None), *window)]
        out[(slice(None), slice(None), *place)] = patch.reshape(len(x), -1) @ weight.reshape(len(weight), -1).T
    scales = step * tables.weight_scale.double().numpy().reshape(by_channel)
    return torch.from_numpy(out * scales + tables.bias.double().numpy().reshape(by_channel))
