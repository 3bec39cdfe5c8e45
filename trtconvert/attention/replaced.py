"""A denoiser while its attention is replaced: what its modules' classes do in a call, see `trtconvert.attention.replace`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trtconvert.attention import kernel, measured
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.sites import folds_of, of_elements, own_channels, taken, too_many
from trtconvert.noise_input import NoiseInput, place_of
from trtconvert.unfused import Unfused, UnfusedAttention

TIMESTEPS = ("timestep", "timesteps", "t")
"""What forwards of denoisers call their timestep."""

DENOISER, SITE = "_int8_denoiser", "_int8_site"


class Plan:
    """How sites compute: what they share.

    Attributes:
        modes: [T] INT32; present: what is among them.
        timestep_max: where the last bin ends; factor: by which the denoiser's timesteps are multiplied before.
        fractions: whether timesteps may be shares of the schedule, as some flow-matching pipelines pass them.
        noise_input: what timesteps are, where they are no places in a table.
    """

    def __init__(
        self,
        modes: Tensor,
        timestep_max: float,
        factor: float,
        fractions: bool,
        noise_input: NoiseInput | None = None,
    ) -> None:
        self.modes, self.timestep_max, self.factor, self.fractions = modes, timestep_max, factor, fractions
        self.noise_input = noise_input
        self.present = frozenset(Mode(mode) for mode in modes.tolist())


@dataclass(frozen=True)
class Calibrated:
    """One call of a site, as a calibration has it; `scaling` and `smooth_k` as in `kernel.int8_attention`."""

    tables: AttentionTables
    scaling: str = "calibrated"
    smooth_k: bool = True


class Denoiser:
    """One denoiser while its attention is replaced.

    Attributes:
        name: its component of the pipeline, or `_ALONE`.
        plan: see `Plan`.
        timestep: [B] FP32 of the call that is running; its place, see `NoiseInput`, where it is no timestep.
        sites: by path; left: path: reason.
    """

    def __init__(self, model: nn.Module, name: str, plan: Plan, left: Mapping[str, str]) -> None:
        parameters = list(inspect.signature(type(model).forward).parameters)[1:]
        self.timestep_name = next(name for name in TIMESTEPS if name in parameters)
        self.timestep_place, self.sample_name = parameters.index(self.timestep_name), parameters[0]
        self.name, self.plan, self.left = name, plan, dict(left)
        self.timestep: Tensor | None = None
        self.sites: dict[str, Site] = {}
        self.swapped: list[tuple[nn.Module, type]] = []

    def enter(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note the timestep of a call."""
        if self.timestep_name in named:
            timestep = named[self.timestep_name]
        elif len(args) > self.timestep_place:
            timestep = args[self.timestep_place]
        else:
            return
        sample = args[0] if args else named.get(self.sample_name)
        self.timestep = None if sample is None or timestep is None else self._steps(sample, timestep)

    def _steps(self, sample: Tensor | list[Tensor], timestep: Tensor | float) -> Tensor:
        batch = len(sample)
        if not isinstance(timestep, Tensor):
            device = sample.device if isinstance(sample, Tensor) else sample[0].device
            timestep = torch.full((1,), float(timestep), device=device)
        steps = timestep.detach().float()
        if steps.dim() > 1:  # of each token or frame: the noisiest tells how large activations may be
            steps = steps.flatten(1).amax(1)
        steps = place_of(self.plan.noise_input, steps.reshape(-1) * self.plan.factor)
        if self.plan.fractions:  # on the device, as the host would have to wait for them
            steps = torch.where(steps.max() <= 1, steps * self.plan.timestep_max, steps)
        return steps.expand(batch) if len(steps) == 1 else steps


