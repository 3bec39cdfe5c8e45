"""Loading a pipeline of diffusers with all of its weights and nothing else: what a file lacks or has too much is told by name.

Both libraries make up what a file lacks, and drop what a model has no place for.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trtconvert.documents import safetensors_header
from trtconvert.errors import BackendUnavailable, TrtconvertError, UserError, did_you_mean, first_line
from trtconvert.models.saved import DENOISERS, INDEX, pipeline_folder, refuse_unfit_config
from trtconvert.runtime.libraries import current_name
from trtconvert.weights.weight_files import (
    READABLE,
    StoredWeights,
    holds_scaled,
    how_without,
    is_spare,
    read_tensors,
    stored_weights,
    variants_of,
)

_TEXT_COMPONENTS = ("text_encoder", "tokenizer", "processor")
"""What the names of a pipeline's components for prompts begin with; a pipeline may be saved without them."""

_ATTENTION = "DIFFUSERS_ATTN_BACKEND"

_FILTERS = ("safety_checker", "feature_extractor")
"""What judges images that are finished: a pipeline that was got without them draws the same ones."""

_NOT_INSTALLED = re.compile(r"^`?([\w-]+)`? is not installed")
"""What diffusers says of a package that a part of a pipeline is of."""

_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,  # transformers, of another size than its weights
    SafetensorError,
)
"""What the libraries raise for a folder that is none of theirs, or damaged; an index that is no index is a TypeError."""


@dataclass(frozen=True)
class Weights:
    """Which weights of a pipeline to load.

    Attributes:
        place: folder that the pipeline's `save_pretrained` wrote, or a file of weights.
        config: for a file, the folder of a pipeline with all but these weights.
        denoiser: which of the pipeline's models the file is of, where there are several denoisers.
        variant: see `stored_weights`.
        ignore: patterns (fnmatch) of names in the files that the models may do without.
    """

    place: Path
    config: Path | None = None
    denoiser: str | None = None
    variant: str | None = None
    ignore: Sequence[str] = ()


def load_pipeline(
    weights: Path,
    *,
    config: Path | None = None,
    denoiser: str | None = None,
    variant: str | None = None,
    ignore: Sequence[str] = (),
) -> Any:
    """A pipeline, with or without its text encoders. Nothing is downloaded, and no code in files of weights is executed.

    Its models are in FP32. The denoiser keeps the 16-bit type of its files where all of its weights have one, so that a large
    denoiser lies in memory once.

    Args: see `Weights`; weights is its place.
    Raises:
        UserError: no pipeline, or a damaged one; a file lacks weights, or holds what no model of the pipeline has.
        BackendUnavailable: diffusers is not installed, or what reads a file of this kind.
    """
    _refuse_unfit_names(variant, ignore)
    asked = Weights(weights, config, denoiser, variant, ignore)
    _refuse_attention_of_environment()  # before diffusers is imported, which fails for names that it does not know
    try:
        import diffusers
    except ImportError as error:
        raise BackendUnavailable(
            "diffusers is not installed",
            expected="the library that reads model.weights",
            got=str(error),
            remedy="pip install 'trtconvert[diffusers]'",
        ) from error
    folder = _folder(asked)
    with _without_progress():
        try:
            index = json.loads((folder / INDEX).read_text())
            pipeline = getattr(diffusers, index["_class_name"])
            parameters = inspect.signature(pipeline.__init__).parameters
            # `save_pretrained` leaves out what is None, and loading wants to be told.
            given: dict[str, Any] = {
                name: None
                for name in parameters
                if name.startswith(_TEXT_COMPONENTS) and index.get(name, [None, None])[0] is None
            }
            given |= _without_filters(folder, index, pipeline)
            given |= _models(folder, {name: entry for name, entry in index.items() if name not in given}, asked)
            if given.get("safety_checker", index) is None and "requires_safety_checker" in parameters:
                given["requires_safety_checker"] = False
            loaded = pipeline.from_pretrained(folder, local_files_only=True, **given)
        except TrtconvertError:
            raise
        except _FAILURES as error:
            if isinstance(error, ImportError) and (package := _NOT_INSTALLED.search(str(error))):
                # Cosmos makes its safety checker where it is given none.
                raise BackendUnavailable(
                    f"{package[1]} is not installed, without which the pipeline in {folder} is not made",
                    expected=f"the package {package[1]}",
                    got=first_line(error),
                    remedy=f"pip install {package[1]}",
                ) from error
            raise _not_loaded(f"the pipeline in {folder}", error) from error
    for name, part in loaded.components.items():
        if isinstance(part, nn.Module) and part.dtype != torch.float32 and name != _denoiser_of(index, asked):
            part.to(torch.float32)
    return loaded


