"""Runs of the program that begin at once: a process that has imported everything forks one for each.

So a kill or a full disk comes while it works and not while it imports, which `test_signals.py` is for.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HANGS_AFTER = 120.0
"""A run of more seconds counts as hanging."""


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        code: its exit code, or minus the signal that ended it.
        seconds: how long it took; output: everything that it printed.
        modules: what it had imported, where it ended by itself.
    """

    code: int
    seconds: float
    output: str
    modules: list[str]


class Forking:
    """A process that runs the program over and over, each time in a fork of its own."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        """
        Args:
            environment: of all runs; log: a file for their output.
        """
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: Sequence[object], kill_after: float | None = None, **order: object) -> Ended:
        """One run of the program.

        Args:
            kill_after: seconds until a kill, unless the run has ended.
            order: `folder`, where it is run; `variables` of the environment; `prepare`, "module:function" that is called first.
        """
        order |= {"arguments": [str(x) for x in arguments], "kill_after": kill_after, "log": str(self._log)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        return Ended(told["code"], told["seconds"], self._log.read_text(errors="replace"), told["modules"])

    def import_all(self, modules: Sequence[str]) -> None:
        """Have every further run begin with these modules imported."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"modules": list(modules)}) + "\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def _serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "modules" in order:
            for name in order["modules"]:
                try:
                    importlib.import_module(name)
                except Exception:  # some are only there under conditions of their own
                    continue
            answer: dict[str, object] = {}
        else:
            answer = _run(order)
        print(json.dumps(answer), flush=True)


def _run(order: Mapping[str, object]) -> dict[str, object]:
    read, write = os.pipe()
    began = time.monotonic()
    process = os.fork()
    if process == 0:
        os.close(read)
        _child(order, write)
    os.close(write)
    limit = order["kill_after"]
    timer = threading.Timer(limit if isinstance(limit, float) else HANGS_AFTER, os.kill, (process, signal.SIGKILL))
    timer.start()
    with os.fdopen(read) as pipe:  # its end comes with the process's
        told = pipe.read()
    status = os.waitpid(process, 0)[1]
    timer.cancel()
    timer.join()
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - began,
        "modules": told.split(),
    }


def _child(order: Mapping[str, object], told: int) -> None:
    code = 70
    try:
        log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ |= order.get("variables", {})  # type: ignore[arg-type,operator]
        os.chdir(str(order.get("folder", ".")))
        if prepare := order.get("prepare"):
            module, function = str(prepare).split(":")
            getattr(importlib.import_module(module), function)()
        from trtconvert.cli import main

        arguments = order["arguments"]
        assert isinstance(arguments, list)
        try:
            main(arguments, prog_name="trtconvert")
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
        sys.stdout.flush()
        os.write(told, " ".join(name for name in sys.modules if name != "__main__").encode())
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
