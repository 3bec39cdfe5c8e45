"""Writes files and folders completely or not at all: into a temporary folder beside the target, which then replaces the target.

File systems without locks, such as some network file systems, keep this guarantee, but the remains of killed processes stay
there, and users must not let several processes write to one place.
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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from trtconvert.errors import UserError
from trtconvert.locks import DAY, lock

PARTIAL = ".partial-"
"""Infix of temporary folders' names: a dot, the target's name, this infix, and a random ending."""

_OLD = "-old"

_PARTIAL_NAME = re.compile(rf"\..*{re.escape(PARTIAL)}[a-z0-9_]{{8}}({_OLD})?", re.DOTALL)
"""Names with an ending of `tempfile`, so that similar names of users' folders do not match."""

PART_BYTES = 64 * 2**20
"""Bytes of the parts of a large file's digest."""

_BUFFER = 2**20
"""Bytes that a thread reads at a time."""

_MOST_THREADS = 16

_INSTEAD = "give another place"

_UNWRITABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOENT,  # a folder such as /proc, which takes no folders
    errno.ENAMETOOLONG,
    errno.ELOOP,
)

_IMMOVABLE = (
    errno.EBUSY,  # a mount point
    errno.EXDEV,  # a folder of a lower layer of overlayfs, as in container images
)


def open_regular(path: Path) -> io.BufferedReader:
    """Opens a regular file for reading, through links. Pipes would block the reader, and devices may have no end.

    Raises:
        OSError: the file cannot be opened or is not a regular file; `strerror` says which.
    """
    _require_regular(path.stat(), path)  # opening a device may have effects
    # O_NONBLOCK, in case a pipe replaced the file meanwhile.
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
    """Returns the content of a regular file.

    Raises:
        OSError: the file is larger than `limit` bytes; or see `open_regular`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(limit + 1) if size <= limit else b""  # the file may grow meanwhile
    if max(size, len(content)) > limit:
        raise OSError(errno.EOVERFLOW, f"a file of more than {limit:,} bytes", str(path))
    return content


def sha256(path: Path) -> str:
    """Returns the hexadecimal SHA-256 of a regular file.

    Raises:
        OSError: see `open_regular`.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 of a file.

    Attributes:
        part_bytes: size of the parts of a larger file; None for a file that was hashed whole. With parts, `sha256` is the SHA-256
            of the concatenated binary SHA-256 digests of the parts. The last part may be smaller.
    """

    size: int
    sha256: str
    part_bytes: int | None = None


def digests(files: Iterable[tuple[Path, int | None]]) -> Generator[FileDigest]:
    """Hashes regular files, and the parts of large files, on all cores; yields in the order of the files.

    Args:
        files: paths, each with the size of the parts of files larger than one part; None: the file is hashed whole.
    Raises:
        OSError: the next file cannot be read, see `open_regular`, or its size changed meanwhile.
    """
    with ThreadPoolExecutor(threads(), "trtconvert-hashes") as pool:
        try:
            begun = [(path, part_bytes, _begin(pool, path, part_bytes)) for path, part_bytes in files]
            for path, part_bytes, parts in begun:
                hashes = [part.result() for part in parts]
                size = path.stat().st_size
                if len(hashes) == 1:
                    yield FileDigest(size, hashes[0].hex())
                else:
                    yield FileDigest(size, hashlib.sha256(b"".join(hashes)).hexdigest(), part_bytes)
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(pool: ThreadPoolExecutor, path: Path, part_bytes: int | None) -> list[Future[bytes]]:
    try:
        size = path.stat().st_size
    except OSError:
        size = 0  # the first part raises the error, in the order of the files
    step = part_bytes or max(size, 1)
    return [pool.submit(_sha256_of_part, path, size, start, step) for start in range(0, max(size, 1), step)]


def _sha256_of_part(path: Path, size: int, start: int, length: int) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(_BUFFER, length)))
    end = min(start + length, size)
    with open_regular(path) as file:
        while start < end:
            count = os.preadv(file.fileno(), [buffer[: end - start]], start)
            if not count:
                break
            digest.update(buffer[:count])
            start += count
        if start < end or os.fstat(file.fileno()).st_size != size:
            raise OSError(errno.EIO, "its size changed while it was read", str(path))
    return digest.digest()


def threads(most: int = _MOST_THREADS) -> int:
    """Returns a number of threads: one for each core that this process may use, at most `most`."""
    return min(most, len(os.sched_getaffinity(0)))


@contextmanager
def whole_folder(target: Path, instead: str = _INSTEAD, ready: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """Yields a temporary folder that replaces `target` if the block ends well, and is removed otherwise.

    The old `target` stays until then. Remains of killed builds are removed first, and a `target` that cannot be replaced is
    refused before the block.

    Args:
        instead: remedy for messages: how the user chooses another place.
        ready: called with the new folder right before the replacement, under the lock of `target`. If it raises, the old folder
            stays.
    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    with _explained(target, instead) as target:  # a link keeps pointing where it did, and "." has a name
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target))
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
    """Yields a temporary file of the same name that replaces `target`; see `whole_folder`.

    Args:
        through_link: replace the file that a link points to; otherwise the link.
    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    with _explained(target, instead, through_link=through_link) as target:
        _refuse_no_file(target)
        with _partial_folder(target) as folder:
            yield folder / target.name
            with locked(target.parent):
                if ready is not None:
                    ready(folder / target.name)
                (folder / target.name).replace(target)


def require_writable(target: Path, instead: str = _INSTEAD, *, through_link: bool = True) -> None:
    """Checks that `whole_file` can write a file.

    Args: see `whole_file`.
    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    with _explained(target, instead, through_link=through_link) as target:
        _refuse_no_file(target)
        with _partial_folder(target):
            pass


