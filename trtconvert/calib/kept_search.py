"""What a search has measured, on the disk: a search that was interrupted goes on, and another budget measures nothing again."""

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

from trtconvert.calib.sensitivity import Sensitivity
from trtconvert.files import open_regular, whole_file
from trtconvert.quant.decision import Plan, Unit

_SUFFIX = ".kept"
_LENGTH_BYTES = 8
_HEADER_BYTES = _LENGTH_BYTES + hashlib.sha256().digest_size


class KeptSearch:
    """Measurements of a search, by sites, layers and plans. Each file is written whole and begins with its length and a
    SHA-256. The search measures the content of a damaged file again.

    Args:
        folder: of everything that decides the measurements but for the units, the plans and the limits of the budget. None keeps
            them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._figures: dict[str, dict[str, float]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def sensitivity(self, units: Sequence[Unit], measure: Callable[[], Sensitivity]) -> Sensitivity:
        """The sensitivity of units, measured where it is not there."""
        key = f"sensitivity-{_hash([asdict(unit) | {'compared': sorted(map(repr, unit.compared))} for unit in units])}"
        tensors = self._tensors(key)
        if tensors is None:
            found = measure()
            self._keep(key, {"error": found.error, "gain": found.gain, "steps": found.steps})
            return found
        return Sensitivity(units, **tensors)

    def images(self, draw: Callable[[], Tensor]) -> Tensor:
        """What full precision draws, [N, C, H, W]."""
        tensors = self._tensors("full")
        if tensors is None:
            tensors = {"images": draw()}
            self._keep("full", tensors)
        return tensors["images"]

    def figures(self, plan: Plan) -> dict[str, float] | None:
        """The figures of a plan's samples; None where they were not measured."""
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
        """What `_write` wrote; None where nothing is there, or something else."""
        if self._folder is None:
            return None
        try:
            with open_regular(self._folder / f"{name}{_SUFFIX}") as file:
                header = file.read(_HEADER_BYTES)
                length = int.from_bytes(header[:_LENGTH_BYTES], "little")
                if os.fstat(file.fileno()).st_size != _HEADER_BYTES + length:  # before memory is asked for
                    return None
                content = file.read()
        except OSError:
            return None
        return content if _header(name, content) == header else None


def _header(name: str, content: bytes) -> bytes:
    """What a file begins with: the length of its content, and the SHA-256 of its name and its content."""
    digest = hashlib.sha256(f"{name}\0".encode())
    digest.update(content)
    return len(content).to_bytes(_LENGTH_BYTES, "little") + digest.digest()


def _plan_key(plan: Plan) -> str:
    return f"plan-{_hash(plan.record())}"


def _hash(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:32]
