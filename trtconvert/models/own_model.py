"""Prepares models that users' functions make, and refuses unfit ones before anything is computed."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.nn.utils import remove_spectral_norm, remove_weight_norm
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from trtconvert.diffusion_model import DiffusionModel, WholeTimesteps
from trtconvert.errors import UserError, several
from trtconvert.models.computed_weights import keep_computed_weights
from trtconvert.models.own_sampler import OwnSampler
from trtconvert.wrapped import uncompiled

_TYPES = ("float32", "int64")

_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters that take any arguments."""


def prepared(source: str, model: DiffusionModel) -> DiffusionModel:
    """Returns a model for a conversion: in evaluation mode, in FP32, not compiled, with weights that are parameters, and with a
    sampler that is watched.

    Args:
        source: the function that made the model, `package.module:function`.
    Raises:
        UserError: the denoiser is no module of torch, does not take the inputs in their order, or an input has another type or
            shape than engines take.
    """
    model = _with_tuples(model)
    denoiser = _module(source, model)
    names = tuple(spec.name for spec in model.inputs)
    _refuse_other_parameters(source, denoiser, names)
    _refuse_unfit_inputs(source, model)
    denoiser.eval()
    for part in denoiser.modules():
        _with_plain_weights(part)
    types = {x.dtype for x in denoiser.state_dict().values() if x.is_floating_point()}
    if len(types) == 1 and types != {torch.float32}:  # of several types, the forward converts between them
        denoiser.float()
    keep_computed_weights(replace(model, denoiser=denoiser))
    sampler = model.sample.sampler if isinstance(model.sample, WholeTimesteps) else model.sample
    return replace(model, denoiser=denoiser, sample=OwnSampler(source, sampler, model))


def _with_tuples(model: DiffusionModel) -> DiffusionModel:
    """Returns a model whose inputs, shapes and ranges are tuples, where its function gave lists."""
    inputs, output = (
        tuple(replace(spec, shape=tuple(spec.shape)) for spec in specs) for specs in (model.inputs, [model.output])
    )
    return replace(
        model, inputs=inputs, output=output[0], dims={name: tuple(sizes) for name, sizes in model.dims.items()}
    )


def _module(source: str, model: DiffusionModel) -> nn.Module:
    """Returns the denoiser without torch.compile, whose calls no hook sees."""
    denoiser = uncompiled(model.denoiser)
    if not isinstance(denoiser, nn.Module):
        raise UserError(
            f"the denoiser of {source} is no module whose calls can be seen",
            expected="a torch.nn.Module in Python",
            got=type(denoiser).__name__,
            remedy="give a module whose forward calls the function",
        )
    if empty := [name for name, x in denoiser.state_dict().items() if x.is_meta]:
        raise UserError(
            f"the denoiser of {source} has no weights",
            expected="weights with values",
            got=f"{several(empty, 3)} on the meta device",
            remedy="load the weights in the function: module.load_state_dict(…, assign=True) after torch.device('meta')",
        )
    if (scripted := _scripted(denoiser)) is not None:
        raise UserError(
            f"the denoiser of {source} is no module whose calls can be seen",
            expected="a torch.nn.Module in Python, not TorchScript",
            got=scripted,
            remedy="set PYTORCH_JIT=0 in the environment, which keeps modules in Python that torch.jit.script or torch.jit.trace "
            "gets; in place of a file of torch.jit.load, make the module in Python and load the file's state_dict()",
        )
    for part in list(denoiser.modules()):
        part._compiled_call_impl = None
        for name, child in part.named_children():
            setattr(part, name, uncompiled(child))
    return denoiser


def _scripted(denoiser: nn.Module) -> str | None:
    """Returns the outermost module of TorchScript with its path; None if all modules are in Python."""
    named = ((path, part) for path, part in denoiser.named_modules() if isinstance(part, torch.jit.ScriptModule))
    path, part = next(named, ("", None))
    return None if part is None else f"{path or 'the model itself'}, a {type(part).__name__}"


