"""Exports models in a process of their own, while the GPU computes for other stages.

An export keeps one core busy, and needs little of the GPU. The two processes share the cache: afterwards the build finds the
exported models there. A build whose process failed exports the models itself, and prints the errors.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from trtconvert.cache import Cache
from trtconvert.entry_point import look_in
from trtconvert.files import threads
from trtconvert.progress import Reporter
from trtconvert.stages.build import Build

FEWEST_CORES = 4
"""The other process would slow the stages of the build down on fewer cores."""

_WATCH_SECONDS = 1.0


def pays(build: Build) -> bool:
    """Returns whether models are exported while the GPU computes. Offloaded models need the GPU's memory and the host's copies
    for themselves."""
    place = build.place
    return place.on_gpu and not place.offload and threads() >= FEWEST_CORES


class ExportAhead:
    """The process that exports models of a build.

    Args:
        what: the models, in words.
        export: runs the stages of the export. A function of a module, which the other process imports.
        given: further arguments of `export`, which are pickled.
    """

    def __init__(self, build: Build, what: str, export: Callable[..., Any], *given: Any) -> None:
        self._build, self._what, self._work = build, what, (export, given)
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def ended(self) -> Iterator[ExportAhead]:
        """Ends the process with the block, if it still runs."""
        try:
            yield self
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def start(self) -> None:
        """Starts the process once, where it pays. Without a process to start, the build exports the models itself."""
        build = self._build
        if self._process is not None or not pays(build):
            return
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            assert self._process.stdin is not None
            cache = build.cache.folder.resolve()
            of_build = build.recipe, build.weights, build.place, cache, build.skip_bad, build.native
            with self._process.stdin as stdin:
                pickle.dump((sys.path, _current_gpu(build), of_build, *self._work), stdin)

    def wait(self) -> None:
        """Waits for the export, if the process runs."""
        if self._process is not None and self._process.poll() is None:
            with self._build.report.stage(f"export {self._what}"):
                self._process.wait()


def main() -> None:
    """Exports the models of the build that stdin holds."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    modules_in, gpu, of_build, export, given = pickle.load(sys.stdin.buffer)
    recipe, weights, place, cache, skip_bad, native = of_build
    for folder in modules_in:
        look_in(Path(folder))
    if gpu is not None:
        import torch

        torch.cuda.set_device(gpu)
    export(Build(recipe, weights, place, Cache(cache), Reporter(Console(quiet=True)), skip_bad, native), *given)


def _current_gpu(build: Build) -> int | None:
    """Returns the index of the GPU that the build computes on; None for a CPU."""
    if not build.place.on_gpu:
        return None
    import torch

    return torch.cuda.current_device()


def _end_with(parent: int) -> None:
    """Ends this process after its parent, which may be killed."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
