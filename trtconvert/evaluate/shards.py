"""Long work in shards: each is on disk once it is done, so a kill loses one per process; ranks share them out.

A set's folder is named by the hash of what made it. Whoever finished a shard, and in whatever order, reading them goes from
the first to the last: statistics merged that way have the same bits for any number of ranks and any number of kills.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from trtconvert.cache import code_identity
from trtconvert.calib.distributed import Ranks
from trtconvert.errors import UserError
from trtconvert.files import sweep_files, whole_file


@dataclass(frozen=True)
class ShardSet:
    """Finished and unfinished shards of one set.

    Attributes:
        folder: where they are.
        ranges: which samples each holds.
    """

    folder: Path
    ranges: tuple[range, ...]

    @staticmethod
    def at(work: Path, name: str, code: Collection[str], reads: Mapping[str, Any], count: int, size: int) -> ShardSet:
        """The set of `count` samples in shards of `size`.

        Args:
            work: folder of all sets.
            code: names of the modules of this package that decide the outcome, see `trtconvert.imports.code_modules`.
            reads: everything else that decides it, as JSON values.
        """
        text = json.dumps({"code": code_identity(*sorted(code)), "size": size, "reads": reads}, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        ranges = tuple(range(start, min(start + size, count)) for start in range(0, count, size))
        return ShardSet(work / f"{name}-{key[:24]}", ranges)

    def path(self, index: int) -> Path:
        """Of a shard. It has the number of samples in its name: the last shard may grow when more are asked for."""
        held = self.ranges[index]
        return self.folder / f"{held.start:08d}-{held.stop:08d}.safetensors"

    def make(self, make: Callable[[range], Mapping[str, Tensor]], ranks: Ranks, done: Callable[[], None]) -> None:
        """Make this rank's share of what is not there yet, and bring it to rank 0.

        Args:
            make: tensors of the samples in a range.
            done: called once per shard of this rank's share.
        Raises:
            UserError: the work folder cannot be written, or the disk is full.
            RankLost: another rank has ended; what was finished is kept.
        """
        if self.folder.is_dir():
            sweep_files(self.folder)  # also beside shards that were finished, of which no more are made
        for index in self.share(ranks):
            path = self.path(index)
            if not _is_whole(path):
                # Copies: features may be views of one another, which files of tensors do not take.
                tensors = {
                    name: x.clone(memory_format=torch.contiguous_format) for name, x in make(self.ranges[index]).items()
                }
                with whole_file(path) as partial:
                    partial.write_bytes(save(tensors))
            done()
        ranks.collect(self.folder, [self.path(index).name for index in self.share(ranks)])

    def share(self, ranks: Ranks) -> range:
        """Indices of this rank's shards."""
        return range(ranks.rank, len(self.ranges), ranks.size)

    def stream(self, names: Collection[str] | None = None) -> Iterator[dict[str, Tensor]]:
        """The shards' tensors, from the first shard to the last.

        Args:
            names: of those that are wanted, where they are there; all by default.
        Raises:
            UserError: a shard is not there.
        """
        for index in range(len(self.ranges)):
            path = self.path(index)
            if not _is_whole(path):
                raise UserError(
                    f"the shard {path} is not there",
                    expected="a file that this evaluation wrote",
                    got="no such file" if not path.exists() else "a damaged file",
                    remedy="run the same command again: missing shards are made anew",
                )
            if names is None:
                yield load_file(path)
                continue
            with safe_open(path, framework="pt") as file:
                yield {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118 (not a dict)


def _is_whole(path: Path) -> bool:
    """Whether a shard is there, with as many bytes as its header promises."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False
