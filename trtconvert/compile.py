"""`trtconvert compile`: give a bundle the engine of the GPU that it has reached. Needs no model code and no calibration."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trtconvert.bundle import MANIFEST, Manifest, check_files, read_manifest, write_manifest
from trtconvert.engine import tensorrt
from trtconvert.files import whole_folder
from trtconvert.progress import Reporter, say


def compile_bundle(folder: Path, report: Reporter) -> Manifest:
    """Build a TensorRT engine for this machine's GPU from each component's ONNX, into the bundle.

    The bundle is replaced once it is whole; until then, and after a failure, the old one stands. Of several that compile one
    bundle at a time, each waits for the others and keeps their engines.

    Returns:
        The new manifest.
    Raises:
        UserError: not a bundle, or an altered one.
        BackendUnavailable: no GPU, no TensorRT, or no plugin library here.
        TrtconvertError: the engine cannot be built.
    """
    tensorrt.load()
    with _alone(folder, lambda: say(report.console, f"another process compiles {folder}: waiting for it")):
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        components = {}
        with whole_folder(folder) as partial, report.live():
            shutil.copytree(folder, partial, dirs_exist_ok=True, copy_function=_link_or_copy)
            for name, component in manifest.components.items():
                with report.stage(f"engine {name}") as bar:
                    engine = tensorrt.build_engine(
                        name, component, partial / component.onnx, manifest.recipe.engine, bar
                    )
                place = partial / engine.record.file
                place.parent.mkdir(exist_ok=True)
                place.unlink(missing_ok=True)  # a link: writing to it would change the old bundle
                place.write_bytes(engine.plan)
                others = [other for other in component.engines if other.file != engine.record.file]
                components[name] = component.model_copy(update={"engines": [*others, engine.record]})
            (partial / MANIFEST).unlink()
            write_manifest(partial, manifest.model_copy(update={"components": components}))
        return read_manifest(folder)


def _link_or_copy(source: str, target: str) -> None:
    """A second name for a file, which costs no space; a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def _alone(folder: Path, wait: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of a bundle, its manifest's; `wait` is called where another process has it.

    That process leaves another folder in the bundle's place, with a lock of its own, so the lock is taken again until it is
    that of the folder which is there.
    """
    waiting = False
    while True:
        read_manifest(folder)  # refuses what is no bundle
        handle = os.open(folder / MANIFEST, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waiting:
                    wait()
                waiting = True
                fcntl.flock(handle, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(handle), os.stat(folder / MANIFEST)):
                yield
                return
        finally:
            os.close(handle)
