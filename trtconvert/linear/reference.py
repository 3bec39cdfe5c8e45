"""INT8 linear layers and convolutions in plain torch: the specification of kernels and ONNX function bodies.

    x̂ = (x − x_offset) · x_factor                         per input channel
    q = clip(round(x̂ / s), −127, 127)                     s per token (`DYNAMIC`) or of the timestep bin (`STATIC`)
    y = (q · Wᵀ) · s · weight_scale + bias                 an exact integer product

`x_factor` equalises channels (SmoothQuant, Xiao et al. 2023, arXiv:2211.10438, equation 3); its inverse is in the weights.
`x_offset` moves channels; its product with the weights is in the bias. Both are exact except for rounding of x̂. The output of a
GELU is one-sided: an offset in the middle of the range saves one bit of symmetric quantisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trtconvert.attention.reference import timestep_bin
from trtconvert.linear.modes import INT8_PRODUCTS, LayerMode
from trtconvert.mixed_types import without_autocast

T = TypeVar("T")

LEVELS = 127
"""INT8 steps on either side of zero."""

_FEWEST_STEPS = 119
"""Least code of a channel's largest number: scales are rounded up by at most a sixteenth, except for the smallest scale."""

_FEW_ROWS = 8
"""Rows of a weight that are checked first."""

_FEW_COLUMNS = 8
"""Columns of a row that are checked first."""

TINY_SCALE = 2.0**-100
"""Least scale, as of a token of zeros."""


@dataclass(frozen=True)
class LayerTables:
    """An INT8 layer. N output channels, K input channels, T timestep bins.

    Attributes:
        weight: INT8 [N, K], of a convolution [N, K, *kernel]: the layer's weight divided by `x_factor` and its scales.
        weight_scale: [N] FP32.
        bias: [N] FP32, with the product of the INT8 weights and `x_offset`. INT8 weights: their error then meets x only.
        x_factor: [K] FP32, positive. x_offset: [K] FP32; zeros for a convolution, due to its zero padding.
        x_scale: [T] FP32, range of x̂ / 127.
        modes: [T] INT32 `LayerMode`, none of them `EXACT`.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor
    x_factor: Tensor
    x_offset: Tensor
    x_scale: Tensor
    modes: Tensor

    def with_modes(self, mode: LayerMode | Sequence[int] | Tensor) -> LayerTables:
        """Returns the layer with another mode for all bins, or with other modes [T] by bin."""
        modes = (
            torch.full_like(self.modes, int(mode))
            if isinstance(mode, LayerMode)
            else torch.as_tensor(mode).to(self.modes)
        )
        return LayerTables(**{f.name: getattr(self, f.name) for f in fields(self)} | {"modes": modes})

    def to(self, device: torch.device | str) -> LayerTables:
        return LayerTables(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def dequantised(self) -> Tensor:
        """Returns the FP32 weight [N, K, …] of x̂."""
        return self.weight.float() * _per_output(self.weight_scale, self.weight)


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a weight to INT8 with a scale per output channel.

    Scales are rounded up to eight significant bits, which FP16 and BF16 hold. Requantising a dequantised FP32 weight returns the
    same numbers.

    Args:
        weight: [N, …], finite.
    Returns:
        INT8 [N, …] and FP32 [N].
    """
    scale = channel_scale(weight.float().flatten(1))
    stored = (weight.float() / _per_output(scale, weight)).round_().clamp_(-LEVELS, LEVELS)
    return stored.to(torch.int8), scale


def is_quantised(weight: Tensor) -> bool:
    """Returns whether `quantise_weight` represents a weight [N, …] exactly, and it is not all zeros."""

    def is_so(rows: Tensor) -> bool:
        stored, scale = quantise_weight(rows)
        return torch.equal(stored.float() * _per_output(scale, rows), rows.float())

    return is_so(weight[:_FEW_ROWS]) and bool(weight.any()) and is_so(weight)


