"""safetensors files, one tensor at a time: checked headers, reads that keep nothing mapped, and a writer that takes tensors one
after the other.

The library safetensors maps whole files and writes from a dictionary of all tensors. Models that are converted here are larger
than memory. Source: the library's description of the format.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trtconvert.documents import safetensors_header
from trtconvert.errors import TrtconvertError
from trtconvert.files import open_regular
from trtconvert.weights.weight_files import damaged

TYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Types that this program reads, as safetensors names them."""

NAMES = {dtype: name for name, dtype in TYPES.items()}
_CHUNK = 2**22  # bytes that are copied or checked at once, and elements whose type is changed at once
_SETTLED = 2**25  # bytes that are written to the disk and compared together, at least
_SPOOLED = 2**24  # bytes of tensors of odd sizes that wait in memory; more wait on the disk


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its type, shape, and first and last byte in the file (the latter not included)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def read_entries(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """The tensors of a safetensors file, in the order of the bytes, and its metadata. Reads the header alone.

    Raises:
        UserError: the file cannot be read, its header does not fit it, or a tensor is of a type that this program does not read.
    """
    try:
        header = safetensors_header(path)
        with open_regular(path) as file:
            begin = 8 + int.from_bytes(file.read(8), "little")
        with safe_open(path, framework="numpy"):
            pass  # the library has checked types, shapes and places
        metadata = header.pop("__metadata__", {})
        for name, said in header.items():
            if said["dtype"] not in TYPES:
                raise ValueError(f"{name} is of the type {said['dtype']}, where one of {', '.join(TYPES)} is needed")
    except (OSError, ValueError, SafetensorError) as error:
        raise damaged(path, error) from error
    entries = [
        Entry(name, TYPES[said["dtype"]], tuple(said["shape"]), *(begin + end for end in said["data_offsets"]))
        for name, said in header.items()
    ]
    return sorted(entries, key=lambda entry: (entry.start, entry.end)), metadata


def read_entry(path: Path, entry: Entry) -> Tensor:
    """One tensor, read into memory of its own.

    Raises:
        UserError: the file cannot be read, or has become shorter.
    """
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    content = np.empty(entry.nbytes, np.uint8)  # in large pages: torch's memory takes twice as long to fill
    try:
        with open_regular(path) as file:
            file.seek(entry.start)
            if file.readinto(content.data) != entry.nbytes:
                raise ValueError(f"a file that became shorter while it was read, at {entry.name}")
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
    return torch.from_numpy(content).view(entry.dtype).reshape(entry.shape)


def _checksum(path: Path, entry: Entry) -> int:
    """CRC-32 of a tensor's bytes, read in parts."""
    value, left = 0, entry.nbytes
    with open_regular(path) as file:
        file.seek(entry.start)
        while left and (part := file.read(min(left, _CHUNK))):
            value, left = zlib.crc32(part, value), left - len(part)
    return value


class TensorWriter:
    """Writes a safetensors file tensor by tensor, and compares the bytes on the disk with those that were added.

    The header comes first in the file and is known last: it gets room in advance, and spaces fill the rest, as the format allows.
    Readers need tensors at multiples of their elements' size, and the format has no gaps. Tensors whose bytes are no multiple of
    eight wait therefore, and come last, by the size of their elements.

    Args:
        path: of the file, which is whole once `close` has returned.
        names: of all tensors that will be added; metadata: the most bytes of its JSON.
    """

    def __init__(self, path: Path, names: Iterable[str], metadata: int) -> None:
        self._path = path
        longest = {"dtype": "F8_E4M3", "shape": [10**12] * 8, "data_offsets": [10**15] * 2}
        room = metadata + sum(len(_json({name: longest})) for name in names) + 64
        self._room = -(-room // 8) * 8
        self._file = path.open("w+b")
        self._file.seek(8 + self._room)
        self._odd = tempfile.SpooledTemporaryFile(_SPOOLED, dir=str(path.parent))  # noqa: SIM115 (closed in __exit__)
        self._entries: list[Entry] = []
        self._waiting: list[Entry] = []  # by their places in the temporary file
        self._sums: dict[str, int] = {}
        self._end = 8 + self._room
        self._settled = 0  # entries that were given to the settler
        self._settler = ThreadPoolExecutor(1, "settler")
        self._settling: Future[None] | None = None
        self._wrong: list[str] = []

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._settler.shutdown()
        self._odd.close()
        self._file.close()

    def add(self, name: str, x: Tensor, dtype: torch.dtype) -> None:
        """Append a tensor. Its type is changed in parts, without a copy of the whole tensor."""
        nbytes, summed = x.numel() * dtype.itemsize, 0
        file = self._odd if (waits := nbytes % 8 != 0) else self._file
        start = self._odd.tell()
        for part in x.reshape(-1).split(_CHUNK) if nbytes else ():
            data = raw_bytes(part.to(dtype))
            summed = zlib.crc32(data, summed)
            file.write(data)
        self._sums[name] = summed
        if waits:
            self._waiting.append(Entry(name, dtype, tuple(x.shape), start, start + nbytes))
        else:
            self._place(name, dtype, tuple(x.shape), nbytes)
            self._settle_behind()

    def _place(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> None:
        self._entries.append(Entry(name, dtype, shape, self._end, self._end + nbytes))
        self._end += nbytes

    def _settle_behind(self) -> None:
        """Let another thread write tensors to the disk, once there are enough of them and the thread is free."""
        if self._end - self._entries[self._settled].start < _SETTLED:
            return
        if self._settling is not None:
            if not self._settling.done():
                return
            self._settling.result()
        self._file.flush()
        entries, self._settled = self._entries[self._settled :], len(self._entries)
        self._settling = self._settler.submit(self._settle, entries)

    def _settle(self, entries: Sequence[Entry]) -> None:
        handle = self._file.fileno()
        os.fdatasync(handle)
        # The next read comes from the disk.
        os.posix_fadvise(handle, entries[0].start, entries[-1].end - entries[0].start, os.POSIX_FADV_DONTNEED)
        self._compare(entries)

    def _compare(self, entries: Iterable[Entry]) -> None:
        self._wrong += [entry.name for entry in entries if _checksum(self._path, entry) != self._sums[entry.name]]

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write the waiting tensors and the header, and compare the disk with the bytes that were added.

        Raises:
            TrtconvertError: they differ.
            OSError: the file cannot be written.
        """
        for entry in sorted(self._waiting, key=lambda e: -e.dtype.itemsize):
            self._odd.seek(entry.start)
            for part in _parts(self._odd, entry.nbytes):
                self._file.write(part)
            self._place(entry.name, entry.dtype, entry.shape, entry.nbytes)
        begin = 8 + self._room
        header = {
            e.name: {"dtype": NAMES[e.dtype], "shape": list(e.shape), "data_offsets": [e.start - begin, e.end - begin]}
            for e in self._entries
        }
        text = _json({"__metadata__": dict(metadata)} | header)
        assert len(text) <= self._room, "the header is longer than its room"
        if self._settling is not None:
            self._settling.result()
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + text.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._file.close()
        self._verify()

    def _verify(self) -> None:
        self._compare(self._entries[self._settled :])
        entries, _ = read_entries(self._path)
        if self._wrong or entries != self._entries:
            raise TrtconvertError(
                f"{self._path.name} was not written correctly",
                expected="on the disk the bytes that were computed",
                got=f"other bytes of {self._wrong[0]}" if self._wrong else "another header",
                remedy="check the disk and the memory of this machine, and run the command again",
            )


def _parts(file: Any, nbytes: int) -> Iterator[bytes]:
    while nbytes:
        part = file.read(min(nbytes, _CHUNK))
        if not part:
            raise io.UnsupportedOperation("a temporary file became shorter")
        nbytes -= len(part)
        yield part


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def raw_bytes(x: Tensor) -> memoryview:
    """A tensor's numbers as a file has them: row by row, in this machine's order of bytes."""
    flat = x.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 1:  # counts as contiguous with any stride, and `view` takes 1 alone
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data
