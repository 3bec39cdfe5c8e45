"""The build cache: each stage's files under the hash of everything the stage reads."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtconvert.errors import UserError
from trtconvert.files import sha256, whole_folder

_INDEX = "stage.json"


def default_folder() -> Path:
    """The user's cache folder, as the XDG base directory specification places it.

    Raises:
        UserError: this user has no home folder. Another place would not do: engines hold code, and others could write it.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "trtconvert"
    except RuntimeError as error:
        raise UserError(
            "there is no place for the build cache",
            expected="a home folder, or XDG_CACHE_HOME",
            got=str(error),
            remedy="set XDG_CACHE_HOME or HOME to a folder that only this user writes, or give --cache or --no-cache",
        ) from error


@dataclass(frozen=True)
class Stage:
    """Files of a finished stage.

    Attributes:
        key: the hash they are filed under; what a later stage that reads them hashes in turn.
        folder: where they are.
        reused: whether they were there already.
    """

    key: str
    folder: Path
    reused: bool


@dataclass(frozen=True)
class Cache:
    """Stages by content. Killed stages leave nothing; damaged ones are made again.

    Attributes:
        folder: root of the cache.
    """

    folder: Path

    def stage(self, name: str, reads: Mapping[str, Any], make: Callable[[Path], None]) -> Stage:
        """The stage's files, made by `make` in the folder it is given unless they are here already.

        Args:
            reads: everything that decides the outcome, as JSON values.
        """
        text = json.dumps({"stage": name, "code": code_identity(), "reads": reads}, sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()
        folder = self.folder / f"{name}-{key[:32]}"
        if _is_whole(folder):
            return Stage(key, folder, reused=True)
        with whole_folder(folder, "give another folder with --cache") as partial:
            make(partial)
            hashes = {path.name: sha256(path) for path in sorted(partial.iterdir())}
            (partial / _INDEX).write_text(json.dumps(hashes, indent=1))
        return Stage(key, folder, reused=False)


def _is_whole(folder: Path) -> bool:
    try:
        hashes = json.loads((folder / _INDEX).read_text())
        return all(sha256(folder / name) == digest for name, digest in hashes.items())
    except (OSError, ValueError, AttributeError):
        return False


@functools.cache
def code_identity() -> str:
    """Hash of this package's sources and of the versions of the libraries that stages call."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*.py")):
        digest.update(str(source.relative_to(package)).encode())
        digest.update(source.read_bytes())
    digest.update(json.dumps(versions(), sort_keys=True).encode())
    return digest.hexdigest()


LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime", "numpy", "diffusers", "tensorrt", "tensorrt_rtx_cu13_libs")


def versions() -> dict[str, str]:
    """Versions of trtconvert and of the installed libraries that take part in a build."""
    found = {}
    for name in ("trtconvert", *LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
