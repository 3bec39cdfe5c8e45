"""Scratch memory of execution contexts, shared by the engines of a bundle."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from trtconvert.errors import BackendUnavailable

MIB = 2**20


class Room:
    """The scratch memory of one stream.

    Attributes:
        memory: UINT8.
        lock: held while a call is enqueued, because kernels of another call in between would overwrite the memory.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.lock = memory, threading.Lock()


class Scratch:
    """One room per stream, as large as the largest engine needs.

    Work on one stream runs in order, so that engines share the memory. A room is freed with its last reference.

    Attributes:
        device: the GPU.
        size: bytes of one room.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.size = device, 0
        self._rooms: weakref.WeakValueDictionary[int, Room] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def reserve(self, size: int) -> None:
        """Enlarge future rooms to at least `size` bytes."""
        self.size = max(self.size, size)

    def on(self, stream: torch.cuda.Stream) -> Room:
        """Return the room of a stream; its memory is freed in the stream's order.

        Raises:
            BackendUnavailable: the GPU is out of memory.
        """
        with self._lock:
            room = self._rooms.get(stream.cuda_stream)
            if room is None or room.memory.numel() < self.size:
                with torch.cuda.stream(stream):
                    room = Room(self.new())
                self._rooms[stream.cuda_stream] = room
            return room

    def new(self) -> Tensor:
        """Allocate memory of a room's size on the current stream.

        Raises:
            BackendUnavailable: the GPU is out of memory.
        """
        try:
            with torch.inference_mode(False):
                return torch.empty(self.size, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise out_of_memory("the engine's execution context", self.size, self.device) from error

    @property
    def allocated(self) -> int:
        """Bytes of all rooms in use."""
        return sum(room.memory.numel() for room in list(self._rooms.values()))


def out_of_memory(what: str, needed: int, device: torch.device) -> BackendUnavailable:
    """Return the error for a failed allocation of `needed` bytes."""
    free, total = torch.cuda.mem_get_info(device)
    return BackendUnavailable(
        f"the GPU has no memory left for {what}",
        expected=f"{needed / MIB:.0f} MiB of free device memory",
        got=f"{free / MIB:.0f} MiB free of {total / MIB:.0f}, and "
        f"{torch.cuda.memory_reserved(device) / MIB:.0f} MiB in torch's cache",
        remedy="free tensors and call torch.cuda.empty_cache(), narrow engine.shapes, or compile with engine.weight_streaming "
        "and load with a weight_budget",
    )
