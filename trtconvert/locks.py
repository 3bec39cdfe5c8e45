"""Locks between processes, and who has one. Nothing waits for ever: each wait has a limit, which its message names."""

from __future__ import annotations

import datetime
import errno
import fcntl
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
"""What file systems answer that have no locks; the last one NFS, for files that cannot be opened for writing."""

HOUR = 3600.0
DAY = 24 * HOUR
"""Seconds to wait for: what takes moments, as to put a file in its place, and may take minutes of a slow disk; whole work."""

_SAID_AFTER = 1.0  # seconds: shorter waits are nothing to tell
_SHORTEST, _LONGEST = 0.0005, 0.1  # seconds between two tries
_NOTE = re.compile(rb"process \d+ on [^\n]{1,200}\n")


def lock(
    handle: int, path: Path, *, wait: float = HOUR, noted: bool = False, say: Callable[[str], None] | None = None
) -> bool:
    """Lock an open file or folder until it is closed, or the process ends.

    Args:
        path: what messages call it.
        wait: seconds to wait for another process that has the lock, at most; 0 does not wait.
        noted: the file is there for its lock alone: who has it writes into it who he is.
        say: told once what this process waits for, where that takes longer than a moment; by default people are, on stderr.
    Returns:
        False where its file system has no locks.
    Raises:
        BlockingIOError: another process has the lock, and this one shall not wait.
        UserError: another process still had it in the end.
    """
    began, pause, said = time.monotonic(), _SHORTEST, False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if wait <= 0:
                raise
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        waited = time.monotonic() - began
        if waited >= wait:
            raise UserError(
                f"{path} is in use",
                expected=f"that the other process is done with it in {_duration(wait)}",
                got=f"{holder(handle)} still has its lock",
                remedy="run the command again when that process is done; or end it: what it has finished is kept",
            )
        if waited >= _SAID_AFTER and not said:
            said = True
            (say or _tell)(f"waiting for {holder(handle)}, which has the lock of {path}; for {_duration(wait)} at most")
        time.sleep(min(pause, max(wait - waited, 0)))
        pause = min(1.5 * pause, _LONGEST)
    if noted:
        with suppress(OSError):  # a full disk
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}, since {_now()}\n".encode(), 0)
    return True


def holder(handle: int) -> str:
    """Who has the lock of an open file, since when, on which machine; as far as the file or this machine tells."""
    with suppress(OSError):  # a folder cannot be read so
        if _NOTE.fullmatch(note := os.pread(handle, 300, 0)):
            return note.decode(errors="replace").strip()
    with suppress(OSError, ValueError, IndexError):
        if (process := _locking_process(os.fstat(handle))) is not None:
            since = datetime.datetime.fromtimestamp(_started(process)).isoformat(" ", "seconds")
            return f"process {process} on this machine, which runs since {since},"
    return "another process, perhaps on another machine"


def _locking_process(file: os.stat_result) -> int | None:
    """As the kernel tells: one line for each lock, "1: FLOCK ADVISORY WRITE process major:minor:inode first last"."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5] == device and int(fields[4]) > 0:
            return int(fields[4])
    return None


def _started(process: int) -> float:
    """Seconds since 1970."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    booted = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
    if booted is None:
        raise ValueError("the kernel does not tell when it was started")
    return int(booted[1]) + ticks / os.sysconf("SC_CLK_TCK")


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(" ", "seconds")


def _duration(seconds: float) -> str:
    for size, name in ((DAY, "day"), (HOUR, "hour"), (60.0, "minute"), (1.0, "second")):
        if seconds >= size:
            return f"{seconds / size:g} {name}{'' if seconds == size else 's'}"
    return f"{seconds:g} seconds"


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
