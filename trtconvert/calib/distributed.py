"""Work on several processes or machines that torchrun started.

The processes exchange names, small results, images, and files of finished statistics on the CPU. They therefore use gloo, on
GPUs, too: NCCL would add a copy to the device. gloo also detects a lost process at once.

Two forms: a calibration and an evaluation run the same code on all processes; a build runs on rank 0, and the other processes
assist with tasks, see `Crew`. This module imports torch when processes are joined: cached builds do not need torch.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trtconvert.errors import TrtconvertError, first_line
from trtconvert.files import whole_file

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)
"""How long a finished process waits for the slowest one. A process that died is detected by its closed connection."""


_FAILED = "trtconvert/exit_code"
"""Key of rank 0's exit code in the store."""

_SAME_ERROR = 2.0
"""Seconds within which rank 0 meets an error that all processes meet, such as unfit data."""


class RankLost(TrtconvertError):
    """Another process of the run has ended. The exit code is 1; finished batches are kept."""


class LeaderFailed(Exception):
    """Rank 0 fails, and prints the message. Other processes exit with its exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"rank 0 fails with exit code {exit_code}")
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ranks:
    """The processes of a run.

    Attributes:
        rank: of this process.
        size: number of processes.
        store: values that all processes see, also after a process has ended.
    """

    rank: int = 0
    size: int = 1
    store: Store | None = field(default=None, compare=False, repr=False)

    def gather(self, value: T) -> list[T]:
        """Returns each process's value by rank, on every process; RankLost if a process has ended."""
        if self.size == 1:
            return [value]
        from torch import distributed

        values: list[T] = [value] * self.size
        with _noticing(self):
            distributed.all_gather_object(values, value)
        return values

    def to_first(self, value: T) -> list[T]:
        """Returns each process's value by rank on rank 0, and nothing on the others; RankLost if a process has ended."""
        if self.size == 1:
            return [value]
        from torch import distributed

        values = [value] * self.size if self.rank == 0 else None
        with _noticing(self):
            distributed.gather_object(value, values)
        return values or []

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value on every process; RankLost if a process has ended."""
        if self.size == 1:
            return value
        from torch import distributed

        box = [value]
        with _noticing(self):
            distributed.broadcast_object_list(box, src=0)
        return box[0]

    def collect(self, folder: Path, names: list[str]) -> None:
        """Copies each process's files to rank 0, unless its disk has them already.

        Args:
            folder: folder of the files on every process; the same folder if the disk is shared.
            names: this process's files.
        Raises:
            RankLost: a process has ended.
        """
        held = self.gather(names)
        if self.size == 1:
            return
        import numpy as np
        import torch
        from torch import distributed

        for name in sorted(set().union(*held) - set(held[0])):
            owner = next(rank for rank, theirs in enumerate(held) if name in theirs)
            with _noticing(self):
                if self.rank == owner:
                    content = torch.from_numpy(np.fromfile(folder / name, dtype=np.uint8))
                    distributed.send(torch.tensor([len(content)]), 0)
                    distributed.send(content, 0)
                elif self.rank == 0:
                    length = torch.zeros(1, dtype=torch.int64)
                    distributed.recv(length, owner)
                    content = torch.empty(int(length), dtype=torch.uint8)
                    distributed.recv(content, owner)
                    with whole_file(folder / name) as partial:
                        content.numpy().tofile(partial)


ALONE = Ranks()
"""A run of one process."""


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Joins the processes that torchrun started; without torchrun, this process alone. RankLost if others cannot be reached."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        yield ALONE
        return
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        # "cuda" then means each process's own GPU; processes share GPUs if there are more processes than GPUs.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    with _noticing(ranks):
        store, rank, size = next(rendezvous("env://"))
        distributed.init_process_group("gloo", timeout=PATIENCE, store=store, rank=rank, world_size=size)
    try:
        yield Ranks(rank, size, store)
    finally:
        distributed.destroy_process_group()


@contextmanager
def _noticing(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # the kind of all errors of torch.distributed
        raise RankLost(
            f"rank {ranks.rank} has lost the other processes",
            expected=f"{ranks.size} running processes that wait for each other at most {PATIENCE.days} days",
            got=first_line(error),
            remedy="look for the process that failed, and run the same command again: finished batches are kept",
        ) from error


Task = Callable[..., Any]
"""Shared work of a build: a function of a module, called with the build, a bar and the arguments that rank 0 sent."""


@dataclass(frozen=True)
class _Failed:
    """Rank 0's message to the other processes that the command fails."""

    exit_code: int


class Crew:
    """The processes of a build. Rank 0 builds, and shares tasks with the other processes.

    Rank 0 alone decides what is done: it reads the cache, checks the recipe, and prints messages.

    Args:
        ranks: processes of the run.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._sharing = False

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Ends the tasks of the other processes after the block. If the block fails, they exit with its exit code."""
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            code = error.exit_code if isinstance(error, TrtconvertError) else 1
            if self.ranks.store is not None:
                with suppress(RuntimeError):
                    self.ranks.store.set(_FAILED, str(code))
            if (
                not self._sharing
            ):  # inside a shared task the others wait for no message: their next exchange raises RankLost
                with suppress(RankLost):
                    self.ranks.broadcast(_Failed(code))
            raise
        self.ranks.broadcast(None)

    @contextmanager
    def assisting(self) -> Iterator[None]:
        """Runs tasks of rank 0 on another rank.

        Raises:
            LeaderFailed: rank 0 fails, too, and prints the message.
        """
        try:
            yield
        except LeaderFailed:
            raise
        except Exception as error:
            until = time.monotonic() + _SAME_ERROR
            while (code := self._code_of_leader()) is None and time.monotonic() < until:
                time.sleep(0.05)
            if code is None:
                raise
            raise LeaderFailed(code) from error

    def _code_of_leader(self) -> int | None:
        """Returns the exit code of rank 0 after it failed."""
        store = self.ranks.store
        try:
            return int(store.get(_FAILED)) if store is not None and store.check([_FAILED]) else None
        except RuntimeError:  # the process that held the store has ended
            return None

    def announce(self, task: Task, *arguments: Any) -> None:
        """Gives the other processes a task without exchanges between processes."""
        if self.ranks.size > 1:
            self.ranks.broadcast((task, arguments))

    @contextmanager
    def sharing(self, task: Task, *arguments: Any) -> Iterator[None]:
        """Gives the other processes a task; the block is rank 0's part of the task."""
        self.announce(task, *arguments)
        self._sharing = True
        yield
        self._sharing = False

    def tasks(self) -> Iterator[tuple[Task, tuple[Any, ...]]]:
        """Yields the tasks of rank 0 and their arguments, on another rank.

        Raises:
            LeaderFailed: rank 0 fails, and prints the message.
            RankLost: rank 0 has ended without a message to this process.
        """
        while (message := self.ranks.broadcast(None)) is not None:
            if isinstance(message, _Failed):
                raise LeaderFailed(message.exit_code)
            yield message
