"""Collects TensorRT's log for the messages of errors.

A process has one logger that lives forever. TensorRT keeps a pointer to the logger of its first builder, runtime or refitter, and
uses the pointer after that object is gone: a shorter-lived logger would crash the process.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

_MEMORY_WORDS = (
    "out of memory", "outofmemory", "mem_alloc", "memory allocation", "memoryallocation", "insufficient memory", "bad_alloc",
    "memory is insufficient", "enough free memory", "enough memory", "scratch memory", "workspace limit",
)  # fmt: skip
"""Phrases of the libraries for a lack of memory. There is no error code."""

_KEPT_ERRORS = 100
"""Kept errors of a log: an engine may run for weeks."""

_LOGGERS: dict[type, Any] = {}
"""The logger of each library, by its class of loggers."""
_LOCK = threading.RLock()
"""Guards the loggers and their listeners. Reentrant: the garbage collector may free an engine, which logs, under the lock."""


def lacks_memory(text: str) -> bool:
    """Return whether a logged text is about a lack of memory."""
    return any(word in text.lower() for word in _MEMORY_WORDS)


class Log:
    """The log of one build or engine.

    Inside `with log:` this log alone receives the messages of the thread. Messages of other threads, such as the library's own,
    go to all logs.

    Attributes:
        logger: of the process, for TensorRT.
        errors: the latest errors. skipped: the latest warning of kernels that lack memory.
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.errors: list[str] = []
        self.skipped = ""

    def __enter__(self) -> Log:
        self.logger.heard_by.logs.append(self)
        return self

    def __exit__(self, *_exception: object) -> None:
        self.logger.heard_by.logs.pop()

    def last(self) -> str:
        """Returns the latest two errors."""
        return "; ".join(self.errors[-2:]) or "no reason was logged"

    def text(self) -> str:
        """Returns all kept errors."""
        return "\n".join(self.errors)


def make_log(trt: Any) -> Log:
    """Makes a log.

    Args:
        trt: the bindings' module of TensorRT or TensorRT-RTX.
    """
    with _LOCK:
        if trt.ILogger not in _LOGGERS:
            _LOGGERS[trt.ILogger] = _make_logger(trt)
        log = Log(_LOGGERS[trt.ILogger])
        log.logger.logs.add(log)
    return log


class _HeardBy(threading.local):
    """Stack of the logs of this thread."""

    def __init__(self) -> None:
        self.logs: list[Log] = []


def _make_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):
        """Keeps errors for messages instead of printing them."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.logs = weakref.WeakSet[Log]()
            self.heard_by = _HeardBy()

        def log(self, severity: Any, message: str) -> None:
            is_error = severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR)
            if not is_error and not (severity == trt.ILogger.WARNING and lacks_memory(message)):
                return
            logs = self.heard_by.logs[-1:]
            if not logs:
                with _LOCK:
                    logs = list(self.logs)
            for log in logs:
                if is_error:
                    log.errors.append(message)
                    del log.errors[:-_KEPT_ERRORS]
                else:
                    log.skipped = message

    return Logger()
