"""Files that are whole or not there: written beside their place, hashed, and renamed into it.

Where a file system has no locks, as some over a network, files and folders are whole all the same; what killed processes leave
there stays, and it is for the user to have one process at a time change a place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from trtconvert.errors import UserError
from trtconvert.locks import DAY, lock

PARTIAL = ".partial-"
"""What the names of temporary folders hold that become folders or files, between a dot with the name and a random ending."""

_OLD = "-old"

_PARTIAL_NAME = re.compile(rf"\..*{re.escape(PARTIAL)}[a-z0-9_]{{8}}({_OLD})?", re.DOTALL)
"""With an ending as `tempfile` makes it: a user's own folder may be called nearly so."""

_INSTEAD = "give another place"

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

_IMMOVABLE = (
    errno.EBUSY,  # something is mounted there
    errno.EXDEV,  # of a lower layer of overlayfs, as in an image of a container
)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading, through links. A pipe would make who reads it wait, and a device may have no end.

    Raises:
        OSError: it cannot be opened, or is no regular file; `strerror` says so.
    """
    _require_regular(path.stat(), path)  # before it is opened: opening a device may do something
    # Without waiting for who writes into a pipe, if one took the file's place meanwhile.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 (given out)
    try:
        _require_regular(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def _require_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        kinds = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
        kind = next((words for is_kind, words in kinds if is_kind(found.st_mode)), "a device")
        raise OSError(errno.EINVAL, f"{kind}, not a file", str(path))


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most so many bytes.

    Raises:
        OSError: see `open_regular`; or it is larger, and nothing of it was read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit + 1) if size <= limit else b""  # no more, should it grow meanwhile
    if max(size, len(content)) > limit:
        raise OSError(errno.EOVERFLOW, f"a file of more than {limit:,} bytes", str(path))
    return content


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a regular file.

    Raises:
        OSError: see `open_regular`.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def whole_folder(target: Path, instead: str = _INSTEAD, ready: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well, and vanishes when it does not.

    What stood at `target` stays until the new folder is whole. Remains of builds that were killed are swept first. What cannot
    be replaced is refused before the block.

    Args:
        instead: for messages, what the user can do to have another place.
        ready: called with the new folder right before it takes its place, while no other process of this program changes what
            is there. What it raises keeps the old one.
    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    with _explained(target, instead):
        target = target.resolve()  # a link keeps pointing where it did, and "." has a name
        with _partial_folder(target) as partial:
            partial.chmod(0o755)  # mkdtemp makes folders that only their owner reads
            _try_to_move(target, partial)
            yield partial
            with locked(target.parent), locked(target) if target.is_dir() else nullcontext():
                if ready is not None:
                    ready(partial)
                _replace_folder(partial, target)


@contextmanager
def whole_file(
    target: Path, instead: str = _INSTEAD, ready: Callable[[Path], None] | None = None, *, through_link: bool = True
) -> Iterator[Path]:
    """As `whole_folder`, for one file; the temporary file has the same name in a folder beside.

    Args:
        through_link: write what a link points to; else the file takes the link's place.
    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    with _explained(target, instead):
        try:
            target = target.resolve() if through_link else target.parent.resolve() / target.name
        except RuntimeError as error:  # Python's word for links that lead in a circle
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(target)) from error
        _refuse_no_file(target)
        with _partial_folder(target) as folder:
            yield folder / target.name
            with locked(target.parent):
                if ready is not None:
                    ready(folder / target.name)
                (folder / target.name).replace(target)


def require_writable(target: Path, instead: str = _INSTEAD) -> None:
    """
    Raises:
        UserError: `whole_file` cannot write at a place.
    """
    with _explained(target, instead):
        _refuse_no_file(target)
        with _partial_folder(target):
            pass


def require_writable_folder(folder: Path, instead: str = _INSTEAD) -> None:
    """
    Raises:
        UserError: no file can be written into a folder, which is made when the first one is.
    """
    with _explained(folder, instead), _partial_folder(folder / "file"):
        pass


def _refuse_no_file(target: Path) -> None:
    """Who may write a folder could put a file in the place of a device or a pipe there: root in that of /dev/null."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if target.exists() and not target.is_file() and not target.is_symlink():
        raise UserError(
            f"{target} cannot be replaced",
            expected="a file, or nothing",
            got="a device, a pipe or a socket",
            remedy="give the path of a file",
        )


def settled(folder: Path) -> Path:
    """A name of a folder that still leads to it when another one takes its place; "." does not.

    Raises:
        UserError: it is a relative one, and the current folder has gone.
    """
    try:
        whole = folder.resolve()
        return whole if Path.cwd().is_relative_to(whole) else folder
    except FileNotFoundError as error:
        if folder.is_absolute():
            return folder
        raise UserError(
            f"there is no current folder that {folder} could be in",
            expected="a current folder",
            got="one that has been removed, or replaced, as bundles are when they are built again",
            remedy='enter it again, as with `cd "$PWD"`',
        ) from error


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in the system's temporary folder, which only its owner reads, until the block ends.

    Remains of processes of this user that were killed are swept first: they may hold a model's weights.

    Raises:
        UserError: there is no such folder, or it cannot be written.
    """
    with ExitStack() as stack:
        try:
            place = Path(tempfile.gettempdir()) / _temporary_name()
            folder = stack.enter_context(_partial_folder(place))
        except OSError as error:
            raise UserError(
                "no temporary folder can be used",
                expected="a folder that this user may write, with free space",
                got=str(error),
                remedy="set TMPDIR to one",
            ) from error
        yield folder


