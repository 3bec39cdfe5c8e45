"""`trtconvert export-triton`: writes a bundle into a model repository of NVIDIA Triton Inference Server.

    REPOSITORY/NAME/            the whole model: prompts, captions or seeds to images, on the Python backend (`triton_model.py`)
        config.pbtxt  1/model.py  1/bundle/
    REPOSITORY/NAME-denoiser/   each component alone, tensors to tensors, for samplers elsewhere
        config.pbtxt  1/*.plan  1/libtrtconvert.so, or 1/*.onnx

Source: Triton's documentation of model repositories and configurations; the fields are those of `model_config.proto`.
"""

from __future__ import annotations

import glob
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from trtconvert.bundle import (
    MANIFEST,
    ComponentRecord,
    EngineRecord,
    Manifest,
    TensorRecord,
    check_files,
    read_unchanged,
)
from trtconvert.errors import UserError
from trtconvert.files import link_files, whole_folder
from trtconvert.library import library_path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_INSTEAD = "give another folder with -o"

_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bfloat16": "TYPE_BF16",
}

_INPUTS = {
    "PROMPT": "TYPE_STRING",
    "SEED": "TYPE_INT64",
    "SIZE": "TYPE_STRING",
    "STEPS": "TYPE_INT64",
    "FORMAT": "TYPE_STRING",
}
_OUTPUTS = {"IMAGE": "TYPE_STRING", "SEED": "TYPE_INT64"}
"""Inputs and outputs of the whole model; see `triton_model.py`."""


@dataclass(frozen=True)
class Name:
    """A value of an enumeration, written without quotes."""

    text: str


@dataclass(frozen=True)
class Settings:
    """Settings of the whole model.

    Attributes:
        name: name in the repository.
        batch: Triton's largest batch; wait: longest wait for a batch in microseconds; queue: most waiting images.
        steps: default number of steps; most_steps: most steps.
    """

    name: str
    batch: int
    wait: int
    queue: int
    steps: int
    most_steps: int


def export_triton(bundle: Path, repository: Path, settings: Settings, *, force: bool) -> list[str]:
    """Write the models of a bundle into a repository, each completely or not at all.

    Args:
        force: replace existing models of these names.
    Returns:
        Notes for the user, in lines.
    Raises:
        UserError: the folder is not a bundle, Triton does not take the name or the bundle, models exist already, or the
            repository cannot be written.
    """
    if not _NAME.fullmatch(settings.name):
        raise UserError(
            f"{settings.name!r} is not a name of a model in a repository",
            expected="1 to 100 letters, digits, '.', '-' and '_'; a letter or digit first",
            got=settings.name,
            remedy="give another name with --name",
        )
    if repository.resolve().is_relative_to(bundle.resolve()):
        raise UserError(
            f"{repository} lies in the bundle",
            expected="a repository outside the bundle",
            got=str(repository.resolve()),
            remedy=_INSTEAD,
        )

    def write(manifest: Manifest) -> list[str]:
        check_files(bundle, manifest)
        folders = {settings.name: "", **{f"{settings.name}-{name}": name for name in manifest.components}}
        if (there := [name for name in folders if (repository / name).exists()]) and not force:
            raise UserError(
                f"{repository} has a model '{there[0]}' already",
                expected="a repository without models of these names",
                got=", ".join(there),
                remedy="give another --name, or replace the models with --force",
            )
        components = {
            name: _component(f"{settings.name}-{name}", record) for name, record in manifest.components.items()
        }
        with ExitStack() as writing:  # all are written before the first is put into its place
            for folder, name in folders.items():
                place = writing.enter_context(whole_folder(repository / folder, _INSTEAD))
                if name:
                    _write_component(place, bundle, manifest.components[name], components[name])
                else:
                    _write_whole(place, bundle, manifest, settings)
        return list(_notes(manifest, repository, settings.name))

    return read_unchanged(bundle, write)


def plans(record: ComponentRecord) -> list[EngineRecord]:
    """Return a component's first TensorRT engine for each architecture."""
    found: dict[str, EngineRecord] = {}
    for engine in record.engines:
        if engine.backend == "tensorrt":
            found.setdefault(engine.target, engine)
    return list(found.values())


def _write_whole(place: Path, bundle: Path, manifest: Manifest, settings: Settings) -> None:
    on_gpu = all(plans(record) for record in manifest.components.values())
    optional = [
        {"name": name, "data_type": Name(kind), "dims": [1], "optional": True} for name, kind in _INPUTS.items()
    ]
    config = {
        "name": settings.name,
        "backend": "python",
        "max_batch_size": settings.batch,
        "input": optional,
        "output": [{"name": name, "data_type": Name(kind), "dims": [1]} for name, kind in _OUTPUTS.items()],
        "instance_group": [{"count": 1, "kind": Name("KIND_GPU" if on_gpu else "KIND_CPU")}],
        "dynamic_batching": {
            "max_queue_delay_microseconds": settings.wait,
            "default_queue_policy": {"max_queue_size": settings.queue},
        },
        "parameters": [
            {"key": key, "value": {"string_value": str(value)}}
            for key, value in (("steps", settings.steps), ("max_steps", settings.most_steps))
        ],
    }
    version = _version(place, config)
    shutil.copyfile(Path(__file__).with_name("triton_model.py"), version / "model.py")
    link_files([MANIFEST, *manifest.files], bundle, version / "bundle")


