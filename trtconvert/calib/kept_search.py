"""What a search has measured, on the disk: a search that was interrupted goes on, and another budget measures nothing again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trtconvert.calib.sensitivity import Sensitivity
from trtconvert.files import whole_file
from trtconvert.quant.decision import Plan, Unit


class KeptSearch:
    """Measurements by what was measured. Each is a file, which is written whole; one that cannot be read is measured again.

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
        if self._folder is not None:
            with whole_file(self._folder / f"{key}.json") as partial:
                partial.write_text(json.dumps(figures))

    def _tensors(self, key: str) -> dict[str, Tensor] | None:
        if self._folder is None:
            return None
        try:
            return load_file(self._folder / f"{key}.safetensors")
        except (OSError, SafetensorError):
            return None

    def _keep(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        if self._folder is not None:
            with whole_file(self._folder / f"{key}.safetensors") as partial:
                save_file({name: x.contiguous() for name, x in tensors.items()}, partial)

    def _read(self, key: str) -> dict[str, float] | None:
        if self._folder is None:
            return None
        try:
            return json.loads((self._folder / f"{key}.json").read_text())
        except (OSError, ValueError):
            return None


def _plan_key(plan: Plan) -> str:
    return f"plan-{_hash(plan.record())}"


def _hash(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:32]
