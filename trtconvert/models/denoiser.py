"""The denoiser of a model for a conversion: on a device, with handlers for its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trtconvert.attention.sites import Handler, attention_hooks
from trtconvert.diffusion_model import Denoiser, DiffusionModel, Sampler, copied_with, weights_in_float32
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.interception import Hooks, InterceptedDenoiser, Interception
from trtconvert.linear.sites import LayerHandler, layer_hooks
from trtconvert.mixed_types import OneType
from trtconvert.models import offloading
from trtconvert.models.drawings import Stopped, WatchedSampler
from trtconvert.models.offloading import offload_large_parts
from trtconvert.models.own_sampler import SamplerError
from trtconvert.noise_input import place_of
from trtconvert.reuse.schedule import Schedule
from trtconvert.runtime.signature import shape_like
from trtconvert.wrapped import WrappedDenoiser


def refuse_steps(model: DiffusionModel, field: str, steps: int, solver: str) -> None:
    """Checks a number of steps with the sampler, which runs up to its first call of the denoiser.

    Args:
        field: of the recipe that has the number.
    Raises:
        UserError: the sampler refuses it.
    """

    def denoiser(*_: Tensor, **__: Tensor) -> Tensor:
        raise Stopped

    try:
        model.sample(denoiser, [0], steps=steps, solver=solver)
    except Stopped:
        pass
    except SamplerError:
        raise
    except UserError as error:
        raise error.about(field) from error


class _Trial:
    """A denoiser whose sampler shall skip the second and the third step. It is its own `Scheduler`.

    Attributes:
        followed: the sampler told the timesteps, and has not called the denoiser in a skipped step.
    """

    def __init__(self, model: DiffusionModel) -> None:
        self.timestep_input, self.timestep_place = model.timestep_input, model.timestep_place
        self.sample_input, self.timesteps_fall = model.sample_input, model.timesteps_fall
        self.noise_input, self.reuse, self.followed = model.noise_input, self, False
        self._model, self._timesteps = model, list[float]()

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """See `trtconvert.reuse.schedule.Scheduler`."""
        self.followed, self._timesteps = True, list(timesteps)
        return Schedule(tuple(step not in (1, 2) for step in range(len(timesteps))), 0.0)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        given = self._model.named(inputs, named)
        if not self._timesteps:
            raise Stopped
        place = float(place_of(self.noise_input, given[self.timestep_input].flatten()[0].double()))
        step = min(range(len(self._timesteps)), key=lambda index: abs(self._timesteps[index] - place))
        if step == 0:
            sample = given[self.sample_input]
            return torch.zeros(shape_like(self._model.output.shape, sample), device=sample.device)
        self.followed = step > 2
        raise Stopped


def refuse_unfollowed(model: DiffusionModel, steps: int) -> None:
    """Checks that the sampler tells its denoiser the timesteps of a trajectory, and skips calls of the denoiser. The sampler runs
    up to the call after these.

    Raises:
        UserError: it does not, so that no step can be left out.
    """
    denoiser = _Trial(model)
    with contextlib.suppress(Stopped):
        model.sample(denoiser, [0], steps=steps, solver="ddim")
    if not denoiser.followed:
        raise not_followed(model)


def not_followed(model: DiffusionModel) -> UserError:
    return UserError(
        f"no step of {model.name} can be left out",
        expected="a sampler that tells its denoiser the timesteps of a trajectory, before it calls it once a step",
        got="a sampler that does not, or that passes other timesteps than it told; or one that adds noise, as for consistency "
        "models, or calls its denoiser twice a step",
        remedy="call trtconvert.runtime.follow(denoiser, timesteps) in the sampler, take another scheduler, or "
        "remove steps.computed from the recipe",
    )


class _Moved(WrappedDenoiser):
    """A denoiser on another device than the tensors of its sampler, which may be on any device."""

    def __init__(self, denoiser: Denoiser, device: torch.device) -> None:
        super().__init__(denoiser)
        self.device = device

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        home = (inputs or tuple(named.values()))[0].device
        there = (x.to(self.device) for x in inputs)
        return self._denoiser(*there, **{name: x.to(self.device) for name, x in named.items()}).to(home)


class _MovingSampler(WatchedSampler):
    """A sampler on any device whose denoisers are on one device."""

    def __init__(self, sampler: Sampler, device: torch.device) -> None:
        super().__init__(sampler)
        self._device = device

    def __call__(self, denoiser: Denoiser, seeds: Sequence[int], **options: Any) -> Tensor:
        return self._sampler(_Moved(denoiser, self._device), seeds, **options)


def require_device(name: str) -> None:
    """
    Raises:
        BackendUnavailable: torch sees no such device.
    """
    if name != "cpu" and not torch.cuda.is_available():
        raise BackendUnavailable(
            "there is no GPU to run the model on",
            expected="an NVIDIA GPU, and a torch that sees it",
            got="none",
            remedy="leave --device cuda out, or install a torch with CUDA",
        )


def on_device(model: DiffusionModel, name: str, offload: bool = False) -> DiffusionModel:
    """Moves a model's denoiser to a device; its sampler may work on another one.

    Args:
        name: "cpu" or "cuda", which is this process's own GPU under torchrun.
        offload: leave the denoiser on the CPU, for `DenoiserInType`, whose copies are offloaded; large ones of the pipeline's
            other models are offloaded too.
    Raises:
        BackendUnavailable: torch sees no such device.
    """
    require_device(name)
    if name == "cpu":
        return model
    device = torch.device("cuda", torch.cuda.current_device())
    if offload:
        offload_large_parts(others_of(model), pinning=False, notice=lambda _: None)
        return sampled_from(replace(model, onload=device), device)
    return sampled_from(replace(model, denoiser=model.denoiser.to(device)), device)


def others_of(model: DiffusionModel) -> list[Any]:
    """Returns the components of the model's pipeline other than its denoiser."""
    caller = getattr(model.sample, "caller", None)
    return [part for name, part in caller.pipe.components.items() if name != caller.component] if caller else []


