"""Denoisers that skip steps. Skipped predictions are extrapolated from the last two computed ones.

`follow` makes an object for one trajectory from its timesteps. The schedule is decided on the host before the first call, so that
no call waits for a device. A skipped step costs one kernel, and so does the correction (see `trtconvert.reuse.trajectories`) at
the computed step after a gap.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert.bundle import ComponentRecord
from trtconvert.errors import UserError, first_line, warn
from trtconvert.guidance import guidance_of
from trtconvert.noise_input import at_place, place_of
from trtconvert.reuse.schedule import SAME, Reuse, Scheduler, extrapolation, reuse_of
from trtconvert.reuse.trajectories import Trajectories
from trtconvert.runtime.weighted_sum import weighted_sum
from trtconvert.wrapped import WrappedDenoiser


class Reusable(WrappedDenoiser):
    """A denoiser that may skip steps for samplers that `follow` a trajectory. Direct calls compute every step.

    Args:
        denoiser: computes every step.
    """

    def __init__(self, denoiser: Callable[..., Tensor], reuse: Scheduler) -> None:
        super().__init__(denoiser)
        self.reuse = reuse


def load_reuse(folder: Path, component: ComponentRecord) -> Reuse:
    """Load the skipped steps of a bundle's denoiser.

    Args:
        folder: folder of the bundle, with checked files; component: a denoiser that skips steps.
    Raises:
        UserError: a build did not write the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    record = component.reuse
    assert record is not None
    try:
        found = Trajectories.of_tensors(load_file(folder / record.file))
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{record.file} in the bundle does not hold the statistics for skipping steps",
            expected="statistics of trajectories from a build with steps.computed",
            got=first_line(error),
            remedy="build the bundle again, or load the bundle with all_steps=True",
        ) from error
    names = [spec.name for spec in component.inputs]
    place = names.index(component.timestep_input)
    sample = names[sample_place(place)]
    return Reuse(found, record.objective, record.limit, component.timestep_input, place, component.noise_input, sample)


def warn_of_other_weights(reuse: Scheduler | None) -> None:
    """Warn if a denoiser skips steps, which were chosen with the built weights."""
    if reuse is not None:
        warn(
            "the skipped denoising steps were chosen with the bundle's built weights; remedy: build a bundle with the new "
            "weights, or load this one with all_steps=True"
        )


def follow(denoiser: Callable[..., Any], timesteps: Sequence[float] | Tensor) -> Callable[..., Any]:
    """Return a denoiser for the calls of one trajectory that skips the steps of its bundle's schedule.

    Args:
        denoiser: a bundle's denoiser, `bundle["denoiser"]`. A denoiser that skips no step is returned unchanged.
        timesteps: timesteps of all calls in order, one call a step. For a tensor on a GPU this waits.
    Returns:
        A callable like the denoiser. It computes calls with other shapes than the call before, calls beyond the timesteps, and
        all calls after one with an unexpected timestep, if timesteps are on the CPU.
    """
    reuse = reuse_of(denoiser)
    if reuse is None:
        return denoiser
    return Following(denoiser, reuse, _places(reuse, timesteps))


def sample_place(timestep_place: int) -> int:
    """Return the position of the noisy sample, the first input other than the timestep."""
    return 0 if timestep_place else 1


def _places(reuse: Scheduler, timesteps: Sequence[float] | Tensor) -> list[float]:
    given = timesteps if isinstance(timesteps, Tensor) else torch.tensor(list(timesteps), dtype=torch.float64)
    return place_of(reuse.noise_input, given.double()).tolist()


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance of equal timesteps of a type, relative to the range of timesteps: pipelines may cast timesteps to the
    type of the latents, and round once more when they divide."""
    return max(SAME, torch.finfo(dtype).eps) if dtype.is_floating_point else SAME


def _ranges(reuse: Scheduler, timesteps: Sequence[float], same: float) -> tuple[list[float], list[float]]:
    """Returns the least and the most timestep input that is that of each step. Python's numbers compare faster than tensors."""
    places, room = torch.tensor(timesteps, dtype=torch.float64), same * max(map(abs, timesteps), default=0.0)
    least, most = (at_place(reuse.noise_input, places + away).tolist() for away in (-room, room))
    return least, most


