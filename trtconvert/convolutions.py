"""The settings of cuDNN for convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def cudnn_convolutions(*, tf32: bool, benchmark: bool = False, deterministic: bool = False) -> Iterator[None]:
    """Computes the convolutions of the block by cuDNN with these settings. The settings of the program return afterwards.

    `torch.backends.cudnn.flags` raises an error in programs that set an `fp32_precision`, such as that of `torch.backends`.

    Args:
        tf32: FP32 is rounded to TF32. benchmark, deterministic: as in `torch.backends.cudnn`.
    """
    cudnn: Any = torch.backends.cudnn
    before, precision = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic), cudnn.conv.fp32_precision
    try:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = True, benchmark, deterministic
        cudnn.conv.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before
        cudnn.conv.fp32_precision = precision