def is_temporary(path: Path) -> bool:
    """Whether a path is in a `temporary_folder`, so that TMPDIR decides where it is."""
    return any(parent.name.startswith(f".{_temporary_name()}{PARTIAL}") for parent in path.parents)


def _temporary_name() -> str:
    return f"trtconvert-{os.getuid()}"


def link_files(names: Iterable[str], source: Path, target: Path) -> None:
    """Give files of a folder a second name in another, which costs no space; copies where the file system has no such thing.

    Args:
        names: paths in both folders.
    """
    for name in names:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, place, follow_symlinks=False)
        except OSError:
            shutil.copy2(source / name, place, follow_symlinks=False)


@contextmanager
def one_at_a_time(work: Path, instead: str = _INSTEAD) -> Iterator[None]:
    """Waits until no other process is inside such a block for the same path, for a day at most, and says for whom. The lock ends
    with the process, however that ends.

    Args:
        work: what the processes would share; the lock is a file beside it, which goes in the end.
        instead: for messages, what the user can do to have another place.
    Raises:
        UserError: the place cannot be written, or another process has it for longer.
    """
    path = work.with_name(work.name + ".lock")
    with _explained(work, instead):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock_file(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _lock_file(path: Path) -> int:
    """A handle of a file that this process has locked, and that is there. It is made where there is none."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock(handle, path, wait=DAY, noted=True)
            # The one before may have removed the file after this process had opened it.
            there = is_open_file(handle, path)
        except BaseException:
            os.close(handle)
            raise
        if there:
            return handle
        os.close(handle)


def is_open_file(handle: int, path: Path) -> bool:
    """Whether an open file is the one that has a path now, and neither removed nor replaced."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target`, for its owner alone. Its lock, which ends with the process, tells a build from its remains."""
    made = not target.parent.exists()
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent):
        _sweep(target)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}{PARTIAL}", dir=target.parent))
        handle = os.open(partial, os.O_RDONLY)
        lock(handle, partial)
    try:
        yield partial
    finally:
        _remove(partial)
        os.close(handle)
        if made:
            with contextlib.suppress(OSError):  # something is in it
                target.parent.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits for the lock of a folder: one process at a time makes, sweeps or replaces what is in it, or replaces it.

    Raises:
        UserError: another process has it for an hour, which takes moments.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    """Remove a folder of this program's, and what is in it, also where it is the copy of one that nobody may write."""
    with contextlib.suppress(OSError):  # another user's
        folder.chmod(0o700)
        for place, names, _ in os.walk(folder):
            for path in (Path(place, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _try_to_move(target: Path, partial: Path) -> None:
    """Find out whether a folder can be moved, by a rename that never succeeds: to a folder that something is in.

    Raises:
        OSError: it cannot.
    """
    with locked(target.parent):
        if not target.exists():
            return
        (partial / "something").mkdir()
        try:
            target.rename(partial)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            (partial / "something").rmdir()


def _replace_folder(partial: Path, target: Path) -> None:
    """Move `partial` to `target`. What was there is left at `partial`, where the caller removes it."""
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
    for left in _remains(target.parent, f".{target.name}{PARTIAL}"):
        if left.name.endswith(_OLD) and not target.exists():
            left.rename(target)
        else:
            _remove(left)


def is_partial(name: str) -> bool:
    """Whether a name is one that only temporary folders have that become folders or files."""
    return _PARTIAL_NAME.fullmatch(name) is not None


def sweep_files(folder: Path) -> None:
    """Remove what killed processes left in a folder of files that they had not finished, whatever the files' names."""
    with locked(folder):
        for left in _remains(folder, "."):
            _remove(left)


def _remains(folder: Path, prefix: str) -> Iterator[Path]:
    """Temporary folders whose names begin so, and whose processes are gone."""
    for left in sorted(p for p in folder.iterdir() if p.name.startswith(prefix) and is_partial(p.name)):
        if not _in_use(left):
            yield left


def _in_use(partial: Path) -> bool:
    try:
        handle = os.open(partial, os.O_RDONLY)
    except OSError:  # another user's, or removed just now by the process that made it
        return True
    try:
        return not lock(handle, partial, wait=0)  # without locks nobody can tell
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


@contextmanager
def _explained(target: Path, instead: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise UserError(
                f"the disk is full while writing {target}",
                expected="free space",
                got=f"{error.strerror or error}, {free_space(target) / 2**20:.0f} MiB free",
                remedy=f"free some space, or {instead}; nothing half-written was left",
            ) from error
        if not _concerns(error, target):
            raise
        if error.errno in _IMMOVABLE:
            raise UserError(
                f"{target} cannot be replaced",
                expected="a folder that can be renamed",
                got="a mount point" if target.is_mount() else f"{error.strerror}: {error.filename}",
                remedy=f"{instead}; one inside of it will do",
            ) from error
        if error.errno in _UNWRITABLE:
            raise UserError(
                f"cannot write {target}",
                expected="a place that this user may write",
                got=f"{error.strerror}: {error.filename}",
                remedy=f"{instead}, or change its permissions",
            ) from error
        raise


def path_of(error: OSError) -> Path | None:
    """The absolute path of the file that an error is about; None where it names none."""
    return Path(os.fsdecode(error.filename)).absolute() if isinstance(error.filename, (str, bytes)) else None


def _concerns(error: OSError, target: Path) -> bool:
    """Whether an error is about a target or what is beside or above it, rather than some other file that a block read."""
    place, target = path_of(error), target.absolute()
    if place is None:
        return False
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
    try:
        there = path.exists()
    except OSError:  # in a folder that this user may not enter
        there = False
    return path if there else _existing(path.absolute().parent)