def _with_plain_weights(part: nn.Module) -> None:
    """Replaces weights that are computed from others, as by weight norm, by the computed ones: layers need parameters."""
    if is_parametrized(part):
        for name in [*cast(nn.ModuleDict, part.parametrizations)]:
            remove_parametrizations(part, name)
    for hook in [*part._forward_pre_hooks.values()]:
        if isinstance(hook, WeightNorm):
            remove_weight_norm(part, hook.name)
        elif isinstance(hook, SpectralNorm):
            remove_spectral_norm(part, hook.name)


def _refuse_other_parameters(source: str, denoiser: nn.Module, names: tuple[str, ...]) -> None:
    """Samplers pass the first two inputs by place, and the others by name."""
    signature = inspect.signature(denoiser.forward)
    named = {name: name for name in names}
    try:
        signature.bind(**named)
        bound = signature.bind(*names[:2], **{name: named[name] for name in names[2:]}).arguments
    except TypeError as error:
        got = str(error)
        if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
            return
    else:
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        if all(named.get(name, value) == value or kinds[name] in _ANY for name, value in bound.items()):
            return
        got = ", ".join(bound)
    raise UserError(
        f"the denoiser of {source} does not take its inputs in their order",
        expected="a forward with the parameters " + ", ".join(names),
        got=got,
        remedy="name the inputs of the model as the parameters of its forward, in the same order",
    )


def _refuse_unfit_inputs(source: str, model: DiffusionModel) -> None:
    for what, expected, got, remedy in _unfit(model):
        raise UserError(f"{what} of {source} does not fit", expected=expected, got=got, remedy=remedy)


def _unfit(model: DiffusionModel) -> Iterator[tuple[str, str, str, str]]:
    """Yields a subject, the expected and the given form, and a remedy for each fault of a model's description."""
    for name in model.dims:
        if not name.isidentifier() or keyword.iskeyword(name):
            remedy = "rename it in `dims` and in all shapes, to letters, digits and underscores"
            yield "a name in `dims`", "a Python identifier", repr(name), remedy
    for name, sizes in model.dims.items():
        if (
            len(sizes) != 3
            or not all(isinstance(size, int) for size in sizes)
            or not 0 < sizes[0] <= sizes[1] <= sizes[2]
        ):
            remedy = "give (smallest, usual, largest), three times the same number for one size"
            yield f"{name!r} in `dims`", "three whole numbers, none smaller than the one before", str(sizes), remedy
    if (count := len(model.sigmas)) != model.timestep_max:
        remedy = "give one σ for each timestep; a model whose input goes from 0 to 1, or is σ, has a noise_input: docs/sigma.md"
        yield "`sigmas`", f"{model.timestep_max:g} numbers, as many as timestep_max", str(count), remedy
    if model.output.name in (names := [spec.name for spec in model.inputs]):
        yield "the name of `output`", f"another name than {', '.join(names)}", model.output.name, "name it 'prediction'"
    if not callable(model.sample):
        remedy = "give a function of the denoiser and seeds, see docs/entry-points.md"
        yield "`sample`", "a function", type(model.sample).__name__, remedy
    for spec in (*model.inputs, model.output):
        if spec.dtype not in _TYPES:
            remedy = "declare one of them, and convert the tensor in the forward"
            yield f"the type of '{spec.name}'", " or ".join(_TYPES), spec.dtype, remedy
        if unknown := [size for size in spec.shape if isinstance(size, str) and size not in model.dims]:
            remedy = f"add {unknown[0]!r} to `dims`, with its smallest, usual and largest size"
            yield f"the shape of '{spec.name}'", "numbers, and names in `dims`", unknown[0], remedy
    if model.timestep_input not in names:
        yield "`timestep_input`", "one of " + ", ".join(names), model.timestep_input, "name the input of the timestep"
        return
    timestep, batch = model.inputs[model.timestep_place], model.sample_spec.shape[:1]
    if timestep.shape != batch:
        remedy = "declare one timestep for each sample, and add axes in the forward: timestep[:, None]"
        yield f"the shape of the timestep '{timestep.name}'", f"{batch}", f"{timestep.shape}", remedy
