"""A build whose stages tell which modules of the package ran while they were made: `python traced_stages.py RECIPE FOLDER`.

Each stage is made in a process of its own, which begins with what the command itself has imported. Prints JSON for each: the
names of code that its key holds, and the modules that ran. The stage that measures errors on a GPU is run too, on the CPU.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from rich.console import Console

import trtconvert
from trtconvert import pipeline
from trtconvert.cache import Cache, Stage
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe
from trtconvert.stages.errors import errors_stage

PACKAGE = Path(trtconvert.__file__).parent
IMPORTED = ("torch", "torch.onnx", "torch.export", "torch._dynamo", "onnx", "onnxruntime", "onnx_ir", "onnxscript")
IMPORTED += ("scipy.optimize", "PIL.Image", "matplotlib.pyplot")
"""Libraries that the stages import: importing them once, before the processes of the stages and without the trace, saves time."""


def ran(work: Callable[[], None]) -> set[str]:
    """Modules of the package whose functions were called, or that were imported."""
    called = set[CodeType]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    # Other threads that began under the profile may still add to the set.
    files = [Path(code.co_filename) for code in tuple(called)]
    inner = [file.relative_to(PACKAGE.parent).with_suffix("").parts for file in files if file.is_relative_to(PACKAGE)]
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in inner}


class Traced(Cache):
    """A cache that tells on stdout how each stage was made."""

    def stage(self, name: str, code: Collection[str], reads: Mapping[str, Any], make: Callable[[Path], None]) -> Stage:
        def make_apart(folder: Path) -> None:
            sys.stdout.flush()
            if (process := os.fork()) == 0:
                try:
                    modules = ran(lambda: make(folder))
                    print(json.dumps({"stage": name, "code": sorted(code), "ran": sorted(modules)}), flush=True)
                    os._exit(0)
                finally:  # with the error on stderr, as of any process
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                    os._exit(1)
            assert os.waitpid(process, 0)[1] == 0, name

        return super().stage(name, code, reads, make_apart)


def main(recipe: Path, folder: Path) -> None:
    for name in IMPORTED:
        importlib.import_module(name)

    def verify_stage(build: Any, planned: Any, *others: Any) -> Stage:
        errors_stage(build, planned)
        return verified(build, planned, *others)

    verified, pipeline.verify_stage = pipeline.verify_stage, verify_stage
    report = Reporter(Console(quiet=True))
    pipeline.build(load_recipe(recipe), folder / "bundle", Traced(folder / "cache"), report)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
