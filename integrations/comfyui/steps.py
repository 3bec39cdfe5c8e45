"""Denoising steps that a bundle leaves out, for ComfyUI's samplers. This module only knows the arguments of ComfyUI's
wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trtconvert.errors import warn
from trtconvert.noise_input import place_of
from trtconvert.reuse.schedule import Scheduler
from trtconvert.runtime.reuse import SAME, Following

_SAMPLERS = frozenset(("deis", "dpmpp_2m", "euler", "gradient_estimation", "ipndm", "ipndm_v", "lms", "res_multistep"))
"""ComfyUI's samplers that call the model once a step, at the step's noise, and add no noise. `ddim` is `euler` in ComfyUI."""

_MODULE = "comfy.k_diffusion.sampling"
"""The module of ComfyUI's samplers. Samplers of other nodes may have the same names."""

_ADD_NOISE = ("s_churn", "eta")
"""Options that make a sampler add noise if they are not 0."""

_PARTS = {
    "context_handler": "a node draws in windows, which may be others in the next step",
    "denoise_mask_function": "a node changes the mask of the sample from step to step",
    "model_function_wrapper": "a node wraps the model's calls, and may make several of one",
}
"""Model options that may put two calls of neighbouring steps into different trajectories."""


class ComfySteps:
    """ComfyUI's place in its trajectory.

    ComfyUI's wrappers call `sampling` around a sampler's run, and `step` around each of its calls, on the host. The device is
    waited for once when a sampler begins, and once at its first call.

    Args:
        denoiser: computes predictions; reuse: chooses the steps that are left out.
        factor: divides the timesteps of ComfyUI's models before the denoiser gets them.
    """

    def __init__(self, denoiser: Callable[..., Tensor], reuse: Scheduler, factor: float) -> None:
        self._denoiser, self._reuse, self._factor = denoiser, reuse, factor
        self._trajectory: _Trajectory | None = None
        self._told: set[str] = set()

    def sampling(self, executor: Any, guider: Any, sigmas: Tensor, extra_args: Any, *others: Any, **named: Any) -> Any:
        """Around `Sampler.sample`, with its arguments. A sampler may run within another one."""
        before, self._trajectory = self._trajectory, None
        if why_not := _why_computed(executor.class_obj, extra_args):
            self._tell(why_not)
        else:
            timesteps = guider.inner_model.model_sampling.timestep(sigmas[:-1])
            self._trajectory = _Trajectory(self._places(timesteps).tolist())
        try:
            return executor(guider, sigmas, extra_args, *others, **named)
        finally:
            self._trajectory = before

    def step(self, executor: Any, *arguments: Any, **named: Any) -> Any:
        """Around `CFGGuider.predict_noise`, which samplers call."""
        if self._trajectory is not None:
            self._trajectory.step += 1
            self._trajectory.calls.clear()
        return executor(*arguments, **named)

    def prediction(self, options: Mapping[str, Any], timesteps: Tensor, named: Mapping[str, Tensor]) -> Tensor:
        """The denoiser's prediction of a call.

        Args:
            options: ComfyUI's `transformer_options`; timesteps: as ComfyUI passes them; named: the denoiser's inputs.
        """
        of, conditions = self._trajectory, options.get("uuids")
        if of is None or of.step < 0 or not conditions:
            return self._denoiser(**named)
        if not of.is_checked:
            of.is_checked = True
            room = SAME * max(map(abs, of.timesteps))
            if bool(((self._places(timesteps) - of.timesteps[of.step]).abs() > room).any()):
                self._trajectory = None
                self._tell("the model is given other noise levels than the sampler's")
                return self._denoiser(**named)
        # A step may call one conditioning several times.
        key = (*conditions, *options.get("cond_or_uncond", ()))
        number = of.calls.count(key)
        of.calls.append(key)
        followed = of.followed.get((key, number))
        # A conditioning may be off for some steps, and ComfyUI batches conditionings by its memory.
        if followed is None or followed.calls != of.step:
            followed = of.followed[key, number] = Following(self._denoiser, self._reuse, of.timesteps)
        return followed.at(of.step, (), named)

    def _tell(self, why_not: str) -> None:
        if why_not not in self._told:
            self._told.add(why_not)
            warn(
                f"all steps of the converted model are computed: {why_not}; remedy: take the sampler euler, ddim or dpmpp_2m of "
                "ComfyUI without such settings and nodes, or build a bundle with steps.computed: all"
            )

    def _places(self, timesteps: Tensor) -> Tensor:
        return place_of(self._reuse.noise_input, timesteps.flatten().double().cpu() / self._factor)


class _Trajectory:
    """A sampler's run.

    Args:
        timesteps: places of the sampler's calls.
    Attributes:
        step: the current one; -1 before the first.
        calls: conditionings of the model's calls in this step; followed: by conditionings and the call's number in its step.
    """

    def __init__(self, timesteps: list[float]) -> None:
        self.timesteps, self.step, self.is_checked = timesteps, -1, False
        self.calls: list[tuple[Any, ...]] = []
        self.followed: dict[tuple[tuple[Any, ...], int], Following] = {}


def _why_computed(sampler: Any, extra_args: Any) -> str:
    """Why all steps of a sampler are computed, in words; empty where some may be left out."""
    function = getattr(sampler, "sampler_function", None)
    name = getattr(function, "__name__", type(sampler).__name__).removeprefix("sample_")
    if getattr(function, "__module__", "") != _MODULE or name not in _SAMPLERS:
        return f"the sampler {name} is not known to call the model once a step, and to add no noise"
    options = getattr(sampler, "extra_options", {})
    for option in _ADD_NOISE:
        if options.get(option):
            return f"the sampler {name} adds noise, by {option}: {options[option]}"
    return next((why for option, why in _PARTS.items() if extra_args.get("model_options", {}).get(option)), "")
