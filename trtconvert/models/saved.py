"""The folder that a pipeline's `save_pretrained` leaves, looked at without loading it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

from trtconvert.documents import parse_json, safetensors_header
from trtconvert.errors import UserError
from trtconvert.recipe import ONNX, ModelSection

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}

_OF_MODELS = {"generation_config.json"}
"""What models have beside their own configuration; tokenizers, schedulers and processors each have one of another name."""

INDEX = "model_index.json"

DENOISERS = ("transformer", "unet")
"""Where pipelines keep what denoises, unless the recipe says otherwise."""

_STORED_TYPES = {"BF16": "bfloat16", "F16": "float16"} | {name: name for name in ("bfloat16", "float16")}


def is_saved_pipeline(folder: Path) -> bool:
    """Whether a whole pipeline was saved there."""
    return (folder / INDEX).is_file()


def pipeline_folder(weights: Path, config: Path | None = None) -> Path | None:
    """The folder that says what a pipeline is made of: that of the weights themselves, or, of a file of weights, `config`, or
    the folder that the file lies in, as published ones do. None where there is none."""
    near = weights if weights.is_dir() else config or weights.parent
    return near if is_saved_pipeline(near) else None


def refuse_unfit_config(weights: Path, config: Path | None) -> None:
    """
    Args:
        weights: a file of weights, or something else, which is fine here; config: see `pipeline_folder`.
    Raises:
        UserError: the configuration beside a file is of no pipeline.
    """
    if config is None or not weights.is_file() or is_saved_pipeline(config):
        return
    if (config / "config.json").is_file():
        got = f"config.json of one model, without {INDEX}"
    elif config.is_dir():
        names = sorted(path.name for path in config.iterdir())
        got = "a folder with " + (", ".join(names[:5]) or "nothing in it") + (", …" if len(names) > 5 else "")
    else:
        got = "a file" if config.exists() else "nothing: there is no such folder"
    patterns = " ".join(f"--include '{pattern}'" for pattern in ("*.json", "*.txt", "*.model"))
    near = next((folder for folder in (config.parent, weights.parent) if is_saved_pipeline(folder)), None)
    raise UserError(
        f"model.config {config} does not say what the pipeline of {weights.name} is made of",
        expected=f"a folder with {INDEX} and the folders that it names; in that of what the file holds, config.json is enough",
        got=got,
        remedy=f"give `config: {near}` under model, where there is one"
        if near
        else f"get the folder of such a pipeline, of small files: `hf download REPOSITORY {patterns} --local-dir FOLDER`, "
        "and give `config: FOLDER` under model",
    )


def with_dtype(section: ModelSection) -> ModelSection:
    """The section with a type in place of `auto`: that of most bytes of an ONNX model's weights, or of a diffusers denoiser's as
    far as their headers tell, and float32 for other models and types.

    Raises:
        UserError: the ONNX model cannot be read.
    """
    if section.dtype != "auto":
        return section
    if section.source == ONNX and section.weights is not None:
        from trtconvert.models.onnx.files import TYPES, read_graph, stored_type  # other models do without the library

        return section.model_copy(update={"dtype": TYPES[stored_type(read_graph(section.weights))]})
    sizes = Counter[str]()
    if section.source == "diffusers" and section.weights is not None:
        for file in _denoiser_files(section):
            try:
                tensors = safetensors_header(file)
            except (OSError, ValueError):  # what is wrong with it is told by who loads it
                continue
            before = _types_before(tensors.get("__metadata__"))
            for name, entry in tensors.items():
                if name != "__metadata__" and isinstance(entry, dict) and "data_offsets" in entry:
                    start, end = entry["data_offsets"]
                    sizes[before.get(name, str(entry.get("dtype")))] += end - start
    stored = max(sizes, key=lambda name: sizes[name], default="F32")
    return section.model_copy(update={"dtype": _STORED_TYPES.get(stored, "float32")})


def _types_before(metadata: object) -> dict[str, str]:
    """Of tensors whose types `trtconvert quantize` changed, what they had before: of the largest, INT8 says nothing."""
    try:
        said = parse_json(metadata["trtconvert"])  # type: ignore[index]
        return {name: str(record["original"]) for name, record in said["tensors"].items()}
    except (KeyError, TypeError, AttributeError, ValueError):
        return {}


def _denoiser_files(section: ModelSection) -> list[Path]:
    weights, options = section.weights, section.options
    assert weights is not None
    if not weights.is_dir():
        return [weights]
    asked = options.get("denoiser")
    for name in (asked,) if isinstance(asked, str) else DENOISERS:
        files = sorted((weights / name).glob("*.safetensors"))
        variant = options.get("variant")
        of_variant = [file for file in files if f".{variant}" in file.name]
        plain = [file for file in files if file.name.count(".") == 1]
        if files:
            return of_variant or plain or files
    return []


def stored_bytes(section: ModelSection) -> int:
    """Bytes of the files that hold a diffusers denoiser; 0 where none is found."""
    return sum(file.stat().st_size for file in _denoiser_files(section) if file.is_file())


def copy_without_models(folder: Path, target: Path) -> None:
    """Copy what a pipeline has beside its models: its index, tokenizers, schedulers, processors.

    A model is a folder that holds weights, or, of a pipeline whose weights are in one file, a configuration and nothing else.
    """
    target.mkdir()
    shutil.copyfile(folder / INDEX, target / INDEX)
    # Published pipelines have other folders too, such as examples and media.
    for name, entry in json.loads((folder / INDEX).read_text()).items():
        part = folder / name
        if isinstance(entry, list) and part.is_dir() and not _is_model(part):
            shutil.copytree(part, target / name)


def _is_model(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    bare = "config.json" in names and not any(
        name.endswith("_config.json") and name not in _OF_MODELS for name in names
    )
    return bare or any(file.suffix in _WEIGHTS for file in folder.rglob("*"))
