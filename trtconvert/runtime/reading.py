"""Numbers from files and from the host's memory to a device, read ahead by several threads.

Each thread reads a piece of a file into pinned memory of its own, and sends it on a stream of its own while the others read: one
thread alone copies from the page cache at a fraction of what the device takes.
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
from trtconvert.files import open_regular

_T = TypeVar("_T")

_PIECE = 2**23
"""Bytes that a thread reads and sends at once: the pinned memory that it has."""

_MOST_THREADS = 8

_ALIGNMENT = 256
"""Bytes at multiples of which tensors begin in memory that they share."""


@dataclass(frozen=True)
class Place:
    """Where numbers lie in a file, row by row, from its byte `start`."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Source = Place | Tensor
"""Of numbers: a file, or the host's memory."""


@dataclass
class Spent:
    """What a change of an engine's weights took.

    Attributes:
        read: bytes of files and of the host's memory. given: bytes that TensorRT was given. parts: how many times it refitted.
        seconds: by what was done: "opening" the bundle's weights, "checking" LoRA files, "waiting" for new weights, "giving" them
            to TensorRT, "refitting" by TensorRT. A thread beside these spends some on "reading", waiting for what is read, and on
            "computing", the device's work included.
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
    """Always the same: torch keeps memory by the stream that it was taken on."""
    return torch.cuda.Stream(device)


def one_ahead(items: Generator[_T], device: torch.device) -> Generator[_T]:
    """What a generator gives, the next item while one is used: in a thread, on a stream of its own, which it has waited for."""
    stream = _stream(device) if device.type == "cuda" else None

    @torch.inference_mode()  # of the caller, if any, a thread knows nothing
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
                del item  # before the next one is waited for
        finally:
            thread.submit(items.close)


def room_for(size: int, device: torch.device) -> Tensor:
    """So many bytes on a device, or on the host where the device has no memory for them."""
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return torch.empty(size, dtype=torch.uint8)


def read_ahead(
    wanted: Iterable[tuple[_T, Sequence[Source]]], device: torch.device, limit: int, spent: Spent | None = None
) -> Iterator[tuple[_T, list[Tensor]]]:
    """What is wanted, with its numbers on a device, in order; on the host where the device has no memory for them.

    Args:
        wanted: something, and what it needs.
        limit: bytes that are read before they are asked for, of the device's memory, or what one of `wanted` needs.
        spent: counts bytes and seconds.
    Raises:
        UserError: a file has become shorter.
        OSError: it cannot be read.
    """
    spent = spent or Spent()
    with _Threads(device) as threads:
        rest, ahead, orders = iter(wanted), 0, deque[tuple[_T, _Order]]()
        while True:
            while (not orders or ahead < limit) and (following := next(rest, None)) is not None:
                orders.append((following[0], threads.order(following[1])))
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


@dataclass(frozen=True)
class _Order:
    """Tensors that are on their way into one piece of memory.

    Attributes:
        places: of each, its first byte there, its type and its shape.
    """

    memory: Tensor
    places: Sequence[tuple[int, torch.dtype, tuple[int, ...]]]
    pieces: Sequence[Future[None]]

    def tensors(self) -> list[Tensor]:
        """Waits for them."""
        for piece in self.pieces:
            piece.result()
        return [
            self.memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, dtype, shape in self.places
        ]


class _Threads:
    """Those that read.

    Args:
        device: that they read for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "trtconvert-weights")
        self._own = threading.local()
        self._files, self._open = dict[Path, int](), ExitStack()

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *of_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._open.close()

    def order(self, sources: Sequence[Source]) -> _Order:
        # Copied where they do not lie row by row; the threads keep them.
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
            # Kernels that are yet to run may read what lay there: the threads' streams wait for them.
            free = torch.cuda.Event()
            free.record()
        pieces = [
            self._pool.submit(self._fill, memory[first : first + _PIECE], first, list(zip(rows, starts, strict=True)), free)
            for first in range(0, size, _PIECE)
        ]  # fmt: skip
        return _Order(memory, [(at, x.dtype, tuple(x.shape)) for x, at in zip(rows, starts, strict=True)], pieces)

    @torch.inference_mode()  # in which the caller may be, and what it has made is not to be changed without
    def _fill(
        self, piece: Tensor, first: int, sources: Sequence[tuple[Source, int]], free: torch.cuda.Event | None
    ) -> None:
        """Of the memory of an order the part that begins at its byte `first`."""
        if free is None:
            self._read(piece, first, sources)
            return
        with torch.cuda.device(self._device):  # which threads do not inherit: pinned memory is of a device's context
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
                # By numpy: torch would have threads of its own in each of these.
                target.numpy()[:] = source.view(-1).view(torch.uint8).numpy()[start - at : end - at]


def _read_file(file: int, place: Place, begin: int, target: Tensor) -> None:
    """Bytes of a place, from the byte `begin` of it."""
    rest, start = target.numpy().data, place.start + begin
    while rest:
        count = os.preadv(file, [rest], start)
        if not count:
            raise UserError(
                f"{place.path} has become shorter while it was read",
                expected=f"{place.start + place.nbytes} bytes at least",
                got=f"{start}",
                remedy="copy or build the bundle again, and load it again",
            )
        rest, start = rest[count:], start + count
