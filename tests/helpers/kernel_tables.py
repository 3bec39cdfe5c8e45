"""The times of kernels that come with the program, as older files of them are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trtconvert.attention.modes import Mode
from trtconvert.calib.identity import KERNEL_COST


def table_without(path: Path, part: str, **others: Any) -> Path:
    """Written to `path` without one of its parts, or with others."""
    table = json.loads(KERNEL_COST.read_text(encoding="utf-8"))
    path.write_text(json.dumps({name: rows for name, rows in table.items() if name != part} | others))
    return path


def table_where_masks_gain(path: Path, modes: Iterable[Mode]) -> Path:
    """Written to `path`: in these modes masks of `tiny_sparse` gain less than what they leave out, as in large models. By the
    shipped times such small ones gain nothing."""
    masked = [
        {"mode": int(mode), "shape": [1, 2, 640, 640, 32], "density": density, "ratio": density + 0.2}
        for mode in modes
        for density in (0.1, 1.0)
    ]
    return table_without(path, "masked", masked=masked)
