"""Loads a pipeline of diffusers with exactly its weights, see `trtconvert.models.model_weights`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trtconvert.documents import PIPELINE_INDEX
from trtconvert.errors import BackendUnavailable, TrtconvertError, UserError, first_line, unfit_option, unknown_name
from trtconvert.models.model_weights import FAILURES, Weights, load_model, model_of, not_loaded
from trtconvert.models.saved import DENOISERS, contents_of, pipeline_folder, refuse_unfit_config
from trtconvert.runtime.libraries import current_name, no_diffusers
from trtconvert.runtime.pipeline import component_entries, component_names
from trtconvert.weights.weight_files import (
    READABLE,
    stored_weights,
    variants_of,
)

_TEXT_COMPONENTS = ("text_encoder", "tokenizer", "processor")
"""Prefixes of the names of a pipeline's components for prompts; a pipeline may be saved without them."""

_ATTENTION = "DIFFUSERS_ATTN_BACKEND"

_FILTERS = ("safety_checker", "feature_extractor")
"""Components that judge finished images; without them a pipeline draws the same images."""

_NOT_INSTALLED = re.compile(r"^`?([\w-]+)`? is not installed")
"""The message of diffusers about a missing package."""


def load_pipeline(
    weights: Path,
    *,
    config: Path | None = None,
    denoiser: str | None = None,
    variant: str | None = None,
    ignore: Sequence[str] = (),
) -> Any:
    """Loads a pipeline, with or without its text encoders. Nothing is downloaded, and no code in files of weights is executed.

    The models are in FP32. A denoiser whose files have one 16-bit type keeps this type, so that memory holds one copy of it.

    Args: see `Weights`; weights is its place.
    Raises:
        UserError: there is no pipeline, or a damaged one; a file lacks weights, or has weights that no model takes.
        BackendUnavailable: diffusers, or the package that reads a file of this kind, is not installed.
    """
    _refuse_unfit_names(denoiser, variant, ignore)
    asked = Weights(weights, config, denoiser, variant, ignore)
    _refuse_attention_of_environment()  # before the import of diffusers, which fails for names that it does not know
    with _reading(asked) as (folder, pipeline, entries):
        # `from_pretrained` must get None for components that were saved as None.
        given: dict[str, Any] = {
            name: None
            for name in component_names(pipeline)
            if entries.get(name) is None and (name in entries or name.startswith(_TEXT_COMPONENTS))
        }
        parts = {name: entry for name, entry in entries.items() if entry is not None}
        given |= _without_filters(folder, parts, pipeline)
        given |= _load_models(folder, {name: entry for name, entry in parts.items() if name not in given}, asked)
        parameters = inspect.signature(pipeline.__init__).parameters
        if given.get("safety_checker", folder) is None and "requires_safety_checker" in parameters:
            given["requires_safety_checker"] = False
        loaded = pipeline.from_pretrained(folder, local_files_only=True, **given)
    for name, part in loaded.components.items():
        if isinstance(part, nn.Module) and part.dtype != torch.float32 and name != _denoiser_name(parts, asked):
            part.to(torch.float32)
    return loaded


def load_parts(
    names: Collection[str], weights: Path, config: Path | None = None, variant: str | None = None
) -> dict[str, nn.Module]:
    """Loads some models of a pipeline. Returns them by name.

    Args:
        names: of the models. See `Weights` for the other arguments.
    Raises:
        UserError: there is no pipeline, or a damaged one; or a model lacks weights.
        BackendUnavailable: see `load_pipeline`.
    """
    asked = Weights(weights, config, None, variant, ())
    with _reading(asked) as (folder, _, entries):
        return _load_models(folder, {name: entry for name in names if (entry := entries.get(name))}, asked)


