"""Exports a pipeline's components in a process of their own, while the GPU calibrates the denoiser.

An export keeps one core busy and needs the GPU for one call. The two processes share the cache: afterwards the build finds the
exported components there. A build whose process failed exports the components itself, and prints the errors.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from trtconvert.cache import Cache
from trtconvert.entry_point import look_in
from trtconvert.files import threads
from trtconvert.progress import Reporter
from trtconvert.stages.build import Build
from trtconvert.stages.components import component_stages

FEWEST_CORES = 4
"""The other process would slow the calibration down on fewer cores."""

_WATCH_SECONDS = 1.0


def pays(build: Build) -> bool:
    """Returns whether components are exported while the denoiser is calibrated. Offloaded models need the GPU's memory and the
    host's copies for themselves."""
    place = build.place
    return bool(build.recipe.components) and place.on_gpu and not place.offload and threads() >= FEWEST_CORES


class ExportsAhead:
    """The process that exports the components of a build."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def ended(self) -> Iterator[ExportsAhead]:
        """Ends the process with the block, if it still runs."""
        try:
            yield self
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def start(self) -> None:
        """Starts the process. Without a process to start, the build exports the components itself."""
        build = self._build
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            assert self._process.stdin is not None
            parts = build.recipe, build.weights, build.place, build.cache.folder.resolve(), build.native, sys.path
            with self._process.stdin as given:
                pickle.dump(parts, given)

    def wait(self) -> None:
        """Waits for the exports, if the process runs."""
        if self._process is not None and self._process.poll() is None:
            with self._build.report.stage("export components"):
                self._process.wait()


def main() -> None:
    """Exports the components of the build that stdin holds."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    recipe, weights, place, cache, native, modules_in = pickle.load(sys.stdin.buffer)
    for folder in modules_in:
        look_in(Path(folder))
    component_stages(Build(recipe, weights, place, Cache(cache), Reporter(Console(quiet=True)), native=native))


def _end_with(parent: int) -> None:
    """Ends this process after its parent, which may be killed."""
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
