"""Linear layers with an INT8 weight: chooses the fastest kernel for the shapes, or plain torch.

| weight's scales | on a GPU | elsewhere |
| --- | --- | --- |
| per block | Triton's kernels: a scale per group of 128 channels of a token | `groups`, the same in torch |
| per channel | the same, or the library's kernels (`kernel`, a scale per token), whichever is faster | |

Few tokens, such as the input of modulations, are not quantised: reading the weight dominates. Without Triton and the library no
tokens are quantised.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor
from torch.jit._trace import is_tracing
from torch.nn import functional as F

from trtconvert.library import serves_gpu
from trtconvert.linear import groups, kernel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LayerTables
from trtconvert.linear.sites import IN_STEP, OUT_STEP
from trtconvert.mixed_types import as_autocast
from trtconvert.weights import blocks

MOST_FEW_ROWS = 16
"""Largest number of rows that are not quantised."""


def int8_linear(x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x · ŵᵀ + bias with INT8 tokens and weight, without gradients.

    Args:
        x: […, K] of a floating-point type; cast under autocast. More than `MOST_FEW_ROWS` rows are quantised.
        stored: INT8 [N, K]. scale: FP32, [⌈N / 128⌉, ⌈K / 128⌉] per block or [N] per channel. bias: [N] or None.
    Returns:
        […, N] in x's type.
    """
    x = as_autocast(x)
    # torch.compile needs the operator; otherwise the operator costs time on the host.
    compute = _operator if torch.compiler.is_compiling() else _compute
    return compute(x, stored, scale, bias)


def dequantised(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ŵ [N, K] in another type, on a GPU by Triton's kernel. Traces get ordinary operators."""
    if torch.compiler.is_compiling() or is_traced():
        return groups.weight_dequant(stored, scale, dtype)
    if stored.is_cuda and (triton := _triton()) is not None:
        with torch.cuda.device(stored.device):
            return triton.weight_dequant(stored, scale, dtype)
    return blocks.dequantise(stored, scale, dtype)


def is_traced() -> bool:
    """Returns whether an exporter or TorchScript traces the computation."""
    return torch.compiler.is_exporting() or is_tracing()


def float_linear(x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Computes x · ŵᵀ + bias in x's type, with gradients of x and bias. Arguments as in `int8_linear`."""
    return F.linear(x, dequantised(stored, scale, x.dtype), None if bias is None else bias.to(x.dtype))


def _compute(x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[-1] != stored.shape[1]:
        raise ValueError(f"x: expected rows of {stored.shape[1]} channels, as the weight has, got {x.shape[-1]}")
    rows = x.reshape(-1, x.shape[-1])
    return _product(rows, stored, scale, bias).view(*x.shape[:-1], len(stored))


_operator = torch.library.custom_op("trtconvert::int8_product", _compute, mutates_args=())


@_operator.register_fake
def _(x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(stored))


def _product(x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    by_library = x.is_cuda and len(x) > 0 and scale.dim() == 1 and _library_takes(x, stored)
    triton = _triton() if x.is_cuda else None
    if not by_library and (len(x) <= MOST_FEW_ROWS or (x.is_cuda and triton is None)):
        return float_linear(x, stored, scale, bias)
    if not x.is_cuda:
        return groups.int8_gemm(*groups.act_quant(x), stored, scale, bias, x.dtype)
    if triton is None or len(x) <= MOST_FEW_ROWS:
        return _by_library(x, stored, scale, bias)
    if by_library and _library_is_faster(triton, x, stored, scale, bias):
        return _by_library(x, stored, scale, bias)
    return _by_triton(triton, x, stored, scale, bias)


def _by_triton(triton: ModuleType, x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    with torch.cuda.device(x.device):  # Triton launches on the current device
        return triton.int8_gemm(*triton.act_quant(x), stored, scale, bias, x.dtype)


def _by_library(x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    outputs, channels = stored.shape
    ones, zeros = _constant(channels, 1.0, x.device), _constant(channels, 0.0, x.device)
    mode = LayerMode.WEIGHT_ONLY if len(x) <= MOST_FEW_ROWS else LayerMode.DYNAMIC
    bias = _constant(outputs, 0.0, x.device) if bias is None else bias.float()
    return kernel.linear(x, None, LayerTables(stored, scale, bias, ones, zeros, ones[:1], _mode(mode)))


def _library_is_faster(triton: ModuleType, x: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None) -> bool:
    """Measures at the first call of a size. During the recording of a CUDA graph the library is taken without measuring."""
    key = (triton.size_class(len(x)), *stored.shape, x.dtype, x.device)
    if key not in _faster:
        if torch.cuda.is_current_stream_capturing():
            return True
        times = [triton.milliseconds(lambda f=f: f(x, stored, scale, bias)) for f in
                 (_by_library, functools.partial(_by_triton, triton))]  # fmt: skip
        _faster[key] = times[0] <= times[1]
    return _faster[key]


_faster: dict[tuple[object, ...], bool] = {}


@functools.cache
def _triton() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("trtconvert.linear.triton_kernels")


def _library_takes(x: Tensor, stored: Tensor) -> bool:
    outputs, channels = stored.shape
    is_16_bit = x.dtype in (torch.float16, torch.bfloat16)
    return is_16_bit and not channels % IN_STEP and not outputs % OUT_STEP and serves_gpu(x.device)


@functools.cache
def _constant(size: int, value: float, device: torch.device) -> Tensor:
    return torch.full((size,), value, device=device)


@functools.cache
def _mode(mode: LayerMode) -> Tensor:
    return torch.tensor([int(mode)], dtype=torch.int32)
