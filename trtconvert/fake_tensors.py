"""Runs models on fake tensors, which have shapes but no values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def shapes_alone() -> Iterator[FakeTensorMode]:
    """Computes with fake tensors inside the block. Existing tensors may take part."""
    with without_tracebacks(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@contextmanager
def in_float32_shapes(module: nn.Module) -> Iterator[None]:
    """Replaces a module's 16-bit weights by expanded FP32 zeros, which take no memory, inside a block with fake tensors."""
    own = [
        (tensors, name, x)
        for part in module.modules()
        for tensors in cast(tuple[dict[str, Any], ...], (part._parameters, part._buffers))
        for name, x in tensors.items()
        if x is not None and x.is_floating_point() and x.itemsize == 2
    ]
    for tensors, name, x in own:
        zeros = torch.zeros((), dtype=torch.float32).expand(x.shape)
        tensors[name] = nn.Parameter(zeros, requires_grad=False) if isinstance(x, nn.Parameter) else zeros
    try:
        yield
    finally:
        for tensors, name, x in own:
            tensors[name] = x


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Suppresses the traceback that torch logs when shapes do not fit, before it raises the error. Callers print the error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_below_error)
    try:
        yield
    finally:
        log.removeFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR
