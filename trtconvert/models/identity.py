"""Hashes everything that a model's outputs depend on, without loading the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trtconvert.documents import PIPELINE_INDEX
from trtconvert.entry_point import source_identity
from trtconvert.errors import UserError
from trtconvert.files import sha256
from trtconvert.models.saved import pipeline_folder
from trtconvert.recipe import ONNX, LoraSection, ModelSection
from trtconvert.weights.lora_files import refuse_unreadable, settings_beside


def identity(section: ModelSection, loras: Sequence[LoraSection] = (), *, code: str | None = None) -> str:
    """Returns the SHA-256 over the weights, the configurations for a file of weights, the images, the options with the files that
    they name by absolute paths, and the code of a `package.module:function`.

    Args:
        code: `source_identity` of the function, where it differs from that of the code in the current folder.
    Raises:
        UserError: the weights, an image or a file that an option names cannot be read.
    """
    parts: dict[str, Any] = {"source": section.source, "options": section.options}
    if section.weights is not None:
        expected = "a file of weights or a folder; the path is relative to the recipe"
        hashed = _hashes if section.weights.is_dir() else sha256
        parts["weights"] = _hash_of_named(section.weights, "weights", "weights", expected, hashed)
        if section.source == ONNX:
            parts["beside"] = {path.name: sha256(path) for path in _beside(section)}
        elif not section.weights.is_dir() and (folder := pipeline_folder(section.weights, section.config)):
            parts["config"] = _configurations(folder)
    if section.images:
        expected = "an image; the path is relative to the recipe"
        parts["images"] = {
            argument: [_hash_of_named(path, "image", "images", expected) for path in of]
            if isinstance(of, list)
            else _hash_of_named(of, "image", "images", expected)
            for argument, of in section.images.items()
        }
    if code := source_identity(section.source) if code is None else code:
        parts["code"] = code
        names = [name for name in _nested_texts(section.options) if _is_file(name)]
        if names:
            expected = "a file that this user may read"
            parts["files"] = {name: _hash_of_named(Path(name), "file", "options", expected) for name in names}
    if loras:
        parts["loras"] = [_lora(lora) for lora in loras]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _beside(section: ModelSection) -> list[Path]:
    """Returns the files of weights beside an ONNX model, and the file of conditions that its options name."""
    from trtconvert.models.onnx.files import external_files  # other models do without the library

    assert section.weights is not None
    conditions = section.options.get("conditions")
    named = section.weights.parent / conditions if isinstance(conditions, str) else None
    return [*external_files(section.weights), *([named] if named is not None and named.is_file() else [])]


def _lora(section: LoraSection) -> dict[str, Any]:
    refuse_unreadable(section.file)
    files = [path for path in (section.file, settings_beside(section.file)) if path is not None]
    return {"target": section.target, "scale": section.scale, "files": [sha256(path) for path in files]}


def _configurations(folder: Path) -> dict[str, str]:
    """Hashes a pipeline's folder without the files of weights beside its index, which have other uses."""
    parts = sorted(path for path in folder.iterdir() if path.is_dir())
    return {PIPELINE_INDEX: sha256(folder / PIPELINE_INDEX)} | {
        f"{part.name}/{name}": digest for part in parts for name, digest in _hashes(part).items()
    }


def _nested_texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _nested_texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _nested_texts(inner)


def _is_file(name: str) -> bool:
    try:
        # The function decides what a relative path means.
        return Path(name).is_absolute() and Path(name).is_file()
    except (OSError, ValueError):  # too long, or with a null character: no path
        return False


def _hash_of_named(
    path: Path, what: str, field: str, expected: str, hashed: Callable[[Path], Any] = sha256
) -> str | dict[str, str]:
    """Returns the hash of a file or folder that a field of the model section names."""
    try:
        return hashed(path)
    except OSError as error:
        raise UserError(
            f"cannot read the {what} {path}",
            expected=expected,
            got=error.strerror or type(error).__name__,
            remedy=f"correct model.{field} in the recipe",
        ) from error


def _hashes(path: Path) -> dict[str, str]:
    files = [file for file in sorted(_files_below(path)) if file.is_file()]
    with ThreadPoolExecutor() as pool:  # hashing a large file releases the interpreter's lock
        return {
            str(file.relative_to(path)): digest for file, digest in zip(files, pool.map(sha256, files), strict=True)
        }


def _files_below(folder: Path) -> Iterator[Path]:
    """Yields all files below a folder, also behind links: a pipeline's model may be a link to a finetuned one."""
    for here, folders, names in os.walk(folder, followlinks=True):
        yield from (Path(here, name) for name in names)
        above = Path(here).resolve()
        # Skips links to a folder above: os.walk follows the names that remain in its list.
        folders[:] = [name for name in folders if not above.is_relative_to(Path(here, name).resolve())]
