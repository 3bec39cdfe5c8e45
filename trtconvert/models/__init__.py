"""Model sources: `load` turns a recipe's `model` section into a `DiffusionModel`.

The names that an entry point needs are here too: the model and its inputs, noise schedules, and samplers.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.bundle import model_section
from trtconvert.entry_point import import_function
from trtconvert.errors import TrtconvertError, UserError, did_you_mean
from trtconvert.recipe import ONNX
from trtconvert.shipped import shipped_folder
from trtconvert.weights.lora_names import DENOISER

if TYPE_CHECKING:
    from torch import Tensor

    from trtconvert.attention.schedules import FlowSchedule, NoiseSchedule, SigmaRange, ddpm_betas
    from trtconvert.diffusion_model import DiffusionModel, ImageEncoder, InputSpec, Sampler
    from trtconvert.models.parametrisation import Parametrisation
    from trtconvert.models.pixels import PixelSampler
    from trtconvert.models.samplers import initial_noise, sample
    from trtconvert.noise_input import NoiseInput
    from trtconvert.recipe import LoraSection, ModelSection
    from trtconvert.runtime import LoadedBundle

__all__ = [
    "DiffusionModel", "FlowSchedule", "ImageEncoder", "InputSpec", "NoiseInput", "NoiseSchedule", "Parametrisation", "Sampler",
    "SigmaRange", "ddpm_betas", "initial_noise", "load", "load_sampler", "sample",
]  # fmt: skip

DIGITS, EMOJI = "digits-dit", "emoji-dit"
_SHIPPED = {
    DIGITS: ("trtconvert.models.digits", "digits_model", "draw_digits"),
    EMOJI: ("trtconvert.models.emoji", "emoji_model", "draw_emoji"),
}
"""Modules of the shipped models, with the function that loads each and its sampler."""

DIFFUSERS = "diffusers"
_FUNCTIONS = {DIFFUSERS: "trtconvert.models.diffusers:diffusers_model", ONNX: "trtconvert.models.onnx.model:onnx_model"}
"""The functions behind the sources `diffusers` and `onnx`."""


_ELSEWHERE = {
    "trtconvert.attention.schedules": ("FlowSchedule", "NoiseSchedule", "SigmaRange", "ddpm_betas"),
    "trtconvert.diffusion_model": ("DiffusionModel", "ImageEncoder", "InputSpec", "Sampler"),
    "trtconvert.models.parametrisation": ("Parametrisation",),
    "trtconvert.models.samplers": ("initial_noise", "sample"),
    "trtconvert.noise_input": ("NoiseInput",),
}
"""Names that are imported on demand, by module: they need torch, and a build whose stages are all cached does not."""


def __getattr__(name: str) -> Any:
    for module, names in _ELSEWHERE.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(section: ModelSection, loras: Sequence[LoraSection] = (), *, as_stored: bool = False) -> DiffusionModel:
    """Loads the model that a recipe names, checks its weights, and merges LoRAs into them. The model computes in FP32.

    Args:
        as_stored: keep the denoiser's weights in the recipe's 16-bit type where its files have this type. Such a model can be
            copied to a GPU or exported, and memory holds its weights once; it does not compute on FP32 inputs.
    Raises:
        UserError: the source is unknown, weights are missing, unfit, NaN or Inf, or a LoRA does not fit them.
    """
    if section.source == DIFFUSERS and section.weights is not None:
        from trtconvert.models.saved import refuse_unfit_config

        refuse_unfit_config(section.weights, section.config)  # before imports and files that take long

    import torch

    default = torch.get_default_dtype()
    try:
        model = _load(section)
    finally:  # the model's own code may have changed it
        torch.set_default_dtype(default)
    if section.source in (DIFFUSERS, _FUNCTIONS[DIFFUSERS]) and not (
        as_stored and _has_type_or_float32(model, section.dtype)
    ):
        model.denoiser.float()
    if loras:
        from trtconvert.models.lora import merge_loras

        merge_loras(model, loras)
    return model


def _has_type_or_float32(model: DiffusionModel, dtype: str) -> bool:
    types = {str(x.dtype).removeprefix("torch.") for x in model.denoiser.state_dict().values() if x.is_floating_point()}
    return types <= {"float32", dtype}


def _load(section: ModelSection) -> DiffusionModel:
    if section.source in _SHIPPED:
        if section.weights is None:
            raise UserError(
                "model.weights is missing",
                expected=f"a safetensors file for the source '{section.source}'",
                got="none",
                remedy=f"add `weights: {shipped_folder() / section.source}.safetensors` under model, or begin with "
                f"`trtconvert init {section.source} -o recipe.yaml`",
            )
        for field, given in (("images", section.images), ("options", section.options), ("config", section.config)):
            if given:
                raise UserError(
                    f"{section.source} takes no {field}",
                    expected=f"{field} for a pipeline of diffusers alone",
                    got=str(given) if isinstance(given, Path) else ", ".join(given),
                    remedy=f"remove model.{field} from the recipe",
                )
        return _shipped(section.source)[0](section.weights)
    if section.source in _FUNCTIONS:
        section = section.model_copy(update={"source": _FUNCTIONS[section.source]})
    return _from_function(section)


def _shipped(source: str) -> tuple[Callable[[Path], DiffusionModel], PixelSampler]:
    """Returns the function that loads a shipped model, and the model's sampler."""
    name, *parts = _SHIPPED[source]
    function, sampler = (getattr(importlib.import_module(name), part) for part in parts)
    return function, sampler


