"""Measurements of a search on disk: an interrupted search resumes, and a search with another budget measures nothing again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from trtconvert.calib.distributed import ALONE, Ranks
from trtconvert.calib.sensitivity import Sensitivity
from trtconvert.files import open_regular, whole_file
from trtconvert.quant.decision import Plan, Unit

_SUFFIX = ".kept"
_LENGTH_BYTES = 8
_HEADER_BYTES = _LENGTH_BYTES + hashlib.sha256().digest_size


class KeptSearch:
    """Measurements of a search, by sites, layers and plans. Each file is written atomically and starts with its length and a
    SHA-256. Damaged files are measured again.

    Args:
        folder: its name covers everything that determines the measurements, except units, plans and the budget's limits. None:
            measurements are kept in memory.
        ranks: processes that share the search. The files of rank 0 decide what is measured; the others do not use the folder.
    """

    def __init__(self, folder: Path | None = None, ranks: Ranks = ALONE) -> None:
        self._folder = folder if ranks.rank == 0 else None
        self._ranks = ranks
        self._figures: dict[str, dict[str, float]] = {}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def sensitivity(self, units: Sequence[Unit], measure: Callable[[], Sensitivity]) -> Sensitivity:
        """Returns the sensitivity of units; measures it if it is not stored."""
        key = f"sensitivity-{_hash([asdict(unit) | {'compared': sorted(map(repr, unit.compared))} for unit in units])}"
        tensors = self._ranks.broadcast(self._tensors(key))
        if tensors is None:
            found = measure()
            tensors = {"error": found.error, "gain": found.gain, "steps": found.steps, "power": found.power}
            self._keep(key, tensors)
            return found
        return Sensitivity(units, **tensors)

    def full(self, draw: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns what a drawing in full precision gave; draws if that is not stored. Only rank 0 has stored tensors."""
        tensors = self._tensors("full")
        if not self._ranks.broadcast(tensors is not None):
            tensors = draw()
            self._keep("full", tensors)
        return tensors or {}

    def figures(self, plan: Plan) -> dict[str, float] | None:
        """Returns the figures of a plan's samples; None if they were not measured."""
        return self._ranks.broadcast(self._known(plan))

    def without_figures(self, plans: Sequence[Plan]) -> list[Plan]:
        """Returns the plans whose figures were not measured, each once."""
        return self._ranks.broadcast([*{_plan_key(plan): plan for plan in plans if not self._known(plan)}.values()])

    def _known(self, plan: Plan) -> dict[str, float] | None:
        key = _plan_key(plan)
        return self._figures.get(key) or self._read(key)

    def keep_figures(self, plan: Plan, figures: dict[str, float]) -> None:
        key = _plan_key(plan)
        self._figures[key] = figures
        self._write(f"{key}.json", json.dumps(figures).encode())

    def _tensors(self, key: str) -> dict[str, Tensor] | None:
        content = self._content(f"{key}.safetensors")
        return None if content is None else load(content)

    def _keep(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        self._write(f"{key}.safetensors", save({name: x.contiguous() for name, x in tensors.items()}))

    def _read(self, key: str) -> dict[str, float] | None:
        content = self._content(f"{key}.json")
        return None if content is None else json.loads(content)

    def _write(self, name: str, content: bytes) -> None:
        if self._folder is not None:
            path = self._folder / f"{name}{_SUFFIX}"
            with whole_file(path, through_link=False) as partial, partial.open("wb") as file:
                file.write(_header(name, content))
                file.write(content)

    def _content(self, name: str) -> bytes | None:
        """Reads a file of `_write`; None if it is missing or damaged."""
        if self._folder is None:
            return None
        try:
            with open_regular(self._folder / f"{name}{_SUFFIX}") as file:
                header = file.read(_HEADER_BYTES)
                length = int.from_bytes(header[:_LENGTH_BYTES], "little")
                if os.fstat(file.fileno()).st_size != _HEADER_BYTES + length:  # before the content takes memory
                    return None
                content = file.read()
        except OSError:
            return None
        return content if _header(name, content) == header else None


def _header(name: str, content: bytes) -> bytes:
    """Returns the start of a file: the length of its content, and the SHA-256 of its name and content."""
    digest = hashlib.sha256(f"{name}\0".encode())
    digest.update(content)
    return len(content).to_bytes(_LENGTH_BYTES, "little") + digest.digest()


def _plan_key(plan: Plan) -> str:
    return f"plan-{_hash(plan.record())}"


def _hash(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:32]
