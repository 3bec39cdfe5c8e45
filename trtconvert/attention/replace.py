"""`replace_attention_with_int8`: a pipeline's denoisers with INT8 attention in torch, in place and undone at will.

A denoiser notes the timestep that it is called with. Each of its modules that calls
`torch.nn.functional.scaled_dot_product_attention`, or writes attention out (see `trtconvert.unfused`), runs under a
`TorchFunctionMode` that computes this call. Both by classes of their own, whose `__call__` differs: weights, names, hooks,
attention processors and compiled parts stay what they are, so that LoRAs, IP-Adapters, CPU offload and torch.compile work as
before, whether they come before or after.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.replaced import (
    DENOISER,
    SITE,
    TIMESTEPS,
    Calibrated,
    Denoiser,
    Plan,
    Site,
    calling_attention,
    denoising,
    swap,
    undo,
)
from trtconvert.attention.schedules import scheduler_sigmas, sigma_rule_modes
from trtconvert.attention.sites import HEAD_DIMS
from trtconvert.attention.tables import read_tables
from trtconvert.bundle import read_manifest
from trtconvert.errors import UserError

BINS = 10
"""Timestep bins of modes, where no calibration says how many."""

_ALONE = "model"
"""Name of a denoiser that is no pipeline's component."""

_FUNCTIONS = ("scaled_dot_product_attention", "dispatch_attention_fn", "softmax")
"""Names by which a forward's code calls attention, in diffusers too, or writes it out."""


@dataclass(frozen=True)
class AttentionReport:
    """What became of a pipeline's attention.

    Attributes:
        replaced: paths of modules whose attention is INT8.
        left: path: why this module's attention is what it was.
        exceptions: path: why a call of a replaced module was computed as before, as far as calls outside of torch.compile told.
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
    """Let the attention of a diffusers pipeline compute in INT8, self- and cross-attention of U-Nets and transformers.

    In place: the same pipeline is returned. Text encoders and VAEs stay as they are. Calls that kernels do not take (causal,
    with dropout, of heads larger than 256) are computed as before; `attention_report` names them. So is attention that a module
    writes out where torch.compile compiles it.

    Args:
        pipe: a pipeline, or a denoiser alone: a module whose forward has a timestep.
        calibration: a bundle's folder, which has scales and a plan of modes, or a calibration's file, which has scales. Of the
            same model. Without one, scales are measured in each call.
        precision_mode: "precision", "balanced", "aggressive", "fp8" or "fp16" for all, or "auto": by the noise of each timestep.
            By default that of the bundle, or "precision", the closest to exact.
        include, exclude: patterns of modules' paths, as "*.attn1"; for a pipeline they begin with the component,
            "unet.mid_block.*".
    Returns:
        `pipe`.
    Raises:
        UserError: no denoiser, no attention in it, attention that is replaced already, or a calibration that does not fit.
            Nothing is replaced then.
    """
    denoisers = _denoisers_of(pipe)
    for name, model in denoisers.items():
        if getattr(_inner(model), DENOISER, None) is not None:
            raise UserError(
                f"the attention of {name} is INT8 already",
                expected="a pipeline as it was loaded",
                got="one whose attention was replaced, perhaps through another pipeline with the same model",
                remedy="restore_attention(pipe) first, to replace it otherwise",
            )
    plan, saved = _planned(pipe, calibration, precision_mode)
    prepared = [
        _prepare(_inner(model), name, plan, saved, include, exclude, alone=model is pipe)
        for name, model in denoisers.items()
    ]
    _refuse_patterns(prepared, include, exclude)
    if saved is not None:
        _refuse_strangers(prepared, saved, Path(str(calibration)))
    if not any(found.sites for found in prepared):
        reasons = [f"{name}: {reason}" for found in prepared for name, reason in found.left.items()]
        raise UserError(
            "the pipeline has no attention that can be INT8",
            expected="modules that call torch.nn.functional.scaled_dot_product_attention, or write attention out",
            got="; ".join(reasons[:5]) or f"none in {', '.join(denoisers)}",
            remedy="use diffusers' own attention processors, and include the modules that are meant",
        )
    changed: list[tuple[nn.Module, type]] = []
    try:
        for model, found in zip(denoisers.values(), prepared, strict=True):
            first = len(changed)
            inner = _inner(model)
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
    _forget_compiled(denoisers.values())
    for model, found in zip(denoisers.values(), prepared, strict=True):
        # Before anything is compiled or recorded, which would record the copies too.
        for device in {x.device for x in _inner(model).parameters()} | _execution_devices(pipe):
            if device.type != "meta":
                for site in found.sites.values():
                    site.on(device)
    return pipe


def restore_attention(pipe: Any) -> Any:
    """Undo `replace_attention_with_int8`; what was done to the pipeline since, as loading LoRAs, stays.

    Returns:
        `pipe`.
    Raises:
        UserError: nothing was replaced in it.
    """
    denoisers = _denoisers_of(pipe)
    found = _replaced_in(denoisers)
    for denoiser in found.values():
        undo(denoiser.swapped)
    _forget_compiled(denoisers.values())
    return pipe


def attention_report(pipe: Any) -> AttentionReport:
    """What `replace_attention_with_int8` replaced, and what not and why. After a first image it also has what only calls tell.

    Raises:
        UserError: nothing was replaced in it.
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


