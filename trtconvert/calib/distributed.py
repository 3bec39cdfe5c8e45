"""Calibration on several processes or machines that torchrun started.

The processes exchange a few names and files of finished statistics on the CPU. They therefore use gloo, on GPUs, too: NCCL would
add a copy to the device. gloo also detects a lost process at once.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import distributed

from trtconvert.errors import TrtconvertError, first_line
from trtconvert.files import whole_file

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)
"""How long a finished process waits for the slowest one. A process that died is detected by its closed connection."""


class RankLost(TrtconvertError):
    """Another process of the run has ended. Exit code 1; finished batches are kept."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run: the rank of this process, and their number."""

    rank: int = 0
    size: int = 1

    def gather(self, value: T) -> list[T]:
        """Returns each process's value by rank, on every process; RankLost if a process has ended."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        with _noticing(self):
            distributed.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value on every process; RankLost if a process has ended."""
        if self.size == 1:
            return value
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
    if torch.cuda.is_available():
        # "cuda" then means each process's own GPU; processes share GPUs if there are more processes than GPUs.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    with _noticing(ranks):
        distributed.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield ranks
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