def _version(place: Path, config: Mapping[str, Any]) -> Path:
    """Write a model's configuration, and return the folder of its only version."""
    (place / "config.pbtxt").write_text(text_format(config), encoding="utf-8")
    version = place / "1"
    version.mkdir()
    return version


def _write_component(place: Path, bundle: Path, record: ComponentRecord, config: Mapping[str, Any]) -> None:
    version, engines = _version(place, config), plans(record)
    for engine in engines:
        source = PurePosixPath(engine.file)
        link_files([source.name], bundle / source.parent, version)
    if any(engine.plugin for engine in engines) and (library := library_path()) is not None:
        shutil.copyfile(library, version / library.name)
    if not engines:
        onnx = bundle / record.onnx
        # With the external weights of large models.
        link_files([path.name for path in onnx.parent.glob(f"{glob.escape(onnx.name)}*")], onnx.parent, version)


def _component(name: str, record: ComponentRecord) -> dict[str, Any]:
    """Return the configuration of a component. The batch is an ordinary dimension, because not every input has it first."""
    if record.caches:
        raise UserError(
            f"{name} keeps caches from step to step, which Triton's clients would mix up",
            expected="a bundle without caches",
            got="MoDiff layers (layers.modiff in the recipe)",
            remedy="build the bundle with layers.modiff: false, or use `trtconvert serve`, which draws whole images",
        )
    engines = plans(record)
    files: dict[str, Any] = {"default_model_filename": PurePosixPath(record.onnx).name}
    group: dict[str, Any] = {"count": 1, "kind": Name("KIND_GPU" if engines else "KIND_CPU")}
    if engines:
        names = {engine.target: PurePosixPath(engine.file).name for engine in engines}
        portable = next((engine for engine in engines if engine.hardware_compatible), engines[0])
        files = {
            "default_model_filename": names[portable.target],
            "cc_model_filenames": [
                {"key": f"{target[2:-1]}.{target[-1]}", "value": file} for target, file in names.items()
            ],
        }
        group["profile"] = [str(i) for i in range(max(1, len(portable.profiles)))]
    return {
        "name": name,
        **({"platform": "tensorrt_plan", "backend": "tensorrt"} if engines else {"backend": "onnxruntime"}),
        "max_batch_size": 0,
        **files,
        "input": [_tensor(spec) for spec in record.inputs],
        "output": [_tensor(spec) for spec in record.outputs],
        "instance_group": [group],
    }


def _tensor(spec: TensorRecord) -> dict[str, Any]:
    if spec.dtype not in _TYPES:
        raise UserError(
            f"Triton has no type for '{spec.name}'",
            expected=", ".join(_TYPES),
            got=spec.dtype,
            remedy="build the bundle with another model.dtype",
        )
    dims = [dim if isinstance(dim, int) else -1 for dim in spec.shape]
    scalar: dict[str, Any] = {} if dims else {"reshape": {"shape": []}}
    return {"name": spec.name, "data_type": Name(_TYPES[spec.dtype]), "dims": dims or [1], **scalar}


def text_format(message: Mapping[str, Any], indent: str = "") -> str:
    """Format a message in protobuf's text format: mappings are messages, lists are repeated fields."""
    return "".join(_field(name, value, indent) for name, value in message.items())


def _field(name: str, value: Any, indent: str) -> str:
    if isinstance(value, Mapping):
        inner = text_format(value, indent + "  ")
        return f"{indent}{name} {{\n{inner}{indent}}}\n" if inner else f"{indent}{name} {{}}\n"
    if isinstance(value, list):
        return "".join(_field(name, one, indent) for one in value)
    return f"{indent}{name}: {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Name):
        return value.text
    # JSON's escapes are valid in protobuf's text format.
    return json.dumps(value)


def _notes(manifest: Manifest, repository: Path, name: str) -> Iterator[str]:
    parts = ", ".join(f"{name}-{component}" for component in manifest.components)
    yield f"{repository}: {name} draws images on Triton's Python backend; single components: {parts}"
    engines = [engine for record in manifest.components.values() for engine in plans(record)]
    extra = " --backend-config=tensorrt,version-compatible=true" if any(engine.plugin for engine in engines) else ""
    yield f"tritonserver --model-repository={repository}{extra}"
    if extra:
        yield "  the option lets TensorRT load the plugin library inside the plans"
    if not engines:
        yield "the bundle has no TensorRT plans and runs on ONNX Runtime, on the CPU; `trtconvert compile` adds plans"
    else:
        needs = sorted({f"{engine.target} with TensorRT {engine.library}" for engine in engines})
        yield f"the plans are for {', '.join(needs)}: use a Triton with this TensorRT"
    yield "the Python backend's Python needs this trtconvert"
    section = manifest.recipe.model
    if not manifest.pipeline and section.weights is not None and ":" in section.source:
        yield f"run tritonserver in a folder where {section.source} and {section.weights} can be found"
