"""`replace_attention_with_int8`: INT8 attention in a diffusers pipeline in torch, in place and reversible.

A denoiser notes the timestep of each call. Each of its modules that calls
`torch.nn.functional.scaled_dot_product_attention`, or writes attention out (see `trtconvert.unfused`), runs under a
`TorchFunctionMode` that computes the attention. Only the classes of these modules change, by subclasses with another `__call__`:
weights, names, hooks, attention processors and compiled parts stay the same. LoRAs, IP-Adapters, CPU offload and torch.compile
therefore work, whether applied before or after.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.attention.modes import PRECISION_MODES, Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.replaced import (
    DENOISER,
    SITE,
    TIMESTEPS,
    Calibrated,
    Denoiser,
    Site,
    TimestepModes,
    calling_attention,
    denoising,
    refuse_replaced,
    swap,
    undo,
)
from trtconvert.attention.schedules import scheduler_sigmas, sigma_rule_modes
from trtconvert.attention.sites import HEAD_DIMS, is_selected, unmatched_pattern
from trtconvert.attention.tables import read_tables
from trtconvert.bundle import read_manifest
from trtconvert.errors import UserError
from trtconvert.wrapped import uncompiled

BINS = 10
"""Timestep bins of modes without a calibration."""

_ALONE = "model"
"""Name of a denoiser that is given without a pipeline."""

_FUNCTIONS = ("scaled_dot_product_attention", "dispatch_attention_fn", "softmax")
"""Names in a forward's code that show that it calls attention, in diffusers too, or writes attention out."""


@dataclass(frozen=True)
class AttentionReport:
    """Result of `replace_attention_with_int8`.

    Attributes:
        replaced: paths of modules with INT8 attention.
        left: reasons by path, of modules that keep their attention.
        exceptions: path: reason, of replaced modules that computed some calls exactly. Calls inside torch.compile are not seen.
    """

    replaced: tuple[str, ...]
    left: Mapping[str, str]
    exceptions: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} attention modules compute in INT8, {len(self.left)} do not"]
        lines += [f"  {name}: {reason}" for name, reason in self.left.items()]
        lines += [f"  {name}, some calls: {reason}" for name, reason in self.exceptions.items()]
        return "\n".join(lines)


def replace_attention_with_int8(
    pipe: Any,
    *,
    calibration: str | Path | None = None,
    precision_mode: str | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
) -> Any:
    """Replaces the attention of a diffusers pipeline by INT8 attention: self- and cross-attention of U-Nets and transformers.

    The pipeline is changed in place. Text encoders and VAEs stay unchanged. Calls that the kernels do not take (causal, with
    dropout, heads larger than 256) are computed exactly; `attention_report` lists them. Attention that a module writes out stays
    exact in code that torch.compile compiles.

    Args:
        pipe: a pipeline, or a denoiser, that is a module with a timestep among the arguments of its forward.
        calibration: a bundle's folder with scales and modes, or a calibration file with scales; of the same model. None: scales
            are measured in each call.
        precision_mode: "precision", "balanced", "aggressive", "fp8" or "fp16" for all timesteps, or "auto": a mode by the noise
            of each timestep. None: the modes of the bundle, or "precision", which is closest to exact.
        include, exclude: patterns of module paths such as "*.attn1"; in a pipeline, paths start with the component:
            "unet.mid_block.*".
    Returns:
        `pipe`.
    Raises:
        UserError: there is no denoiser or no attention, the attention is replaced already, or the calibration does not fit.
            The pipeline is unchanged then.
    """
    denoisers = _denoisers_of(pipe)
    for name, model in denoisers.items():
        refuse_replaced(model, name)
    shared, saved = _modes_and_calibration(pipe, calibration, precision_mode)
    prepared = [
        _prepare(uncompiled(model), name, shared, saved, include, exclude, alone=model is pipe)
        for name, model in denoisers.items()
    ]
    _refuse_patterns(prepared, include, exclude)
    if saved is not None:
        _refuse_foreign_calibration(prepared, saved, Path(str(calibration)))
    if not any(found.sites for found in prepared):
        reasons = [f"{name}: {reason}" for found in prepared for name, reason in found.left.items()]
        raise UserError(
            "the pipeline has no attention that can be INT8",
            expected="modules that call torch.nn.functional.scaled_dot_product_attention, or write attention out",
            got="; ".join(reasons[:5]) or f"none in {', '.join(denoisers)}",
            remedy="use diffusers' own attention processors, and check the patterns of include and exclude",
        )
    _swap_classes(list(denoisers.values()), prepared)
    _forget_compiled(denoisers.values())
    for model, found in zip(denoisers.values(), prepared, strict=True):
        # Tables are copied now: torch.compile and CUDA graphs would record the copies of a first call.
        for device in {x.device for x in uncompiled(model).parameters()} | _execution_devices(pipe):
            if device.type != "meta":
                for site in found.sites.values():
                    site.on(device)
    return pipe


