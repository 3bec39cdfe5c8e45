"""What several test files use: the program, in this process or in one of its own, what a refusal looks like, a full disk."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from trtconvert.bars import NoBar
from trtconvert.cli import main

HELPERS = Path(__file__).parent
REPOSITORY = HELPERS.parents[1]
WEIGHTS = REPOSITORY / "recipes" / "digits-dit.safetensors"
PARTIAL = ".partial-"


@dataclass(frozen=True)
class Outcome:
    """How the program ended, and everything that it printed."""

    exit_code: int
    output: str


@dataclass(frozen=True)
class Built:
    """A build that ended well."""

    recipe: Path
    bundle: Path
    cache: Path


class Quiet(NoBar):
    """Progress that nobody looks at, but how many steps it was told of."""

    def __init__(self) -> None:
        self.told = self.done = 0.0

    def total(self, steps: float) -> None:
        self.told = steps

    def more(self, steps: float) -> None:
        self.told += steps

    def step(self, count: float = 1) -> None:
        self.done += count

    skip = step


def run(*arguments: object) -> Outcome:
    """The program in this process."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    return Outcome(result.exit_code, result.output)


def environment() -> dict[str, str]:
    """Of the program in processes of its own, where it finds the tests' models. One thread: several share the machine."""
    paths = [str(REPOSITORY), str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def torchrun(ranks: int, *arguments: object, timeout: float = 120, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The program on so many ranks, as users start it; it ended well, or with this exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "trtconvert.cli", *map(str, arguments)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == code, ended.stderr
    return ended


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The program in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "trtconvert.cli", *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def finish(process: subprocess.Popen[str]) -> Outcome:
    """Wait for a started program."""
    output, errors = process.communicate(timeout=120)
    return Outcome(process.returncode, output + errors)


def refusal(outcome: Outcome, *parts: str) -> str:
    """Check that the program refused as users are owed: exit code 2, expected, got, remedy, no traceback. All parts are in it.

    Returns:
        The message.
    """
    assert outcome.exit_code == 2, outcome.output
    message = outcome.output[outcome.output.index("error: ") :]
    assert "Traceback" not in outcome.output and "internal error" not in outcome.output
    for label in ("expected: ", "got: ", "remedy: ", *parts):
        assert label in message, f"{label!r} is not in:\n{message}"
    return message


def tiny_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """A recipe for a model of `tiny_models`, with fields of some sections replaced. Its layers stay as they are by default."""
    recipe: dict[str, dict[str, Any]] = {
        "model": {"source": "tiny_models:build"},
        "attention": {"modes": ["precision", "balanced"]},
        "layers": {"modes": "off"},
        "calibration": {"samples": 2, "batch": 2, "steps": 4, "bins": 2},
        "engine": {"backend": "onnxruntime"},
        "verify": {"samples": 2, "steps": 4, "min_psnr": 20},
        "output": {"grid": 2},
    }
    for name, fields in sections.items():
        recipe[name] = recipe.get(name, {}) | fields
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return path


def partials(*folders: Path) -> list[str]:
    """Temporary files and folders that are left."""
    return [path.name for folder in folders if folder.exists() for path in folder.iterdir() if PARTIAL in path.name]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def reused(outcome: Outcome) -> dict[str, bool]:
    """Whether each stage of a build came from the cache, as the table says."""
    rows = re.findall(r"time, (\w+) +│ (from the cache|[\d.]+ s)", outcome.output)
    return {stage: time == "from the cache" for stage, time in rows if stage not in ("bundle", "all")}


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """A signal's handler in this process, and in those that it starts meanwhile as far as they inherit it."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Files that this process writes cannot be larger, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with handled(signal.SIGXFSZ, signal.SIG_IGN):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def at_once(work: Callable[[Any], object], each: Iterable[Any]) -> None:
    """Run work(x) for each x, in threads of their own, to the end."""
    threads = [threading.Thread(target=work, args=(x,)) for x in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
