"""Ctrl-C while a library runs that calls back into Python."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredSignals:
    """Ctrl-C and SIGTERM inside the block wait for its end, where they do what they would have done. Where no Python handler is
    set nothing changes: what the process ignores, as jobs in the background ignore Ctrl-C, stays ignored.

    An exception that is raised in one of the library's callbacks crosses C++ code. That ends the process, or loses the exception,
    as in TensorRT's loggers.

    Attributes:
        caught: the number of the last signal, None for none.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def _keep(self, number: int, _frame: FrameType | None) -> None:
        self.caught = number

    def __enter__(self) -> DeferredSignals:
        # Python refuses it in other threads, and sends signals to this one only.
        if threading.current_thread() is threading.main_thread():
            # Others raise nothing: a default ends the process, and None is a handler in C, which could not be put back.
            heeded = [number for number in self._NUMBERS if callable(signal.getsignal(number))]
            self._before = {number: signal.signal(number, self._keep) for number in heeded}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.caught is not None:
            signal.raise_signal(self.caught)
