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

    The build and the process have half of the cores each while the process runs. Threads of one operator wait for each other:
    with more threads than cores, a small operator takes ten times as long.

    Args:
        what: the models, in words.
        export: runs the stages of the export. A function of a module, which the other process imports.
        loads: loads the models of the build in the other process before the export starts. A function of a module.
    """

    def __init__(
        self, build: Build, what: str, export: Callable[..., Any], loads: Callable[[Build], Any] | None = None
    ) -> None:
        self._build, self._what, self._export, self._loads = build, what, export, loads
        self._process: subprocess.Popen[bytes] | None = None
        self._threads = 0  # of this process before it shared its cores

    @contextlib.contextmanager
    def ended(self) -> Iterator[ExportAhead]:
        """Ends the process with the block, if it still runs."""
        try:
            yield self
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                if self._process.stdin is not None:
                    self._process.stdin.close()
                self._take_cores()

    @property
    def prepared(self) -> bool:
        """Whether the process was started."""
        return self._process is not None

    def prepare(self) -> None:
        """Starts the process once, where it pays. The process loads the models and waits for `start`."""
        build = self._build
        if self._process is not None or not pays(build):
            return
        import torch

        before = torch.get_num_threads()
        half = max(1, before // 2)
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": str(half)},
            )
            self._threads = before
            torch.set_num_threads(half)
            cache = build.cache.folder.resolve()
            of_build = build.recipe, build.weights, build.place, cache, build.skip_bad, build.native
            self._tell((sys.path, _current_gpu(build), of_build, self._loads))

    def start(self, *given: Any) -> None:
        """Starts the export once, where it pays. Without a process, the build exports the models itself.

        Args:
            given: further arguments of the export, which are pickled.
        """
        self.prepare()
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError), stdin:  # the process may have ended
                self._tell((self._export, given))

    def wait(self) -> None:
        """Waits for the export, if the process runs."""
        if self._process is not None and self._process.poll() is None:
            with self._build.report.stage(f"export {self._what}"):
                self._process.wait()
        self._take_cores()

    def _tell(self, message: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def _take_cores(self) -> None:
        """Gives this process all of its cores again."""
        if self._threads:
            import torch

            torch.set_num_threads(self._threads)
            self._threads = 0


def main() -> None:
    """Exports the models of the build that stdin holds."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    modules_in, gpu, of_build, loads = pickle.load(sys.stdin.buffer)
    recipe, weights, place, cache, skip_bad, native = of_build
    for folder in modules_in:
        look_in(Path(folder))
    if gpu is not None:
        import torch

        torch.cuda.set_device(gpu)
    build = Build(recipe, weights, place, Cache(cache), Reporter(Console(quiet=True)), skip_bad, native)
    if loads is not None:
        loads(build)
    export, given = pickle.load(sys.stdin.buffer)
    export(build, *given)


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
