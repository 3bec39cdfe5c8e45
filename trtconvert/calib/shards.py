"""Statistics of finished batches on disk, so that a calibration that was killed goes on where it was.

Rows are kept in one file per batch. Counts of elements, which only add up, are kept in one file per process, which is
replaced after each batch and names the batches in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from trtconvert.attention.blocks import BlockRows
from trtconvert.attention.ranges import Rows
from trtconvert.calib.histogram import Histograms
from trtconvert.calib.layer_observer import LayerRows
from trtconvert.files import whole_file

_ROWS, _ELEMENTS = "rows-", "elements-"
_LAYER = "layer:"
"""In front of a layer's name: the module may be an attention site as well."""
_BLOCKS = "blocks:"
"""In front of a site's name, of the blocks that it needs."""


class Shards(Mapping[str, Rows]):
    """The rows of each site in all finished batches, in the batches' order. A site is read when it is asked for.

    Args:
        folder: holds the statistics of one calibration and nothing else; made when something is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # By batch: which file it is, since another process may replace it; the file, and the names in the file.
        self._open: dict[str, tuple[tuple[int, int], Any, frozenset[str]]] = {}

    def names(self) -> list[str]:
        """The files, in order."""
        return (
            sorted(p.name for p in self.folder.iterdir() if p.suffix == ".safetensors") if self.folder.is_dir() else []
        )

    # Rows

    def batches(self) -> set[int]:
        """Numbers of the batches whose rows are here."""
        return {int(Path(name).stem.removeprefix(_ROWS)) for name in self.names() if name.startswith(_ROWS)}

    def whole_batches(self) -> set[int]:
        """Of these, the ones from which nothing was left out."""
        return {batch for batch in self.batches() if not self._skipped_of(batch)}

    def write(
        self,
        batch: int,
        rows: Mapping[str, Rows],
        skipped: list[str],
        layers: Mapping[str, LayerRows] | None = None,
        blocks: Mapping[str, BlockRows] | None = None,
    ) -> None:
        """Keep the rows of a batch, those of layers, the blocks that sites need, and what was left out of it."""
        seen_by = {**rows, **{_LAYER + name: seen for name, seen in (layers or {}).items()}}
        seen_by |= {_BLOCKS + name: seen for name, seen in (blocks or {}).items()}
        tensors = {f"{site}/{name}": x for site, seen in seen_by.items() for name, x in seen.tensors().items()}
        self._save(f"{_ROWS}{batch:06d}", tensors, {"skipped": json.dumps(skipped)})

    def __getitem__(self, site: str) -> Rows:
        return Rows.cat([Rows(**part) for part in self._parts(site, [f.name for f in fields(Rows)])])

    def layer(self, name: str) -> LayerRows:
        """The rows of a layer in all finished batches, in the batches' order."""
        parts = self._parts(_LAYER + name, [f.name for f in fields(LayerRows)])
        return LayerRows.cat([LayerRows(**part) for part in parts])

    def blocks(self, site: str) -> BlockRows:
        """The blocks that a site needs in any finished batch."""
        return BlockRows.merged(
            BlockRows(**x) for x in self._parts(_BLOCKS + site, [f.name for f in fields(BlockRows)])
        )

    def _parts(self, site: str, names: Sequence[str]) -> list[dict[str, Tensor]]:
        parts = []
        for batch in sorted(self.batches()):
            stem = f"{_ROWS}{batch:06d}"
            state = self._path(stem).stat()
            identity = state.st_ino, state.st_mtime_ns
            if stem not in self._open or self._open[stem][0] != identity:  # once: there are thousands of names in each
                file = safe_open(self._path(stem), framework="pt")
                self._open[stem] = identity, file, frozenset(file.keys())
            _, file, held = self._open[stem]
            if f"{site}/bin" in held:
                parts.append({name: file.get_tensor(f"{site}/{name}") for name in names})
        if not parts:
            raise KeyError(site)
        return parts

    def __iter__(self) -> Iterator[str]:
        sites: dict[str, None] = {}
        for batch in sorted(self.batches()):
            with safe_open(self._path(f"{_ROWS}{batch:06d}"), framework="pt") as file:
                keys = (key.rpartition("/")[0] for key in file.keys())  # noqa: SIM118
                sites |= dict.fromkeys(sorted(key for key in keys if not key.startswith((_LAYER, _BLOCKS))))
        return iter(sites)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def skipped(self) -> list[str]:
        """What was left out of the batches, in their order."""
        left_out: list[str] = []
        for batch in sorted(self.batches()):
            left_out += self._skipped_of(batch)
        return left_out

    def _skipped_of(self, batch: int) -> list[str]:
        return json.loads(self._metadata(f"{_ROWS}{batch:06d}")["skipped"])

    # Counts of elements

    def counted(self) -> set[int]:
        """Numbers of the batches whose elements are counted here."""
        return {batch for name in self._element_files() for batch in json.loads(self._metadata(name)["batches"])}

    def write_counts(self, batches: list[int], histograms: Histograms) -> None:
        """Keep what a process has counted so far, in place of what it had kept before.

        Args:
            batches: that were counted, in order; no other process has any of them.
        """
        tensors = {}
        for site, counted in histograms.items():
            for name in ("q", "k", "v"):
                counts = getattr(counted, name).counts
                # Magnitudes fill a few of the octaves: the rest is not worth writing. The name keeps where they begin.
                used = counts.sum(0).nonzero().flatten().tolist() or [0]
                tensors[f"{site}/{name}/{used[0]}"] = _narrow(counts[:, used[0] : used[-1] + 1]).cpu().contiguous()
        self._save(f"{_ELEMENTS}{batches[0]:06d}", tensors, {"batches": json.dumps(batches)})

    def add_counts(self, into: Histograms) -> None:
        """Add everything that was counted to histograms of the same sites and shapes."""
        for stem in self._element_files():
            with safe_open(self._path(stem), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    (site, name, start), counts = key.rsplit("/", 2), file.get_tensor(key)
                    into_counts: Tensor = getattr(into[site], name).counts
                    into_counts[:, int(start) : int(start) + counts.shape[1]] += counts

    def _element_files(self) -> list[str]:
        return [Path(name).stem for name in self.names() if name.startswith(_ELEMENTS)]

    # Files

    def _path(self, stem: str) -> Path:
        return self.folder / f"{stem}.safetensors"

    def _metadata(self, stem: str) -> dict[str, str]:
        with safe_open(self._path(stem), framework="pt") as file:
            return file.metadata()

    def _save(self, stem: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        with whole_file(self._path(stem)) as partial:
            # Written by Python, whose errors say when a disk is full; safetensors' own do not.
            partial.write_bytes(save(dict(tensors), metadata))


def _narrow(counts: Tensor) -> Tensor:
    """Counts in the narrowest type that holds them all: most are small, and copying and writing them takes time."""
    most = int(counts.amax())
    return counts.to(next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if most <= torch.iinfo(dtype).max))
