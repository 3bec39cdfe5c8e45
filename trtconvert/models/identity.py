"""What a model's outputs depend on, as a hash, without loading the model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtconvert.entry_point import source_file
from trtconvert.errors import UserError
from trtconvert.files import sha256
from trtconvert.recipe import ModelSection


def identity(section: ModelSection) -> str:
    """SHA-256 over the weights, the images, the options and the source file of a `package.module:function`.

    Raises:
        UserError: the weights or an image cannot be read.
    """
    parts: dict[str, Any] = {"source": section.source, "options": section.options}
    if section.weights is not None:
        try:
            parts["weights"] = _contents(section.weights)
        except OSError as error:
            raise UserError(
                f"cannot read the weights {section.weights}",
                expected="a safetensors file or a folder; the path is relative to the recipe",
                got=error.strerror or type(error).__name__,
                remedy="correct model.weights in the recipe",
            ) from error
    if section.images:
        parts["images"] = {argument: _image(path) for argument, path in section.images.items()}
    if source := source_file(section.source):
        parts["code"] = sha256(source)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _image(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise UserError(
            f"cannot read the image {path}",
            expected="an image; the path is relative to the recipe",
            got=error.strerror or type(error).__name__,
            remedy="correct model.images in the recipe",
        ) from error


def _contents(path: Path) -> str | dict[str, str]:
    """SHA-256 of a file, or of every file in a folder by its path there."""
    if not path.is_dir():
        return sha256(path)
    return {str(file.relative_to(path)): sha256(file) for file in sorted(_files(path)) if file.is_file()}


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, also behind links: a pipeline's model may be a link to one that was finetuned."""
    for here, folders, names in os.walk(folder, followlinks=True):
        yield from (Path(here, name) for name in names)
        above = Path(here).resolve()
        # Not in circles: os.walk goes where what is left in its list leads.
        folders[:] = [name for name in folders if not above.is_relative_to(Path(here, name).resolve())]