def sampled_from(model: DiffusionModel, device: torch.device) -> DiffusionModel:
    """Returns the model with a sampler for denoisers on a device. The denoiser is not moved."""
    return replace(model, sample=_MovingSampler(model.sample, device))


def intercepted(
    model: DiffusionModel,
    handler: Handler | None = None,
    layers: LayerHandler | None = None,
    around: Callable[[Interception], AbstractContextManager[Any]] = nullcontext,
) -> InterceptedDenoiser:
    """Returns the model's denoiser with handlers for its attention calls, its layers, or both.

    Args:
        around: see `InterceptedDenoiser`.
    """
    hooks = dict(attention_hooks(handler)) if handler is not None else {}
    if layers is not None:
        hooks |= layer_hooks(layers)
    names = [spec.name for spec in model.inputs]
    return InterceptedDenoiser(model.denoiser, names, model.timestep_input, hooks, model.noise_input, around)


class DenoiserInType:
    """A copy of a model's denoiser in a floating-point type, with hooks for its calls.

    It takes the inputs of the model's denoiser, and casts the floating-point ones other than the timestep.

    Args:
        model: its denoiser is copied on its own device, unless it has the type already. With `onload` it is always copied, and
            the copy is offloaded.
        dtype: of weights, inputs and outputs.
        hooks: see `InterceptedDenoiser`.
    """

    def __init__(self, model: DiffusionModel, dtype: torch.dtype, hooks: Hooks) -> None:
        self._dtype = dtype
        self._floating = {s.name for s in model.inputs if s.dtype == "float32" and s.name != model.timestep_input}
        self._names = [spec.name for spec in model.inputs]
        same = all(x.dtype == dtype for x in model.denoiser.parameters() if x.is_floating_point())
        if model.onload is not None or not same:
            wide = weights_in_float32(model, dtype)
            denoiser = copied_with(
                model.denoiser,
                lambda name, x: x.to(dtype if x.is_floating_point() and name not in wide else x.dtype, copy=True),
            )
        else:
            denoiser = model.denoiser
        if model.onload is not None:
            offloading.offload(denoiser, model.onload)
        self._denoiser = InterceptedDenoiser(
            denoiser, self._names, model.timestep_input, hooks, model.noise_input, around=lambda _: OneType()
        )

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        given = dict(zip(self._names, inputs, strict=False)) | named
        with torch.no_grad():
            return self._denoiser(
                **{name: x.to(self._dtype) if name in self._floating else x for name, x in given.items()}
            )
