"""Attention that computes less, on one GPU: fused guidance, pruned keys and block masks, beside the same attention whole.

    python bench/less_attention.py [--output FOLDER]

`Int8Attention` in `precision`, calibrated, FP16. Device time of calls in a CUDA graph, median; quantisation, the choice of keys
and the making of masks are inside. Writes less_attention.md; nothing is asserted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from linear import write_table
from torch import Tensor

from trtconvert.attention import Int8Attention
from trtconvert.attention.device_time import device_microseconds

CALLS = 3

Shape = tuple[int, int, int, int]


def tensors(batch: int, heads: int, tokens: int, dim: int) -> list[Tensor]:
    return [torch.randn(batch, heads, tokens, dim, device="cuda", dtype=torch.float16) for _ in range(3)]


def attention_for(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Int8Attention:
    made = Int8Attention(q.shape[1], q.shape[3], precision_mode="precision", **options).cuda()
    return made.calibrate([(q, k, v, 500)])


def row(what: str, shape: Shape, whole: Callable[[], object], less: Callable[[], object]) -> str:
    before, after = (device_microseconds([call] * CALLS) for call in (whole, less))
    return f"| {what} | {' '.join(map(str, shape))} | {before:.0f} | {after:.0f} | {before / after:.2f} |"


def guided(shape: Shape) -> str:
    q, k, v = tensors(*shape)
    fusing = attention_for(q, k, v, enable_cfg_fusion=True)
    two = lambda: (fusing(q, k, v, 500), fusing(q, k, v, 500))  # noqa: E731
    return row("fused_cfg, beside two calls", shape, two, lambda: fusing.fused_cfg(q, q, k, v, 500))


def pruned(shape: Shape, share: float) -> str:
    q, k, v = tensors(*shape)
    dense, pruning = attention_for(q, k, v), attention_for(q, k, v, enable_pruning=True, pruning_ratio=share)
    return row(f"{share:.0%} of keys pruned", shape, lambda: dense(q, k, v, 500), lambda: pruning(q, k, v, 500))


def half_of_blocks(shape: Shape) -> str:
    q, k, v = tensors(*shape)
    dense, blocks = attention_for(q, k, v), shape[2] // 128
    half = torch.rand(1, shape[1], blocks, blocks, device="cuda") < 0.5
    half |= torch.eye(blocks, dtype=torch.bool, device="cuda")
    return row("half of the blocks", shape, lambda: dense(q, k, v, 500), lambda: dense(q, k, v, 500, block_mask=half))


def in_windows(shape: Shape, window: int) -> str:
    q, k, v = tensors(*shape)
    dense = attention_for(q, k, v)
    windows = attention_for(q, k, v, attention_type="block_sparse", window_size=window)
    return row(f"window of {window}", shape, lambda: dense(q, k, v, 500), lambda: windows(q, k, v, 500))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    arguments = parser.parse_args()
    lines = ["| what | B H N D | whole, µs | less, µs | times |", "| --- | --- | ---: | ---: | ---: |"]
    lines += [guided(shape) for shape in ((1, 24, 4096, 64), (1, 24, 4096, 128), (1, 4, 1024, 64))]
    large = ((1, 24, 4096, 128), (16, 32, 4096, 128), (1, 24, 16_384, 128))
    lines += [pruned(shape, share) for shape in large for share in (0.2, 0.4)]
    lines += [half_of_blocks((1, 24, 16_384, 128)), in_windows((1, 4, 131_072, 64), 512)]
    write_table(lines, arguments.output / "less_attention.md")


if __name__ == "__main__":
    main()
