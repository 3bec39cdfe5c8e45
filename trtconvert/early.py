"""The first that the command line imports: how a process of its own leaves that is asked to before it can say more, or after all
is said. Nothing happens where another program imports it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from typing import NoReturn

_ASKED = (signal.SIGINT, signal.SIGTERM)


def _is_the_program() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return getattr(spec, "name", "") == "trtconvert.cli" or os.path.basename(sys.argv[0]) == "trtconvert"


def _leave_at_once(number: int, _frame: object) -> NoReturn:
    """Handles a signal while modules are imported and where a command has ended: there is nothing to clear up."""
    os._exit(128 + number)


def leave(code: int) -> NoReturn:
    """End the process when all is done, by 128 and its number where a signal comes meanwhile.

    Without the interpreter's own teardown: it gives signals back to the system, which would end the process as killed while
    libraries clear up for some tenths of a second.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKED)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader of a pipe has left, or it was closed
            stream.flush()
    asked = [number for number in _ASKED if number in signal.sigpending()]
    os._exit(128 + asked[0] if asked else code)


if _is_the_program():
    for asked in _ASKED:
        # What the process ignores, as jobs in the background ignore Ctrl-C, stays ignored.
        if signal.getsignal(asked) != signal.SIG_IGN:
            signal.signal(asked, _leave_at_once)
