"""The times of kernels that come with the program, as older files of them are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtconvert.calib.identity import KERNEL_COST


def table_without(path: Path, part: str, **others: Any) -> Path:
    """Written to `path` without one of its parts, or with others."""
    table = json.loads(KERNEL_COST.read_text(encoding="utf-8"))
    path.write_text(json.dumps({name: rows for name, rows in table.items() if name != part} | others))
    return path