# What is in a pipeline ------------------------------------------------------------------------------------------------


def _inner(model: nn.Module) -> nn.Module:
    """The module that torch.compile was given."""
    return getattr(model, "_orig_mod", model)


def _denoisers_of(pipe: Any) -> dict[str, nn.Module]:
    """Modules by component whose forward takes a timestep.

    Raises:
        UserError: there is none.
    """
    if isinstance(pipe, nn.Module):
        parts = {_ALONE: pipe}
    else:
        components = getattr(pipe, "components", None)
        parts = dict(components) if isinstance(components, Mapping) else {}
    found = {
        name: part
        for name, part in parts.items()
        if isinstance(part, nn.Module)
        and any(name in inspect.signature(type(_inner(part)).forward).parameters for name in TIMESTEPS)
    }
    if not found:
        raise UserError(
            "this has no attention to replace",
            expected="a pipeline of diffusers with a unet or a transformer, or such a model, whose forward takes a timestep",
            got=type(pipe).__name__ + (f" with {', '.join(parts)}" if parts and parts.keys() != {_ALONE} else ""),
            remedy="give the pipeline that draws; Int8Attention is for modules of your own",
        )
    return found


def _replaced_in(denoisers: Mapping[str, nn.Module]) -> dict[str, Denoiser]:
    found = {
        name: made for name, model in denoisers.items() if (made := getattr(_inner(model), DENOISER, None)) is not None
    }
    if not found:
        raise UserError(
            "the pipeline's attention was not replaced",
            expected="one that went through replace_attention_with_int8",
            got=", ".join(denoisers),
            remedy="call replace_attention_with_int8(pipe) first",
        )
    return found


def _execution_devices(pipe: Any) -> set[torch.device]:
    """Where a pipeline with offloaded models computes."""
    device = getattr(pipe, "_execution_device", None)
    if not isinstance(device, (str, torch.device)):
        return set()
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:  # tensors say which
        device = torch.device("cuda", torch.cuda.current_device())
    return {device}


def _calls_attention(module: nn.Module) -> bool:
    if callable(getattr(module, "processor", None)) or any(isinstance(x, nn.Softmax) for x in module.children()):
        return True
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and any(name in code.co_names for name in _FUNCTIONS)


def _known_obstacle(module: nn.Module) -> str:
    """Why a module's attention cannot be INT8, as far as its attributes tell; empty where they do not."""
    dim = _head_dim(module)
    return f"head_dim {dim} is more than {HEAD_DIMS[-1]}" if dim > HEAD_DIMS[-1] else ""


def _head_dim(module: nn.Module) -> int:
    """Of a module that says so, as diffusers' own; 0 else."""
    heads, width = getattr(module, "heads", None), getattr(module, "inner_dim", None)
    return width // heads if isinstance(heads, int) and isinstance(width, int) and heads > 0 else 0


# What is to be computed -----------------------------------------------------------------------------------------------