def channel_scale(rows: Tensor) -> Tensor:
    """Returns the scales [N] of FP32 rows [N, K].

    In a requantised row the largest number may be below 127 steps of the old, rounded-up scale. Such rows are found as whole
    multiples of a short scale.
    """
    largest = rows.abs().amax(1)
    # A tensor: by Python numbers torch divides on a GPU inexactly.
    steps = torch.arange(LEVELS, _FEWEST_STEPS - 1, -1, dtype=torch.float32, device=rows.device)
    candidates = largest / steps[:, None]
    scale = short_scale(candidates[0])
    short = candidates == short_scale(candidates)
    few = rows[:, :_FEW_COLUMNS] / candidates[..., None]
    short &= (few == few.round()).all(-1)
    if not short.any():  # waits for the GPU once
        return scale
    found = torch.zeros_like(scale, dtype=torch.bool)
    for candidate, is_short in zip(candidates, short, strict=True):
        (open_rows,) = torch.nonzero(~found & is_short, as_tuple=True)
        if len(open_rows):
            whole = rows[open_rows] / candidate[open_rows, None]
            fits = open_rows[(whole == whole.round()).all(1)]
            scale[fits], found[fits] = candidate[fits], True
    return scale


_DROPPED_BITS = 16
"""Dropped bits of FP32's 23 stored bits."""

_LEAST_NORMAL = 2.0**-17
"""Smaller numbers of eight bits are no multiples of 2⁻²⁴."""


def short_scale(scale: Tensor) -> Tensor:
    """Rounds FP32 scales up to eight significant bits and multiples of 2⁻²⁴, at least 2⁻²⁰, which FP16 and BF16 hold.

    Bit operations and powers of two give equal results on all devices.
    """
    scale = scale.float().clamp_min(2.0**-20)
    rest = (1 << _DROPPED_BITS) - 1
    up = ((scale.view(torch.int32) + rest) & ~rest).view(torch.float32)
    return torch.where(scale < _LEAST_NORMAL, (scale * 2.0**24).ceil() * 2.0**-24, up)


