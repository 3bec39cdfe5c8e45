"""INT8 linear layers for bench/linear.py: our kernels, and torch's for the same layer.

Every call takes FP16 rows and gives 16-bit rows, unless its name says that quantisation is excluded. Scales are those of each
row and of each output channel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trtconvert.c_structs import INT8_LINEAR_VERSION, QUANTISE_VERSION, Int8LinearParams, ModeTable, QuantiseParams
from trtconvert.library import run
from trtconvert.linear.groups import GROUP
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.products import int8_linear

GEGLU = 1
E4M3_MOST = 448.0


@dataclass(frozen=True)
class Int8Layer:
    """INT8 weights [N, K], with GEGLU [2 N, K], and FP32 scales and biases of their rows."""

    weight: Tensor
    scale: Tensor
    bias: Tensor
    geglu: bool

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, geglu: bool) -> Int8Layer:
        scale = weight.float().abs().amax(1) / 127
        return cls((weight.float() / scale[:, None]).round().to(torch.int8), scale, bias.float(), geglu)

    def run(self, x: Tensor, y: Tensor, rows: Rows | None = None) -> None:
        """Computes with quantised rows, or with 16-bit rows."""
        source, scale = (x, None) if rows is None else (rows.payload, rows.scale.data_ptr())
        mode_set = 1 << (LayerMode.WEIGHT_ONLY if rows is None else LayerMode.DYNAMIC)
        pointers = [tensor.data_ptr() for tensor in (self.weight, self.scale, self.bias)]
        stream = torch.cuda.current_stream().cuda_stream
        sizes = (*x.shape, y.shape[1], 0, GEGLU if self.geglu else 0, mode_set)
        given = Int8LinearParams(
            ctypes.sizeof(Int8LinearParams),
            INT8_LINEAR_VERSION,
            *sizes,
            source.data_ptr(),
            scale,
            *pointers,
            None,
            y.data_ptr(),
            stream,
        )
        run("trtconvert_int8_linear_run", given)


@dataclass(frozen=True)
class Rows:
    """INT8 [M, K] and FP32 [M]."""

    payload: Tensor
    scale: Tensor

    @classmethod
    def like(cls, x: Tensor) -> Rows:
        return cls(torch.empty_like(x, dtype=torch.int8), torch.empty(len(x), device=x.device))

    def quantise(self, x: Tensor) -> None:
        pointers = (x.data_ptr(), None, None, self.payload.data_ptr(), self.scale.data_ptr())
        table = ModeTable(1 << LayerMode.DYNAMIC, 1, 1, 1000.0)
        stream = torch.cuda.current_stream().cuda_stream
        run(
            "trtconvert_quantise_run",
            QuantiseParams(ctypes.sizeof(QuantiseParams), QUANTISE_VERSION, *x.shape, 0, table, *pointers, stream, 0),
        )


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float() / 127
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


def dequantised(sums: Tensor, row_scale: Tensor, weight_scale: Tensor, bias: Tensor) -> Tensor:
    return (sums.float() * (row_scale * weight_scale) + bias).half()


@dataclass(frozen=True)
class BlockLayer:
    """INT8 weights [N, K] with scales of blocks, as `trtconvert quantize` writes them for Triton's kernels, and FP16 biases."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> BlockLayer:
        scale = F.max_pool2d(weight.float().abs()[None], GROUP, ceil_mode=True)[0] / 127
        of_each = scale.repeat_interleave(GROUP, 0)[: len(weight)].repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
        return cls((weight.float() / of_each).round().to(torch.int8), scale, bias)

    def run(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.scale, self.bias)


def torchao_layer(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a weight that torchao quantised for INT8 products, and its bias."""
    from torchao import quantization

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    layer.weight.data, layer.bias.data = weight, bias
    quantization.quantize_(layer, quantization.Int8DynamicActivationInt8WeightConfig())
    return layer.weight.detach(), bias


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float() / E4M3_MOST
    return (x / scale).to(torch.float8_e4m3fn), scale


def gated(y: Tensor) -> Tensor:
    value, gate = y.chunk(2, dim=-1)
    return value * F.gelu(gate)


compiled_linear = torch.compile(F.linear)
compiled_rows = torch.compile(quantised_rows, dynamic=True)
compiled_dequantised = torch.compile(dequantised, dynamic=True)
compiled_fp8_rows = torch.compile(fp8_rows, dynamic=True)


def int_mm(layer: Int8Layer, x: Tensor, quantise: Callable, dequantise: Callable) -> Tensor:
    """Computes torch._int_mm, torch's INT8 product, with quantisation of rows before and scaling of sums behind."""
    rows, scale = quantise(x)
    return dequantise(torch._int_mm(rows, layer.weight.T), scale, layer.scale, layer.bias)


@dataclass(frozen=True)
class Fp8Layer:
    """E4M3 weights [N, K] and FP32 scales and BF16 biases of their rows: of cuBLASLt's FP8, which gives BF16 with such scales."""

    weight: Tensor
    scale: Tensor
    bias: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor) -> Fp8Layer:
        stored, scale = fp8_rows(weight)
        return cls(stored, scale, bias.bfloat16())

    def product(self, rows: Tensor, scale: Tensor) -> Tensor:
        return torch._scaled_mm(
            rows, self.weight.T, scale_a=scale, scale_b=self.scale.T, bias=self.bias, out_dtype=torch.bfloat16
        )