def _swap_classes(models: Sequence[nn.Module], prepared: Sequence[Denoiser]) -> None:
    """Gives the denoisers and their sites the classes that compute in INT8, all or none; UserError if a class forbids it."""
    changed: list[tuple[nn.Module, type]] = []
    try:
        for model, found in zip(models, prepared, strict=True):
            first, inner = len(changed), uncompiled(model)
            for site in found.sites.values():
                swap(site.module, calling_attention, changed)
                vars(site.module)[SITE] = site
            for outer in {id(model): model, id(inner): inner}.values():
                swap(outer, denoising, changed)
            vars(inner)[DENOISER] = found
            found.swapped = changed[first:]
    except TypeError as error:
        undo(changed)
        raise UserError(
            "a module of the pipeline cannot be replaced",
            expected="modules whose classes are written in Python",
            got=str(error),
            remedy="leave it out with exclude=[…]",
        ) from error


def restore_attention(pipe: Any) -> Any:
    """Undoes `replace_attention_with_int8`. Other changes since then, such as LoRAs, stay.

    Returns:
        `pipe`.
    Raises:
        UserError: the pipeline's attention is not replaced.
    """
    denoisers = _denoisers_of(pipe)
    found = _replaced_in(denoisers)
    for denoiser in found.values():
        undo(denoiser.swapped)
    _forget_compiled(denoisers.values())
    return pipe


def attention_report(pipe: Any) -> AttentionReport:
    """Reports which attention `replace_attention_with_int8` replaced, and why not the rest. Complete after a first image.

    Raises:
        UserError: the pipeline's attention is not replaced.
    """
    replaced, left, exceptions = [], {}, {}
    for denoiser in _replaced_in(_denoisers_of(pipe)).values():
        left |= denoiser.left
        has_run = any(site.called or site.exceptions for site in denoiser.sites.values())
        for path, site in denoiser.sites.items():
            if has_run and not site.called:
                left[path] = "; ".join(site.exceptions) or "it has computed no attention"
                continue
            replaced.append(path)
            if site.exceptions:
                exceptions[path] = "; ".join(site.exceptions)
    return AttentionReport(tuple(replaced), left, exceptions)


# Parts of a pipeline --------------------------------------------------------------------------------------------------


def _denoisers_of(pipe: Any) -> dict[str, nn.Module]:
    """Returns the modules whose forward takes a timestep, by component; UserError if there is none."""
    if isinstance(pipe, nn.Module):
        parts = {_ALONE: pipe}
    else:
        components = getattr(pipe, "components", None)
        parts = dict(components) if isinstance(components, Mapping) else {}
    found = {
        name: part
        for name, part in parts.items()
        if isinstance(part, nn.Module)
        and any(name in inspect.signature(type(uncompiled(part)).forward).parameters for name in TIMESTEPS)
    }
    if not found:
        raise UserError(
            "this has no attention to replace",
            expected="a diffusers pipeline with a unet or a transformer, or such a model with a forward that takes a timestep",
            got=type(pipe).__name__ + (f" with {', '.join(parts)}" if parts and parts.keys() != {_ALONE} else ""),
            remedy="give the pipeline that generates images; use Int8Attention in modules of your own",
        )
    return found


