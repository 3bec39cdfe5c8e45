"""Reads the folder that a pipeline's `save_pretrained` wrote, without loading the pipeline."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from trtconvert.documents import PIPELINE_INDEX, parse_json, safetensors_header
from trtconvert.errors import UserError, did_you_mean
from trtconvert.recipe import ONNX, ModelSection

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".gguf"}

_OF_MODELS = {"generation_config.json"}
"""Further configurations of models. Tokenizers, schedulers and processors have configurations of other names."""

DENOISERS = ("transformer", "unet")
"""Names of the component that denoises, unless the recipe names another."""

_STORED_TYPES = {"BF16": "bfloat16", "F16": "float16"} | {name: name for name in ("bfloat16", "float16")}


def denoiser_among(models: Collection[str], asked: str | None, pipeline: str) -> str:
    """Returns the name of the model that denoises.

    Args:
        models: names of the pipeline's models; asked: the name in the recipe, or None.
    Raises:
        UserError: the pipeline has no such model.
    """
    wanted = (asked,) if asked else DENOISERS
    for name in wanted:
        if name in models:
            return name
    remedy = (
        "name the model that denoises in model.options.denoiser, or convert a pipeline that denoises with one model"
    )
    raise UserError(
        f"{pipeline} has no denoiser" + (f" '{asked}'" if asked else ""),
        expected=" or ".join(wanted) + " among its models",
        got=", ".join(models) or "no models",
        remedy=did_you_mean(asked, models, remedy) if asked else remedy,
    )


def is_saved_pipeline(folder: Path) -> bool:
    """Whether the folder has the index of a whole pipeline."""
    return (folder / PIPELINE_INDEX).is_file()


def pipeline_folder(weights: Path, config: Path | None = None) -> Path | None:
    """Returns the folder that describes a pipeline: the weights' folder; for a file of weights, `config`, or the file's folder,
    which may be a published pipeline's. None if there is no such folder."""
    near = weights if weights.is_dir() else config or weights.parent
    return near if is_saved_pipeline(near) else None


def refuse_unfit_config(weights: Path, config: Path | None) -> None:
    """
    Args:
        weights: a file of weights; anything else passes.
        config: see `pipeline_folder`.
    Raises:
        UserError: the configuration for a file does not describe a pipeline.
    """
    if config is None or not weights.is_file() or is_saved_pipeline(config):
        return
    if (config / "config.json").is_file():
        got = f"config.json of one model, without {PIPELINE_INDEX}"
    elif config.is_dir():
        got = contents_of(config)
    else:
        got = "a file" if config.exists() else "nothing: there is no such folder"
    near = next((folder for folder in (config.parent, weights.parent) if is_saved_pipeline(folder)), None)
    raise UserError(
        f"model.config {config} does not say what the pipeline of {weights.name} is made of",
        expected=f"a folder with {PIPELINE_INDEX} and the folders that it names; a model in the file needs config.json alone",
        got=got,
        remedy=f"give `config: {near}` under model"
        if near
        else f"get the folder of such a pipeline, of small files: `{download_of_configurations('REPOSITORY')}`, and give "
        "`config: FOLDER` under model",
    )


def contents_of(folder: Path) -> str:
    """Returns the first names in a folder, for messages."""
    if not folder.is_dir():
        return "a file" if folder.exists() else "no such folder"
    names = sorted(path.name for path in folder.iterdir())
    return "a folder with " + (", ".join(names[:5]) or "nothing in it") + (", …" if len(names) > 5 else "")


def download_of_configurations(repository: str) -> str:
    """Returns the command that downloads a pipeline's configurations, without weights, to FOLDER."""
    patterns = " ".join(f"--include '{pattern}'" for pattern in ("*.json", "*.txt", "*.model"))
    return f"hf download {repository} {patterns} --local-dir FOLDER"


def with_dtype(section: ModelSection) -> ModelSection:
    """Returns the section with a type in place of `auto`: the type of most bytes of the weights of an ONNX model, or of a
    diffusers denoiser as far as the files' headers tell; float32 for other models and types.

    Raises:
        UserError: the ONNX model cannot be read.
    """
    if section.dtype != "auto":
        return section
    if section.source == ONNX and section.weights is not None:
        from trtconvert.models.onnx.files import TYPES, read_graph, stored_type  # here, as other models need no onnx

        return section.model_copy(update={"dtype": TYPES[stored_type(read_graph(section.weights))]})
    sizes = Counter[str]()
    if section.source == "diffusers" and section.weights is not None:
        for file in _denoiser_files(section):
            try:
                tensors = safetensors_header(file)
            except (OSError, ValueError):  # loading the file raises the error
                continue
            before = _types_before(tensors.get("__metadata__"))
            for name, entry in tensors.items():
                if name != "__metadata__" and isinstance(entry, dict) and "data_offsets" in entry:
                    start, end = entry["data_offsets"]
                    sizes[before.get(name, str(entry.get("dtype")))] += end - start
    stored = max(sizes, key=lambda name: sizes[name], default="F32")
    return section.model_copy(update={"dtype": _STORED_TYPES.get(stored, "float32")})


def _types_before(metadata: object) -> dict[str, str]:
    """Returns the types of tensors before `trtconvert quantize` changed them; INT8 does not tell the type to compute in."""
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
    """Returns the bytes of the files that hold a diffusers denoiser; 0 for none."""
    return sum(file.stat().st_size for file in _denoiser_files(section) if file.is_file())


def copy_without_models(folder: Path, target: Path) -> None:
    """Copies a pipeline without its models: its index, tokenizers, schedulers, processors.

    A folder is a model's if it holds weights, or, for a pipeline whose weights are in one file, a configuration and nothing else.
    """
    target.mkdir()
    shutil.copyfile(folder / PIPELINE_INDEX, target / PIPELINE_INDEX)
    # Published pipelines have other folders too, such as examples and media.
    for name, entry in json.loads((folder / PIPELINE_INDEX).read_text()).items():
        part = folder / name
        if isinstance(entry, list) and part.is_dir() and not _is_model(part):
            shutil.copytree(part, target / name)


def _is_model(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    bare = "config.json" in names and not any(
        name.endswith("_config.json") and name not in _OF_MODELS for name in names
    )
    return bare or any(file.suffix in _WEIGHTS for file in folder.rglob("*"))
