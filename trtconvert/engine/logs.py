"""What TensorRT logs, for the messages of errors.

A process has one logger. TensorRT keeps a single pointer, to that of the builder, runtime or refitter which was there first, and
does not let go of it when that one goes while others live. Loggers that come and go with their engines left it pointing to
nothing, and what was logged next without an engine, as by a look into the plugin registry, ended the process.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

_MEMORY_WORDS = (
    "out of memory", "outofmemory", "mem_alloc", "memory allocation", "memoryallocation", "insufficient memory", "bad_alloc",
    "memory is insufficient", "enough free memory", "enough memory", "scratch memory", "workspace limit",
)  # fmt: skip
"""How the libraries' messages name a lack of memory; there is no code for it."""

_KEPT_ERRORS = 100
"""The latest of a log: an engine that runs for weeks may see many."""

_LOGGERS: dict[type, Any] = {}
"""Of each library by its class of loggers, for as long as the process lives."""
_LOCK = threading.RLock()
"""Of these, and of who listens. An engine may be let go of, and log, wherever the garbage collector runs: under the lock too."""


def lacks_memory(text: str) -> bool:
    """Whether what a library logged is about memory that ran out."""
    return any(word in text.lower() for word in _MEMORY_WORDS)


class Log:
    """What one user of the library, a build or an engine, is told by the process's logger.

    Within `with log:` what the thread's calls log is for this one alone. What is logged by other threads, the library's own ones
    too, is for all.

    Attributes:
        logger: the process's, to give to TensorRT.
        errors: the latest; skipped: the latest warning of kernels for which memory does not suffice.
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
        """The latest two errors."""
        return "; ".join(self.errors[-2:]) or "no reason was logged"

    def text(self) -> str:
        """All errors that are kept."""
        return "\n".join(self.errors)


def make_log(trt: Any) -> Log:
    """A log of one's own.

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
    """Logs that this thread's calls are heard by, the innermost last."""

    def __init__(self) -> None:
        self.logs: list[Log] = []


def _make_logger(trt: Any) -> Any:
    class Logger(trt.ILogger):
        """Keeps errors for the message to the user instead of printing them."""

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