def _replaced_in(denoisers: Mapping[str, nn.Module]) -> dict[str, Denoiser]:
    found = {
        name: made
        for name, model in denoisers.items()
        if (made := getattr(uncompiled(model), DENOISER, None)) is not None
    }
    if not found:
        raise UserError(
            "the pipeline's attention was not replaced",
            expected="a pipeline after replace_attention_with_int8",
            got=", ".join(denoisers),
            remedy="call replace_attention_with_int8(pipe) first",
        )
    return found


def _execution_devices(pipe: Any) -> set[torch.device]:
    """Returns the device that computes a pipeline with offloaded models."""
    device = getattr(pipe, "_execution_device", None)
    if not isinstance(device, (str, torch.device)):
        return set()
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:  # devices of tensors have an index
        device = torch.device("cuda", torch.cuda.current_device())
    return {device}


def _calls_attention(module: nn.Module) -> bool:
    if callable(getattr(module, "processor", None)) or any(isinstance(x, nn.Softmax) for x in module.children()):
        return True
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and any(name in code.co_names for name in _FUNCTIONS)


def _head_dim(module: nn.Module) -> int:
    """Returns the head size of modules with diffusers' attributes; 0 for others."""
    heads, width = getattr(module, "heads", None), getattr(module, "inner_dim", None)
    return width // heads if isinstance(heads, int) and isinstance(width, int) and heads > 0 else 0


# Modes and calibration ------------------------------------------------------------------------------------------------


def _modes_and_calibration(
    pipe: Any, calibration: str | Path | None, precision_mode: str | None
) -> tuple[TimestepModes, dict[str, Calibrated] | None]:
    """Returns the modes by timestep, and the calibrated sites; None without a calibration."""
    if precision_mode is not None and precision_mode not in PRECISION_MODES:
        raise UserError(
            "there is no such precision mode",
            expected=", ".join(PRECISION_MODES),
            got=repr(precision_mode),
            remedy='"precision" is the closest to exact, "fp8" the fastest for long sequences on Hopper',
        )
    scheduler = getattr(pipe, "scheduler", None)
    config = getattr(scheduler, "config", None) or {}
    noise = None if scheduler is None else scheduler_sigmas(scheduler)
    fractions, noise_input = noise is not None and noise.flow, None if noise is None else noise.noise_input

    def modes(wanted: str, bins: int) -> Tensor:
        if wanted != "auto":
            return torch.full((bins,), int(Mode[wanted.upper()]), dtype=torch.int32)
        if noise is None:
            raise UserError(
                'precision_mode="auto" needs the noise of the timesteps, but the noise of the timesteps is not known',
                expected="a scheduler with alphas_cumprod, or of flow matching, EDM or consistency models",
                got=type(scheduler).__name__,
                remedy='choose one mode, such as precision_mode="precision"',
            )
        return sigma_rule_modes(noise.sigmas, bins)

    if calibration is None:
        end = float(config.get("num_train_timesteps", 1000)) if noise_input is None else noise_input.timestep_max
        own = modes(precision_mode or "precision", BINS if precision_mode == "auto" else 1)
        return TimestepModes(own, end, fractions=fractions, noise_input=noise_input), None
    path = Path(calibration)
    if not path.is_dir():
        made, saved = read_tables(path)
        own = modes(precision_mode or "precision", made.bins)
        return TimestepModes(own, made.timestep_max, fractions=fractions, noise_input=noise_input), {
            site: Calibrated(AttentionTables(**tables, modes=own)) for site, tables in saved.items()
        }
    manifest = read_manifest(path)
    made, saved = read_tables(path / manifest.calibration)
    component = next(part for part in manifest.components.values() if part.is_denoiser)
    factor = 1 / component.diffusers.timestep_factor if component.diffusers is not None else 1.0
    forced = None if precision_mode is None else modes(precision_mode, made.bins)
    scalings, smooth_k = manifest.scalings, manifest.recipe.attention.smooth_k
    found = {}
    for site in manifest.sites:
        if site.modes and site.name in saved:
            own = torch.tensor(site.modes, dtype=torch.int32) if forced is None else forced
            tables = AttentionTables(**saved[site.name], modes=own)
            found[site.name] = Calibrated(tables, scalings[site.name], smooth_k)
    common = modes("precision", made.bins) if forced is None else forced
    return TimestepModes(common, component.timestep_max, factor, noise_input=component.noise_input), found


