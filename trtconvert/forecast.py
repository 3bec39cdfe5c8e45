"""Forecast of a build's time: its denoiser calls are counted, and the first of them are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from trtconvert.attention.sites import Site
from trtconvert.calib.calibrate import Parts
from trtconvert.calib.candidates import MOST_EXACT, PROBES_FORWARDS
from trtconvert.calib.data import SITE_STEPS_PER_BIN, samples_for_errors
from trtconvert.calib.frontier import MOST_RIVALS, usual_drawings
from trtconvert.diffusion_model import Denoiser, DiffusionModel, Sampler
from trtconvert.models.drawings import CountedDenoiser, WatchedSampler
from trtconvert.models.placed import Place
from trtconvert.progress import Reporter
from trtconvert.recipe import Recipe

OBSERVED = {"cpu": 1.0, "cuda": 1.5}
"""Time of a call with observed ranges, in calls in full precision, by device; see docs/builds.md."""

IN_INT8 = {"cpu": 3.0, "cuda": 1.3}
"""Time of an INT8 call, in calls in full precision: on a CPU by the specification, on a GPU by the kernels in torch."""

LEAST_SECONDS = 60.0
"""Shorter builds get no forecast."""

_TIMED = {"cpu": (1, 3), "cuda": (5, 9)}
"""First and last call of a drawing that are timed, by device: the first call sets up kernels, and a GPU records the first few in
CUDA graphs."""


def forecast(
    recipe: Recipe, device: str, choices: int, sites: Sequence[Site], step: float, processes: int = 1
) -> dict[str, float]:
    """Returns the seconds of the stages that draw samples; data that is not drawn does not count.

    Args:
        device: "cpu" or "cuda".
        choices: number of choices of sites and layers that a search measures.
        sites: converted sites.
        step: seconds of one denoising step of one sample in full precision.
        processes: number of processes that share the samples.
    """
    verify, plan, bins = recipe.verify, recipe.plan, recipe.calibration.bins
    observed, in_int8 = OBSERVED[device], IN_INT8[device]
    steps = dict[str, float]()
    if recipe.calibration.data == "denoise":
        passes = 1 if recipe.calibration.statistic == "batch-max" else 2
        steps["calibration"] = recipe.calibration.samples * recipe.calibration.steps * passes * observed / processes
    if recipe.attention.modes == "auto":
        exact = plan.sensitivity == "exact" or (plan.sensitivity == "auto" and choices <= MOST_EXACT)
        shared = (choices if exact else 0) + bins + 1 + usual_drawings(masks=bool(recipe.sparse_shares)) * in_int8
        repeated = 1 + (0 if exact else PROBES_FORWARDS)
        steps["the search"] = plan.samples * plan.steps * (repeated + shared / processes)
    if recipe.steps.computed != "all":
        from trtconvert.calib.reuse import drawings

        plans = MOST_RIVALS if recipe.plan_follows_steps else 1
        drawn = drawings(recipe.steps.calibrated, recipe.steps.computed == "auto", plans)
        steps["the choice of steps"] = recipe.steps.samples * recipe.steps.calibrated * drawn * in_int8
    of_errors = samples_for_errors(sites, verify.samples) * SITE_STEPS_PER_BIN * bins
    steps["verification"] = (1 + in_int8) * (verify.samples * verify.steps / processes + of_errors)
    return {name: count * step for name, count in steps.items()}


def with_forecast(
    recipe: Recipe, place: Place, report: Reporter, model: DiffusionModel, parts: Parts, processes: int = 1
) -> DiffusionModel:
    """Returns the model with a timer on its first drawing, the calibration's; the timer reports the forecast."""
    searched = len(recipe.plan.searched_layer_modes) if recipe.layers.modes == "auto" else 0
    groups = {layer.input_group for layer in parts.layers}
    choices = len(parts.sites) * len(recipe.plan.searched_modes) + len(groups) * searched

    def tell(step: float) -> None:
        found = forecast(recipe, place.device, choices, parts.sites, step / OBSERVED[place.device], processes)
        if (total := sum(found.values())) < LEAST_SECONDS:
            return
        stages = ", ".join(f"{name} {_words(seconds)}" for name, seconds in found.items())
        report.notice(
            f"about {_words(total)}, estimated from the first calls: {stages}{_memory(place)}; export, the pipeline's other "
            "models and engines take additional time"
        )

    return replace(model, sample=_Timed(model.sample, place, tell))


def _words(seconds: float) -> str:
    """Formats a time in its natural unit."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _memory(place: Place) -> str:
    """Describes the GPU memory of a call."""
    if not place.on_gpu:
        return ""
    import torch

    most, all_of_it = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(0).total_memory
    offloaded = ", with the model's weights in host memory" if place.offload else ""
    return (
        f"; a call takes {most / 2**30:.1f} of the GPU's {all_of_it / 2**30:.0f} GiB{offloaded}, a call of a search with probes "
        "more"
    )


class _Timed(WatchedSampler):
    """A sampler that reports the seconds of a denoising step of one sample, once."""

    def __init__(self, sampler: Sampler, place: Place, tell: Callable[[float], None]) -> None:
        super().__init__(sampler)
        self._place, self._tell, self._told = place, tell, False

    def __call__(self, denoiser: Denoiser, seeds: Sequence[int], *, steps: int, **named: Any) -> Tensor:
        if self._told:
            return self._sampler(denoiser, seeds, steps=steps, **named)
        chunks, count, began = self.chunks(len(seeds)), 0, 0.0
        first, last = _TIMED[self._place.device]

        def called() -> None:
            nonlocal count, began
            if not self._told and count == first:
                began = self._now()
            if not self._told and count == last:
                self._told = True
                self._tell((self._now() - began) / (last - first) * chunks / len(seeds))
            count += 1

        return self._sampler(CountedDenoiser(denoiser, called), seeds, steps=steps, **named)

    def _now(self) -> float:
        """Returns the time after all earlier calls have ended."""
        if self._place.on_gpu:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()
