"""What leaving denoising steps out costs: schedules of `trtconvert.calib.reuse` beside uniform ones and as many plain steps.

    python bench/reuse.py [--model digits|emoji] [--steps N …] [--fewer FACTOR …] [--calibrated N] [--unseen N]
                          [--device auto|cpu|cuda]

Schedules are chosen on some seeds and measured on others: PSNR of all unseen samples, and of the worst of them, against the same
model with all steps computed. The fourth column has, for other numbers of steps, schedules that follow from what was measured at
the first one. Prints a Markdown table with the date and the machine.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Sequence

import torch
from machine import processor
from torch import Tensor

from trtconvert.bars import NoBar
from trtconvert.calib.budget import Measure
from trtconvert.calib.reuse import measure_trajectories, search_reuse
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.evaluate.metrics import psnr
from trtconvert.models.denoiser import on_device
from trtconvert.models.digits import digits_model
from trtconvert.models.emoji import emoji_model
from trtconvert.reuse.schedule import Schedule, all_computed
from trtconvert.runtime.reuse import Reusable
from trtconvert.shipped import shipped_folder

MODELS = {"digits": (digits_model, "digits-dit"), "emoji": (emoji_model, "emoji-dit")}
FIRST_CALIBRATED, FIRST_UNSEEN = 500, 10_000


class Stated:
    """Steps that are stated, in the place of a `Reuse`."""

    timestep_input, timestep_place = "timestep", 1

    def __init__(self, computed: Sequence[bool]) -> None:
        self._computed = tuple(computed)

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """The steps, for as many timesteps."""
        fits = len(timesteps) == len(self._computed)
        return Schedule(self._computed, 0.0) if fits else all_computed(len(timesteps))


class Counted:
    """A denoiser, and how often it was called."""

    def __init__(self, denoiser) -> None:
        self._denoiser, self.calls = denoiser, 0

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        self.calls += 1
        return self._denoiser(*inputs, **named)


def uniform(steps: int, count: int) -> list[bool]:
    """Computed steps that lie evenly."""
    kept = {round(k * steps / count) for k in range(count)}
    return [step in kept for step in range(steps)]


def loss(samples: Tensor, expected: Tensor) -> str:
    """dB of all samples, and of the worst."""
    squared = (samples.double() - expected.double()).square().flatten(1).mean(1).clamp_min(1e-12)
    return f"{-10 * squared.mean().log10():.1f} ({-10 * squared.max().log10():.1f})"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="digits")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 28, 20])
    parser.add_argument("--fewer", type=float, nargs="+", default=[2.0, 2.5, 3.1])
    parser.add_argument("--calibrated", type=int, default=32, help="seeds that schedules are chosen on")
    parser.add_argument("--unseen", type=int, default=96, help="other seeds, that figures are of")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    load, weights = MODELS[options.model]
    model: DiffusionModel = on_device(load(shipped_folder() / f"{weights}.safetensors"), device)
    where = torch.cuda.get_device_name() if device == "cuda" else processor()
    calibrated = range(FIRST_CALIBRATED, FIRST_CALIBRATED + options.calibrated)
    unseen = range(FIRST_UNSEEN, FIRST_UNSEEN + options.unseen)
    print(
        f"{options.model}, DDIM, schedules of {len(calibrated)} seeds, {len(unseen)} others, {where}, {datetime.date.today()}\n"
    )
    print("| steps | computed | schedule | of the first steps' calibration | uniform | as many plain steps |")
    print("| ---: | ---: | --- | --- | --- | --- |")

    def drawn(denoiser, seeds: range, steps: int) -> Tensor:
        return model.sample(denoiser, seeds, steps=steps, solver="ddim")

    budget = [Measure("psnr", psnr, True, 0.0)]
    first = {}
    for steps in options.steps:
        began = time.monotonic()
        measured, full = measure_trajectories(model, calibrated, steps, NoBar())
        took = time.monotonic() - began
        expected = drawn(model.denoiser, unseen, steps)
        for factor in options.fewer:
            found = search_reuse(model, model.denoiser, measured, full, calibrated, steps, budget, 1 / factor, NoBar())[
                -1
            ]
            if found.reuse is None:
                continue
            count = found.schedule.count
            own = loss(drawn(Reusable(model.denoiser, found.reuse), unseen, steps), expected)
            other = "–"
            if factor in first:
                counted = Counted(model.denoiser)
                other = loss(drawn(Reusable(counted, first[factor]), unseen, steps), expected)
                other += f" with {counted.calls}"
            first.setdefault(factor, found.reuse)
            even = loss(drawn(Reusable(model.denoiser, Stated(uniform(steps, count))), unseen, steps), expected)
            plain = loss(drawn(model.denoiser, unseen, count), expected)
            print(f"| {steps} | {count} ({steps / count:.2f}×) | {own} | {other} | {even} | {plain} |", flush=True)
        print(f"<!-- {steps} steps: trajectories measured in {took:.0f} s -->", flush=True)


if __name__ == "__main__":
    main()
