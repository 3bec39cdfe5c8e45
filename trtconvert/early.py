"""Handles SIGINT and SIGTERM while the command line imports its modules, and after a command has ended.

The command line imports this module first. In other programs the import has no effect.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _is_the_program() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = getattr(spec, "name", "")
    return name in ("trtconvert.cli", "trtconvert.__main__") or os.path.basename(sys.argv[0]) == "trtconvert"


def _exit_at_once(number: int, _frame: object) -> NoReturn:
    os._exit(128 + number)  # there are no temporary files to remove


def leave(code: int) -> NoReturn:
    """Ends the process, with the exit code 128 + N if signal N arrives meanwhile.

    Skips the interpreter's teardown, which restores the default signal handlers: a signal would then end the process as killed
    while libraries clean up.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed stream, or a pipe without a reader
            stream.flush()
    pending = [number for number in _SIGNALS if number in signal.sigpending()]
    os._exit(128 + pending[0] if pending else code)


if _is_the_program():
    for number in _SIGNALS:
        # Signals that the process ignores stay ignored: background jobs ignore Ctrl-C.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit_at_once)
