"""The build cache: each stage's files under the hash of everything the stage reads."""

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
from trtconvert.files import is_temporary, one_at_a_time, sha256, sweep_files, whole_folder
from trtconvert.imports import code_hash

_INDEX = "stage.json"


def default_folder() -> Path:
    """The user's cache folder, as the XDG base directory specification places it.

    Raises:
        UserError: this user has no home folder. Another place would not do: engines hold code, and others could write it.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        # The specification has relative ones ignored: they would be another place in every folder.
        return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "trtconvert"
    except RuntimeError as error:
        raise UserError(
            "there is no place for the build cache",
            expected="a home folder, or XDG_CACHE_HOME",
            got=str(error),
            remedy="set XDG_CACHE_HOME or HOME to a folder that only this user writes, or give --cache or --no-cache",
        ) from error


def timing_path(name: str, suffix: str) -> Path | None:
    """Where what was measured on this machine is kept, in the user's cache folder; None for a user without one.

    Args:
        name: in words, of what was measured and what measured it.
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
        key: the hash they are filed under; what a later stage that reads them hashes in turn.
        folder: where they are.
        reused: whether they were there already.
        hashes: SHA-256 by name, as it was when the stage was taken.
    """

    key: str
    folder: Path
    reused: bool
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cache:
    """Stages by content. Killed stages leave nothing; damaged ones are made again.

    Attributes:
        folder: root of the cache.
    """

    folder: Path

    @property
    def instead(self) -> str:
        """For messages, what the user can do to have another place."""
        return "set TMPDIR to another folder" if is_temporary(self.folder) else "give another folder with --cache"

    def stage(self, name: str, code: Collection[str], reads: Mapping[str, Any], make: Callable[[Path], None]) -> Stage:
        """The stage's files, made by `make` in the folder it is given unless they are here already.

        Of several processes that want one stage, the first makes it, and the others wait for it.

        Args:
            code: names of the modules of this package that decide the outcome; what they import counts too, see `code_modules`.
            reads: everything else that decides it, as JSON values.
        """
        key = _key(code, reads, stage=name)
        folder = self.folder / f"{name}-{key[:32]}"
        if (hashes := _whole(folder)) is not None:
            return Stage(key, folder, True, hashes)
        with one_at_a_time(folder.with_name(f".{folder.name}"), self.instead):  # what has no dot is a finished stage
            if (hashes := _whole(folder)) is not None:  # another process has made it meanwhile
                return Stage(key, folder, True, hashes)
            with whole_folder(folder, self.instead) as partial:
                sweep_files(self.folder)  # what killed processes left of other stages
                make(partial)
                hashes = {path.name: sha256(path) for path in sorted(partial.iterdir())}
                index = {name: [(partial / name).stat().st_size, digest] for name, digest in hashes.items()}
                (partial / _INDEX).write_text(json.dumps(index, indent=1))
        return Stage(key, folder, False, hashes)

    def work(self, name: str, code: Collection[str], reads: Mapping[str, Any]) -> Path:
        """The folder of what a stage keeps while it is not finished, or for others like it; whoever wants it makes it.

        Args: see `stage`.
        """
        return self.folder / f"{name}-{_key(code, reads)[:32]}"


def _key(code: Collection[str], reads: Mapping[str, Any], **more: str) -> str:
    """SHA-256 of all that decides a stage, or what one keeps: modules by their names, and JSON values."""
    document = {"code": code_identity(*sorted(code)), "reads": reads} | more
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()


def _whole(folder: Path) -> dict[str, str] | None:
    """The hashes of a stage's files; None where it is not there, or damaged."""
    try:
        index = {name: (size, digest) for name, (size, digest) in read_json(folder / _INDEX).items()}
        for name, (size, digest) in index.items():
            if (folder / name).stat().st_size != size or sha256(
                folder / name
            ) != digest:  # sizes first: they cost nothing
                return None
        return {name: digest for name, (_, digest) in index.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return None


@functools.cache
def code_identity(*names: str) -> str:
    """Hash of code of this package, see `code_modules`, and of the versions of the libraries that stages call."""
    return hashlib.sha256(json.dumps([code_hash(names), versions()], sort_keys=True).encode()).hexdigest()


LIBRARIES = (
    "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "polygraphy", "numpy", "scipy", "pillow", "diffusers",
    "transformers", "torchmetrics", "torch-fidelity", "lpips", "tensorrt", "tensorrt_rtx_cu13_libs",
)  # fmt: skip
"""Those that stages and evaluations compute with."""


def versions() -> dict[str, str]:
    """Versions of trtconvert and of the installed libraries that take part in a build."""
    found = {}
    for name in ("trtconvert", *LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
