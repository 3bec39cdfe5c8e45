"""The classes of a denoiser and its modules while their attention is replaced, see `trtconvert.attention.replace`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trtconvert.attention import kernel, measured
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.sites import (
    folds_of,
    fused_attention,
    of_elements,
    own_channels,
    taken,
    too_many,
)
from trtconvert.errors import UserError
from trtconvert.noise_input import NoiseInput, place_of
from trtconvert.unfused import Attention, Unfused, UnfusedAttention
from trtconvert.wrapped import uncompiled

TIMESTEPS = ("timestep", "timesteps", "t")
"""Names of the timestep parameter in forwards of denoisers."""

DENOISER, SITE = "_int8_denoiser", "_int8_site"


@dataclass
class TimestepModes:
    """Precision modes by timestep, and how the denoiser's timesteps are read. All sites of a denoiser share one.

    Attributes:
        modes: [T] INT32, `Mode` per timestep bin; present: the modes in that table.
        timestep_max: the end of the last bin.
        factor: multiplies the denoiser's timesteps first.
        fractions: true if timesteps may be shares of the schedule, as in some flow-matching pipelines.
        noise_input: maps timesteps to places; None if timesteps are DDPM timesteps.
    """

    modes: Tensor
    timestep_max: float
    factor: float = 1.0
    fractions: bool = False
    noise_input: NoiseInput | None = None
    present: frozenset[Mode] = field(init=False)

    def __post_init__(self) -> None:
        self.present = frozenset(Mode(mode) for mode in self.modes.tolist())


@dataclass(frozen=True)
class Calibrated:
    """One call of a site with a calibration; `scaling` and `smooth_k` as in `kernel.int8_attention`."""

    tables: AttentionTables
    scaling: str = "calibrated"
    smooth_k: bool = True


class Denoiser:
    """One denoiser while its attention is replaced.

    Attributes:
        timestep: [B] FP32 of the running call, as a place where `NoiseInput` maps timesteps; None between calls.
        sites: replaced modules by path.
        left: reasons by path, of modules that are not replaced.
        swapped: modules whose class changed, with the class before.
    """

    def __init__(self, model: nn.Module, timestep_modes: TimestepModes) -> None:
        parameters = list(inspect.signature(type(model).forward).parameters)[1:]
        self.timestep_name = next(name for name in TIMESTEPS if name in parameters)
        self.timestep_place, self.sample_name = parameters.index(self.timestep_name), parameters[0]
        self.timestep_modes, self.left = timestep_modes, dict[str, str]()
        self.timestep: Tensor | None = None
        self.sites: dict[str, Site] = {}
        self.swapped: list[tuple[nn.Module, type]] = []

    def enter(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Notes the timestep of a call."""
        if self.timestep_name in named:
            timestep = named[self.timestep_name]
        elif len(args) > self.timestep_place:
            timestep = args[self.timestep_place]
        else:
            return
        sample = args[0] if args else named.get(self.sample_name)
        self.timestep = None if sample is None or timestep is None else self._steps(sample, timestep)

    def _steps(self, sample: Tensor | list[Tensor], timestep: Tensor | float) -> Tensor:
        shared, batch = self.timestep_modes, len(sample)
        if not isinstance(timestep, Tensor):
            device = sample.device if isinstance(sample, Tensor) else sample[0].device
            timestep = torch.full((1,), float(timestep), device=device)
        steps = timestep.detach().float()
        if steps.dim() > 1:  # one for each token or frame: the noisiest bounds the activations
            steps = steps.flatten(1).amax(1)
        steps = place_of(shared.noise_input, steps.reshape(-1) * shared.factor)
        if shared.fractions:  # decided on the device, as reading the maximum would synchronise
            steps = torch.where(steps.max() <= 1, steps * shared.timestep_max, steps)
        return steps.expand(batch) if len(steps) == 1 else steps