@contextmanager
def _reading(asked: Weights) -> Iterator[tuple[Path, Any, dict[str, tuple[str, str] | None]]]:
    """Yields the folder of a pipeline, its class and its components. Errors of diffusers in the block become `UserError`s."""
    try:
        import diffusers
    except ImportError as error:
        raise no_diffusers(error) from error
    folder = _index_folder(asked)
    with _without_progress():
        try:
            index = json.loads((folder / PIPELINE_INDEX).read_text())
            pipeline = getattr(diffusers, index["_class_name"])
            yield folder, pipeline, component_entries(pipeline, index)
        except TrtconvertError:
            raise
        except FAILURES as error:
            if isinstance(error, ImportError) and (package := _NOT_INSTALLED.search(str(error))):
                # Cosmos makes a safety checker where it gets none.
                raise BackendUnavailable(
                    f"{package[1]} is not installed, which the pipeline in {folder} needs",
                    expected=f"the package {package[1]}",
                    got=first_line(error),
                    remedy=f"pip install {package[1]}",
                ) from error
            raise not_loaded(f"the pipeline in {folder}", error) from error


def _refuse_attention_of_environment() -> None:
    """Torch's attention alone is converted; exporters do not know the libraries that diffusers can use instead."""
    chosen = os.environ.get(_ATTENTION)
    if chosen is not None and chosen.removeprefix("_").partition("_")[0] != "native":
        raise UserError(
            f"the variable {_ATTENTION} makes diffusers compute attention by {chosen or 'nothing'}",
            expected="native, torch's own, which is the default",
            got=f"{_ATTENTION}={chosen}",
            remedy=f"unset {_ATTENTION}, or call the program as {_ATTENTION}=native trtconvert …; an engine has kernels of "
            "its own anyway",
        )


def _refuse_unfit_names(denoiser: Any, variant: Any, ignore: Any) -> None:
    texts = isinstance(ignore, (list, tuple)) and all(isinstance(pattern, str) for pattern in ignore)

    def is_name(given: Any) -> bool:
        return given is None or (isinstance(given, str) and bool(given))

    for option, fits, expected, got in (
        ("denoiser", is_name(denoiser), "the name of a model of the pipeline, such as transformer_2", denoiser),
        ("variant", is_name(variant), "a text such as fp16", variant),
        ("ignore", texts, "a list of patterns of names", ignore),
    ):
        if not fits:
            raise unfit_option(option, expected, got)


def _index_folder(asked: Weights) -> Path:
    """Returns the folder of the pipeline's index."""
    place = asked.place
    refuse_unfit_config(place, asked.config)
    if place.is_dir() and asked.config is not None:
        raise UserError(
            f"{place} is a folder, which has its own configurations",
            expected="model.config beside a file of weights",
            got=f"model.config {asked.config}",
            remedy="remove model.config from the recipe, or give model.weights a file",
        )
    folder = pipeline_folder(place, asked.config)
    if folder is not None:
        return folder
    if place.is_file():
        from trtconvert.models.single_file import looks_like

        raise UserError(
            f"{place} is a file of weights, which does not say what its pipeline is made of",
            expected="model.config: a folder with model_index.json and the folders that it names; the folder of a model that the "
            "file holds needs config.json alone",
            got="none",
            remedy=looks_like(place),
        )
    raise UserError(
        f"{place} holds no diffusers pipeline",
        expected="a folder with model_index.json, as `pipeline.save_pretrained(folder)` writes it, or a file that ends with "
        + ", ".join(READABLE),
        got="a single component" if (place / "config.json").is_file() else contents_of(place),
        remedy="save the whole pipeline; its text encoders and its VAE may be None. Or give model.weights one file, and "
        "model.config the folder of a pipeline for it",
    )


@contextmanager
def _without_progress() -> Iterator[None]:
    """Turns off the libraries' progress bars: this program shows progress of its own."""
    names = ["diffusers.utils.logging"]
    if importlib.util.find_spec("transformers"):
        names.append("transformers.utils.logging")
    libraries = [importlib.import_module(name) for name in names]
    for library in libraries:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in libraries:
            library.enable_progress_bar()


