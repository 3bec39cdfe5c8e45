"""Tiles of Triton's products of modulated layers: candidates for a size, and the measured choices, kept between processes.

Each measured tile is a kernel to compile: only few are measured, and none again in later processes.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from trtconvert.cache import timing_path
from trtconvert.documents import parse_json
from trtconvert.errors import UserError
from trtconvert.files import one_at_a_time, whole_file


@dataclass(frozen=True)
class Tiles:
    """A tiling of a product: rows and output channels of a tile, channels multiplied at a time; warps and stages of Triton."""

    rows: int
    strip: int
    depth: int
    warps: int
    stages: int


TILES = (
    Tiles(128, 128, 128, 8, 3),
    Tiles(128, 128, 64, 8, 4),
    Tiles(128, 128, 64, 4, 4),
    Tiles(128, 256, 64, 8, 3),
    Tiles(256, 128, 64, 8, 3),
    Tiles(64, 128, 128, 4, 3),
    Tiles(64, 256, 64, 8, 3),
    Tiles(128, 64, 128, 4, 3),
    Tiles(64, 64, 128, 4, 4),
    Tiles(32, 64, 128, 4, 4),
)
"""All candidates."""

_LEAST_TRIED, _MOST_TRIED = 4, 6
_WORSE = 1.5
"""Tiles beyond this multiple of the least cost are measured only to reach `_LEAST_TRIED`."""
_READ = 64.0
"""Cost of reading a number of a row or column, in products."""


def candidates(pixels: int, outputs: int, widths: Sequence[int], processors: int) -> tuple[Tiles, ...]:
    """Returns likely fastest tiles, the best first, by a simple cost model: products and reads of a multiprocessor.

    Args:
        pixels: rows of the product. widths: channels of each part of its input. processors: of the GPU.
    """

    def cost(tiles: Tiles) -> float:
        count = math.ceil(pixels / tiles.rows) * math.ceil(outputs / tiles.strip)
        deep = sum(math.ceil(width / tiles.depth) for width in widths) * tiles.depth
        each = tiles.rows * tiles.strip + _READ * (tiles.rows + tiles.strip)
        return math.ceil(count / processors) * deep * each

    costs = {tiles: cost(tiles) for tiles in TILES}
    ranked = sorted(TILES, key=costs.__getitem__)
    near = sum(costs[tiles] <= _WORSE * costs[ranked[0]] for tiles in ranked)
    return tuple(ranked[: min(max(near, _LEAST_TRIED), _MOST_TRIED)])


class Choices:
    """The fastest tiles by size, in memory and in the user's cache folder.

    Args:
        gpu: name of the GPU. version: of Triton. kernel: hash of the kernel; choices of other kernels are dropped.
    """

    def __init__(self, gpu: str, version: str, kernel: str) -> None:
        self._path, self._kernel = timing_path(f"{gpu} modiff triton {version}", ".json"), kernel
        self._known = dict(self._stored())

    def get(self, size: str) -> Tiles | None:
        """Returns the fastest tiles of a size."""
        return self._known.get(size)

    def add(self, size: str, tiles: Tiles) -> None:
        """Keeps a choice, merged with those of other processes; only in memory if the file cannot be written."""
        self._known[size] = tiles
        if self._path is None:
            return
        with contextlib.suppress(OSError, UserError), one_at_a_time(self._path):
            merged = {**self._stored(), size: tiles}
            said = {"kernel": self._kernel, "tiles": {size: astuple(tiles) for size, tiles in sorted(merged.items())}}
            with whole_file(self._path) as partial:
                partial.write_text(json.dumps(said, indent=1))

    def _stored(self) -> Mapping[str, Tiles]:
        """Reads the choices of this kernel. Skips damaged files and unknown tiles."""
        try:
            said = parse_json(self._path.read_text()) if self._path is not None else {}
            if said.get("kernel") != self._kernel:
                return {}
            known = {astuple(tiles): tiles for tiles in TILES}
            return {size: known[tuple(row)] for size, row in said["tiles"].items() if tuple(row) in known}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
            return {}
