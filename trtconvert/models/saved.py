"""The folder that a pipeline's `save_pretrained` leaves, looked at without loading it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}


INDEX = "model_index.json"


def is_saved_pipeline(folder: Path) -> bool:
    """Whether a whole pipeline was saved there."""
    return (folder / INDEX).is_file()


def pipeline_folder(weights: Path, config: Path | None = None) -> Path | None:
    """The folder that says what a pipeline is made of: that of the weights themselves, or, of a file of weights, `config`, or
    the folder that the file lies in, as published ones do. None where there is none."""
    near = weights if weights.is_dir() else config or weights.parent
    return near if is_saved_pipeline(near) else None


def copy_without_models(folder: Path, target: Path) -> None:
    """Copy what a pipeline has beside its models: its index, tokenizers, schedulers, processors.

    A model is a folder that holds weights.
    """
    target.mkdir()
    shutil.copyfile(folder / INDEX, target / INDEX)
    # Published pipelines have other folders too, such as examples and media.
    for name, entry in json.loads((folder / INDEX).read_text()).items():
        part = folder / name
        if isinstance(entry, list) and part.is_dir() and not any(f.suffix in _WEIGHTS for f in part.rglob("*")):
            shutil.copytree(part, target / name)
