"""Conditions for convolutions that our INT8 kernel computes faster. The plan and the engines share the conditions.

TensorRT's own layers and ONNX Runtime may compute other convolutions in INT8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trtconvert.linear.sites import Layer

MOST_CHANNELS, MOST_OUTPUTS, MOST_KERNEL, MOST_STRIDE = 16384, 65536, 15, 8  # of int8_conv.h

FEWEST_PIXELS, FEWEST_OUTPUTS = 128, 2**17
"""Smallest results of bench/int8_conv.py, from one tile of pixels on. The kernel does not split the depth."""
LEAST_DEPTH = 640
"""Least elements of a window: below this, reading the images dominates."""

PIXELS = "of single pixels, which are products"
NOT_NORMED = "without a group norm in front that writes INT8"


def obstacle(shape: Sequence[int], stride: Sequence[int], before: Sequence[int], after: Sequence[int]) -> str:
    """Returns why the kernel does not support a convolution without groups and dilation, "" if it does.

    Args:
        shape: of the weight, [N, K, *kernel]. before, after: padding at both ends of each size.
    """
    outputs, channels, *kernel = shape
    if len(kernel) != 2:
        return f"over {len(kernel)} dimensions, our kernel supports two"
    if channels > MOST_CHANNELS or outputs > MOST_OUTPUTS:
        return f"of more than {MOST_CHANNELS:,} input or {MOST_OUTPUTS:,} output channels"
    if max(kernel) == 1:  # 16-bit plugins compute these as products of tokens
        return PIXELS
    if max(kernel) > MOST_KERNEL or max(stride) > MOST_STRIDE:
        return f"with windows larger than {MOST_KERNEL}, or steps larger than {MOST_STRIDE}"
    if tuple(before) != tuple(after):
        return "with padding that differs from side to side"
    if any(pad >= size for pad, size in zip(before, kernel, strict=True)):
        return "with padding as wide as the window"
    return ""


def too_small(pixels: int, outputs: int, depth: int) -> str:
    """Returns why a convolution is not faster in INT8, "" if it is.

    Args:
        pixels: of all resulting images. outputs: channels. depth: elements of a window.
    """
    if pixels < FEWEST_PIXELS or pixels * outputs < FEWEST_OUTPUTS:
        return "of too few pixels to be faster in INT8"
    return "of too few channels to be faster in INT8" if depth < LEAST_DEPTH else ""


def left(layer: Layer, batch: int) -> str:
    """Returns why engines with our plugins compute a convolution of a batch in 16 bits, "" if in INT8."""
    shape = (layer.out_channels, layer.in_channels, *layer.kernel)
    depth = layer.in_channels * math.prod(layer.kernel)
    return (
        obstacle(shape, layer.stride, layer.padding, layer.padding)
        or ("" if layer.normed else NOT_NORMED)
        or too_small(batch * layer.rows, layer.out_channels, depth)
    )
