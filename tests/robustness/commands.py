"""The five commands that work for long, each with a small job, for tests that stop them on the way.

All that a job reads and writes is in one folder, so that what two runs left can be compared file by file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from forking import Ended, Forking
from PIL import Image
from pretend_engines import pretend_engines
from safetensors.torch import save_file
from support import Built, tiny_recipe

from trtconvert import bundle
from trtconvert.engine import BuiltEngine, tensorrt


@dataclass(frozen=True)
class Command:
    """A command with a job.

    Attributes:
        name: of the command; arguments: the rest, relative to the job's folder.
        output: what it writes; where it is a bundle, there is one before.
        lay_out: puts what it reads into an empty folder, from the bundle of the tiny model.
        prepare: what its process calls first.
        is_once: it refuses to write what is there already.
    """

    name: str
    arguments: tuple[str, ...]
    output: str
    lay_out: Callable[[Path, Built], object]
    prepare: str = ""
    is_once: bool = False

    def place(self, folder: Path, tiny: Built) -> Path:
        """The folder, which is there and empty, ready for the job."""
        (folder / "temporary").mkdir()
        self.lay_out(folder, tiny)
        return folder

    def run(self, forking: Forking, folder: Path, kill_after: float | None = None) -> Ended:
        """In the folder, with the cache and temporary files in it too."""
        variables = {"XDG_CACHE_HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary")}
        arguments = [self.name, *self.arguments]
        return forking.run(arguments, kill_after, folder=str(folder), variables=variables, prepare=self.prepare)

    def check_output(self, folder: Path, finished: Mapping[str, str]) -> None:
        """What the command writes is not there, or is whole: of a bundle what its manifest says, else what a run leaves.

        Args:
            finished: what `left` tells of the folder of a run that nothing disturbed.
        """
        output = folder / self.output
        if not output.exists():
            assert self.name not in ("build", "compile"), "the earlier bundle is gone"
        elif output.is_dir() and (output / bundle.MANIFEST).exists():
            bundle.check_files(output, bundle.read_manifest(output))
        else:
            of_output = {path: what for path, what in left(folder).items() if path.startswith(self.output)}
            assert of_output == {path: what for path, what in finished.items() if path.startswith(self.output)}


OTHERS = ("Microsoft", "matplotlib", "torchinductor_root", ".ses")
"""Files of libraries in the folders for caches and temporary files."""


def left(folder: Path) -> dict[str, str]:
    """Contents of a folder by path: a hash of each file; an evaluation without its time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        place = path.relative_to(folder)
        if (
            any(part in OTHERS for part in place.parts) or path.suffix == ".lock"
        ):  # which says nothing without its process
            continue
        content = path.read_bytes() if path.is_file() else b""
        if path.name == "evaluation.json":
            content = json.dumps(json.loads(content) | {"created": ""}).encode()
        found[str(place)] = hashlib.sha256(content).hexdigest()[:12] if path.is_file() else "folder"
    return found


def undisturbed(command: Command, forking: Forking, place: Callable[[], Path]) -> tuple[float, dict[str, str]]:
    """How long a command takes that nothing disturbs, and what it leaves.

    Args:
        place: makes a folder for the job.
    """
    seconds, finished = 0.0, {}
    for _ in range(2):  # the first one imports what the others begin with
        folder = place()
        ended = command.run(forking, folder)
        assert ended.code == 0, ended.output
        forking.import_all(ended.modules)
        seconds, finished = ended.seconds, left(folder)
    return seconds, finished


def pretend_gpu() -> None:
    """A machine with TensorRT, whose engines are no engines: each follows from its ONNX file, and takes a while."""

    def build_engine(name: str, component: Any, onnx: Path, options: object, watch: object) -> BuiltEngine:
        time.sleep(0.05)
        record = bundle.EngineRecord.of(name, "tensorrt", "10.6.0", "sm90", "NVIDIA H200")
        record = record.model_copy(update={"profiles": component.profiles})
        return BuiltEngine(hashlib.sha256(onnx.read_bytes()).digest() * 1000, record)

    tensorrt.load = lambda: None  # type: ignore[assignment]
    tensorrt.device_architecture = lambda: "sm90"
    tensorrt.build_engine = build_engine  # type: ignore[assignment]
    pretend_engines(setattr)


def _recipe(folder: Path, _: Built) -> None:
    tiny_recipe(folder, calibration={"samples": 8, "batch": 2})


def _recipe_and_bundle(folder: Path, tiny: Built) -> None:
    """A recipe whose build searches a plan and leaves steps out, and an earlier bundle in the place of the output."""
    tiny_recipe(
        folder,
        attention={"modes": "auto"},
        calibration={"samples": 8, "batch": 2},
        plan={"samples": 1, "steps": 4, "min_psnr": 20},
        steps={"computed": 0.5, "calibrated": 8, "samples": 2},
    )
    shutil.copytree(tiny.bundle, folder / "out")


def _bundle(folder: Path, tiny: Built) -> None:
    shutil.copytree(tiny.bundle, folder / "bundle")


def _evaluation(folder: Path, tiny: Built) -> None:
    _bundle(folder, tiny)
    (folder / "images").mkdir()
    pixels = torch.randint(0, 256, (20, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for index, image in enumerate(pixels):
        Image.fromarray(image.numpy()).save(folder / "images" / f"{index:02d}.png")


def _weights(folder: Path, _: Built) -> None:
    (folder / "model").mkdir()
    generator = torch.Generator().manual_seed(0)
    for shard in range(2):
        tensors = {f"block.{shard}.{i}.weight": torch.randn(512, 512, generator=generator) for i in range(4)}
        save_file(tensors, folder / "model" / f"part{shard}.safetensors")


COMMANDS = (
    Command("build", ("recipe.yaml", "-o", "out", "--cache", "cache"), "out", _recipe_and_bundle),
    Command("compile", ("bundle", "--cache", "cache"), "bundle", _bundle, "commands:pretend_gpu"),
    Command("calibrate", ("recipe.yaml", "-o", "out.safetensors", "--cache", "cache"), "out.safetensors", _recipe),
    Command(
        "evaluate",
        ("bundle", "--reference", "images", "--features", "tiny_features:pixels", "--samples", "600", "--steps", "2"),
        "evaluation.json",
        _evaluation,
    ),
    Command("quantize", ("model", "-o", "out"), "out", _weights, is_once=True),
)
