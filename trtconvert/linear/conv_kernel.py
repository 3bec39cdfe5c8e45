"""INT8 convolutions behind group norms: calls the CUDA kernels by ctypes, for measurements."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trtconvert.c_structs import GROUP_NORM_VERSION, INT8_CONV_VERSION, GroupNormParams, Int8ConvParams, ModeTable
from trtconvert.library import run
from trtconvert.linear.modes import LayerMode


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, out: Tensor, *, groups: int, epsilon: float = 1e-5, shift: Tensor | None = None,
    scale: Tensor | None = None, marks: Tensor | None = None,
) -> None:  # fmt: skip
    """Computes the SiLU of the group norm of an image.

    Args:
        x: [B, H, W, C] FP16, contiguous; weight, bias: [C] FP16; shift: [B, C] FP16, added to x before.
        out: like x; or INT8 of its shape, divided by `scale`, [1] FP32. Then `marks`, [B, IMAGE_MARKS] bytes, become nonzero for
            images that are not finite.
    Raises:
        RuntimeError: the GPU has no kernel, or CUDA failed.
    """
    batch, *sizes, channels = x.shape
    in_int8 = out.dtype == torch.int8
    given = GroupNormParams(
        struct_size=ctypes.sizeof(GroupNormParams), version=GROUP_NORM_VERSION, batch=batch, pixels=sizes[0] * sizes[1],
        channels=channels, groups=groups, silu=1, epsilon=epsilon, x=x.data_ptr(),
        shift=None if shift is None else shift.data_ptr(), weight=weight.data_ptr(), bias=bias.data_ptr(),
        normed=None if in_int8 else out.data_ptr(), stream=torch.cuda.current_stream(x.device).cuda_stream,
    )  # fmt: skip
    if in_int8:
        assert scale is not None and marks is not None
        given.table, given.payload, given.marks = one_scale(scale), out.data_ptr(), marks.data_ptr()
    run("trtconvert_group_norm_run", given)


def int8_conv(
    x: Tensor,
    marks: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor,
    scale: Tensor,
    y: Tensor,
    *,
    padding: int,
    arch: int = 0,
) -> None:
    """Computes a convolution of square windows with stride 1.

    Args:
        x: [B, H, W, C] INT8, of `scale`, [1] FP32; marks: [B, IMAGE_MARKS] bytes, as `group_norm` gives them.
        weight: [N, R, R, C] INT8, of `weight_scale`, [N] FP32; bias: [N] FP32.
        y: [B, P, Q, N] FP16, the result.
        arch: 80 for the kernels of all GPUs; 0 for those of this GPU.
    Raises:
        RuntimeError: the GPU has no kernel, or CUDA failed.
    """
    batch, height, width, channels = x.shape
    given = Int8ConvParams(
        struct_size=ctypes.sizeof(Int8ConvParams), version=INT8_CONV_VERSION, batch=batch, height=height, width=width,
        in_channels=channels, out_channels=len(weight), kernel_h=weight.shape[1], kernel_w=weight.shape[2], stride_y=1,
        stride_x=1, pad_y=padding, pad_x=padding, table=one_scale(scale), x=x.data_ptr(), weight=weight.data_ptr(),
        weight_scale=weight_scale.data_ptr(), bias=bias.data_ptr(), y=y.data_ptr(),
        stream=torch.cuda.current_stream(x.device).cuda_stream, target_arch=arch,
        marks=marks.data_ptr(),
    )  # fmt: skip
    run("trtconvert_int8_conv_run", given)


def one_scale(scale: Tensor) -> ModeTable:
    """Returns the table of one scale, [1] FP32, for all timesteps."""
    return ModeTable(1 << LayerMode.STATIC, 1, 1, 1000.0, None, None, scale.data_ptr())
