"""The record of passed GPU tests: a pytest plugin that writes it, and a command that lists later changes.

`make test-gpu` runs the tests that need a GPU and writes `tests/gpu/record.json`, which keeps the last run of each kind of
card. `make gpu-record` compares the sources with those that ran. It compares hashes of files, and needs no history of commits.

If a command may not take as long as all tests, run them in parts: `make test-gpu PART=1/2` and `make test-gpu
PART=2/2`. A part has whole files of tests. The record keeps a part until all parts of the same code and machine have run, and
then joins them.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
_RECORD_PATH = "tests/gpu/record.json"
RECORD = ROOT / _RECORD_PATH
SOURCES = ("plugins", "trtconvert/engine", "trtconvert/runtime")
"""Folders with files that decide the work of a GPU."""
SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cpp", ".txt"}


def source_hashes(root: Path = ROOT) -> dict[str, str]:
    """The first 16 digits of each source's SHA-256, by path."""
    files = (file for folder in SOURCES for file in sorted((root / folder).rglob("*")))
    return {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in files
        if file.suffix in SUFFIXES and file.is_file()
    }


def code_hash(root: Path = ROOT) -> str:
    """The first 16 digits of the SHA-256 of all code and all tests, which parts of one run share."""
    digest = hashlib.sha256()
    for folder in ("plugins", "trtconvert", "tests", "tools"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in SUFFIXES and file.is_file():
                digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def changed(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Paths of sources that were added, removed or changed."""
    return sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))


def machine() -> dict[str, Any] | None:
    """The card and its driver; None without a GPU."""
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
    """The commit that is checked out, with "+" where files but the record differ from it; None outside a repository."""
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


class Part(NamedTuple):
    """One part of a run, of so many; parts count from 1."""

    number: int
    of: int

    @staticmethod
    def read(text: str) -> Part:
        """Of a text such as "1/2". Raises ValueError, which says what is wrong."""
        found = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
        part = Part(*map(int, found.groups())) if found else None
        if part is None or not 1 <= part.number <= part.of:
            raise ValueError(f"--part: expected a number of a part and how many there are, such as 1/2, got {text!r}")
        return part


def files_of(part: Part, counts: Mapping[str, int], seconds: Mapping[str, float]) -> set[str]:
    """The files of tests that a part of a run has. All parts together have each file once, and take about the same time.

    Args:
        counts: how many tests each file has.
        seconds: that each file took before. Tests of other files count as much as the mean test of these.
    """
    known = sum(counts[file] for file in counts if file in seconds)
    each = sum(seconds[file] for file in counts if file in seconds) / known if known else 1.0
    weights = {file: seconds.get(file, count * each) for file, count in counts.items()}
    loads, shares = [0.0] * part.of, [set[str]() for _ in range(part.of)]
    for file in sorted(counts, key=lambda file: (-weights[file], file)):
        lightest = loads.index(min(loads))
        loads[lightest] += weights[file]
        shares[lightest].add(file)
    return shares[part.number - 1]


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entry of a run from those of its parts."""
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


def with_part(record: Mapping[str, Any], part: Part, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A card's record with an entry of a part: the joined run where all parts have run, else the record with the parts so far.

    Parts of other code, another machine or another number of parts are dropped.
    """

    def run_of(of: Mapping[str, Any]) -> dict[str, Any]:
        own = ("date", "passed", "failed", "skipped", "seconds", "files")
        return {name: value for name, value in of.items() if name not in own}

    before = record.get("parts", {})
    parts = {
        name: known for name, known in before.items() if name.endswith(f"/{part.of}") and run_of(known) == run_of(entry)
    } | {f"{part.number}/{part.of}": dict(entry)}
    names = [f"{number}/{part.of}" for number in range(1, part.of + 1)]
    if all(name in parts for name in names):
        return joined([parts[name] for name in names])
    return {name: value for name, value in record.items() if name != "parts"} | {"parts": parts}


class Recorder:
    """Counts outcomes of tests, and writes them where the session ends.

    Args:
        run: the machine, see `machine`.
        path: of the record.
        part: of the run; None for all of it.
    """

    def __init__(self, run: Mapping[str, Any], path: Path, part: Part | None = None) -> None:
        self._run, self._path, self._part = run, path, part
        self._started = time.monotonic()
        self._files = Counter[str]()  # seconds
        self._sources = source_hashes()
        self._outcomes = Counter[str]()
        self._skipped = Counter[str]()
        self._failed: list[str] = []

    def _records(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.is_file() else {}

    @pytest.hookimpl(trylast=True)  # behind `-m`
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self._part is None:
            return
        files = [item.nodeid.partition("::")[0] for item in items]
        seconds = self._records().get(self._run["card"], {}).get("files", {})
        mine = files_of(self._part, Counter(files), seconds)
        config.hook.pytest_deselected(items=[item for item, file in zip(items, files, strict=True) if file not in mine])
        items[:] = [item for item, file in zip(items, files, strict=True) if file in mine]

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
            "files": {file: round(seconds, 1) for file, seconds in sorted(self._files.items())},
            "sources": self._sources,
        }
        records, card = self._records(), self._run["card"]
        if self._part is not None:
            entry = with_part(records.get(card, {}), self._part, entry | {"code": code_hash()})
        records[card] = entry
        self._path.write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--part", help="The part of the GPU tests that this run has, as 1/2. The record joins all parts.")


def pytest_configure(config: Any) -> None:
    part = config.getoption("--part")
    try:
        part = Part.read(part) if part else None
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    run = machine()
    if run is None:
        raise pytest.UsageError(
            "the record of GPU tests needs an NVIDIA GPU that torch sees; without one, run make test"
        )
    config.pluginmanager.register(Recorder(run, RECORD, part))


def summary(records: Mapping[str, Mapping[str, Any]], now: Mapping[str, str]) -> list[str]:
    """One line for each card that ran the tests, and the sources that changed since."""
    if not records:
        return ["No run of the GPU tests is on record: make test-gpu on a machine with a GPU writes one."]
    lines = []
    for card, run in records.items():
        for name, part in sorted(run.get("parts", {}).items()):
            lines.append(
                f"{card}, {part['date']}: part {name} of a run, {part['passed']} passed; the other parts have not run."
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
    records = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    sys.stdout.write("\n".join(summary(records, source_hashes())) + "\n")
