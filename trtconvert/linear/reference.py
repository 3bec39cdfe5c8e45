"""INT8 linear layers and convolutions in plain torch: the specification that kernels and ONNX function bodies follow.

    x̂ = (x − x_offset) · x_factor                         per input channel
    q = clip(round(x̂ / s), −127, 127)                     s per token (`DYNAMIC`) or of the timestep bin (`STATIC`)
    y = (q · Wᵀ) · s · weight_scale + bias                 the product exact in integers

Channels are equalised by `x_factor` (SmoothQuant, Xiao et al. 2023, arXiv:2211.10438, equation 3), whose inverse is in the
weights, and moved by `x_offset`, whose product with the weights is in the bias: both are exact but for what rounding does to x̂.
What a GELU gives lies on one side of zero: an offset in the middle of the range saves one bit of symmetric quantisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trtconvert.attention.reference import timestep_bin
from trtconvert.linear.modes import INT8_PRODUCTS, LayerMode

LEVELS = 127
"""INT8 steps on either side of zero."""

_FEWEST_STEPS = 119
"""Of the largest number of a channel: its scale is rounded up by a sixteenth at most, unless it is the smallest there is."""

_FEW_ROWS = 8
"""Of a weight, which tell whether it is worth looking at all of it."""

_FEW_COLUMNS = 8
"""Of a row, which tell whether it is worth looking whether all of it are whole numbers of a scale."""

TINY_SCALE = 2.0**-100
"""Scale of a token of zeros, which quantises to zeros whatever the scale is."""


@dataclass(frozen=True)
class LayerTables:
    """An INT8 layer. N output channels, K input channels, T timestep bins.

    Attributes:
        weight: INT8 [N, K], of a convolution [N, K, *kernel]; the layer's own divided by `x_factor` and by its scales.
        weight_scale: [N] FP32.
        bias: [N] FP32, with the product of the INT8 weights and `x_offset`: of these, so that their error is that of x alone.
        x_factor: [K] FP32, positive. x_offset: [K] FP32; zeros for a convolution, whose padding is zero.
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
        """The same layer with another mode for all bins, or with other modes by bin."""
        modes = (
            torch.full_like(self.modes, int(mode))
            if isinstance(mode, LayerMode)
            else torch.as_tensor(mode).to(self.modes)
        )
        return LayerTables(**{f.name: getattr(self, f.name) for f in fields(self)} | {"modes": modes})

    def to(self, device: torch.device | str) -> LayerTables:
        return LayerTables(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def dequantised(self) -> Tensor:
        """FP32 weight [N, K, …] of x̂."""
        return self.weight.float() * _per_output(self.weight_scale, self.weight)


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight in INT8 with a scale per output channel; a channel of zeros has the smallest scale.

    Scales are rounded up to eight significant bits, so that FP16 and BF16 hold them too and all lowerings have the same. What was
    quantised so before and multiplied with its scales in FP32 comes back as it was, number by number.

    Args:
        weight: [N, …], finite.
    Returns:
        INT8 [N, …] and FP32 [N].
    """
    scale = _channel_scale(weight.float().flatten(1))
    stored = (weight.float() / _per_output(scale, weight)).round_().clamp_(-LEVELS, LEVELS)
    return stored.to(torch.int8), scale


def is_quantised(weight: Tensor) -> bool:
    """Whether a weight [N, …] is exactly what `quantise_weight` makes of it, and not all zeros."""

    def is_so(rows: Tensor) -> bool:
        stored, scale = quantise_weight(rows)
        return torch.equal(stored.float() * _per_output(scale, rows), rows.float())

    return is_so(weight[:_FEW_ROWS]) and bool(weight.any()) and is_so(weight)


def _channel_scale(rows: Tensor) -> Tensor:
    """[N] scales of [N, K] FP32 rows.

    A scale that was rounded up leaves the largest number below 127 steps: from it alone the next smaller scale would follow. So
    rows are looked at that are whole numbers of a scale of so many bits, which others are only by chance in 2¹⁶, and all of its
    numbers never.
    """
    largest = rows.abs().amax(1)
    # By numbers of Python torch divides on a GPU as by their reciprocals.
    steps = torch.arange(LEVELS, _FEWEST_STEPS - 1, -1, dtype=torch.float32, device=rows.device)
    candidates = largest / steps[:, None]
    scale = short_scale(candidates[0])
    short = candidates == short_scale(candidates)
    few = rows[:, :_FEW_COLUMNS] / candidates[..., None]
    short &= (few == few.round()).all(-1)
    if not short.any():  # asked once: a GPU has to be waited for
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
"""Of the 23 that FP32 stores of a number's 24."""

_LEAST_NORMAL = 2.0**-17
"""Below it numbers of eight bits are no multiples of 2⁻²⁴."""


def short_scale(scale: Tensor) -> Tensor:
    """FP32 scales rounded up to numbers that FP16 and BF16 hold: of eight significant bits, multiples of 2⁻²⁴, at least 2⁻²⁰.

    By the bits of the numbers, and products with powers of two: all devices give the same.
    """
    scale = scale.float().clamp_min(2.0**-20)
    rest = (1 << _DROPPED_BITS) - 1
    up = ((scale.view(torch.int32) + rest) & ~rest).view(torch.float32)
    return torch.where(scale < _LEAST_NORMAL, (scale * 2.0**24).ceil() * 2.0**-24, up)


def layer_weight(weight: Tensor, x_factor: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's weight as `LayerTables` has it: INT8 of its shape, and [N] FP32 scales.

    Args:
        weight: [N, K, *kernel], of the layer's own input; x_factor: [K].
    """
    return quantise_weight(weight.float() / x_factor.view(1, -1, *[1] * (weight.dim() - 2)))


def layer_bias(bias: Tensor | None, weight: Tensor, weight_scale: Tensor, x_factor: Tensor, x_offset: Tensor) -> Tensor:
    """A layer's bias as `LayerTables` has it: [N] FP32.

    Args:
        bias: [N], of the layer's own input; None for none.
        weight, weight_scale: see `layer_weight`; x_offset: [K].
    """
    own = torch.zeros_like(weight_scale) if bias is None else bias.float()
    if not x_offset.any():
        return own
    # x = x̂ / factor + offset: of the INT8 weights, whose error then meets x and not x less the offset.
    moved = (x_offset * x_factor).double()
    return own + ((weight.double() @ moved) * weight_scale).float()


def linear(
    x: Tensor,
    timestep: Tensor | None,
    tables: LayerTables,
    *,
    timestep_max: float = 1000.0,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A linear layer in the mode that the timestep selects.

    A call computes in one mode, the most careful (smallest) of those that its samples' timesteps select: the samples of a step
    have one timestep, and a kernel then has one product to compute.

    Args:
        x: [B · n, …, K], the rows of each sample beside each other; any floating-point type.
        timestep: [B], what the denoiser is given; None where there is one bin.
        tables: of the layer.
        timestep_max: the timestep at which the last bin ends.
        compute_dtype: type of all arithmetic. FP32 holds sums of up to 1,040 products exactly, larger ones to 6e-8.
    Returns:
        [B · n, …, N] in x's type. NaN for samples whose timestep is NaN, everywhere for a mode that is not one of `LayerMode`'s
        INT8 modes or a table entry that cannot be used. Rows with NaN or ±Inf among their channels are NaN, or in mode
        `WEIGHT_ONLY` what their products are, NaN or ±Inf.
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
    """A convolution without groups or dilation, as `linear`; padding is zero.

    Args:
        x: [B · n, K, *sizes], of one to three sizes.
        stride, padding: of each size, the same on both sides.
    Returns:
        [B · n, N, *sizes]; NaN as `linear`, and everywhere in mode `DYNAMIC`, which convolutions have not. A pixel that is NaN or
        ±Inf in any channel makes all results NaN whose window has it.
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
    """The mode of a call; where it gives NaN, [B · n, 1, …] bool; and the calibrated scale, of the same shape."""
    bins = len(tables.modes)
    index = torch.zeros(1, dtype=torch.long) if timestep is None else timestep_bin(timestep.cpu(), timestep_max, bins)
    mode = int(tables.modes.cpu()[index].min())
    unknown = timestep.cpu().isnan() if timestep is not None else torch.zeros(1, dtype=torch.bool)
    step = tables.x_scale.cpu()[index]
    bad = unknown | (mode not in (LayerMode.WEIGHT_ONLY, *INT8_PRODUCTS))
    if mode == LayerMode.STATIC:
        bad = bad | ~(step.isfinite() & (step > 0))

    def of_rows(values: Tensor) -> Tensor:  # [B] -> [B · n, 1, …]
        rows = values.repeat_interleave(x.shape[0] // len(values))
        return rows.view(-1, *[1] * (x.dim() - 1)).to(x.device)

    return mode, of_rows(bad), of_rows(step.to(compute_dtype))


def _int8(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-LEVELS, LEVELS)


def _per_output(scale: Tensor, weight: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (weight.dim() - 1))
