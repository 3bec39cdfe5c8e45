"""Hashes everything that a model's outputs depend on, without loading the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtconvert.entry_point import source_identity
from trtconvert.errors import UserError
from trtconvert.files import PART_BYTES, digests
from trtconvert.models.saved import INDEX, pipeline_folder
from trtconvert.recipe import ONNX, LoraSection, ModelSection
from trtconvert.weights.lora_files import refuse_unreadable, settings_beside


def is_identity(
    recorded: str, section: ModelSection, loras: Sequence[LoraSection] = (), *, code: str | None = None
) -> bool:
    """Returns whether a recorded identity is that of a model. Earlier versions hashed large files whole. For arguments and errors
    see `identity`."""
    return any(recorded == identity(section, loras, code=code, part_bytes=size) for size in (PART_BYTES, None))


def identity(
    section: ModelSection,
    loras: Sequence[LoraSection] = (),
    *,
    code: str | None = None,
    part_bytes: int | None = PART_BYTES,
) -> str:
    """Returns the SHA-256 over the weights, the configurations for a file of weights, the images, the options with the files that
    they name by absolute paths, and the code of a `package.module:function`.

    Args:
        code: `source_identity` of the function, where it differs from that of the code in the current folder.
        part_bytes: see `trtconvert.files.Hashing.digest`.
    Raises:
        UserError: the weights, an image or a file that an option names cannot be read.
    """
    parts: dict[str, Any] = {"source": section.source, "options": section.options}
    if section.weights is not None:
        try:
            parts["weights"] = _hash_of_file_or_folder(section.weights, part_bytes)
        except OSError as error:
            raise UserError(
                f"cannot read the weights {section.weights}",
                expected="a file of weights or a folder; the path is relative to the recipe",
                got=error.strerror or type(error).__name__,
                remedy="correct model.weights in the recipe",
            ) from error
        if section.source == ONNX:
            beside = _beside(section)
            parts["beside"] = dict(zip((path.name for path in beside), _sha256s(beside, part_bytes), strict=True))
        elif not section.weights.is_dir() and (folder := pipeline_folder(section.weights, section.config)):
            parts["config"] = _configurations(folder, part_bytes)
    if section.images:
        expected = "an image; the path is relative to the recipe"
        parts["images"] = {
            argument: [_hash_of_named_file(path, "image", "images", expected, part_bytes) for path in of]
            if isinstance(of, list)
            else _hash_of_named_file(of, "image", "images", expected, part_bytes)
            for argument, of in section.images.items()
        }
    if code := source_identity(section.source) if code is None else code:
        parts["code"] = code
        names = [name for name in _nested_texts(section.options) if _is_file(name)]
        if names:
            expected = "a file that this user may read"
            parts["files"] = {
                name: _hash_of_named_file(Path(name), "file", "options", expected, part_bytes) for name in names
            }
    if loras:
        parts["loras"] = [_lora(lora, part_bytes) for lora in loras]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _beside(section: ModelSection) -> list[Path]:
    """Returns the files of weights beside an ONNX model, and the file of conditions that its options name."""
    from trtconvert.models.onnx.files import external_files  # other models do without the library

    assert section.weights is not None
    conditions = section.options.get("conditions")
    named = section.weights.parent / conditions if isinstance(conditions, str) else None
    return [*external_files(section.weights), *([named] if named is not None and named.is_file() else [])]


def _lora(section: LoraSection, part_bytes: int | None) -> dict[str, Any]:
    refuse_unreadable(section.file)
    files = [path for path in (section.file, settings_beside(section.file)) if path is not None]
    return {"target": section.target, "scale": section.scale, "files": _sha256s(files, part_bytes)}


def _configurations(folder: Path, part_bytes: int | None) -> dict[str, str]:
    """Hashes a pipeline's folder without the files of weights beside its index, which have other uses."""
    parts = sorted(path for path in folder.iterdir() if path.is_dir())
    return {INDEX: _sha256s([folder / INDEX], part_bytes)[0]} | {
        f"{part.name}/{name}": digest for part in parts for name, digest in _hashes(part, part_bytes).items()
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


def _hash_of_named_file(path: Path, what: str, field: str, expected: str, part_bytes: int | None) -> str:
    """Returns the SHA-256 of a file that a field of the model section names."""
    try:
        return _sha256s([path], part_bytes)[0]
    except OSError as error:
        raise UserError(
            f"cannot read the {what} {path}",
            expected=expected,
            got=error.strerror or type(error).__name__,
            remedy=f"correct model.{field} in the recipe",
        ) from error


def _hash_of_file_or_folder(path: Path, part_bytes: int | None) -> str | dict[str, str]:
    return _hashes(path, part_bytes) if path.is_dir() else _sha256s([path], part_bytes)[0]


def _hashes(path: Path, part_bytes: int | None) -> dict[str, str]:
    files = [file for file in sorted(_files_below(path)) if file.is_file()]
    names = (str(file.relative_to(path)) for file in files)
    return dict(zip(names, _sha256s(files, part_bytes), strict=True))


def _sha256s(paths: Sequence[Path], part_bytes: int | None) -> list[str]:
    return [found.sha256 for found in digests(paths, part_bytes)]


def _files_below(folder: Path) -> Iterator[Path]:
    """Yields all files below a folder, also behind links: a pipeline's model may be a link to a finetuned one."""
    for here, folders, names in os.walk(folder, followlinks=True):
        yield from (Path(here, name) for name in names)
        above = Path(here).resolve()
        # Skips links to a folder above: os.walk follows the names that remain in its list.
        folders[:] = [name for name in folders if not above.is_relative_to(Path(here, name).resolve())]