def _without_filters(folder: Path, parts: Collection[str], pipeline: Any) -> dict[str, None]:
    """Returns None for each safety component that the folder lacks, and for the safety checker."""
    optional = [name for name in _FILTERS if name in pipeline._optional_components]
    named = [name for name in parts if not (folder / name).is_dir()]
    if lost := [name for name in named if name not in optional]:
        raise UserError(
            f"the pipeline in {folder} is not whole",
            expected=f"the folder {lost[0]}, which its {PIPELINE_INDEX} names",
            got=f"no {', '.join(lost)}",
            remedy=f'get it too, or, if it is optional, write "{lost[0]}": [null, null] in {PIPELINE_INDEX}',
        )
    return dict.fromkeys(named + [name for name in optional if name == "safety_checker"])  # its verdict is not used


def _load_models(folder: Path, parts: Mapping[str, tuple[str, str]], asked: Weights) -> dict[str, Any]:
    """Loads the models of a pipeline, each with exactly its weights. Returns them by name.

    Args:
        parts: library and class of each component, by name.
    """
    kinds = {name: _class_in_index(entry) for name, entry in parts.items()}
    if lacking := [name for name, kind in kinds.items() if kind is None]:
        name, (module, title) = lacking[0], parts[lacking[0]]
        raise UserError(
            f"the pipeline in {folder} cannot be loaded: there is no class for {name}",
            expected="classes of the installed diffusers and transformers",
            got=f"{title} of {module}",
            remedy="save the pipeline again with such a class, or install a version that has the class; or, if the pipeline can "
            f'do without, write "{name}": [null, null] in {PIPELINE_INDEX}',
        )
    kinds = {name: kind for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    models: dict[str, Any] = {}
    if asked.place.is_file():
        from trtconvert.models.single_file import states_of

        states = states_of(asked.place, folder, kinds, asked.denoiser, asked.ignore)
        for name, state in states.items():
            models[name] = model_of(kinds[name], folder / name, state, f"{name} in {asked.place}", asked.ignore)
    rest = {name: _parts(kind, folder / name) for name, kind in kinds.items() if name not in models}
    places = [path for of_part in rest.values() for _, path in of_part]
    _refuse_unknown_variant(folder, asked.variant, places)
    stored = {path: stored_weights(path, asked.variant) for path in places}
    for name, of_part in rest.items():
        as_stored = name == _denoiser_name(parts, asked)
        loaded = [
            load_model(kind, path, stored[path], f"{name} in {folder}", asked, as_stored) for kind, path in of_part
        ]
        models[name] = kinds[name](loaded) if of_part[0][0] is not kinds[name] else loaded[0]
    return models


def _denoiser_name(parts: Collection[str], asked: Weights) -> str | None:
    """Returns the name of the model that is converted; None for none, which the caller refuses later."""
    return next((name for name in ([asked.denoiser] if asked.denoiser else DENOISERS) if name in parts), None)


def _refuse_unknown_variant(folder: Path, variant: str | None, places: Iterable[Path]) -> None:
    names = sorted(set[str]().union(*map(variants_of, places)))
    if variant is not None and variant not in names:
        raise unknown_name(
            f"the pipeline in {folder} has no variant {variant}",
            variant,
            names,
            "correct model.options.variant in the recipe, or remove it",
            none="none: the names of its files have no variant",
        )


def _class_in_index(entry: tuple[str, str]) -> Any:
    import diffusers.pipelines

    module, name = entry
    if module in ("diffusers", "transformers"):
        library = importlib.import_module(module)
        return getattr(library, current_name(library, name), None)
    return getattr(getattr(diffusers.pipelines, module, None), name, None)


def _parts(kind: Any, folder: Path) -> list[tuple[Any, Path]]:
    """Returns the models that a component consists of, with the folder of each: several ControlNets are in controlnet,
    controlnet_1, …, and the configuration of each names its class."""
    if "Multi" in kind.__name__:
        own = json.loads((folder / "config.json").read_text()).get("_class_name", kind.__name__)
        if own != kind.__name__:
            import diffusers

            folders = [folder]
            while (following := folder.with_name(f"{folder.name}_{len(folders)}")).is_dir():
                folders.append(following)
            return [(getattr(diffusers, own), path) for path in folders]
    return [(kind, folder)]
