"""ONNX's products and convolutions, and operators that resize images."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trtconvert.models.onnx.call import Call, Table, Value, in_narrowest_type, require_one_output


def _product_of(call: Call, a: Value, b: Value) -> Tensor:
    return torch.matmul(*in_narrowest_type([call.tensor(a), call.tensor(b)]))


def _gemm(call: Call, a: Value, b: Value, c: Value | None = None) -> Tensor:
    x, y = in_narrowest_type([call.tensor(a), call.tensor(b)])
    found = (x.T if call.get("transA", 0) else x) @ (y.T if call.get("transB", 0) else y)
    found = found * call.get("alpha", 1.0) if call.get("alpha", 1.0) != 1 else found
    if c is None:
        return found
    bias = call.tensor(c).to(found.dtype)
    return found + (bias * call.get("beta", 1.0) if call.get("beta", 1.0) != 1 else bias)


def _linear(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `trtconvert::linear`: a product with a constant, as in torch's layers. weight [N, K]."""
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype))


def _fused_product(call: Call, a: Tensor, b: Tensor) -> Tensor:
    if call.get("transBatchA", 0) or call.get("transBatchB", 0):
        raise call.refused("FusedMatMul with transBatch", "without")
    x = a.transpose(-1, -2) if call.get("transA", 0) else a
    y = b.transpose(-1, -2) if call.get("transB", 0) else b
    return torch.matmul(*in_narrowest_type([x, y])) * call.get("alpha", 1.0)


def _einsum(call: Call, *operands: Tensor) -> Tensor:
    return torch.einsum(call.get("equation"), *in_narrowest_type(operands))


def _padding(call: Call, x: Tensor, kernel: Sequence[int], strides: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Applies uneven padding; returns the tensor, and the even padding that is left to apply."""
    count = len(kernel)
    auto = call.get("auto_pad", "NOTSET")
    pads = call.get("pads") or [0] * (2 * count)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        pads = [0] * (2 * count)
        for i, (size, k, s) in enumerate(zip(x.shape[2:], kernel, strides, strict=True)):
            total = max(
                (-(-int(size) // s) - 1) * s + (k - 1) * call.get("dilations", [1] * count)[i] + 1 - int(size), 0
            )
            small = total // 2
            pads[i], pads[count + i] = (small, total - small) if auto == "SAME_UPPER" else (total - small, small)
    if pads[:count] == pads[count:]:
        return x, list(pads[:count])
    sides = [side for i in reversed(range(count)) for side in (pads[i], pads[count + i])]
    return F.pad(x, sides), [0] * count


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _conv(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    count = weight.dim() - 2
    strides, dilations = call.get("strides", [1] * count), call.get("dilations", [1] * count)
    x, pads = _padding(call, x.to(weight.dtype), weight.shape[2:], strides)
    bias = None if bias is None else bias.to(weight.dtype)
    return _CONVOLUTIONS[count](
        x, weight, bias, stride=strides, padding=pads, dilation=dilations, groups=call.get("group", 1)
    )


def _conv_transposed(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    count = weight.dim() - 2
    pads = call.get("pads") or [0] * (2 * count)
    if pads[:count] != pads[count:] or call.get("output_shape") or call.get("auto_pad", "NOTSET") != "NOTSET":
        raise call.refused("uneven or automatic padding", "a transposed convolution with even padding")
    return _TRANSPOSED[count](
        x.to(weight.dtype), weight, bias, stride=call.get("strides", [1] * count), padding=pads[:count],
        output_padding=call.get("output_padding", [0] * count), groups=call.get("group", 1),
        dilation=call.get("dilations", [1] * count),
    )  # fmt: skip


def _pooled(functions: Mapping[int, Callable[..., Tensor]]) -> Callable[..., Tensor]:
    def computed(call: Call, x: Tensor) -> Tensor:
        require_one_output(call)
        kernel = call.get("kernel_shape")
        strides = call.get("strides", [1] * len(kernel))
        pads = call.get("pads") or [0] * (2 * len(kernel))
        if pads[: len(kernel)] != pads[len(kernel) :] or call.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            raise call.refused("uneven padding", "pooling with even padding")
        more = {"count_include_pad": bool(call.get("count_include_pad", 0))} if functions is _AVERAGES else {}
        ceil = bool(call.get("ceil_mode", 0))
        return functions[len(kernel)](x, kernel, strides, pads[: len(kernel)], ceil_mode=ceil, **more)

    return computed


_AVERAGES = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_MAXIMA = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _resize(call: Call, x: Tensor, *given: Value | None) -> Tensor:
    """Resizes images as torch does. `_check_numbers` compares the result with onnxruntime's."""
    scales, sizes = (given[0], None) if call.step.op == "Upsample" else ((*given, None, None, None)[1:3])
    count = x.dim() - 2
    mode, of = call.get("mode", "nearest"), call.get("coordinate_transformation_mode", "half_pixel")
    named = call.get("axes") or list(range(x.dim()))
    wanted: list[Any] = list(x.shape)
    if sizes is not None and (not isinstance(sizes, np.ndarray) or sizes.size):
        for axis, size in zip(named, call.sizes(sizes), strict=True):
            wanted[axis] = size
    else:
        for axis, scale in zip(named, call.sizes(scales), strict=True):
            whole = isinstance(scale, (int, float)) and float(scale).is_integer()
            wanted[axis] = wanted[axis] * int(scale) if whole else math.floor(wanted[axis] * scale)
    if any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(wanted[:2], x.shape[:2], strict=True)):
        raise call.refused("samples or channels are resized", "height and width alone")
    if mode == "nearest":
        exact = of in ("half_pixel", "pytorch_half_pixel") and call.get("nearest_mode", "round_prefer_floor") != "floor"
        return F.interpolate(x, wanted[2:], mode="nearest-exact" if exact else "nearest")
    modes = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}
    aligned = {"align_corners": True, "half_pixel": False, "pytorch_half_pixel": False}
    if (mode, count) not in modes or of not in aligned:
        raise call.refused(
            f"Resize with mode {mode} and {of}", "nearest, linear or cubic, with half_pixel or align_corners"
        )
    antialias = {"antialias": True} if call.get("antialias", 0) else {}
    return F.interpolate(x, wanted[2:], mode=modes[mode, count], align_corners=aligned[of], **antialias)


def _dequantised(call: Call, x: Tensor, scale: Value, zero: Value | None = None) -> Tensor:
    """Computes the weights of constants that are stored in 8 bits."""
    factor = call.tensor(scale).float()
    shape = [1] * x.dim()
    if factor.dim() == 1 and factor.numel() > 1:
        shape[call.get("axis", 1)] = -1
    elif factor.dim() > 1:
        raise call.refused("scales by blocks", "one scale, or one for each channel")
    offset = 0 if zero is None else call.tensor(zero).float().reshape(shape)
    return (x.float() - offset) * factor.reshape(shape)


PRODUCTS: Table = {
    "AveragePool": _pooled(_AVERAGES),
    "Conv": _conv,
    "ConvTranspose": _conv_transposed,
    "DequantizeLinear": _dequantised,
    "Einsum": _einsum,
    "Gemm": _gemm,
    "MatMul": _product_of,
    "MaxPool": _pooled(_MAXIMA),
    "Resize": _resize,
    "Upsample": _resize,
    "com.microsoft::FusedMatMul": _fused_product,
    "trtconvert::linear": _linear,  # made by `layers`
}