def load_sampler(bundle: LoadedBundle, prompts: Sequence[str] = (), weights: Path | None = None) -> Sampler:
    """Returns the sampler for a bundle's denoiser.

    The samplers of the shipped models, and of bundles with the whole pipeline, need no weights; other models are loaded. Models
    of a pipeline that do not become components, such as a ControlNet, are loaded from the original pipeline.

    Args:
        prompts: what samples show, by turns with their seeds; the recipe's by default.
        weights: place of the original pipeline; by default that of the recipe, in the current folder.
    Raises:
        UserError: see `load`; weights are looked for in the current folder, as bundles do not hold them. Or there are prompts,
            and the bundle has no text encoder for them. Or weights are given, and the bundle holds its whole pipeline.
    """
    manifest = bundle.manifest
    section = model_section(bundle.folder, manifest)
    if manifest.pipeline:
        from trtconvert.models.pipeline_sampler import pipeline_sampler

        sampler = pipeline_sampler(
            _whole_pipeline(bundle, section, weights),
            manifest.components["denoiser"],
            section.options,
            prompts,
            section.images,
        )
        if prompts and not sampler.caller.takes_prompts:  # it would draw from embeddings of noise
            got = "a pipeline that was saved without text encoders"
            if "prompt" not in sampler.caller.parameters:
                got = f"{sampler.caller.kind}, whose call takes no prompt"
            raise _no_prompts(bundle, got)
        return sampler
    if prompts:
        raise _no_prompts(bundle, f"a bundle of {section.source} without components")
    return load_conditional_sampler(bundle)[0]


def _whole_pipeline(bundle: LoadedBundle, section: ModelSection, weights: Path | None) -> Any:
    from trtconvert.runtime.pipeline import MissingParts

    try:
        pipeline = bundle.pipeline()
    except MissingParts as lacking:
        place = weights or section.weights
        if place is None or not place.exists():
            raise
        import torch

        from trtconvert.models.loading import load_parts

        variant = section.options.get("variant")
        parts = load_parts(lacking.names, place, section.config, variant if isinstance(variant, str) else None)
        # Embeddings decide the type of a pipeline's latents; embeddings of noise are FP32.
        encodes = any(name.startswith("text_encoder") for name in bundle.manifest.components)
        dtype = getattr(torch, section.dtype) if encodes else torch.float32
        return bundle.pipeline(**{name: part.to(dtype) for name, part in parts.items()})
    if weights is not None:
        raise UserError(
            f"{bundle.folder} needs no weights",
            expected="no --weights: the bundle holds its pipeline",
            got=f"--weights {weights}",
            remedy="leave --weights out",
        )
    return pipeline