def _planned(
    pipe: Any, calibration: str | Path | None, precision_mode: str | None
) -> tuple[Plan, dict[str, Calibrated] | None]:
    """The plan, and the sites of the calibration if there is one."""
    choices = ("auto", *(mode.name.lower() for mode in Mode))
    if precision_mode is not None and precision_mode not in choices:
        raise UserError(
            "there is no such precision mode",
            expected=", ".join(choices),
            got=repr(precision_mode),
            remedy='"precision" is the closest to exact, "fp8" the fastest for long sequences on Hopper',
        )
    scheduler = getattr(pipe, "scheduler", None)
    config = getattr(scheduler, "config", None) or {}
    length = config.get("num_train_timesteps", 1000)
    noise = None if scheduler is None else scheduler_sigmas(scheduler)
    flows, told = noise is not None and noise.flow, noise.noise_input if noise is not None else None

    def modes(wanted: str, bins: int) -> Tensor:
        if wanted != "auto":
            return torch.full((bins,), int(Mode[wanted.upper()]), dtype=torch.int32)
        if noise is None:
            raise UserError(
                'the noise of the timesteps is not known, which precision_mode="auto" goes by',
                expected="a pipeline whose scheduler has alphas_cumprod, or is of flow matching, EDM or consistency models",
                got=type(scheduler).__name__,
                remedy='name one mode, precision_mode="precision"',
            )
        return sigma_rule_modes(noise.sigmas, bins)

    if calibration is None:
        bins = BINS if precision_mode == "auto" else 1
        end = float(length) if told is None else told.timestep_max
        return Plan(modes(precision_mode or "precision", bins), end, 1.0, flows, told), None
    path = Path(calibration)
    if not path.is_dir():
        saved = read_tables(path)
        common = modes(precision_mode or "precision", saved.bins)
        plan = Plan(common, saved.timestep_max, 1.0, flows, told)
        return plan, {
            site: Calibrated(AttentionTables(**tables, modes=common)) for site, tables in saved.tables.items()
        }
    manifest = read_manifest(path)
    saved = read_tables(path / manifest.calibration)
    component = next(part for part in manifest.components.values() if part.is_denoiser)
    factor = 1 / component.diffusers.timestep_factor if component.diffusers is not None else 1.0
    forced = None if precision_mode is None else modes(precision_mode, saved.bins)
    scalings, smooth_k = manifest.scalings, manifest.recipe.attention.smooth_k
    found = {}
    for site in manifest.sites:
        if site.modes and site.name in saved.tables:
            own = torch.tensor(site.modes, dtype=torch.int32) if forced is None else forced
            tables = AttentionTables(**saved.tables[site.name], modes=own)
            found[site.name] = Calibrated(tables, scalings[site.name], smooth_k)
    common = torch.full((saved.bins,), int(Mode.PRECISION), dtype=torch.int32) if forced is None else forced
    return Plan(common, component.timestep_max, factor, False, component.noise_input), found


def _prepare(
    model: nn.Module,
    name: str,
    plan: Plan,
    saved: Mapping[str, Calibrated] | None,
    include: Sequence[str],
    exclude: Sequence[str],
    *,
    alone: bool,
) -> Denoiser:
    """What will be replaced in a denoiser; nothing is changed."""
    found = Denoiser(model, name, plan, {})
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
        if not any(fnmatchcase(full, p) for p in include) or any(fnmatchcase(full, p) for p in exclude):
            found.left[full] = "it is not included"
        elif isinstance(module, nn.MultiheadAttention):
            found.left[full] = "it is torch's own multi-head attention"
        elif reason := _known_obstacle(module):
            found.left[full] = reason
        elif saved is not None and full not in calls:
            found.left[full] = "the calibration has no scales for it"
        else:
            found.sites[full] = Site(found, module, calls.get(full, {}))
    return found


def _refuse_patterns(prepared: Sequence[Denoiser], include: Sequence[str], exclude: Sequence[str]) -> None:
    names = [name for found in prepared for name in (*found.sites, *found.left)]
    for pattern in (*include, *exclude):
        if names and not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"the pattern '{pattern}' matches no attention",
                expected="a pattern of one of: " + ", ".join(names[:20]),
                got=f"'{pattern}'",
                remedy="correct include or exclude",
            )


def _path_of(site: str, paths: Collection[str]) -> str:
    """A calibrated site among a denoiser's modules: calibrations of pipelines name the component first, which is not there where
    the denoiser was given alone."""
    if site == "denoiser" and _ALONE in paths:  # its own forward calls attention
        return _ALONE
    return site if site in paths else site.partition(".")[2]


def _refuse_strangers(prepared: Sequence[Denoiser], saved: Mapping[str, Calibrated], file: Path) -> None:
    """
    Raises:
        UserError: the calibration has sites that the pipeline has not, or of other heads.
    """
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
            expected="scales of attention that the pipeline has, as " + (", ".join(sorted(names)[:3]) or "none"),
            got=strange or "no attention",
            remedy="give the bundle or the calibration that was made of this model",
        )


def _other_heads(module: nn.Module, site: str, tables: AttentionTables) -> str:
    """What the tables say of heads that a module, as far as its attributes tell, has not; empty where they fit."""
    dim = _head_dim(module)
    if not dim:
        return ""
    size = next((size for size in HEAD_DIMS if size >= dim), dim)  # others are filled up
    heads, found = module.heads, (tables.q_scale.shape[1], tables.v_scale.shape[2])
    return "" if found == (heads, size) else f"{site} with {found[0]} heads of {found[1]}, not {heads} of {size}"


def _forget_compiled(models: Iterable[nn.Module]) -> None:
    """Code that torch.compile made of modules before they changed would go on as before."""
    parts = (part for model in models for part in (model, *model.modules()))
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in parts):
        torch._dynamo.reset()
