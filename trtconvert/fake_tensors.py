"""Running a model on tensors that have shapes and no values."""

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
    """Inside this block, what is computed has shapes alone; tensors that are there already may take part."""
    with without_tracebacks(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@contextmanager
def in_float32_shapes(module: nn.Module) -> Iterator[None]:
    """While the block runs a module on shapes alone, its weights of 16 bits are FP32 ones, of zeros that take no memory."""
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
    """Of an operation whose shapes do not fit, torch logs the traceback before it raises the error. Who catches the error says it
    in a message of ours, which nobody would find below that."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_is_no_error)
    try:
        yield
    finally:
        log.removeFilter(_is_no_error)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR
