"""Locks between processes. Every wait has a limit, and its messages name the holder as far as the lock file tells."""

from __future__ import annotations

import datetime
import errno
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trtconvert.errors import UserError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)
"""Errors of file systems without locks. NFS answers EBADF for files that are not open for writing."""

HOUR = 3600.0
DAY = 24 * HOUR
"""Limits of waits in seconds: an hour for moving files into place, a day for whole work."""

_SAID_AFTER = 1.0  # seconds: shorter waits are not announced
_SHORTEST, _LONGEST = 0.0005, 0.1  # seconds between two tries
_NOTE = re.compile(rb"process \d+ on [^\n]{1,200}\n")


def lock(
    handle: int, path: Path, *, wait: float = HOUR, noted: bool = False, say: Callable[[str], None] | None = None
) -> bool:
    """Locks an open file or folder until the handle is closed or the process ends.

    Args:
        path: the path that messages print.
        wait: limit of the wait for another process in seconds; 0 does not wait.
        noted: write the PID and the host of this process into the file, which exists for the lock alone.
        say: called once if the wait takes longer than a second; prints to stderr by default.
    Returns:
        False if the file system has no locks.
    Raises:
        BlockingIOError: another process holds the lock, and `wait` is 0.
        UserError: another process still holds the lock when the wait ends.
    """
    from filelock import lock_descriptor  # commands that lock nothing start faster without it

    began, pause, said = time.monotonic(), _SHORTEST, False
    while True:
        try:
            if lock_descriptor(handle, blocking=False):
                break
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        if wait <= 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        waited = time.monotonic() - began
        if waited >= wait:
            raise UserError(
                f"{path} is in use",
                expected=f"the other process to release the lock within {_duration(wait)}",
                got=f"{holder(handle)} still holds the lock",
                remedy="run the command again when that process has ended, or end that process: its finished stages are kept",
            )
        if waited >= _SAID_AFTER and not said:
            said = True
            (say or _tell)(
                f"waiting for {holder(handle)}, which holds the lock of {path}; for {_duration(wait)} at most"
            )
        time.sleep(min(pause, max(wait - waited, 0)))
        pause = min(1.5 * pause, _LONGEST)
    if noted:
        with suppress(OSError):  # a full disk
            os.ftruncate(handle, 0)
            now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}, since {now}\n".encode(), 0)
    return True


def holder(handle: int) -> str:
    """Returns the PID, host and start of the process that holds a lock, if the lock file has a note."""
    with suppress(OSError):  # a folder has no content to read
        if _NOTE.fullmatch(note := os.pread(handle, 300, 0)):
            return note.decode(errors="replace").strip()
    return "another process, perhaps on another machine"


def _duration(seconds: float) -> str:
    for size, name in ((DAY, "day"), (HOUR, "hour"), (60.0, "minute"), (1.0, "second")):
        if seconds >= size:
            return f"{seconds / size:g} {name}{'' if seconds == size else 's'}"
    return f"{seconds:g} seconds"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
