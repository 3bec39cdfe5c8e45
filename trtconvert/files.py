"""Files that are whole or not there: written beside their place, hashed, and renamed into it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtconvert.errors import UserError

_PARTIAL, _OLD = ".partial-", "-old"

_UNWRITABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOENT,  # /proc and the like: folders that cannot be made
    errno.ENAMETOOLONG,
)


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
        target = target.resolve()  # a link keeps pointing where it did, and "." has a name
        with _partial_folder(target) as partial:
            partial.chmod(0o755)  # mkdtemp makes folders that only their owner reads
            yield partial
            _replace_folder(partial, target)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """As `whole_folder`, for one file; the temporary file has the same name in a folder beside.

    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    with _explained(target):
        target = target.resolve()
        with _partial_folder(target) as folder:
            yield folder / target.name
            (folder / target.name).replace(target)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in the system's temporary folder, which only its owner reads, until the block ends.

    Remains of processes of this user that were killed are swept first: they may hold a model's weights.
    """
    with _partial_folder(Path(tempfile.gettempdir()) / f"trtconvert-{os.getuid()}") as folder:
        yield folder


@contextmanager
def one_at_a_time(work: Path) -> Iterator[None]:
    """Waits until no other process is inside such a block for the same path. The lock ends with the process, however that ends.

    Args:
        work: what the processes would share; the lock is a file beside it, which goes in the end.
    Raises:
        UserError: the place cannot be written.
    """
    path = work.with_name(work.name + ".lock")
    with _explained(work):
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # The one before may have removed the file after this process had opened it.
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                break
            os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


@contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target`, for its owner alone. Its lock, which ends with the process, tells a build from its remains."""
    made = not target.parent.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent):
        _sweep(target)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}{_PARTIAL}", dir=target.parent))
        lock = os.open(partial, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)
        if made:
            with contextlib.suppress(OSError):  # something is in it
                target.parent.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits for the lock of a folder: one process at a time makes, sweeps or replaces what is in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace_folder(partial: Path, target: Path) -> None:
    """Move `partial` to `target`. What was there is left at `partial`, where the caller removes it."""
    with _locked(target.parent):
        try:
            partial.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not _exchange(partial, target):
                # The old folder steps aside; if this process dies between the renames, the next sweep puts it back.
                old = partial.with_name(partial.name + _OLD)
                target.rename(old)
                partial.rename(target)
                old.rename(partial)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in a single step, so that a reader or a kill never finds neither.

    Returns:
        False where the C library or the file system cannot.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2  # linux/fcntl.h, linux/fs.h
    if renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _sweep(target: Path) -> None:
    """Remove what killed processes left; put back a folder that one of them had moved aside."""
    prefix = f".{target.name}{_PARTIAL}"
    for left in sorted(p for p in target.parent.iterdir() if p.name.startswith(prefix)):
        if not _in_use(left):
            if left.name.endswith(_OLD) and not target.exists():
                left.rename(target)
            else:
                shutil.rmtree(left, ignore_errors=True)


def _in_use(partial: Path) -> bool:
    try:
        handle = os.open(partial, os.O_RDONLY)
    except OSError:  # another user's, or removed just now by the process that made it
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise UserError(
                f"the disk is full while writing {target}",
                expected="free space",
                got=f"{error.strerror or error}, {free_space(target) / 2**20:.0f} MiB free",
                remedy="free some space or give another folder; nothing half-written was left",
            ) from error
        if error.errno in _UNWRITABLE and _concerns(error, target):
            raise UserError(
                f"cannot write {target}",
                expected="a place that this user may write",
                got=f"{error.strerror}: {error.filename}" if error.filename else error.strerror or "",
                remedy="give another one with -o (or --cache, for the build cache), or change its permissions",
            ) from error
        raise


def _concerns(error: OSError, target: Path) -> bool:
    """Whether an error is about a target or what is beside or above it, rather than some other file that a block read."""
    if not isinstance(error.filename, (str, bytes)):
        return True
    place, target = Path(os.fsdecode(error.filename)).absolute(), target.absolute()
    return place in (target, *target.parents) or target.parent in place.parents


def is_disk_full(error: OSError) -> bool:
    """Whether free space would have avoided an error. numpy's `tofile` gives no number, only how much was written."""
    if error.errno is None:
        return str(error).endswith(" written")
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_space(path: Path) -> int:
    """Free bytes on the disk where a path is or would be."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)
