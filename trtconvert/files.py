"""Files that are whole or not there: written beside their place, hashed, and renamed into it."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtconvert.errors import UserError

_PARTIAL = ".partial-"


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well, and vanishes when it does not.

    What stood at `target` stays until the new folder is whole. Remains of builds that were killed are swept first.

    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    with _explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}{_PARTIAL}{os.getpid()}-", dir=target.parent))
        partial.chmod(0o755)  # mkdtemp makes folders that only their owner reads
        try:
            yield partial
            _replace_folder(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """As `whole_folder`, for one file; the temporary name keeps the suffix.

    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    with _explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.stem}{_PARTIAL}{os.getpid()}{target.suffix}")
        try:
            yield partial
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def _replace_folder(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        # A folder cannot be renamed over one with files: the old one steps aside for the moment between two renames.
        old = partial.with_name(partial.name + "-old")
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what killed processes left; put back a folder that one of them had moved aside."""
    for left in sorted(target.parent.glob(f".{target.name}{_PARTIAL}*")):
        pid = left.name.removeprefix(f".{target.name}{_PARTIAL}").split("-")[0]
        if pid.isdecimal() and not _alive(int(pid)):
            if left.name.endswith("-old") and not target.exists():
                left.rename(target)
            else:
                shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk is full while writing {target}",
                expected="free space",
                got=f"{free_space(target) / 2**20:.0f} MiB free",
                remedy="free some space or give another folder; nothing half-written was left",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"cannot write {target}",
                expected="a folder that this user may write",
                got=error.strerror or type(error).__name__,
                remedy="give another folder with -o, or change its permissions",
            ) from error
        raise


def free_space(path: Path) -> int:
    """Free bytes on the disk where a path is or would be."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)