def _refuse_attention_of_environment() -> None:
    """
    Raises:
        UserError: a variable has diffusers compute attention by a library of its own, which is not torch's function that is
            converted, and of which an exporter makes nothing.
    """
    chosen = os.environ.get(_ATTENTION)
    if chosen is not None and chosen.removeprefix("_").partition("_")[0] != "native":
        raise UserError(
            f"the variable {_ATTENTION} has diffusers compute attention by {chosen or 'nothing'}",
            expected="native, torch's own, as where it is not set",
            got=f"{_ATTENTION}={chosen}",
            remedy=f"unset {_ATTENTION}, or call the program as {_ATTENTION}=native trtconvert …: an engine has kernels of "
            "its own",
        )


def _refuse_unfit_names(variant: Any, ignore: Any) -> None:
    """
    Raises:
        UserError: the variant is no text, or the patterns are no list of texts.
    """
    texts = isinstance(ignore, (list, tuple)) and all(isinstance(pattern, str) for pattern in ignore)
    for option, fits, expected, got in (
        ("variant", variant is None or (isinstance(variant, str) and variant), "a text such as fp16", variant),
        ("ignore", texts, "a list of patterns of names", ignore),
    ):
        if not fits:
            raise UserError(
                f"model.options.{option} does not fit",
                expected=expected,
                got=repr(got),
                remedy="correct it in the recipe, or leave it out",
            )


def _not_loaded(what: str, error: BaseException) -> UserError:
    return UserError(
        f"{what} cannot be loaded",
        expected="a whole folder that `save_pretrained` of an installed pipeline class wrote",
        got=first_line(error),
        remedy="save the pipeline again, or install the diffusers that wrote it",
    )


def _folder(asked: Weights) -> Path:
    """Where the pipeline's index is.

    Raises:
        UserError: nowhere.
    """
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
            expected="model.config: a folder with model_index.json and what it names; of what the file holds, "
            "config.json is enough",
            got="none",
            remedy=looks_like(place),
        )
    raise UserError(
        f"{place} holds no diffusers pipeline",
        expected="a folder with model_index.json, as `pipeline.save_pretrained(folder)` writes it, or a file that ends with "
        + ", ".join(READABLE),
        got=_what_is_in(place),
        remedy="save the whole pipeline; its text encoders and its VAE may be None. Or give model.weights one file, and "
        "model.config the folder of a pipeline for it",
    )


def _what_is_in(place: Path) -> str:
    if not place.exists():
        return "no such folder"
    if (place / "config.json").is_file():
        return "a single component"
    names = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
    return "a folder with " + (", ".join(names[:5]) + (", …" if len(names) > 5 else "") if names else "nothing in it")


@contextmanager
def _without_progress() -> Iterator[None]:
    """This program shows progress of its own."""
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


