"""What a model's outputs depend on, as a hash, without loading the model."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

from trtconvert.errors import UserError
from trtconvert.files import sha256
from trtconvert.recipe import ModelSection


def identity(section: ModelSection) -> str:
    """SHA-256 over the weights file, the options and the source file of a `package.module:function`.

    Raises:
        UserError: the weights file cannot be read.
    """
    parts = {"source": section.source, "options": section.options}
    if section.weights is not None:
        try:
            parts["weights"] = sha256(section.weights)
        except OSError as error:
            raise UserError(
                f"cannot read the weights {section.weights}",
                expected="a safetensors file; the path is relative to the recipe",
                got=error.strerror or type(error).__name__,
                remedy="correct model.weights in the recipe",
            ) from error
    if source := _source_file(section.source):
        parts["code"] = sha256(source)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _source_file(source: str) -> Path | None:
    module, colon, _ = source.partition(":")
    if not colon:
        return None
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # of the user's own package; loading the model reports it
        return None
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None
