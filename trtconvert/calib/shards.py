"""Statistics of finished batches on disk, so that an interrupted calibration resumes.

Rows are stored in one file per batch. The process that wrote a file reads it again only if memory has no room for its rows.
Counts of elements are sums: one file per process, replaced after each batch, which lists its batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trtconvert.attention.blocks import BlockRows
from trtconvert.attention.ranges import Rows
from trtconvert.calib.histogram import Histograms
from trtconvert.calib.layer_observer import LayerRows
from trtconvert.calib.record import RowWriter
from trtconvert.files import whole_file

_ROWS, _ELEMENTS = "rows-", "elements-"
_LAYER = "layer:"
"""Prefix of a layer's name: the same module may also be an attention site."""
_BLOCKS = "blocks:"
"""Prefix of a site's name for its needed blocks."""


class Shards(Mapping[str, Rows]):
    """The rows of each site in all finished batches, in the order of the batches. Sites are read lazily.

    Args:
        folder: holds the statistics of one calibration and nothing else; created by the first write.
        room: bytes of memory for written rows. Mapped files take many times as long to read on some file systems.
    """

    def __init__(self, folder: Path, room: int = 0) -> None:
        self.folder, self._room = folder, room
        # By batch: identity of the file, which another process may replace; a getter of the file's tensors; the tensors' names.
        self._open: dict[str, tuple[tuple[int, int], Callable[[str], Tensor], Collection[str]]] = {}

    def names(self) -> list[str]:
        """Returns the names of the files, sorted."""
        return (
            sorted(p.name for p in self.folder.iterdir() if p.suffix == ".safetensors") if self.folder.is_dir() else []
        )

    # Rows

    def batches(self) -> set[int]:
        """Returns the numbers of the batches with rows."""
        return {int(Path(name).stem.removeprefix(_ROWS)) for name in self.names() if name.startswith(_ROWS)}

    def whole_batches(self) -> set[int]:
        """Returns the numbers of the batches with rows and without skipped samples."""
        return {batch for batch in self.batches() if not self._skipped_of(batch)}

    def write(
        self,
        batch: int,
        rows: Mapping[str, Rows],
        skipped: list[str],
        layers: Mapping[str, LayerRows] | None = None,
        blocks: Mapping[str, BlockRows] | None = None,
    ) -> None:
        """Writes the rows of a batch, rows of layers, needed blocks, and the skipped samples."""
        seen_by = {**rows, **{_LAYER + name: seen for name, seen in (layers or {}).items()}}
        seen_by |= {_BLOCKS + name: seen for name, seen in (blocks or {}).items()}
        tensors = {f"{site}/{name}": x for site, seen in seen_by.items() for name, x in seen.tensors().items()}
        stem = f"{_ROWS}{batch:06d}"
        self._save(stem, tensors, {"skipped": json.dumps(skipped)})
        size = sum(x.nbytes for x in tensors.values())
        if size <= self._room:
            self._room -= size
            self._open[stem] = self._identity(stem), tensors.__getitem__, tensors.keys()

    def __getitem__(self, site: str) -> Rows:
        return Rows.cat([Rows(**part) for part in self._parts(site, [f.name for f in fields(Rows)])])

    def layer(self, name: str) -> LayerRows:
        """Returns the rows of a layer in all finished batches, in the order of the batches."""
        parts = self._parts(_LAYER + name, [f.name for f in fields(LayerRows)])
        return LayerRows.cat([LayerRows(**part) for part in parts])

    def blocks(self, site: str) -> BlockRows:
        """Returns the blocks that a site needs in any finished batch."""
        return BlockRows.merged(
            BlockRows(**x) for x in self._parts(_BLOCKS + site, [f.name for f in fields(BlockRows)])
        )

    def _parts(self, site: str, names: Sequence[str]) -> list[dict[str, Tensor]]:
        parts = []
        for batch in sorted(self.batches()):
            stem = f"{_ROWS}{batch:06d}"
            identity = self._identity(stem)
            if stem not in self._open or self._open[stem][0] != identity:  # kept open: a file has thousands of names
                file = safe_open(self._path(stem), framework="pt")
                self._open[stem] = identity, file.get_tensor, frozenset(file.keys())
            _, tensor, held = self._open[stem]
            if f"{site}/bin" in held:
                parts.append({name: tensor(f"{site}/{name}") for name in names})
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
        """Returns the skipped samples of all batches, in the order of the batches."""
        left_out: list[str] = []
        for batch in sorted(self.batches()):
            left_out += self._skipped_of(batch)
        return left_out

    def _skipped_of(self, batch: int) -> list[str]:
        return json.loads(self._metadata(f"{_ROWS}{batch:06d}")["skipped"])

    # Counts of elements

    def counted(self) -> set[int]:
        """Returns the numbers of the batches whose elements are counted."""
        return {batch for name in self._element_files() for batch in json.loads(self._metadata(name)["batches"])}

    def write_counts(self, batches: list[int], histograms: Histograms) -> None:
        """Writes the counts of a process in place of its earlier counts; no other process counted any of these batches."""
        tensors = {}
        for site, counted in histograms.items():
            for name in ("q", "k", "v"):
                counts = getattr(counted, name).counts
                # Magnitudes span few octaves: only the used range is written; the key holds its start.
                used = counts.sum(0).nonzero().flatten().tolist() or [0]
                tensors[f"{site}/{name}/{used[0]}"] = _narrow(counts[:, used[0] : used[-1] + 1]).cpu().contiguous()
        self._save(f"{_ELEMENTS}{batches[0]:06d}", tensors, {"batches": json.dumps(batches)})

    def add_counts(self, into: Histograms) -> None:
        """Adds all counts to histograms of the same sites and shapes."""
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

    def _identity(self, stem: str) -> tuple[int, int]:
        state = self._path(stem).stat()
        return state.st_ino, state.st_mtime_ns

    def _metadata(self, stem: str) -> dict[str, str]:
        with safe_open(self._path(stem), framework="pt") as file:
            return file.metadata()

    def _save(self, stem: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        # Readers need tensors at multiples of their elements' size.
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        # Python's write reports a full disk; safetensors' own does not, and copies all tensors before.
        with whole_file(self._path(stem)) as partial, partial.open("wb") as file:
            RowWriter(file, 0, {}, dict(ordered), metadata)


def _narrow(counts: Tensor) -> Tensor:
    """Returns counts in the narrowest type that holds them, which saves time to copy and write."""
    most = int(counts.amax())
    return counts.to(next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if most <= torch.iinfo(dtype).max))
