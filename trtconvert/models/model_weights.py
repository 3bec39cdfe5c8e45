"""Makes models of diffusers and transformers from their folders, with exactly their weights.

Both libraries initialise weights that a file lacks, and drop weights that a model has no place for; here both are errors that
name the weight.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trtconvert.documents import PIPELINE_INDEX, safetensors_header
from trtconvert.errors import TrtconvertError, UserError, first_line
from trtconvert.models.saved import DENOISERS
from trtconvert.weights.weight_files import StoredWeights, holds_scaled, how_without, is_spare, read_tensors

FAILURES = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ImportError,
    RuntimeError,  # of transformers, where a weight has another size
    SafetensorError,
)
"""Exceptions of the libraries for a folder that is not theirs, or damaged; a list as index raises a TypeError."""


@dataclass(frozen=True)
class Weights:
    """Which weights of a pipeline to load.

    Attributes:
        place: folder that the pipeline's `save_pretrained` wrote, or a file of weights.
        config: for a file, the folder of a pipeline with everything but these weights.
        denoiser: name of the model that the file holds, where there are several denoisers.
        variant: see `stored_weights`.
        ignore: patterns (fnmatch) of names in the files that the models may do without.
    """

    place: Path
    config: Path | None = None
    denoiser: str | None = None
    variant: str | None = None
    ignore: Sequence[str] = ()


def load_model(
    kind: Any, folder: Path, stored: StoredWeights | None, title: str, asked: Weights, as_stored: bool
) -> nn.Module:
    """Loads a model with the weights of its folder, in FP32.

    Args:
        title: of the model, for messages.
        as_stored: keep the weights in the 16-bit type of their files, and on the disk until they are read.
    Raises:
        UserError: see `load_pipeline`.
    """
    if stored is None:
        of_file = asked.place.is_file() and folder.name.startswith(DENOISERS)
        otherwise = (
            f"if {asked.place} holds them, add `options: {{denoiser: {folder.name}}}` under model; else "
            if of_file
            else ""
        )
        name = "diffusion_pytorch_model" if _is_diffusers_class(kind) else "model"
        others = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
        if dangling := [path for path in others if not path.exists()]:
            raise UserError(
                f"there are no weights of {title}",
                expected=f"the file that {dangling[0].name} is a link to",
                got=f"no {os.path.realpath(dangling[0])}",
                remedy="get the file again, or copy the pipeline with the files that its links lead to (cp -rL)",
            )
        raise UserError(
            f"there are no weights of {title}",
            expected=f"files as `save_pretrained` names them, such as {name}.safetensors",
            got=", ".join(sorted(path.name for path in folder.iterdir()))
            + (f", and {asked.place} holds none for it" if asked.place.is_file() else ""),
            remedy=f"rename {others[0].name} to {name}{others[0].suffix}, if it has all weights"
            if others
            else f"{otherwise}get them; or, if the pipeline can do without, "
            f'write "{folder.name}": [null, null] in {PIPELINE_INDEX}',
        )
    try:
        quantised = "quantization_config" in json.loads((folder / "config.json").read_text())
        if quantised or holds_scaled(stored.files):
            return model_of(kind, folder, read_tensors(stored.files), title, asked.ignore)
        dtype = _stored_16_bit_type(kind, stored) if as_stored else None
        # Both libraries prefer safetensors, whichever format has the variant.
        model, told = kind.from_pretrained(
            folder,
            local_files_only=True,
            output_loading_info=True,
            variant=stored.variant,
            use_safetensors=stored.safetensors,
            **_type_argument(kind, dtype or torch.float32),
        )
        if dtype is not None:
            _restore_float32_buffers(model, kind, folder)
    except TrtconvertError:
        raise
    except FAILURES as error:
        read_tensors(stored.files)  # raises an error about a damaged file
        raise not_loaded(title, error) from error
    _refuse_others(model, title, told["missing_keys"], told["unexpected_keys"], asked.ignore)
    return model


def model_of(kind: Any, folder: Path, state: Mapping[str, Tensor], title: str, ignore: Sequence[str]) -> nn.Module:
    """Makes a model from the configuration in a folder and the weights of a state dict, in FP32.

    Raises:
        UserError: see `load_pipeline`.
    """
    try:
        if _is_diffusers_class(kind):
            return _filled(kind, folder, state, title, ignore)
        config = kind.config_class.from_pretrained(folder, local_files_only=True)
        vars(config).pop("quantization_config", None)
        model, told = kind.from_pretrained(
            None, config=config, state_dict=dict(state), output_loading_info=True, dtype=torch.float32
        )
    except TrtconvertError:
        raise
    except FAILURES as error:
        raise not_loaded(title, error) from error
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
                remedy="give the configuration of the model that these weights belong to",
            )
    filled = {
        name: state[name].float() if x.is_floating_point() else state[name].to(x.dtype) for name, x in wanted.items()
    }
    model.load_state_dict({name: x.contiguous() for name, x in filled.items()}, assign=True)
    return model.eval()


def _without_weights(kind: Any, folder: Path) -> nn.Module:
    """Makes a model of diffusers from the configuration in a folder. Its weights take no memory; other buffers are computed."""
    from accelerate import init_empty_weights

    config = dict(kind.load_config(folder, local_files_only=True))
    config.pop("quantization_config", None)
    with init_empty_weights(include_buffers=False):
        return kind.from_config(config)


def _is_diffusers_class(kind: Any) -> bool:
    return hasattr(kind, "load_config")


def _type_argument(kind: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the argument of `from_pretrained` for a type. diffusers loads FP32 by default, and makes a copy where it is asked
    to."""
    if not _is_diffusers_class(kind):
        return {"dtype": dtype}
    return {} if dtype == torch.float32 else {"torch_dtype": dtype}


