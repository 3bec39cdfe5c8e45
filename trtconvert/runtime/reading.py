"""Reads tensors from files and host memory to a device, ahead of their use, with several threads.

Each thread reads pieces of a file into its own pinned memory and copies them on its own stream, because one thread copies from
the page cache at a fraction of the device's bandwidth.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.files import open_regular, threads

_T = TypeVar("_T")

_PIECE = 2**23
"""Bytes of a piece, and of each thread's pinned memory."""

_MOST_THREADS = 8

_ALIGNMENT = 256
"""Alignment of tensors in shared memory in bytes."""


@dataclass(frozen=True)
class Place:
    """A row-major tensor in a file, from byte `start`."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Source = Place | Tensor
"""A tensor in a file or in host memory."""


@dataclass
class Spent:
    """Time and memory of a change of an engine's weights.

    Attributes:
        read: bytes read from files and host memory. given: bytes handed to TensorRT. parts: number of refits.
        seconds: seconds by activity: "opening" the bundle's weights, "checking" LoRA files, "waiting" for new weights, "giving"
            them to TensorRT, "refitting". A second thread spends seconds on "reading" and "computing".
    """

    read: int = 0
    given: int = 0
    parts: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream per device, because torch's allocator keeps memory per stream."""
    return torch.cuda.Stream(device)


def one_ahead(items: Generator[_T], device: torch.device) -> Generator[_T]:
    """Yield a generator's items, and make the next item in a thread and on a stream of its own meanwhile."""
    stream = _stream(device) if device.type == "cuda" else None

    @torch.inference_mode()  # threads do not inherit the caller's mode
    def following() -> _T | None:
        if stream is None:
            return next(items, None)
        with torch.cuda.stream(stream):
            item = next(items, None)
            stream.synchronize()
        return item

    with ThreadPoolExecutor(1, "trtconvert-new-weights") as thread:
        try:
            coming = thread.submit(following)
            while (item := coming.result()) is not None:
                coming = thread.submit(following)
                yield item
                del item  # freed before the next item is made
        finally:
            thread.submit(items.close)


def room_for(size: int, device: torch.device) -> Tensor:
    """Allocate bytes on a device, or on the host if the device has no memory."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return torch.empty(size, dtype=torch.uint8)


def read_ahead(
    wanted: Iterable[tuple[_T, Sequence[Source]]], device: torch.device, limit: int, spent: Spent | None = None
) -> Iterator[tuple[_T, list[Tensor]]]:
    """Yield each wanted item with its tensors on a device, or on the host if the device has no memory.

    Args:
        wanted: items, each with the sources of its tensors.
        limit: device memory in bytes for reading ahead, beside the tensors of one item.
        spent: counts bytes and seconds.
    Raises:
        UserError: a file became shorter.
        OSError: a file cannot be read.
    """
    spent = spent or Spent()
    with _Threads(device) as readers:
        rest, ahead, orders = iter(wanted), 0, deque[tuple[_T, _Order]]()
        while True:
            while (not orders or ahead < limit) and (following := next(rest, None)) is not None:
                orders.append((following[0], readers.order(following[1])))
                ahead += orders[-1][1].memory.nbytes
            if not orders:
                return
            item, order = orders.popleft()
            ahead -= order.memory.nbytes
            with spent.on("reading"):
                tensors = order.tensors()
            spent.read += sum(x.nbytes for x in tensors)
            del order
            yield item, tensors


def read_whole(path: Path) -> memoryview:
    """Read a file into host memory with several threads.

    Raises:
        UserError: the file became shorter.
        OSError: the file cannot be read.
    """
    place = Place(path, 0, torch.uint8, (path.stat().st_size,))
    ((_, (content,)),) = read_ahead([(None, [place])], torch.device("cpu"), 0)
    return content.numpy().data


@dataclass(frozen=True)
class _Order:
    """Tensors that are being read into one block of memory.

    Attributes:
        places: offset in bytes, type and shape of each tensor.
    """

    memory: Tensor
    places: Sequence[tuple[int, torch.dtype, tuple[int, ...]]]
    pieces: Sequence[Future[None]]

    def tensors(self) -> list[Tensor]:
        """Wait for the tensors and return them."""
        for piece in self.pieces:
            piece.result()
        return [
            self.memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, dtype, shape in self.places
        ]


class _Threads:
    """Threads that read for a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(threads(_MOST_THREADS), "trtconvert-weights")
        self._own = threading.local()
        self._files, self._open = dict[Path, int](), ExitStack()

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *of_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._open.close()

    def order(self, sources: Sequence[Source]) -> _Order:
        rows = [x if isinstance(x, Place) else x.detach().contiguous() for x in sources]
        starts, size = list[int](), 0
        for source in rows:
            starts.append(size)
            size += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
            if isinstance(source, Place) and source.path not in self._files:
                self._files[source.path] = self._open.enter_context(open_regular(source.path)).fileno()
        memory = room_for(size, self._device)
        free = None
        if memory.is_cuda:
            # Pending kernels may still read this memory: the threads' streams wait for them.
            free = torch.cuda.Event()
            free.record()
        pieces = [
            self._pool.submit(self._fill, memory[first : first + _PIECE], first, list(zip(rows, starts, strict=True)), free)
            for first in range(0, size, _PIECE)
        ]  # fmt: skip
        return _Order(memory, [(at, x.dtype, tuple(x.shape)) for x, at in zip(rows, starts, strict=True)], pieces)

    @torch.inference_mode()  # tensors made in inference mode can only be written in it
    def _fill(
        self, piece: Tensor, first: int, sources: Sequence[tuple[Source, int]], free: torch.cuda.Event | None
    ) -> None:
        """Read the piece of an order's memory that begins at byte `first`."""
        if free is None:
            self._read(piece, first, sources)
            return
        with torch.cuda.device(self._device):  # threads do not inherit the device of pinned memory
            if not hasattr(self._own, "pinned"):
                self._own.pinned = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
                self._own.stream = torch.cuda.Stream()
            pinned, stream = self._own.pinned[: len(piece)], self._own.stream
            self._read(pinned, first, sources)
            with torch.cuda.stream(stream):
                stream.wait_event(free)
                piece.copy_(pinned, non_blocking=True)
            stream.synchronize()

    def _read(self, piece: Tensor, first: int, sources: Sequence[tuple[Source, int]]) -> None:
        for source, at in sources:
            start, end = max(at, first), min(at + source.nbytes, first + len(piece))
            if start >= end:
                continue
            target = piece[start - first : end - first]
            if isinstance(source, Place):
                _read_file(self._files[source.path], source, start - at, target)
            else:
                # numpy, because torch would start further threads here.
                target.numpy()[:] = source.view(-1).view(torch.uint8).numpy()[start - at : end - at]


def _read_file(file: int, place: Place, begin: int, target: Tensor) -> None:
    """Read the bytes of a place from its byte `begin`."""
    rest, start = target.numpy().data, place.start + begin
    while rest:
        count = os.preadv(file, [rest], start)
        if not count:
            raise UserError(
                f"{place.path} became shorter while it was read",
                expected=f"at least {place.start + place.nbytes} bytes",
                got=f"{start}",
                remedy="copy or build the bundle again, and load it again",
            )
        rest, start = rest[count:], start + count