class Site:
    """One module that calls attention.

    Args:
        denoiser: that it belongs to.
        module: that it is.
        calibrated: its calls by their number from 1; empty where scales are measured.
    """

    def __init__(self, denoiser: Denoiser, module: nn.Module, calibrated: Mapping[int, Calibrated]) -> None:
        self.denoiser, self.module, self.calibrated = denoiser, module, dict(calibrated)
        self.exceptions: dict[str, None] = {}
        self.called = False
        self._on: dict[torch.device, tuple[Tensor, dict[int, Calibrated]]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, dict[int, Calibrated]]:
        """Modes of the plan and tables on a device; copied there once. The module's own moves and casts do not touch them."""
        found = self._on.get(device)
        if found is None:
            calls = {number: replace(call, tables=call.tables.to(device)) for number, call in self.calibrated.items()}
            found = self._on[device] = (self.denoiser.plan.modes.to(device), calls)
        return found

    def attend(
        self,
        number: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """One call of `scaled_dot_product_attention`; number: of the module's calls, from 1."""

        def exact() -> Tensor:
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        scale_of_call = query.shape[-1] ** -0.5 if scale is None else scale
        reason = "it is causal" if is_causal else "it uses dropout" if dropout_p else ""
        return self._computed(number, (query, key, value), attn_mask, scale_of_call, reason, exact)

    def attend_unfused(self, number: int, attention: UnfusedAttention) -> Tensor:
        """Attention that the module writes out, likewise."""
        tensors = (attention.query, attention.key, attention.value)
        return self._computed(number, tensors, attention.mask, attention.scale, attention.obstacle, attention.written)

    def _computed(
        self,
        number: int,
        tensors: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        scale: float,
        reason: str,
        exact: Callable[[], Tensor],
    ) -> Tensor:
        """One attention, in INT8 unless there is a reason not to, or found one."""
        plan, timestep, (q, k, v) = self.denoiser.plan, self.denoiser.timestep, tensors
        folds, value = 1, v
        if timestep is None:
            reason = "it was called outside of its denoiser, or without a timestep"
        elif not reason:
            folds = folds_of(q, k, v, len(timestep))
            q, k, v, reason = taken(q, k, v, 0.0, False, folds)
            reason = reason or too_many(value.shape[0])
            if not reason and value.is_cuda and value.dtype not in (torch.float16, torch.bfloat16):
                reason = f"it computes in {value.dtype}: kernels take float16 and bfloat16"
        if not torch.compiler.is_compiling():
            self.called = True
            if reason:
                self.exceptions[reason] = None
        if reason or timestep is None:
            return exact()
        steps = of_elements(timestep.to(value.device), folds)
        modes, calibrated = self.on(value.device)
        options: dict[str, Any] = {"mask": mask, "softmax_scale": scale, "timestep_max": plan.timestep_max}
        call = calibrated.get(number)
        if call is None:
            out = measured.attention(q, k, v, steps, modes, plan.present, **options)
        else:
            options |= {"scaling": call.scaling, "smooth_k": call.smooth_k}
            out = kernel.attention(q, k, v, steps, call.tables, **options)
        return own_channels(out, value)


class _Mode(TorchFunctionMode):
    """One call of a module that calls attention, or writes it out."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site, self.calls = site, 0
        timestep = site.denoiser.timestep
        self._unfused: Unfused | None = None
        if timestep is not None and not torch.compiler.is_compiling():  # tensors are followed by their identity
            self._unfused = Unfused(self._attend_unfused, timestep.shape[0])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        if self._unfused is None:
            return self._call(func, args, kwargs)
        return self._unfused(func, args, kwargs, self._call)

    def end(self) -> None:
        """The call has ended: attention that the module writes out and that was not followed is told of."""
        if self._unfused is not None:
            for softmax in self._unfused.left():
                self.site.exceptions[softmax.reason] = None

    def _call(self, func, args, kwargs):
        if func is scaled_dot_product_attention:
            self.calls += 1
            return self.site.attend(self.calls, *args, **kwargs)
        return func(*args, **kwargs)

    def _attend_unfused(self, attention: UnfusedAttention) -> Tensor:
        self.calls += 1
        return self.site.attend_unfused(self.calls, attention)


def calling_attention(cls: type) -> type:
    """A class whose instances run under a `_Mode`."""
    call: Any = cls.__call__

    def __call__(self: nn.Module, *args: Any, **named: Any) -> Any:
        site = self.__dict__.get(SITE)
        if site is None:  # compiled code may keep this function after it was undone
            return call(self, *args, **named)
        with _Mode(site) as mode:
            output = call(self, *args, **named)
        if not torch.compiler.is_compiling():
            mode.end()
        return output

    return _like(cls, __call__)


def denoising(cls: type) -> type:
    """A class whose instances note their timestep."""
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
    """A subclass under the same name, by which pipelines save their models and find what belongs to them."""
    names = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), names)


_CLASSES: dict[tuple[Any, type], type] = {}
"""What was made of which class by which of the two functions: modules of one class stay of one class, which torch.compile needs
to compile repeated blocks once."""


def swap(module: nn.Module, make: Callable[[type], type], changed: list[tuple[nn.Module, type]]) -> None:
    """Give a module a class that is made of its own.

    Raises:
        TypeError: its class is of another layout, as of what is not written in Python.
    """
    cls = type(module)
    if (made := _CLASSES.get((make, cls))) is None:
        made = _CLASSES[make, cls] = make(cls)
    object.__setattr__(module, "__class__", made)  # a module of torch.compile would set that of what it wraps
    changed.append((module, cls))


def undo(changed: Sequence[tuple[nn.Module, type]]) -> None:
    for module, cls in reversed(changed):
        object.__setattr__(module, "__class__", cls)
        for name in (SITE, DENOISER):
            vars(module).pop(name, None)