def _prepare(
    model: nn.Module,
    name: str,
    shared: TimestepModes,
    saved: Mapping[str, Calibrated] | None,
    include: Sequence[str],
    exclude: Sequence[str],
    *,
    alone: bool,
) -> Denoiser:
    """Lists the modules of a denoiser that will be replaced; changes nothing."""
    found = Denoiser(model, shared)
    prefix = "" if alone else f"{name}."
    paths = {(prefix + path) or name for path, _ in model.named_modules()}
    calls: dict[str, dict[int, Calibrated]] = {}
    for site, call in (saved or {}).items():
        path, _, number = site.partition("#")
        path = _path_of(path, paths)
        calls.setdefault(path, {})[int(number or 1)] = call
    for path, module in model.named_modules():
        full = (prefix + path) or name
        if not (_calls_attention(module) or full in calls or isinstance(module, nn.MultiheadAttention)):
            continue
        if not is_selected(full, include, exclude):
            found.left[full] = "it is not included"
        elif isinstance(module, nn.MultiheadAttention):
            found.left[full] = "it is torch's own multi-head attention"
        elif (dim := _head_dim(module)) > HEAD_DIMS[-1]:
            found.left[full] = f"head_dim {dim} is more than {HEAD_DIMS[-1]}"
        elif saved is not None and full not in calls:
            found.left[full] = "the calibration has no scales for it"
        else:
            found.sites[full] = Site(found, module, calls.get(full, {}))
    return found


def _refuse_patterns(prepared: Sequence[Denoiser], include: Sequence[str], exclude: Sequence[str]) -> None:
    names = [name for found in prepared for name in (*found.sites, *found.left)]
    pattern = unmatched_pattern((*include, *exclude), names) if names else None
    if pattern is not None:
        raise UserError(
            f"the pattern '{pattern}' matches no attention",
            expected="a pattern of one of: " + ", ".join(names[:20]),
            got=f"'{pattern}'",
            remedy="correct include or exclude",
        )


def _path_of(site: str, paths: Collection[str]) -> str:
    """Returns the module's path of a calibrated site. Calibrations of pipelines start with the component; a denoiser that is
    given alone has no component."""
    if site == "denoiser" and _ALONE in paths:  # the denoiser's own forward calls attention
        return _ALONE
    return site if site in paths else site.partition(".")[2]


def _refuse_foreign_calibration(prepared: Sequence[Denoiser], saved: Mapping[str, Calibrated], file: Path) -> None:
    """Raises a UserError if a site of the calibration does not exist in the pipeline, or has other heads."""
    names = {name for found in prepared for name in (*found.sites, *found.left)}
    strange = ""
    for site, call in saved.items():
        path = _path_of(site.partition("#")[0], names)
        if path not in names:
            strange = site
        for found in prepared:
            if (made := found.sites.get(path)) is not None:
                strange = strange or _other_heads(made.module, site, call.tables)
    if strange or not saved:
        raise UserError(
            f"{file} was calibrated on another model",
            expected="scales of attention in the pipeline, such as " + (", ".join(sorted(names)[:3]) or "none"),
            got=strange or "no attention",
            remedy="give a bundle or a calibration of this model",
        )


def _other_heads(module: nn.Module, site: str, tables: AttentionTables) -> str:
    """Describes how the tables' heads differ from the module's; empty if they fit or the module's heads are unknown."""
    dim = _head_dim(module)
    if not dim:
        return ""
    size = next((size for size in HEAD_DIMS if size >= dim), dim)  # heads are padded to the next size
    heads, found = module.heads, (tables.q_scale.shape[1], tables.v_scale.shape[2])
    return "" if found == (heads, size) else f"{site} with {found[0]} heads of {found[1]}, not {heads} of {size}"


def _forget_compiled(models: Iterable[nn.Module]) -> None:
    """Drops what torch.compile compiled before the classes changed."""
    parts = (part for model in models for part in (model, *model.modules()))
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in parts):
        torch._dynamo.reset()