def require_writable_folder(folder: Path, instead: str = _INSTEAD) -> None:
    """Checks that files can be written into a folder, which may not exist yet.

    Raises:
        UserError: the place cannot be written, or the disk is full.
    """
    with _explained(folder, instead) as folder, _partial_folder(folder / "file"):
        pass


def _refuse_no_file(target: Path) -> None:
    """Refuses devices and pipes: root could replace /dev/null by a file."""
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
    """Returns a path of a folder. Unlike ".", the path stays valid when the folder is replaced.

    Raises:
        UserError: the path is relative, and the current folder was removed.
    """
    try:
        whole = real_path(folder)
        return whole if Path.cwd().is_relative_to(whole) else folder
    except FileNotFoundError as error:
        if folder.is_absolute():
            return folder
        raise UserError(
            f"{folder} is relative to a current folder that does not exist",
            expected="a current folder",
            got="a folder that was removed or replaced, as a new build replaces a bundle",
            remedy='enter the folder again with `cd "$PWD"`',
        ) from error


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a folder in the system's temporary folder that only its owner can read, and removes it after the block.

    Remains of this user's killed processes are removed first, because they may hold a model's weights.

    Raises:
        UserError: there is no temporary folder that can be written.
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
                remedy="set TMPDIR to such a folder",
            ) from error
        yield folder


def is_temporary(path: Path) -> bool:
    """Returns whether a path is in a `temporary_folder`. TMPDIR decides the place of these folders."""
    return any(parent.name.startswith(f".{_temporary_name()}{PARTIAL}") for parent in path.parents)


def _temporary_name() -> str:
    return f"trtconvert-{os.getuid()}"


def link_files(names: Iterable[str], source: Path, target: Path) -> None:
    """Hard-links files of one folder into another, or copies them if the file system has no hard links.

    Args:
        names: paths relative to both folders.
    """
    for name in names:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, place, follow_symlinks=False)
        except OSError:
            shutil.copy2(source / name, place, follow_symlinks=False)