class Site:
    """One module that calls attention.

    Args:
        denoiser: the denoiser that contains the module.
        calibrated: the module's calls by number from 1; empty if scales are measured.
    """

    def __init__(self, denoiser: Denoiser, module: nn.Module, calibrated: Mapping[int, Calibrated]) -> None:
        self.denoiser, self.module, self.calibrated = denoiser, module, dict(calibrated)
        self.exceptions: dict[str, None] = {}
        self.called = False
        self._on: dict[torch.device, tuple[Tensor, dict[int, Calibrated]]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, dict[int, Calibrated]]:
        """Returns the modes and tables on a device; copies them once. Moves and casts of the module do not affect the copies."""
        found = self._on.get(device)
        if found is None:
            calls = {number: replace(call, tables=call.tables.to(device)) for number, call in self.calibrated.items()}
            found = self._on[device] = (self.denoiser.timestep_modes.modes.to(device), calls)
        return found

    def attend(self, number: int, attention: Attention) -> Tensor:
        """Computes an attention in INT8, or exactly if INT8 is not possible; number: of the module's calls, from 1."""
        shared, timestep = self.denoiser.timestep_modes, self.denoiser.timestep
        q, k, value, mask, scale, reason, exact, *_ = attention
        folds, v = 1, value
        if timestep is None:
            reason = "it was called outside of its denoiser, or without a timestep"
        elif not reason:
            folds = folds_of(q, k, v, len(timestep))
            q, k, v, reason = taken(q, k, v, folds, scale)
            reason = reason or too_many(value.shape[0])
            if not reason and v.is_cuda and v.dtype not in (torch.float16, torch.bfloat16):
                reason = f"it computes in {v.dtype}: kernels take float16 and bfloat16"
        if not torch.compiler.is_compiling():
            self.called = True
            if reason:
                self.exceptions[reason] = None
        if reason or timestep is None:
            return exact()
        steps = of_elements(timestep.to(value.device), folds)
        modes, calibrated = self.on(value.device)
        options: dict[str, Any] = {"mask": mask, "softmax_scale": scale, "timestep_max": shared.timestep_max}
        call = calibrated.get(number)
        if call is None:
            out = measured.attention(q, k, v, steps, modes, shared.present, **options)
        else:
            options |= {"scaling": call.scaling, "smooth_k": call.smooth_k}
            out = kernel.attention(q, k, v, steps, call.tables, **options)
        return own_channels(out, value)


class _Mode(TorchFunctionMode):
    """Intercepts attention during one call of a site's module."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.calls = site, 0
        timestep = site.denoiser.timestep
        self._unfused: Unfused | None = None
        if timestep is not None and not torch.compiler.is_compiling():  # `Unfused` follows tensors by identity
            self._unfused = Unfused(self._attend_unfused, timestep.shape[0])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        if self._unfused is None:
            return self._call(func, args, kwargs)
        return self._unfused(func, args, kwargs, self._call)

    def end(self) -> None:
        """Notes attention that the module wrote out but that could not be followed."""
        if self._unfused is not None:
            for softmax in self._unfused.left():
                self.site.exceptions[softmax.reason] = None

    def _call(self, func, args, kwargs):
        if func is scaled_dot_product_attention:
            self.calls += 1
            return self.site.attend(self.calls, fused_attention(*args, **kwargs))
        return func(*args, **kwargs)

    def _attend_unfused(self, x: UnfusedAttention) -> Tensor:
        self.calls += 1
        return self.site.attend(self.calls, x.attention)


def calling_attention(cls: type) -> type:
    """Returns a subclass whose instances run under a `_Mode`."""
    call: Any = cls.__call__

    def __call__(self: nn.Module, *args: Any, **named: Any) -> Any:
        site = self.__dict__.get(SITE)
        if site is None:  # compiled code may still call this function after `undo`
            return call(self, *args, **named)
        with _Mode(site) as mode:
            output = call(self, *args, **named)
        if not torch.compiler.is_compiling():
            mode.end()
        return output

    return _like(cls, __call__)


def denoising(cls: type) -> type:
    """Returns a subclass whose instances note their timestep."""
    call: Any = cls.__call__

    def __call__(self: nn.Module, *args: Any, **named: Any) -> Any:
        denoiser = getattr(self, DENOISER, None)
        if denoiser is None:
            return call(self, *args, **named)
        denoiser.enter(args, named)
        try:
            return call(self, *args, **named)
        finally:
            denoiser.timestep = None

    return _like(cls, __call__)


def _like(cls: type, call: Any) -> type:
    """Returns a subclass of the same name: pipelines save and find their models by the name of the class."""
    names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), names)


_CLASSES: dict[tuple[Any, type], type] = {}
"""Subclasses by function and class: modules of one class keep one class, so that torch.compile compiles repeated blocks once."""


def swap(module: nn.Module, make: Callable[[type], type], changed: list[tuple[nn.Module, type]]) -> None:
    """Replaces a module's class by `make` of that class, and appends the module and its old class to `changed`.

    Raises:
        TypeError: the class has another memory layout, for example because it is not written in Python.
    """
    cls = type(module)
    if (made := _CLASSES.get((make, cls))) is None:
        made = _CLASSES[make, cls] = make(cls)
    object.__setattr__(module, "__class__", made)  # setattr on a module of torch.compile changes the wrapped module
    changed.append((module, cls))


def refuse_replaced(model: nn.Module, name: str) -> None:
    """Raises a UserError if the attention of a model, by its name in a pipeline, is replaced."""
    if getattr(uncompiled(model), DENOISER, None) is not None:
        raise UserError(
            f"the attention of {name} is INT8 already",
            expected="a pipeline as it was loaded",
            got="one whose attention was replaced, perhaps through another pipeline with the same model",
            remedy="call trtconvert.attention.restore_attention(pipe) first",
        )


def undo(changed: Sequence[tuple[nn.Module, type]]) -> None:
    """Restores the classes that `swap` replaced."""
    for module, cls in reversed(changed):
        object.__setattr__(module, "__class__", cls)
        for name in (SITE, DENOISER):
            vars(module).pop(name, None)