def layer_weight(weight: Tensor, x_factor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a layer's weight for `LayerTables`: INT8 of its shape, and FP32 scales [N].

    Args:
        weight: [N, K, *kernel] of the layer. x_factor: [K].
    """
    return quantise_weight(weight.float() / x_factor.view(1, -1, *[1] * (weight.dim() - 2)))


def layer_bias(bias: Tensor | None, weight: Tensor, weight_scale: Tensor, x_factor: Tensor, x_offset: Tensor) -> Tensor:
    """Returns a layer's bias for `LayerTables`, [N] FP32.

    Args:
        bias: [N] of the layer, or None.
        weight, weight_scale: see `layer_weight`. x_offset: [K].
    """
    own = torch.zeros_like(weight_scale) if bias is None else bias.float()
    if not x_offset.any():
        return own
    # x = x̂ / factor + offset. INT8 weights: their error then meets x, not x less the offset.
    moved = (x_offset * x_factor).double()
    return own + ((weight.double() @ moved) * weight_scale).float()


@without_autocast
def linear(
    x: Tensor,
    timestep: Tensor | None,
    tables: LayerTables,
    *,
    timestep_max: float = 1000.0,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes a linear layer in the mode of the timestep.

    A call computes in one mode: the most careful (smallest) of its samples' modes. The samples of a step usually share a
    timestep.

    Args:
        x: [B · n, …, K], with the rows of each sample together; any floating-point type.
        timestep: [B] of the denoiser; None for one bin.
        tables: of the layer.
        timestep_max: end of the last bin.
        compute_dtype: of the arithmetic. FP32 holds sums of up to 1,040 products exactly, larger ones to 6e-8.
    Returns:
        [B · n, …, N] in x's type. NaN for samples with a NaN timestep, and everywhere for invalid modes or table entries. Rows
        with NaN or ±Inf are NaN, or in mode `WEIGHT_ONLY` the result of their products.
    """
    mode, bad, step = _at(x, timestep, tables, timestep_max, compute_dtype)
    moved = (x.to(compute_dtype) - tables.x_offset.to(x.device)) * tables.x_factor.to(x.device)
    weight = tables.weight.to(x.device, compute_dtype)
    if mode not in INT8_PRODUCTS:
        products, step = moved.to(x.dtype).to(compute_dtype) @ weight.T, torch.ones_like(step)
    else:
        if mode == LayerMode.DYNAMIC:
            step = (moved.abs().amax(-1, keepdim=True) / LEVELS).clamp_min(TINY_SCALE)
        bad = bad | ~moved.isfinite().all(-1, keepdim=True)
        products = _int8(moved, step) @ weight.T
    scales = step * tables.weight_scale.to(x.device, compute_dtype)
    return (products * scales + tables.bias.to(x.device, compute_dtype)).masked_fill(bad, math.nan).to(x.dtype)


@without_autocast
def conv(
    x: Tensor,
    timestep: Tensor | None,
    tables: LayerTables,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    timestep_max: float = 1000.0,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes a convolution without groups or dilation, with zero padding, like `linear`.

    Args:
        x: [B · n, K, *sizes] with one to three sizes.
        stride, padding: of each size, equal on both sides.
    Returns:
        [B · n, N, *sizes]. NaN as in `linear`, and everywhere in mode `DYNAMIC`, which convolutions lack. Windows with NaN or
        ±Inf give NaN.
    """
    mode, bad, step = _at(x, timestep, tables, timestep_max, compute_dtype)
    if mode == LayerMode.DYNAMIC:
        bad = torch.ones_like(bad)
    of_channels = (1, -1, *[1] * (x.dim() - 2))
    scaled = x.to(compute_dtype) * tables.x_factor.to(x.device, compute_dtype).view(of_channels)
    if mode == LayerMode.STATIC:
        scaled = _int8(scaled, step).masked_fill(~scaled.isfinite(), math.nan)
    else:
        scaled, step = scaled.to(x.dtype).to(compute_dtype), torch.ones_like(step)
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[x.dim() - 3]
    products = convolve(scaled, tables.weight.to(x.device, compute_dtype), None, list(stride), list(padding))
    scales = step * tables.weight_scale.to(x.device, compute_dtype).view(of_channels)
    bias = tables.bias.to(x.device, compute_dtype).view(of_channels)
    return (products * scales + bias).masked_fill(bad, math.nan).to(x.dtype)


def _at(
    x: Tensor, timestep: Tensor | None, tables: LayerTables, timestep_max: float, compute_dtype: torch.dtype
) -> tuple[int, Tensor, Tensor]:
    """Returns the mode of a call, the rows that give NaN [B · n, 1, …], and the calibrated scales of that shape."""
    bins, modes = len(tables.modes), distinct_modes(tables)
    told = torch.zeros(1, device=x.device)  # an empty batch has no timestep
    if timestep is not None and len(timestep):
        told = timestep.to(x.device)
    index = timestep_bin(told, timestep_max, bins)
    # With several modes the host waits for the timesteps, and a CUDA graph cannot record the call.
    mode = modes[0] if len(modes) == 1 else int(tables.modes.cpu()[index.cpu()].min())
    step = tables.x_scale.to(x.device)[index]
    bad = told.isnan()
    if mode not in (LayerMode.WEIGHT_ONLY, *INT8_PRODUCTS):
        bad = torch.ones_like(bad)
    if mode == LayerMode.STATIC:
        bad = bad | ~(step.isfinite() & (step > 0))

    def of_rows(values: Tensor) -> Tensor:  # [B] -> [B · n, 1, …]
        rows = values.repeat_interleave(x.shape[0] // len(values))
        return rows.view(-1, *[1] * (x.dim() - 1))

    return mode, of_rows(bad), of_rows(step.to(compute_dtype))


_read: MutableMapping[Tensor, Any] = WeakIdKeyDictionary()
"""What the host read from tables, by tensor."""


def read_once(table: Tensor, read: Callable[[Tensor], T]) -> T:
    """Returns what `read` finds in a table. The host reads each tensor once, so that later calls do not wait for a GPU."""
    if table not in _read:
        _read[table] = read(table)
    return _read[table]


def distinct_modes(tables: LayerTables) -> list[int]:
    """Returns the modes of all timestep bins, each once."""
    return read_once(tables.modes, lambda modes: sorted(set(modes.tolist())))


def _int8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-LEVELS, LEVELS)


def _per_output(scale: Tensor, weight: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (weight.dim() - 1))
