"""Which convolutions our INT8 kernel computes, and where it is the faster: what the plan prices is what engines have.

Elsewhere, as between TensorRT's own layers, and in ONNX Runtime, other convolutions may be INT8 as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trtconvert.linear.sites import Layer

MOST_CHANNELS, MOST_OUTPUTS, MOST_KERNEL, MOST_STRIDE = 16384, 65536, 15, 8  # of int8_conv.h

FEWEST_PIXELS, FEWEST_OUTPUTS = 128, 2**17
"""Of a result: the smallest that bench/int8_conv.py has beside cuDNN, a tile of pixels. The kernel does not split the depth."""
LEAST_DEPTH = 640
"""Numbers of a window below which reading the images takes most of the time, as of linear layers."""

IMAGE_MARKS = 32
"""Bytes of an image that say whether a norm in front found NaN or infinity in it, see layer_modes.h."""

PIXELS = "of single pixels, which is a product"
NOT_NORMED = "behind no group norm that would give its input in INT8"


def obstacle(shape: Sequence[int], stride: Sequence[int], before: Sequence[int], after: Sequence[int]) -> str:
    """Why a convolution without groups and dilation is not for the kernel; empty where it is.

    Args:
        shape: of the weight, [N, K, *kernel]; before, after: padding of each size at both ends.
    """
    outputs, channels, *kernel = shape
    if len(kernel) != 2:
        return f"over {len(kernel)} dimensions, our kernel has the two of images"
    if channels > MOST_CHANNELS or outputs > MOST_OUTPUTS:
        return f"of more than {MOST_CHANNELS:,} input or {MOST_OUTPUTS:,} output channels"
    if max(kernel) == 1:  # in U-Nets between images and tokens, which plugins of 16 bits have as these lie
        return PIXELS
    if max(kernel) > MOST_KERNEL or max(stride) > MOST_STRIDE:
        return f"with windows larger than {MOST_KERNEL}, or steps larger than {MOST_STRIDE}"
    if tuple(before) != tuple(after):
        return "with padding that differs from side to side"
    if any(pad >= size for pad, size in zip(before, kernel, strict=True)):
        return "with padding as wide as the window"
    return ""


def too_small(pixels: int, outputs: int, depth: int) -> str:
    """Why a convolution is no faster in INT8; empty where it is.

    Args:
        pixels: of the result, of all images; outputs: channels; depth: numbers of a window.
    """
    if pixels < FEWEST_PIXELS or pixels * outputs < FEWEST_OUTPUTS:
        return "of too few pixels to be faster in INT8"
    return "of too few channels to be faster in INT8" if depth < LEAST_DEPTH else ""


def left(layer: Layer, batch: int) -> str:
    """Why engines with our plugins have a convolution of so many samples in 16 bits; empty where it is INT8, behind a group norm
    that quantises its input."""
    shape = (layer.out_channels, layer.in_channels, *layer.kernel)
    depth = layer.in_channels * math.prod(layer.kernel)
    return (
        obstacle(shape, layer.stride, layer.padding, layer.padding)
        or ("" if layer.normed else NOT_NORMED)
        or too_small(batch * layer.rows, layer.out_channels, depth)
    )
