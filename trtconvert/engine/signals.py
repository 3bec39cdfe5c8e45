"""Defers Ctrl-C while a library runs that calls back into Python."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class DeferredSignals:
    """Defers Ctrl-C and SIGTERM to the end of the block. Signals without a Python handler are not touched: ignored ones stay
    ignored.

    An exception in a callback of the library would cross C++ code, which ends the process or loses the exception.

    Attributes:
        caught: number of the last signal, or None.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.caught: int | None = None
        self._before: dict[int, Any] = {}

    def _keep(self, number: int, _frame: FrameType | None) -> None:
        self.caught = number

    def __enter__(self) -> DeferredSignals:
        # Only the main thread may set handlers, and receives signals.
        if threading.current_thread() is threading.main_thread():
            # Defaults raise nothing, and a C handler (None) could not be restored.
            heeded = [number for number in self._NUMBERS if callable(signal.getsignal(number))]
            self._before = {number: signal.signal(number, self._keep) for number in heeded}
        return self

    def __exit__(self, *_exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.caught is not None:
            signal.raise_signal(self.caught)
