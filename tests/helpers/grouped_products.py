"""Triton's kernels against what specifies them: for a GPU's tests, and as a program for Triton's interpreter, which a process has
or has not."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from trtconvert.linear import groups
from trtconvert.weights import blocks

#: rows, depth, outputs: whole tiles, ends of every kind, one row, and a depth that descriptors cannot read as it lies.
SIZES = [(128, 256, 256), (70, 300, 200), (5, 128, 128), (1, 16, 8), (65, 203, 77)]


def weight(outputs: int, channels: int, granularity: blocks.Granularity, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """A weight in INT8 and its scales; the blocks' differ by orders of magnitude."""
    torch.manual_seed(outputs * channels)
    w = torch.randn(outputs, channels) * torch.logspace(-2, 1, channels)
    scale = blocks.scales(blocks.measure(w), granularity)
    return blocks.quantise(w, scale)[0].to(device), scale.to(device)


def tokens(rows: int, channels: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """With an outlier, and a group of zeros."""
    torch.manual_seed(rows)
    x = torch.randn(rows, channels)
    x[-1, channels // 2] = 300
    x[: min(1, rows - 1), :128] = 0
    return x.to(device, dtype)


def compare(
    size: tuple[int, int, int], dtype: torch.dtype, granularity: blocks.Granularity, tiles: Any, device: str
) -> dict:
    """Elements that differ, and the relative error of the product in FP32 and in another type."""
    from trtconvert.linear import triton_kernels

    rows, channels, outputs = size
    x, (stored, scale) = tokens(rows, channels, dtype, device), weight(outputs, channels, granularity, device)
    bias = torch.linspace(-3, 3, outputs, device=device).to(dtype)
    q, step = triton_kernels.act_quant(x)
    wanted_q, wanted_step = groups.act_quant(x)
    found: dict[str, float] = {"q": int((q != wanted_q).sum()), "step": int((step != wanted_step).sum())}
    restored, exact = triton_kernels.weight_dequant(stored, scale, dtype), blocks.dequantise(stored, scale, dtype)
    found["weight"] = int((restored != exact).sum())
    for name, added, wanted_type in (
        ("product", bias, torch.float32),
        ("no bias", None, torch.float32),
        ("half", bias, dtype),
    ):
        y = triton_kernels.int8_gemm(q, step, stored, scale, added, wanted_type, tiles)
        exact_x = wanted_q.double() * wanted_step.double().repeat_interleave(groups.GROUP, 1)[:, :channels]
        wanted = exact_x @ blocks.dequantise(stored, scale, torch.float64).T + (0 if added is None else added.double())
        found[name] = float((y.double() - wanted).norm() / wanted.norm())
    return found


if __name__ == "__main__":
    from trtconvert.linear.triton_kernels import Tiles

    every = []
    for size in SIZES:
        for tiles in (Tiles(64, 64, 2, 4, 3), Tiles(16, 128, 1, 4, 3)):
            every += [compare(size, torch.float16, granularity, tiles, "cpu") for granularity in ("block", "channel")]
    json.dump(every, sys.stdout)
