"""Running a model on tensors that have shapes and no values."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def shapes_alone() -> Iterator[FakeTensorMode]:
    """Inside this block, what is computed has shapes alone; tensors that are there already may take part."""
    with without_tracebacks(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


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