def load_conditional_sampler(
    bundle: LoadedBundle,
) -> tuple[Sampler, Callable[[Sequence[str]], Mapping[str, Tensor]] | None]:
    """Returns the sampler for the denoiser of a bundle without a pipeline, and the function that turns its captions into
    conditions, see `DiffusionModel.condition`.

    Raises:
        UserError: see `load_sampler`.
    """
    manifest = bundle.manifest
    section = model_section(bundle.folder, manifest)
    if section.source in _SHIPPED:
        _, sampler = _shipped(section.source)
        return sampler, sampler.labels
    if section.weights is not None and not section.weights.exists():
        raise UserError(
            f"{section.source} samples with its original weights, which this bundle does not hold",
            expected=f"{section.weights} in the current folder",
            got="no such file",
            remedy="give the file with `trtconvert run --weights`, run this in the folder of the file, or, for a diffusers "
            "pipeline, build it with components: {all: {}}",
        )
    # The bundle has the denoiser with its LoRAs; the other LoRAs change the conditions.
    model = load(section, [lora for lora in manifest.recipe.loras if lora.target != DENOISER])
    return model.sample, model.condition


def _no_prompts(bundle: LoadedBundle, got: str) -> UserError:
    return UserError(
        f"{bundle.folder} does not turn prompts into images",
        expected="a bundle of a diffusers pipeline with its text encoders: components: {all: {}} in the recipe",
        got=got,
        remedy="leave the prompts out, or build a pipeline with text encoders, with components",
    )


def _from_function(section: ModelSection) -> DiffusionModel:
    from trtconvert.diffusion_model import DiffusionModel
    from trtconvert.weights.finite import require_finite

    if not section.source.partition(":")[2]:
        raise UserError(
            f"unknown model source '{section.source}'",
            expected=f"'{DIGITS}', '{EMOJI}', '{DIFFUSERS}', an ONNX file or 'package.module:function'",
            got=f"'{section.source}'",
            remedy="correct model.source in the recipe",
        )
    function = import_function(section.source, "model.source")
    signature = inspect.signature(function)
    arguments: dict[str, Any] = dict(section.options)
    if section.weights is not None:
        arguments["weights"] = section.weights
    for field, given in (("images", section.images), ("config", section.config)):
        if given:
            arguments[field] = given
    _refuse_unfit_options(section, signature, arguments)
    try:
        model = function(**arguments)
    except TrtconvertError:
        raise
    except Exception as error:
        raise UserError(
            f"{section.source} failed",
            expected="a trtconvert.models.DiffusionModel",
            got=f"{type(error).__name__}: {error}",
            remedy="correct the function, or model.options and model.weights; --debug shows where it failed",
        ) from error
    if not isinstance(model, DiffusionModel):
        raise UserError(
            f"{section.source} does not return a model",
            expected="a trtconvert.models.DiffusionModel",
            got=type(model).__name__,
            remedy="return one; trtconvert/models/digits.py is an example",
        )
    if section.source not in _FUNCTIONS.values():
        from trtconvert.models.own_model import prepared

        model = prepared(section.source, model)
    for name, tensor in model.denoiser.state_dict().items():
        if tensor.is_floating_point():
            remedy = "get the weights again, or load them in a type that holds their range"
            require_finite(f"the weight {name} of {model.name} is damaged", tensor, remedy)
    return model


def _refuse_unfit_options(section: ModelSection, signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    try:
        signature.bind(**arguments)
    except TypeError as error:
        title = next((name for name, function in _FUNCTIONS.items() if function == section.source), section.source)
        fields = ("weights", "images", "config")
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        unknown = [] if anything else [name for name in arguments if name not in signature.parameters]
        options = [name for name in signature.parameters if name not in fields]
        if not unknown:
            wanted = [
                name
                for name, parameter in signature.parameters.items()
                if name not in arguments
                and parameter.default is parameter.empty
                and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            ]
            raise UserError(
                f"the recipe's model section lacks arguments of {title}",
                expected=", ".join(wanted) or f"arguments {signature}",
                got=", ".join(arguments) or "none",
                remedy=f"add {', '.join(name if name in fields else f'options.{name}' for name in wanted)} under model"
                if wanted
                else "correct model.options",
            ) from error
        field = f"model.{unknown[0]}" if unknown[0] in fields else f"model.options.{unknown[0]}"
        raise UserError(
            f"{title} does not take the recipe's {field}",
            expected="options among " + ", ".join(options) if options else "no options",
            got=", ".join(unknown),
            remedy=did_you_mean(unknown[0], options, f"remove {field} from the recipe"),
        ) from error