class Following:
    """One trajectory of a denoiser, see `follow`.

    Args:
        timesteps: places of the timestep inputs.
        same: tolerance of equal timesteps, relative to their range; larger for inputs of a narrow type.
    Attributes:
        calls, computed: number of calls, and of computed calls.
    """

    def __init__(
        self, denoiser: Callable[..., Any], reuse: Scheduler, timesteps: Sequence[float], same: float = SAME
    ) -> None:
        self._denoiser, self._reuse, self._timesteps, self._same = denoiser, reuse, timesteps, same
        self._schedule = reuse.schedule(timesteps)
        self._reads_sample = any(of_sample for _, _, of_sample in self._schedule.factors)
        self._ranges: dict[torch.dtype, tuple[list[float], list[float]]] = {}
        self._kept: list[_Kept] = []
        self._shapes: list[tuple[int | str, torch.Size]] = []
        self._told = True
        self.guidance = guidance_of(denoiser)
        if (device := getattr(denoiser, "device", None)) is not None:
            self.device = device
        self.calls = self.computed = 0

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        """See the denoiser."""
        return self.at(self.calls, inputs, named)

    def at(self, step: int, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
        """Return the prediction of a step of the schedule; steps between calls may be left out."""
        prediction = self._prediction(step, inputs, named)
        self.calls = step + 1  # a call that fails may be repeated
        return prediction

    def _prediction(self, step: int, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
        shapes = [(name, x.shape) for name, x in (*enumerate(inputs), *named.items()) if isinstance(x, Tensor)]
        sample = self._sample(inputs, named) if self._reads_sample else None
        line = None
        if not self._goes_on(step, inputs, named) or shapes != self._shapes:
            self._kept.clear()
            self._shapes = shapes
        elif self._reaches(step) and self._fits(sample):
            line = self._kept
        if line is not None and not self._schedule.computed[step]:
            return weighted_sum(self._extrapolation(line, step, sample))
        prediction = self._denoiser(*inputs, **named)
        self.computed += 1
        if not self._told or not isinstance(prediction, Tensor) or step >= len(self._timesteps):
            return prediction
        # Inference tensors have no version counter, so a copy is kept.
        kept = prediction.clone() if prediction.is_inference() else prediction
        # No later call of the trajectory reads the last prediction.
        self._kept = [] if step + 1 == len(self._timesteps) else [*self._kept[-1:], _Kept(step, kept)]
        factor = self._schedule.correction(step)
        # The correction holds for the schedule's whole gap.
        if not factor or line is None or [kept.step for kept in line] != self._schedule.before(step):
            return prediction
        # The extrapolation plus 1 + factor times the prediction's difference to the extrapolation.
        extrapolated = [(x, -factor * of_x) for x, of_x in self._extrapolation(line, step, sample)]
        return weighted_sum([(prediction, 1 + factor), *extrapolated])

    def _reaches(self, step: int) -> bool:
        """Return whether the kept predictions are as near to a step as those that the schedule extrapolates. They are not if
        steps were left out, as by guidance that pauses."""
        before = self._schedule.before(step)
        return len(self._kept) == len(before) and all(
            kept.step >= least for kept, least in zip(self._kept, before, strict=True)
        )

    def _sample(self, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Tensor | None:
        """Return the noisy sample of a call."""
        place = sample_place(self._reuse.timestep_place)
        found = inputs[place] if len(inputs) > place else named.get(self._reuse.sample_input)
        return found if isinstance(found, Tensor) else None

    def _fits(self, sample: Tensor | None) -> bool:
        """Return whether extrapolations may read a sample, if they need one."""
        return not self._reads_sample or (sample is not None and sample.shape == self._kept[-1].prediction.shape)

    def _extrapolation(self, kept: list[_Kept], step: int, sample: Tensor | None) -> list[tuple[Tensor, float]]:
        """Return the terms of a step's extrapolation: the kept predictions and the call's sample, with their factors."""
        of_last, of_before, of_sample = extrapolation(self._timesteps, self._schedule, [x.step for x in kept], step)
        terms = [(x.prediction, factor) for x, factor in zip(reversed(kept), (of_last, of_before), strict=False)]
        if of_sample:
            assert sample is not None
            terms.append((sample.to(terms[0][0].device), of_sample))
        return terms

    def _goes_on(self, step: int, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> bool:
        """Return whether the kept predictions belong to the steps before this call."""
        if self._told and step < len(self._timesteps) and not self._is_at(step, inputs, named):
            warn(
                f"a denoiser computes the calls of a trajectory from step {step} on: the timestep of this call is not that of "
                "the step; remedy: pass the timesteps of all calls to trtconvert.runtime.follow in their order, or load the "
                "bundle with all_steps=True"
            )
            self._told = False
        self._told = self._told and step < len(self._timesteps)
        return self._told and bool(self._kept) and all(kept.is_unchanged() for kept in self._kept)

    def _is_at(self, step: int, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> bool:
        """Return whether a call's timesteps, if they are on the CPU, are those of a step."""
        timestep = named.get(self._reuse.timestep_input)
        if timestep is None and len(inputs) > self._reuse.timestep_place:
            timestep = inputs[self._reuse.timestep_place]
        if not isinstance(timestep, Tensor) or not timestep.is_cpu:
            return True
        if (ranges := self._ranges.get(timestep.dtype)) is None:
            same = max(self._same, tolerance(timestep.dtype))
            ranges = self._ranges[timestep.dtype] = _ranges(self._reuse, self._timesteps, same)
        least, most = (of_steps[step] for of_steps in ranges)
        return all(least <= given <= most for given in timestep.flatten().tolist())


class _Kept:
    """A computed prediction with its step."""

    def __init__(self, step: int, prediction: Tensor) -> None:
        self.step, self.prediction = step, prediction
        self._version = _version(prediction)

    def is_unchanged(self) -> bool:
        """Return whether the prediction was not written into."""
        return _version(self.prediction) == self._version


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


_FIRST_ORDER = frozenset(
    (
        "CogVideoXDDIM",
        "DDIM",
        "DDIMParallel",
        "DEISMultistep",
        "DPMSolverMultistep",
        "EDMDPMSolverMultistep",
        "EDMEuler",
        "EulerDiscrete",
        "FlowMatchEulerDiscrete",
        "IPNDM",
        "LMSDiscrete",
        "PNDM",
        "UniPCMultistep",
    )
)
"""Schedulers of diffusers that call the model once a step and add no noise, without the suffix `Scheduler`."""

_OTHERWISE = {
    "algorithm_type": ("sde", "adds noise"),
    "stochastic_sampling": (True, "adds noise"),
    "skip_prk_steps": (False, "calls the model four times in each of its first steps"),
}
"""Settings with which some of these schedulers do otherwise, and what they do."""


class PipelineSteps(threading.local):
    """Follows the trajectory of a diffusers pipeline by its scheduler, in each thread the trajectory of its own.

    A pipeline may pass the scheduler's timesteps, or the number of training timesteps minus these.

    Args:
        reuse: the denoiser's; model: name of the model in messages.
        of_tokens: the pipeline passes a timestep for each token or frame. All steps are computed.
    """

    def __init__(self, reuse: Scheduler, model: str, *, of_tokens: bool = False) -> None:
        self._reuse, self._model, self._of_tokens = reuse, model, of_tokens
        self._times: list[float] = []
        self._trajectories: dict[tuple[str | None, int], Following] = {}
        self._calls: dict[str | None, int] = {}
        self._start = self._step = 0
        self._same, self._is_known = SAME, False
        self._scheduler: Any = None

    def _take(self, scheduler: Any) -> None:
        """Begin with a scheduler."""
        self._scheduler, self._why_not = scheduler, _why_computed(scheduler)
        self._takes_eta = "eta" in inspect.signature(scheduler.step).parameters
        self._own: Any = None
        self._differs = self._told = False

    def see(self, scheduler: Any, passed: Any, timestep: Tensor, eta: float = 0.0, of_loop: Any = None) -> None:
        """Note a call of the model.

        Args:
            scheduler: the pipeline's; None computes the call.
            passed: the pipeline's timestep; timestep: [B], the denoiser's.
            eta: noise that the scheduler adds, if it takes such an argument.
            of_loop: the timestep of the pipeline's loop, from which the pipeline may have computed its own.
        """
        self._is_known = False
        if scheduler is None:
            self._trajectories.clear()
            return
        if scheduler is not self._scheduler:
            self._take(scheduler)
        self._same = tolerance(passed.dtype) if isinstance(passed, Tensor) else SAME
        adds_noise = bool(eta) and self._takes_eta
        step = None if self._why_not or adds_noise or self._of_tokens else self._step_of((passed, of_loop), timestep)
        if step is None:
            self._trajectories.clear()
            self._tell(eta if adds_noise else 0.0)
            return
        self._is_known = True
        if not self._trajectories or step < self._step:
            self._trajectories.clear()
            self._start = step
        if step != self._step:
            self._calls.clear()
        self._step = step

    def _tell(self, eta: float) -> None:
        """Warn once of a scheduler's computed steps; eta: of the call, if it is the reason."""
        if self._told:
            return
        self._told = True
        name, why, remedy = type(self._scheduler).__name__, self._why_not, ""
        if self._of_tokens:
            why = "its pipeline passes a timestep for each token or frame"
            remedy = "set steps.computed: all in the recipe and build again,"
        elif why:
            remedy = "use another scheduler, such as DPMSolverMultistepScheduler,"
        elif eta:
            why, remedy = f"{name} adds noise with eta: {eta:g}", "leave eta out,"
        else:
            why = f"its timesteps are not those of the {name} that it follows"
            remedy = "pass the scheduler of the loop to the converted model's follow(scheduler),"
        warn(
            f"the converted {self._model} computes all steps: {why}; remedy: {remedy} or load the bundle with "
            "all_steps=True"
        )

    def prediction(self, context: str | None, denoiser: Callable[..., Tensor], named: Mapping[str, Tensor]) -> Tensor:
        """Return the prediction of the call that `see` noted last.

        Args:
            context: context of the call; several calls of a step in one context belong to different trajectories.
        """
        if not self._is_known:
            return denoiser(**named)
        number = self._calls.get(context, 0)
        self._calls[context] = number + 1
        if (context, number) not in self._trajectories:
            self._trajectories[context, number] = Following(
                denoiser, self._reuse, self._times[self._start :], self._same
            )
        return self._trajectories[context, number].at(self._step - self._start, (), named)

    def _step_of(self, given: Sequence[Any], timestep: Tensor) -> int | None:
        """Return the index of a call's timestep in the scheduler's timesteps, by the first of `given` that is one of these, or by
        the scheduler's count; None if unknown."""
        own = self._scheduler.timesteps
        if own is not self._own:
            self._own, self._times, self._differs = own, self._places_of(own), False
            self._trajectories.clear()
            self._calls.clear()  # an exception may have ended the pipeline in its first step
        if self._differs or not self._times:
            return None
        address = own.untyped_storage().data_ptr()
        for x in given:
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() == address:
                step = (x.storage_offset() - own.storage_offset()) // max(1, own.stride(0))
                break
        else:
            step = getattr(self._scheduler, "step_index", None)
            if step is None:
                step = getattr(self._scheduler, "begin_index", None)
        if step is not None and not 0 <= step < len(self._times):
            return None
        begins = not self._trajectories or (step is not None and step < self._step)
        # Reading a timestep waits for the device.
        if step is None or begins:
            step = self._checked(step, timestep)
        return step

    def _checked(self, step: int | None, timestep: Tensor) -> int | None:
        """Return the index of a timestep that is `step`, or the nearest one if that is None; None if no timestep is near."""
        (place,) = _places(self._reuse, timestep.flatten()[:1])
        if step is None:
            step = min(range(len(self._times)), key=lambda index: abs(self._times[index] - place))
        self._differs = abs(place - self._times[step]) > self._same * max(map(abs, self._times))
        return None if self._differs else step

    def _places_of(self, own: Tensor) -> list[float]:
        """Return the denoiser's timesteps, as far as the scheduler and their direction tell."""
        times = _places(self._reuse, own)
        if self._reuse.noise_input is None and len(times) > 1 and (times[0] > times[-1]) != self._reuse.timesteps_fall:
            end = float(getattr(self._scheduler, "config", {}).get("num_train_timesteps", 1000))
            return [end - time for time in times]
        return times


def _why_computed(scheduler: Any) -> str:
    """Return why all steps of a scheduler are computed; empty if steps may be skipped."""
    name = type(scheduler).__name__
    config = getattr(scheduler, "config", {})
    if name.removesuffix("Scheduler") not in _FIRST_ORDER:
        return f"{name} is not known to call the model once a step without adding noise"
    for setting, (value, does) in _OTHERWISE.items():
        given = config.get(setting)
        if given is value or (isinstance(value, str) and value in str(given)):
            return f"{name} {does} with {setting}: {given}"
    return ""
