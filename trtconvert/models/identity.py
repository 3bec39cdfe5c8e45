"""What a model's outputs depend on, as a hash, without loading the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trtconvert.entry_point import source_identity
from trtconvert.errors import UserError
from trtconvert.files import sha256
from trtconvert.models.saved import INDEX, pipeline_folder
from trtconvert.recipe import ONNX, LoraSection, ModelSection
from trtconvert.weights.lora_files import refuse_unreadable, settings_beside


def identity(section: ModelSection, loras: Sequence[LoraSection] = (), *, code: str | None = None) -> str:
    """SHA-256 over the weights, the configurations of a file of weights, the images, the options with the files that they name by
    absolute paths, and the code of a `package.module:function`.

    Args:
        code: `source_identity` of the function, if that is not to be what lies here now.
    Raises:
        UserError: the weights, an image or a file that an option names cannot be read.
    """
    parts: dict[str, Any] = {"source": section.source, "options": section.options}
    if section.weights is not None:
        try:
            parts["weights"] = _contents(section.weights)
        except OSError as error:
            raise UserError(
                f"cannot read the weights {section.weights}",
                expected="a file of weights or a folder; the path is relative to the recipe",
                got=error.strerror or type(error).__name__,
                remedy="correct model.weights in the recipe",
            ) from error
        if section.source == ONNX:
            parts["beside"] = {path.name: sha256(path) for path in _beside(section)}
        elif not section.weights.is_dir() and (folder := pipeline_folder(section.weights, section.config)):
            parts["config"] = _configurations(folder)
    if section.images:
        expected = "an image; the path is relative to the recipe"
        parts["images"] = {
            argument: [_content(path, "image", "images", expected) for path in of]
            if isinstance(of, list)
            else _content(of, "image", "images", expected)
            for argument, of in section.images.items()
        }
    if code := source_identity(section.source) if code is None else code:
        parts["code"] = code
        names = [name for name in _texts(section.options) if _is_file(name)]
        if names:
            expected = "a file that this user may read"
            parts["files"] = {name: _content(Path(name), "file", "options", expected) for name in names}
    if loras:
        parts["loras"] = [_lora(lora) for lora in loras]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _beside(section: ModelSection) -> list[Path]:
    """Files of weights beside an ONNX model, and that of conditions which its options name."""
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
    """What a pipeline's folder has beside files of weights that lie where its index does: those are of other uses."""
    parts = sorted(path for path in folder.iterdir() if path.is_dir())
    return {INDEX: sha256(folder / INDEX)} | {
        f"{part.name}/{name}": digest for part in parts for name, digest in _hashes(part).items()
    }


def _texts(value: object) -> Iterator[str]:
    """All texts in options, which may have options of their own."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _is_file(name: str) -> bool:
    try:
        # What a relative one means is for the function to say.
        return Path(name).is_absolute() and Path(name).is_file()
    except (OSError, ValueError):  # too long, or with a null character: a text
        return False


def _content(path: Path, what: str, field: str, expected: str) -> str:
    """SHA-256 of a file that a field of the model section names."""
    try:
        return sha256(path)
    except OSError as error:
        raise UserError(
            f"cannot read the {what} {path}",
            expected=expected,
            got=error.strerror or type(error).__name__,
            remedy=f"correct model.{field} in the recipe",
        ) from error


def _contents(path: Path) -> str | dict[str, str]:
    """SHA-256 of a file, or of every file in a folder by its path there."""
    return _hashes(path) if path.is_dir() else sha256(path)


def _hashes(path: Path) -> dict[str, str]:
    files = [file for file in sorted(_files(path)) if file.is_file()]
    with ThreadPoolExecutor() as pool:  # the hash of a large file lets other threads run
        return {
            str(file.relative_to(path)): digest for file, digest in zip(files, pool.map(sha256, files), strict=True)
        }


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, also behind links: a pipeline's model may be a link to one that was finetuned."""
    for here, folders, names in os.walk(folder, followlinks=True):
        yield from (Path(here, name) for name in names)
        above = Path(here).resolve()
        # Not in circles: os.walk goes where what is left in its list leads.
        folders[:] = [name for name in folders if not above.is_relative_to(Path(here, name).resolve())]
