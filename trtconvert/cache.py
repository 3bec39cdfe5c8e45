"""The build cache: the files of each stage, filed under the hash of everything that the stage reads."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtconvert.documents import read_json
from trtconvert.errors import UserError
from trtconvert.files import PART_BYTES, digests, is_temporary, one_at_a_time, sweep_files, whole_folder
from trtconvert.imports import code_hash

_INDEX = "stage.json"


def default_folder() -> Path:
    """Returns the user's cache folder after the XDG base directory specification.

    Raises:
        UserError: the user has no home folder. A shared folder would not be safe, because engines hold code.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        # The specification ignores relative paths.
        return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "trtconvert"
    except RuntimeError as error:
        raise UserError(
            "there is no folder for the build cache",
            expected="a home folder, or XDG_CACHE_HOME",
            got=str(error),
            remedy="set XDG_CACHE_HOME or HOME to a folder that only this user writes, or give --cache or --no-cache",
        ) from error


def timing_path(name: str, suffix: str) -> Path | None:
    """Returns the path of measured times in the user's cache folder; None for a user without one.

    Args:
        name: description of the measurement and of the hardware.
    """
    plain = re.sub(r"[^\w.]+", "-", name).strip("-").lower()
    try:
        return default_folder() / "timing" / f"{plain}{suffix}"
    except UserError:
        return None


@dataclass(frozen=True)
class Stage:
    """Files of a finished stage.

    Attributes:
        key: the hash of everything that the stage reads; later stages that read these files hash the key.
        folder: the folder of the files.
        reused: True if the cache had the files already.
        hashes: SHA-256 by file name, in parts for large files, see `trtconvert.files.FileDigest`.
    """

    key: str
    folder: Path
    reused: bool
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cache:
    """The cache of finished stages in `folder`. Killed stages leave no files; damaged stages are made again."""

    folder: Path

    @property
    def instead(self) -> str:
        """Remedy for messages: how the user chooses another place."""
        return "set TMPDIR to another folder" if is_temporary(self.folder) else "give another folder with --cache"

    def stage(self, name: str, code: Collection[str], reads: Mapping[str, Any], make: Callable[[Path], None]) -> Stage:
        """Returns the stage's files, which `make` writes into the folder that it gets if the cache does not have them.

        If several processes want one stage, the first makes it and the others wait.

        Args:
            code: names of this package's modules that decide the result, including their imports; see `code_modules`.
            reads: everything else that decides the result, as JSON values.
        """
        key = _key(code, reads, stage=name)
        folder = self.folder / f"{name}-{key[:32]}"
        if (hashes := _whole(folder)) is not None:
            return Stage(key, folder, True, hashes)
        with one_at_a_time(
            folder.with_name(f".{folder.name}"), self.instead
        ):  # names without a dot are finished stages
            if (hashes := _whole(folder)) is not None:  # made by another process meanwhile
                return Stage(key, folder, True, hashes)
            with whole_folder(folder, self.instead) as partial:
                sweep_files(self.folder)  # remains of other stages
                make(partial)
                paths = sorted(partial.iterdir())
                hashed = digests((path, PART_BYTES) for path in paths)
                found = {path.name: digest for path, digest in zip(paths, hashed, strict=True)}
                index = {name: [digest.size, digest.sha256] for name, digest in found.items()}
                (partial / _INDEX).write_text(json.dumps(index, indent=1))
                hashes = {name: digest.sha256 for name, digest in found.items()}
        return Stage(key, folder, False, hashes)

    def work(self, name: str, code: Collection[str], reads: Mapping[str, Any]) -> Path:
        """Returns the folder for a stage's unfinished work. The caller creates the folder. For arguments see `stage`."""
        return self.folder / f"{name}-{_key(code, reads)[:32]}"


def _key(code: Collection[str], reads: Mapping[str, Any], **more: str) -> str:
    document = {"code": code_identity(*sorted(code)), "reads": reads} | more
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def _whole(folder: Path) -> dict[str, str] | None:
    """Returns the hashes of a stage's files; None if a file is missing or damaged."""
    try:
        index = {name: (size, digest) for name, (size, digest) in read_json(folder / _INDEX).items()}
        if any((folder / name).stat().st_size != size for name, (size, _) in index.items()):
            return None
        hashes = {name: digest for name, (_, digest) in index.items()}
        found = [digest.sha256 for digest in digests((folder / name, PART_BYTES) for name in hashes)]
        return hashes if found == [*hashes.values()] else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


@functools.cache
def code_identity(*names: str) -> str:
    """Returns the hash of this package's code, see `code_modules`, and of the versions of the libraries that stages call."""
    return hashlib.sha256(json.dumps([code_hash(names), versions()], sort_keys=True).encode()).hexdigest()


LIBRARIES = (
    "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "polygraphy", "numpy", "scipy", "pillow", "diffusers",
    "transformers", "torchmetrics", "torch-fidelity", "lpips", "tensorrt", "tensorrt_rtx_cu13_libs",
)  # fmt: skip
"""Libraries of stages and evaluations."""


def versions() -> dict[str, str]:
    """Returns the versions of trtconvert and of the installed `LIBRARIES`."""
    found = {}
    for name in ("trtconvert", *LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
