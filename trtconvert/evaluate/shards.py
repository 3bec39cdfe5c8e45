"""Long work in shards, which ranks divide. Finished shards are on disk: a killed process loses at most one.

The name of a set's folder holds the hash of its inputs. Shards are always read from the first to the last, so that merged
statistics have the same bits for any number of ranks and restarts.
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
    """The shards of one set.

    Attributes:
        folder: that holds the files.
        ranges: samples of each shard.
    """

    folder: Path
    ranges: tuple[range, ...]

    @staticmethod
    def at(work: Path, name: str, code: Collection[str], reads: Mapping[str, Any], count: int, size: int) -> ShardSet:
        """Returns the set of `count` samples in shards of `size`.

        Args:
            work: folder of all sets.
            code: names of the modules of this package that affect the result, see `trtconvert.imports.code_modules`.
            reads: everything else that affects it, as JSON values.
        """
        text = json.dumps({"code": code_identity(*sorted(code)), "size": size, "reads": reads}, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        ranges = tuple(range(start, min(start + size, count)) for start in range(0, count, size))
        return ShardSet(work / f"{name}-{key[:24]}", ranges)

    def path(self, index: int) -> Path:
        """Returns the path of a shard. Its name holds the range: the last shard grows when more samples are asked for."""
        held = self.ranges[index]
        return self.folder / f"{held.start:08d}-{held.stop:08d}.safetensors"

    def make(self, make: Callable[[range], Mapping[str, Tensor]], ranks: Ranks, done: Callable[[], None]) -> None:
        """Makes the missing shards of this rank, and brings them to rank 0.

        Args:
            make: returns the tensors of a range of samples.
            done: called after each shard.
        Raises:
            UserError: the work folder cannot be written, or the disk is full.
            RankLost: another rank has ended. Finished shards are kept.
        """
        if self.folder.is_dir():
            sweep_files(self.folder)
        for index in self.share(ranks):
            path = self.path(index)
            if not _is_whole(path):
                # Copies: safetensors refuses views of one memory.
                tensors = {
                    name: x.clone(memory_format=torch.contiguous_format) for name, x in make(self.ranges[index]).items()
                }
                with whole_file(path) as partial:
                    partial.write_bytes(save(tensors))
            done()
        ranks.collect(self.folder, [self.path(index).name for index in self.share(ranks)])

    def share(self, ranks: Ranks) -> range:
        """Returns the indices of this rank's shards."""
        return range(ranks.rank, len(self.ranges), ranks.size)

    def stream(self, names: Collection[str] | None = None) -> Iterator[dict[str, Tensor]]:
        """Yields the tensors of each shard, from the first shard to the last.

        Args:
            names: of the wanted tensors; names that a shard lacks are skipped. None: all.
        Raises:
            UserError: a shard is missing or damaged.
        """
        for index in range(len(self.ranges)):
            path = self.path(index)
            if not _is_whole(path):
                raise UserError(
                    f"the shard {path} cannot be read",
                    expected="a whole file of this command",
                    got="no such file" if not path.exists() else "a damaged file",
                    remedy="run the same command again: it makes missing and damaged shards",
                )
            if names is None:
                yield load_file(path)
                continue
            with safe_open(path, framework="pt") as file:
                yield {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118 (not a dict)


def _is_whole(path: Path) -> bool:
    """Return whether a shard has as many bytes as its header says."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False