def copy_files(sources: Mapping[Path, Path]) -> None:
    """Copies the contents of files, several at a time.

    Args:
        sources: the file to copy by the path of its copy. The folder of the copy exists.
    Raises:
        OSError: a file cannot be copied; half-written copies stay.
    """
    with ThreadPoolExecutor(threads(), "trtconvert-copies") as pool:
        try:
            for copy in [pool.submit(shutil.copyfile, source, target) for target, source in sources.items()]:
                copy.result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def one_at_a_time(work: Path, instead: str = _INSTEAD) -> Iterator[None]:
    """Runs the block in one process at a time per path. Waits for a day at most, and prints the process that it waits for.

    The lock ends with the process, however the process ends.

    Args:
        work: the path to protect; the lock file lies beside it and is removed after the block.
        instead: remedy for messages: how the user chooses another place.
    Raises:
        UserError: the place cannot be written, or another process holds the lock for longer.
    """
    with _explained(work, instead, through_link=False) as place:
        path = place.with_name(place.name + ".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock_file(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _lock_file(path: Path) -> int:
    """Creates and locks a lock file, and returns its handle."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock(handle, path, wait=DAY, noted=True)
            # The previous holder may have removed the file after this process had opened it.
            there = is_open_file(handle, path)
        except BaseException:
            os.close(handle)
            raise
        if there:
            return handle
        os.close(handle)


def is_open_file(handle: int, path: Path) -> bool:
    """Returns whether a path still names an open file: the file was neither removed nor replaced."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    """Yields a folder beside `target`, readable by its owner alone. Its lock distinguishes running builds from remains."""
    made = [folder for folder in target.parents if not folder.exists()]
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
        with contextlib.suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder: one process at a time changes or replaces the folder.

    Raises:
        UserError: another process holds the lock for an hour; usually locks are held for moments.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock(handle, folder)
        yield
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    """Removes a folder and its content, read-only folders too."""
    with contextlib.suppress(OSError):  # a folder of another user
        folder.chmod(0o700)
        for place, names, _ in os.walk(folder):
            for path in (Path(place, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _try_to_move(target: Path, partial: Path) -> None:
    """Checks that a folder can be moved, by a rename to a non-empty folder, which always fails.

    Raises:
        OSError: the folder cannot be moved.
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
    """Moves `partial` to `target`. The old folder ends at `partial`, and the caller removes it."""
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if not _exchange(partial, target):
            # If this process dies between the renames, the next sweep restores the old folder.
            old = partial.with_name(partial.name + _OLD)
            target.rename(old)
            partial.rename(target)
            old.rename(partial)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders atomically, so that the target exists at every moment.

    Returns:
        False if the C library or the file system does not support this.
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
    """Removes the remains of killed processes, and restores a folder that one of them had moved aside."""
    for left in _remains(target.parent, f".{target.name}{PARTIAL}"):
        if left.name.endswith(_OLD) and not target.exists():
            left.rename(target)
        else:
            _remove(left)


def is_partial(name: str) -> bool:
    """Returns whether a name has the form of a temporary folder's name."""
    return _PARTIAL_NAME.fullmatch(name) is not None


def sweep_files(folder: Path) -> None:
    """Removes the temporary folders of killed processes in a folder, for all targets."""
    with locked(folder):
        for left in _remains(folder, "."):
            _remove(left)


def _remains(folder: Path, prefix: str) -> Iterator[Path]:
    """Yields temporary folders with a prefix if their processes have ended."""
    for left in sorted(p for p in folder.iterdir() if p.name.startswith(prefix) and is_partial(p.name)):
        if not _in_use(left):
            yield left


def _in_use(partial: Path) -> bool:
    try:
        handle = os.open(partial, os.O_RDONLY)
    except OSError:  # a folder of another user, or just removed by its process
        return True
    try:
        return not lock(handle, partial, wait=0)  # without locks every folder counts as in use
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


@contextmanager
def _explained(target: Path, instead: str, *, through_link: bool = True) -> Iterator[Path]:
    """Yields the real path of a target, which errors of the system name. Turns errors at this place into `UserError`.

    Args:
        through_link: the path that the target links to; otherwise the path of the link.
    """
    place = target
    try:
        place = real_path(target) if through_link else real_path(target.parent) / target.name
        if through_link and place.is_symlink():  # of links that lead in a circle
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))
        yield place
    except OSError as error:
        if is_disk_full(error):
            raise UserError(
                f"the disk is full while writing {target}",
                expected="free space",
                got=f"{error.strerror or error}, {free_space(target) / 2**20:.0f} MiB free",
                remedy=f"free some space, or {instead}; half-written files were removed",
            ) from error
        if not _concerns(error, place):
            raise
        if error.errno in _IMMOVABLE:
            raise UserError(
                f"{target} cannot be replaced",
                expected="a folder that can be renamed",
                got="a mount point" if place.is_mount() else f"{error.strerror}: {error.filename}",
                remedy=f"{instead}, for example a folder inside this one",
            ) from error
        if error.errno in _UNWRITABLE:
            raise UserError(
                f"cannot write {target}",
                expected="a place that this user may write",
                got=f"{error.strerror}: {error.filename}",
                remedy=f"{instead}, or change its permissions",
            ) from error
        raise


def real_path(path: Path) -> Path:
    """Returns an absolute path without links. Unlike `Path.resolve`, it raises nothing for links that lead in a circle."""
    return Path(os.path.realpath(path))


def path_of(error: OSError) -> Path | None:
    """Returns the absolute path of the file that an error names; None if it names no file."""
    return Path(os.fsdecode(error.filename)).absolute() if isinstance(error.filename, (str, bytes)) else None


def _concerns(error: OSError, target: Path) -> bool:
    """Returns whether an error concerns a target, its siblings or parents, and not another file that the block read."""
    place, target = path_of(error), target.absolute()
    if place is None:
        return False
    return place in (target, *target.parents) or target.parent in place.parents


def is_disk_full(error: OSError) -> bool:
    """Returns whether an error means a lack of space."""
    if error.errno is None:  # of numpy's `tofile`
        return str(error).endswith(" written")
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_space(path: Path) -> int:
    """Returns the free bytes on the disk of a path, which may not exist yet."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    try:
        there = path.exists()
    except OSError:  # in a folder without permission
        there = False
    return path if there else _existing(path.absolute().parent)