def _without_filters(folder: Path, index: Mapping[str, Any], pipeline: Any) -> dict[str, None]:
    """None for each part that the index names, that the folder lacks, and that the pipeline draws the same images without.

    Raises:
        UserError: the folder lacks another part.
    """
    optional = [name for name in _FILTERS if name in pipeline._optional_components]
    named = [name for name, entry in index.items() if _is_part(entry) and not (folder / name).is_dir()]
    if lost := [name for name in named if name not in optional]:
        raise UserError(
            f"the pipeline in {folder} is not whole",
            expected=f"the folder {lost[0]}, which its {INDEX} names",
            got=f"no {', '.join(lost)}",
            remedy=f'get it too, or, if it is optional, write "{lost[0]}": [null, null] there',
        )
    return dict.fromkeys(named + [name for name in optional if name == "safety_checker"])  # nobody asks it here


def _is_part(entry: Any) -> bool:
    """Whether an entry of an index is a library and a class; settings of a pipeline may be lists too, as the layers that
    Krea 2 reads."""
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(name, str) for name in entry)


def _models(folder: Path, index: Mapping[str, Any], asked: Weights) -> dict[str, Any]:
    """The models of a pipeline by name, each with all of its weights, and no file with more.

    Raises:
        UserError: see `load_pipeline`.
    """
    kinds = {name: _class_of(entry) for name, entry in index.items() if _is_part(entry)}
    kinds = {name: kind for name, kind in kinds.items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    models: dict[str, Any] = {}
    if asked.place.is_file():
        from trtconvert.models.single_file import states_of

        states = states_of(asked.place, folder, kinds, asked.denoiser, asked.ignore)
        for name, state in states.items():
            models[name] = _model_of(kinds[name], folder / name, state, f"{name} in {asked.place}", asked.ignore)
    rest = {name: _parts(kind, folder / name) for name, kind in kinds.items() if name not in models}
    places = [path for parts in rest.values() for _, path in parts]
    _refuse_unknown_variant(folder, asked.variant, places)
    stored = {path: stored_weights(path, asked.variant) for path in places}
    for name, parts in rest.items():
        as_stored = name == _denoiser_of(index, asked)
        loaded = [_loaded(kind, path, stored[path], f"{name} in {folder}", asked, as_stored) for kind, path in parts]
        models[name] = kinds[name](loaded) if parts[0][0] is not kinds[name] else loaded[0]
    return models


def _denoiser_of(index: Mapping[str, Any], asked: Weights) -> str | None:
    """The name of the model that is converted; None where the pipeline has none, which is told later."""
    return next((name for name in ([asked.denoiser] if asked.denoiser else DENOISERS) if name in index), None)


def _refuse_unknown_variant(folder: Path, variant: str | None, places: Iterable[Path]) -> None:
    """
    Raises:
        UserError: none of the models has the variant that is asked for. Those that have none come without it.
    """
    names = sorted(set[str]().union(*map(variants_of, places)))
    if variant is not None and variant not in names:
        raise UserError(
            f"the pipeline in {folder} has no variant {variant}",
            expected="one of " + ", ".join(names) if names else "none: the names of its files have no variant",
            got=variant,
            remedy=did_you_mean(variant, names, "correct model.options.variant in the recipe, or take it out"),
        )


def _class_of(entry: Sequence[str]) -> Any:
    """The class that an entry of an index names: of one of the two libraries, or of a pipeline's own module."""
    import diffusers.pipelines

    module, name = entry
    if module in ("diffusers", "transformers"):
        library = importlib.import_module(module)
        return getattr(library, current_name(library, name))
    return getattr(getattr(diffusers.pipelines, module, None), name, None)


def _parts(kind: Any, folder: Path) -> list[tuple[Any, Path]]:
    """The models that a part of a pipeline is made of, and the folder of each: several ControlNets lie in controlnet,
    controlnet_1, …, and each says what it is."""
    if "Multi" in kind.__name__:
        own = json.loads((folder / "config.json").read_text()).get("_class_name", kind.__name__)
        if own != kind.__name__:
            import diffusers

            folders = [folder]
            while (following := folder.with_name(f"{folder.name}_{len(folders)}")).is_dir():
                folders.append(following)
            return [(getattr(diffusers, own), path) for path in folders]
    return [(kind, folder)]


def _of_diffusers(kind: Any) -> bool:
    """Whether a class of models is one of diffusers, and not of transformers."""
    return hasattr(kind, "load_config")


def _loaded(
    kind: Any, folder: Path, stored: StoredWeights | None, title: str, asked: Weights, as_stored: bool
) -> nn.Module:
    """A model with the weights of its folder, in FP32.

    Args:
        title: of the model, for messages.
        as_stored: leave the weights in the 16-bit type of their files, where there is one, and on the disk until they are read.
    Raises:
        UserError: see `load_pipeline`.
    """
    if stored is None:
        of_file = asked.place.is_file() and folder.name.startswith(DENOISERS)
        otherwise = (
            f"if the file is of it, add `options: {{denoiser: {folder.name}}}` under model; else " if of_file else ""
        )
        name = "diffusion_pytorch_model" if _of_diffusers(kind) else "model"
        others = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
        raise UserError(
            f"there are no weights of {title}",
            expected=f"files as `save_pretrained` names them, such as {name}.safetensors",
            got=", ".join(sorted(path.name for path in folder.iterdir()))
            + (f", and {asked.place} holds none for it" if asked.place.is_file() else ""),
            remedy=f"call {others[0].name} {name}{others[0].suffix}, if it is all of them"
            if others
            else f'{otherwise}get them; or, where the pipeline can go without, write "{folder.name}": [null, null] in {INDEX}',
        )
    try:
        quantised = "quantization_config" in json.loads((folder / "config.json").read_text())
        if quantised or holds_scaled(stored.files):
            return _model_of(kind, folder, read_tensors(stored.files), title, asked.ignore)
        dtype = _type_of_files(kind, stored) if as_stored else None
        # Both libraries take safetensors first, wherever the variant is.
        model, told = kind.from_pretrained(
            folder,
            local_files_only=True,
            output_loading_info=True,
            variant=stored.variant,
            use_safetensors=stored.safetensors,
            **_asking_for(kind, dtype or torch.float32),
        )
        if dtype is not None:
            _buffers_of_float32(model, kind, folder)
    except TrtconvertError:
        raise
    except _FAILURES as error:
        read_tensors(stored.files)  # which says what is wrong with a file, where it is one
        raise _not_loaded(title, error) from error
    _refuse_others(model, title, told["missing_keys"], told["unexpected_keys"], asked.ignore)
    return model


def _asking_for(kind: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """What `from_pretrained` takes for a type. FP32 is what diffusers does unless it is told, and makes a copy where it is."""
    if not _of_diffusers(kind):
        return {"dtype": dtype}
    return {} if dtype == torch.float32 else {"torch_dtype": dtype}


def _type_of_files(kind: Any, stored: StoredWeights) -> torch.dtype | None:
    """The 16-bit type of all floating-point weights in files, but for those that diffusers keeps in FP32; None where there is no
    such type, or the files do not say it beforehand."""
    if not (stored.safetensors and _of_diffusers(kind)):
        return None
    kept = set(getattr(kind, "_keep_in_fp32_modules", None) or ())
    types = set[str]()
    for file in stored.files:
        for name, entry in safetensors_header(file).items():
            if name != "__metadata__" and not kept & {*name.split(".")}:
                types.add(str(entry["dtype"]))
    floating = types & {"F64", "F32", "F16", "BF16"}
    return {"F16": torch.float16, "BF16": torch.bfloat16}.get(floating.pop()) if len(floating) == 1 else None


def _buffers_of_float32(model: nn.Module, kind: Any, folder: Path) -> None:
    """Put FP32 tables, such as those of positions, in the place of those that the library computed in 16 bits."""
    exact = _without_weights(kind, folder)
    of_files = model.state_dict().keys()
    computed = {name: x for name, x in exact.named_buffers() if name not in of_files and x.is_floating_point()}
    for name, x in computed.items():
        place, _, buffer = name.rpartition(".")
        model.get_submodule(place).register_buffer(buffer, x, persistent=False)


def _without_weights(kind: Any, folder: Path) -> nn.Module:
    """A model of diffusers by the configuration in a folder. Its weights take no memory; its other buffers are computed."""
    from accelerate import init_empty_weights

    config = dict(kind.load_config(folder, local_files_only=True))
    config.pop("quantization_config", None)
    with init_empty_weights(include_buffers=False):
        return kind.from_config(config)


def _model_of(kind: Any, folder: Path, state: Mapping[str, Tensor], title: str, ignore: Sequence[str]) -> nn.Module:
    """A model of the configuration in a folder with the weights of a state dict, in FP32.

    Raises:
        UserError: see `load_pipeline`.
    """
    try:
        if _of_diffusers(kind):
            return _filled(kind, folder, state, title, ignore)
        config = kind.config_class.from_pretrained(folder, local_files_only=True)
        vars(config).pop("quantization_config", None)
        model, told = kind.from_pretrained(
            None, config=config, state_dict=dict(state), output_loading_info=True, dtype=torch.float32
        )
    except TrtconvertError:
        raise
    except _FAILURES as error:
        raise _not_loaded(title, error) from error
    _refuse_others(model, title, told["missing_keys"], told["unexpected_keys"], ignore)
    return model


def _filled(kind: Any, folder: Path, state: Mapping[str, Tensor], title: str, ignore: Sequence[str]) -> nn.Module:
    model = _without_weights(kind, folder)
    wanted = model.state_dict()
    spared = [re.compile(pattern) for pattern in getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()]
    more = [name for name in state if name not in wanted and not any(pattern.search(name) for pattern in spared)]
    _refuse_others(model, title, wanted.keys() - state.keys(), more, ignore)
    for name, x in wanted.items():
        if state[name].shape != x.shape:
            raise UserError(
                f"the weights of {title} do not fit its config.json",
                expected=f"{name} of shape {list(x.shape)}",
                got=str(list(state[name].shape)),
                remedy="give the configuration that the weights were made with",
            )
    filled = {
        name: state[name].float() if x.is_floating_point() else state[name].to(x.dtype) for name, x in wanted.items()
    }
    model.load_state_dict({name: x.contiguous() for name, x in filled.items()}, assign=True)
    return model.eval()


def _is_shared(model: nn.Module, name: str) -> bool:
    """Whether a weight is of a module that the pipeline puts into a model from its denoiser, by `from_transformer(controlnet,
    transformer)`, as it does into Z-Image's ControlNet: `save_pretrained` wrote it with both."""
    shares: Any = getattr(type(model), "from_transformer", None)
    if shares is None or "controlnet" not in inspect.signature(shares).parameters:
        return False
    return getattr(model, name.partition(".")[0], model) is None


def _refuse_others(
    model: nn.Module, title: str, missing: Iterable[str], unexpected: Iterable[str], ignore: Sequence[str]
) -> None:
    """
    Raises:
        UserError: weights are missing, or the files hold what the model has no place for.
    """
    if lost := sorted(missing):
        raise UserError(
            f"the weights of {title} are incomplete",
            expected=f"all weights of {type(model).__name__}",
            got=f"{len(lost)} missing, {lost[0]} the first of them",
            remedy=f"save the pipeline again, or correct what its {INDEX} and config.json say it is",
        )
    further = (name for name in unexpected if not _is_shared(model, name))
    more = sorted(name for name in further if not is_spare(name, type(model), ignore))
    if more:
        raise UserError(
            f"the weights of {title} are more than the model takes",
            expected=f"only those of {type(model).__name__}, of its config.json",
            got=f"{len(more)} more, {more[0]} the first of them",
            remedy=how_without(more[0]),
        )
