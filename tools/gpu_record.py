"""The record of passed GPU tests: a pytest plugin that writes it, and a command that lists later changes.

`make test-gpu` runs the tests that need a GPU and writes `tests/gpu/record.json`, which keeps the last run of each kind of
card. `make gpu-record` compares the sources with those that ran. It compares hashes of files, and needs no history of commits.

The run has two parts, `make test-gpu-shared` and `make test-gpu-alone`. Tests of the first part run beside each other in
processes of pytest-xdist. Tests of the second part measure the device's memory and times, and run in one process. The record
keeps a part until the other part of the same code and machine has run, and then joins both.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
_RECORD_PATH = "tests/gpu/record.json"
RECORD = ROOT / _RECORD_PATH
SOURCES = ("plugins", "trtconvert/engine", "trtconvert/runtime")
"""Folders with files that decide the work of a GPU."""
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".txt"}


PARTS = ("shared", "alone")


def source_hashes(root: Path = ROOT) -> dict[str, str]:
    """Returns the first 16 digits of each source's SHA-256, by path."""
    files = (file for folder in SOURCES for file in sorted((root / folder).rglob("*")))
    return {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in files
        if file.suffix in SUFFIXES and file.is_file()
    }


def code_hash(root: Path = ROOT) -> str:
    """Returns the first 16 digits of the SHA-256 of all code and all tests, which parts of one run share."""
    digest = hashlib.sha256()
    for folder in ("plugins", "trtconvert", "tests", "tools"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in SUFFIXES and file.is_file():
                digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns the paths of sources that were added, removed or changed."""
    return sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))


def machine() -> dict[str, Any] | None:
    """Returns the card and its driver; None without a GPU."""
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
    """Returns TensorRT's version; None where it cannot build."""
    from trtconvert.engine import tensorrt

    status = tensorrt.status()
    return status.detail if status.available else None


def _commit() -> str | None:
    """Returns the commit that is checked out, with "+" where files but the record differ from it; None outside a repository."""
    try:
        commit, state = (
            subprocess.run(
                ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", ".", f":(exclude){_RECORD_PATH}"])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if state else "")


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the entry of a run from those of its parts."""
    last = parts[-1]
    return {
        **{name: value for name, value in last.items() if name not in ("parts", "code")},
        "date": max(part["date"] for part in parts),
        "passed": sum(part["passed"] for part in parts),
        "failed": [test for part in parts for test in part["failed"]],
        "skipped": dict(sorted(sum((Counter(part["skipped"]) for part in parts), Counter()).items())),
        "seconds": sum(part["seconds"] for part in parts),
        "files": {file: spent for part in parts for file, spent in sorted(part["files"].items())},
    }


def with_part(record: Mapping[str, Any], part: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a card's record with an entry of a part: the joined run if both parts have run, else the record with this part.

    Parts of other code or another machine are dropped.
    """

    def run_of(of: Mapping[str, Any]) -> dict[str, Any]:
        own = ("date", "passed", "failed", "skipped", "seconds", "files")
        return {name: value for name, value in of.items() if name not in own}

    before = record.get("parts", {})
    parts = {name: known for name, known in before.items() if run_of(known) == run_of(entry)} | {part: dict(entry)}
    if all(name in parts for name in PARTS):
        return joined([parts[name] for name in PARTS])
    return {name: value for name, value in record.items() if name != "parts"} | {"parts": parts}


def _records(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


class Recorder:
    """Counts outcomes of tests, and writes them at the end of the session.

    Args:
        run: the machine, see `machine`.
        path: of the record.
        part: one of `PARTS`; None for a run of all tests.
    """

    def __init__(self, run: Mapping[str, Any], path: Path, part: str | None = None) -> None:
        self._run, self._path, self._part = run, path, part
        self._started = time.monotonic()
        self._files = Counter[str]()  # seconds
        self._sources = source_hashes()
        self._outcomes = Counter[str]()
        self._skipped = Counter[str]()
        self._failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._files[report.nodeid.partition("::")[0]] += report.duration
        if report.failed:
            self._failed.append(report.nodeid)
        elif report.skipped:
            self._outcomes["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            self._skipped[reason.removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self._outcomes["passed"] += 1

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Writes the record, except after interrupted sessions and sessions without tests."""
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
            "files": {file: round(seconds, 1) for file, seconds in sorted(self._files.items())},
            "sources": self._sources,
        }
        records, card = _records(self._path), self._run["card"]
        if self._part is not None:
            entry = with_part(records.get(card, {}), self._part, entry | {"code": code_hash()})
        records[card] = entry
        self._path.write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")


def pytest_addoption(parser: Any) -> None:
    parser.addoption(
        "--part", choices=PARTS, help="The part of the GPU tests that this run has. The record joins both."
    )


def pytest_configure(config: Any) -> None:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist reports to the process that records
        return
    run = machine()
    if run is None:
        raise pytest.UsageError(
            "the record of GPU tests needs an NVIDIA GPU that torch sees; without one, run make test"
        )
    config.pluginmanager.register(Recorder(run, RECORD, config.getoption("--part")))


def summary(records: Mapping[str, Mapping[str, Any]], now: Mapping[str, str]) -> list[str]:
    """Returns one line for each card that ran the tests, and the sources that changed since."""
    if not records:
        return ["No run of the GPU tests is on record: make test-gpu on a machine with a GPU writes one."]
    lines = []
    for card, run in records.items():
        for name, part in sorted(run.get("parts", {}).items()):
            lines.append(
                f"{card}, {part['date']}: part {name} of a run, {part['passed']} passed; the other part has not run."
            )
        if "sources" not in run:
            continue
        outcome = f"{run['passed']} passed, {len(run['failed'])} failed, {sum(run['skipped'].values())} skipped"
        lines.append(f"{card}, {run['date']}, TensorRT {run['tensorrt']}, driver {run['driver']}: {outcome}.")
        paths = changed(run["sources"], now)
        lines.append(
            f"  Source files that changed since: {len(paths)}" if paths else "  The sources are those that ran."
        )
        lines += [f"    {path}" for path in paths]
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(summary(_records(RECORD), source_hashes())) + "\n")
