"""The record of what passed on a GPU: a pytest plugin that writes it, and a command that says what changed since.

`make test-gpu` runs the tests that need a GPU and writes `tests/gpu/record.json`, which keeps the last run of each kind of
card. `make gpu-record` compares the sources with those that ran. It compares hashes of files, and needs no history of commits.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "gpu" / "record.json"
SOURCES = ("plugins", "trtconvert/engine", "trtconvert/runtime")
"""Folders whose files decide what a GPU does."""
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".txt"}


def source_hashes(root: Path = ROOT) -> dict[str, str]:
    """The first 16 digits of each source's SHA-256, by path."""
    files = (file for folder in SOURCES for file in sorted((root / folder).rglob("*")))
    return {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in files
        if file.suffix in SUFFIXES and file.is_file()
    }


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Paths of sources that were added, removed or changed."""
    return sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))


def machine() -> dict[str, Any] | None:
    """The card with what drives it; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "card": torch.cuda.get_device_name(),
        "cards": torch.cuda.device_count(),
        "compute_capability": f"{capability[0]}.{capability[1]}",
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "tensorrt": _tensorrt(),
    }


def _tensorrt() -> str | None:
    """TensorRT's version; None where it is not installed."""
    try:
        import tensorrt  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return tensorrt.__version__


def _commit() -> str | None:
    """The commit that is checked out, with "+" where files differ from it; None outside a repository."""
    try:
        commit, state = (
            subprocess.run(
                ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if state else "")


class Recorder:
    """Counts outcomes of tests, and writes them where the session ends.

    Args:
        run: the machine, see `machine`.
        path: of the record.
    """

    def __init__(self, run: Mapping[str, Any], path: Path) -> None:
        self._run, self._path = run, path
        self._started = time.monotonic()
        self._sources = source_hashes()
        self._outcomes = Counter[str]()
        self._skipped = Counter[str]()
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.append(report.nodeid)
        elif report.skipped:
            self._outcomes["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            self._skipped[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self._outcomes["passed"] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Interrupted sessions and those that collected nothing leave the record as it was."""
        if int(exitstatus) > 1:
            return
        entry = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": _commit(),
            "trtconvert": importlib.metadata.version("trtconvert"),
            **self._run,
            "passed": self._outcomes["passed"],
            "failed": self._failed,
            "skipped": dict(sorted(self._skipped.items())),
            "seconds": round(time.monotonic() - self._started),
            "sources": self._sources,
        }
        records = json.loads(self._path.read_text()) if self._path.is_file() else {}
        records[self._run["card"]] = entry
        self._path.write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")


def pytest_configure(config: Any) -> None:
    import pytest

    run = machine()
    if run is None:
        raise pytest.UsageError(
            "the record of GPU tests needs an NVIDIA GPU that torch sees; without one, run make test"
        )
    config.pluginmanager.register(Recorder(run, RECORD))


def summary(records: Mapping[str, Mapping[str, Any]], now: Mapping[str, str]) -> list[str]:
    """One line for each card that ran the tests, and the sources that changed since."""
    if not records:
        return ["No run of the GPU tests is on record: make test-gpu on a machine with a GPU writes one."]
    lines = []
    for card, run in records.items():
        outcome = f"{run['passed']} passed, {len(run['failed'])} failed, {sum(run['skipped'].values())} skipped"
        lines.append(f"{card}, {run['date']}, TensorRT {run['tensorrt']}, driver {run['driver']}: {outcome}.")
        paths = changed(run["sources"], now)
        lines.append(
            f"  Source files that changed since: {len(paths)}" if paths else "  The sources are those that ran."
        )
        lines += [f"    {path}" for path in paths]
    return lines


if __name__ == "__main__":
    records = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    sys.stdout.write("\n".join(summary(records, source_hashes())) + "\n")
