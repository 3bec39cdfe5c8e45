"""Inputs of the shipped model's engine, and memory in use."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def make_inputs(batch: int = 2, seed: int = 0, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """In the signature's order, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 1, 8, 8, generator=generator).to("cuda", dtype)
    timestep = (torch.rand(batch, generator=generator) * 999).cuda()
    return [x, timestep, torch.randint(0, 10, (batch,), generator=generator).cuda()]


def resident() -> int:
    """Bytes of host memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> int:
    """Bytes of device memory in use, by torch and by others."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free