def _stored_16_bit_type(kind: Any, stored: StoredWeights) -> torch.dtype | None:
    """Returns the one 16-bit type of all floating-point weights in the files, other than those that diffusers keeps in FP32; None
    where there is no such type, or the files' headers do not tell."""
    if not (stored.safetensors and _is_diffusers_class(kind)):
        return None
    kept = set(getattr(kind, "_keep_in_fp32_modules", None) or ())
    types = set[str]()
    for file in stored.files:
        for name, entry in safetensors_header(file).items():
            if name != "__metadata__" and not kept & {*name.split(".")}:
                types.add(str(entry["dtype"]))
    floating = types & {"F64", "F32", "F16", "BF16"}
    return {"F16": torch.float16, "BF16": torch.bfloat16}.get(floating.pop()) if len(floating) == 1 else None


def _restore_float32_buffers(model: nn.Module, kind: Any, folder: Path) -> None:
    """Replaces tables that the library computed in 16 bits, such as those of positions, by FP32 tables."""
    exact = _without_weights(kind, folder)
    of_files = model.state_dict().keys()
    computed = {name: x for name, x in exact.named_buffers() if name not in of_files and x.is_floating_point()}
    for name, x in computed.items():
        place, _, buffer = name.rpartition(".")
        model.get_submodule(place).register_buffer(buffer, x, persistent=False)


def _is_shared(model: nn.Module, name: str) -> bool:
    """Whether a weight belongs to a module that the pipeline shares between its denoiser and this model, by
    `from_transformer(controlnet, transformer)`, as for Z-Image's ControlNet: `save_pretrained` wrote it with both."""
    shares: Any = getattr(type(model), "from_transformer", None)
    if shares is None or "controlnet" not in inspect.signature(shares).parameters:
        return False
    return getattr(model, name.partition(".")[0], model) is None


_OF_PIPELINES_IN_USE = (
    (".base_layer.", "with a LoRA that is not merged", "pipe.fuse_lora() and pipe.unload_lora_weights()"),
    (".to_qkv.", "with joint projections", "pipe.unfuse_qkv_projections()"),
    (".to_kv.", "with joint projections", "pipe.unfuse_qkv_projections()"),
)
"""Parts of names that layers get while a pipeline is in use, what such a pipeline was saved with, and calls that undo it."""


def _refuse_others(
    model: nn.Module, title: str, missing: Iterable[str], unexpected: Iterable[str], ignore: Sequence[str]
) -> None:
    unexpected = list(unexpected)
    for part, what, remedy in _OF_PIPELINES_IN_USE:
        if changed := sorted(name for name in unexpected if part in name):
            raise UserError(
                f"the weights of {title} were saved {what}",
                expected=f"the weights of a {type(model).__name__} as its class has them",
                got=f"{len(changed)} others, {changed[0]} the first of them",
                remedy=f"load the pipeline again as you did, call {remedy}, and then save_pretrained",
            )
    if lost := sorted(missing):
        raise UserError(
            f"the weights of {title} are incomplete",
            expected=f"all weights of {type(model).__name__}",
            got=f"{len(lost)} missing, {lost[0]} the first of them",
            remedy=f"save the pipeline again, or correct its classes in {PIPELINE_INDEX} and its sizes in config.json",
        )
    further = (name for name in unexpected if not _is_shared(model, name))
    more = sorted(name for name in further if not is_spare(name, type(model), ignore))
    if more:
        raise UserError(
            f"the weights of {title} are more than the model takes",
            expected=f"only those of {type(model).__name__}, as its config.json describes it",
            got=f"{len(more)} more, {more[0]} the first of them",
            remedy=how_without(more[0]),
        )


def not_loaded(what: str, error: BaseException) -> UserError:
    return UserError(
        f"{what} cannot be loaded",
        expected="a whole folder that `save_pretrained` of an installed pipeline class wrote",
        got=first_line(error),
        remedy="save the pipeline again, or install the diffusers that wrote it",
    )
