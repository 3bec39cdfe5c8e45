"""Quality loss of skipped denoising steps: schedules of `trtconvert.calib.reuse` beside uniform ones and as many plain steps.

    python bench/reuse.py [--model digits|emoji|RECIPE] [--steps N …] [--fewer FACTOR …] [--calibrated N] [--unseen N]
                          [--device auto|cpu|cuda] [--int8] [--peers] [--picture FILE]

RECIPE is a YAML file, such as `bench/train_unet.py` writes. Schedules are chosen on some seeds and measured on others: PSNR of
all unseen samples, and of the worst of them, against the same model with all steps computed. Two columns have, for other
numbers of steps, schedules from the measurement at the first number: with as many computed steps, and with as many as its
modelled error asks for. The first row of a number of steps computes all of them from noisy samples that are rounded to BF16:
the model itself turns a change as small as this into this error. With --int8 the model has the INT8 attention and layers of its
recipe's plan, and the last column compares with FP32 and all steps. Prints a Markdown table with the date and the machine. With
--peers a second table has rivals in full precision: DPM++ 2M at as many calls, and cache-dit (DBCache at several thresholds,
alone and with TaylorSeer). A step of cache-dit counts as computed if the last block ran. --picture writes the first unseen
samples of the first number of steps and the first factor, a row each: all steps, the schedule, evenly spaced computed steps, and
as many plain steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import processor
from PIL import Image
from rich.console import Console
from torch import Tensor

from trtconvert import models
from trtconvert.attention.schedules import ddpm_betas
from trtconvert.bars import NoBar
from trtconvert.cache import Cache
from trtconvert.calib.budget import Measure
from trtconvert.calib.reuse import measure_trajectories, search_reuse, with_trajectories_of
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.errors import UserError
from trtconvert.evaluate.metrics import psnr
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.denoiser import on_device
from trtconvert.models.emoji import GUIDANCE
from trtconvert.models.identity import identity
from trtconvert.models.int8_denoiser import int8_denoiser
from trtconvert.models.placed import placed
from trtconvert.models.placement import choose_place
from trtconvert.modiff.commands import find_recipe
from trtconvert.progress import Reporter
from trtconvert.recipe import Recipe
from trtconvert.reuse.schedule import Schedule, Scheduler, all_computed, best_schedules
from trtconvert.runtime.reuse import Reusable, follow
from trtconvert.stages.build import Build
from trtconvert.stages.calibrate import calibrate_stage
from trtconvert.stages.converted import int8_in_torch
from trtconvert.stages.plan import plan_stages
from trtconvert.stages.search import search_stage
from trtconvert.wrapped import WrappedDenoiser

SHIPPED = {"digits": "digits-dit", "emoji": "emoji-dit"}
THRESHOLDS = (0.08, 0.2, 0.5)
"""Thresholds of cache-dit: the default, and larger ones, which skip more steps."""

FIRST_CALIBRATED, FIRST_UNSEEN = 500, 10_000
SHOWN, SCALE = 8, 2
"""Samples in a row of a picture, and how many times they are enlarged."""


class Stated:
    """A stated schedule, in the place of a `Reuse`."""

    timestep_input, timestep_place, noise_input = "timestep", 1, None
    timesteps_fall = True

    def __init__(self, schedule: Schedule, sample_input: str = "x") -> None:
        self._schedule, self.sample_input = schedule, sample_input

    def schedule(self, timesteps: Sequence[float]) -> Schedule:
        """Returns the schedule, for as many timesteps."""
        return self._schedule if len(timesteps) == len(self._schedule.computed) else all_computed(len(timesteps))


class Counted:
    """A denoiser that counts its calls."""

    def __init__(self, denoiser) -> None:
        self._denoiser, self.calls = denoiser, 0

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        self.calls += 1
        return self._denoiser(*inputs, **named)


def host_microseconds(model: DiffusionModel, denoiser: Denoiser, reuse: Scheduler, seed: int, steps: int) -> float:
    """Returns the median host time of a skipped step of one sample, over 20 trajectories of the same calls."""
    calls: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = []

    def recording(*inputs: Tensor, **named: Tensor) -> Tensor:
        calls.append((inputs, named))
        return denoiser(*inputs, **named)

    model.sample(recording, [seed], steps=steps, solver="ddim")
    timesteps = [float(model.named(*call)[model.timestep_input].reshape(-1)[0]) for call in calls]
    skipped = []
    for _ in range(20):
        following = follow(Reusable(denoiser, reuse), timesteps)
        for inputs, named in calls:
            computed, began = following.computed, time.perf_counter()
            following(*inputs, **named)
            took = time.perf_counter() - began
            if following.computed == computed:
                skipped.append(took)
    return statistics.median(skipped) * 1e6


def uniform(steps: int, count: int) -> Schedule:
    """Returns evenly spaced computed steps."""
    kept = {round(k * steps / count) for k in range(count)}
    return Schedule(tuple(step in kept for step in range(steps)), 0.0)


class OfRounded(WrappedDenoiser):
    """A denoiser of noisy samples that are rounded to BF16."""

    def __call__(self, x: Tensor, *others: Tensor, **named: Tensor) -> Tensor:
        return self._denoiser(x.bfloat16().to(x.dtype), *others, **named)


def loss(samples: Tensor, expected: Tensor) -> str:
    """Returns the PSNR of all samples in dB, and of the worst sample."""
    squared = (samples.double() - expected.double()).square().flatten(1).mean(1).clamp_min(1e-12)
    return f"{-10 * squared.mean().log10():.1f} ({-10 * squared.max().log10():.1f})"


def write_picture(rows: Sequence[Tensor], path: Path) -> None:
    """Writes the first samples of each row, [N, C, H, W] from 0 to 1 enlarged."""
    shown = torch.cat([torch.cat([*samples[:SHOWN]], -1) for samples in rows], -2)
    pixels = (shown.repeat_interleave(SCALE, -1).repeat_interleave(SCALE, -2) * 255).round().byte().cpu()
    Image.fromarray(pixels.movedim(0, -1).squeeze(-1).numpy()).save(path)


@dataclass(frozen=True)
class Subject:
    """The measured model.

    Attributes:
        model: draws the measured trajectories; denoiser: draws the samples, in full precision or in INT8.
        in_float32: draws samples in FP32, where `denoiser` is in INT8; else None.
    """

    model: DiffusionModel
    denoiser: Denoiser
    in_float32: Callable[[range, int], Tensor] | None


def recipe_of(name: str) -> Recipe:
    """Returns a shipped recipe by its model's short name, or one by its path.

    Raises:
        UserError: see `find_recipe`.
    """
    return find_recipe(SHIPPED.get(name, name))


def subject(name: str, device: str, int8: bool, work: Path) -> Subject:
    """Returns the model of a recipe, in INT8 by the first stages of `trtconvert build`."""
    recipe = recipe_of(name)
    if not int8:
        model = on_device(models.load(recipe.model), device)
        return Subject(model, graphed(model, model.denoiser), None)
    section = recipe.compute.model_copy(update={"device": device})
    report = Reporter(Console(stderr=True))
    build = Build(
        recipe, identity(recipe.model, recipe.loras), choose_place(section, recipe.model), Cache(work), report
    )
    calibrated = calibrate_stage(build)
    planned = plan_stages(build, calibrated, search_stage(build, calibrated))[0]
    model = build.source.placed()
    exact = placed(build.source.model(), dataclasses.replace(build.place, dtype="float32"))

    def in_float32(seeds: range, steps: int) -> Tensor:
        return exact.sample(graphed(exact, exact.denoiser), seeds, steps=steps, solver="ddim")

    return Subject(model, int8_denoiser(model, *int8_in_torch(recipe, model, planned)), in_float32)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="digits", help=f"{', '.join(SHIPPED)}, or the path of a recipe")
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 28, 20])
    parser.add_argument("--fewer", type=float, nargs="+", default=[2.0, 2.5, 3.1])
    parser.add_argument("--calibrated", type=int, default=32, help="seeds that schedules are chosen on")
    parser.add_argument("--unseen", type=int, default=96, help="other seeds, for the figures")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--peers", action="store_true", help="measure rivals too; cache-dit needs the package cache-dit"
    )
    parser.add_argument("--int8", action="store_true", help="sample with the INT8 of the recipe's plan")
    parser.add_argument("--picture", type=Path, help="write samples into this PNG")
    options = parser.parse_args()
    if options.peers and options.model not in SHIPPED:
        parser.error(f"--peers measures {' and '.join(SHIPPED)} only, got {options.model}: leave --peers out")
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as work:
        of = subject(options.model, device, options.int8, Path(work))
        measure(options, of, torch.cuda.get_device_name() if device == "cuda" else processor())
        if options.peers:
            rivals(options, device)


def measure(options: argparse.Namespace, of: Subject, where: str) -> None:
    """Prints the table."""
    model, denoiser = of.model, of.denoiser
    calibrated = range(FIRST_CALIBRATED, FIRST_CALIBRATED + options.calibrated)
    unseen = range(FIRST_UNSEEN, FIRST_UNSEEN + options.unseen)
    kind = "INT8" if of.in_float32 else "full precision"
    print(
        f"{options.model} in {kind}, DDIM, schedules of {len(calibrated)} seeds, {len(unseen)} others, {where}, "
        f"{datetime.date.today()}\n"
    )
    print(
        "| steps | computed | schedule | of the first steps' calibration | by its limit | uniform | as many plain steps | to "
        "FP32 |"
    )
    print("| ---: | ---: | --- | --- | --- | --- | --- | --- |")

    def drawn(denoiser: Denoiser, seeds: range, steps: int) -> Tensor:
        return model.sample(denoiser, seeds, steps=steps, solver="ddim")

    budget = [Measure("psnr", psnr, True, 0.0)]
    first = {}
    for steps in options.steps:
        host, began = math.nan, time.monotonic()
        measured, full = measure_trajectories(model, calibrated, steps, NoBar())
        if of.in_float32:
            measured = with_trajectories_of(denoiser, measured, model, calibrated, steps, NoBar())
        took = time.monotonic() - began
        expected = drawn(denoiser, unseen, steps)
        in_float32 = of.in_float32(unseen, steps) if of.in_float32 else None
        exact = loss(expected, in_float32) if in_float32 is not None else "–"
        floor = loss(drawn(OfRounded(denoiser), unseen, steps), expected)
        print(f"| {steps} | {steps} (1.00×), rounded samples | {floor} | – | – | – | – | {exact} |", flush=True)
        for factor in options.fewer:
            found = search_reuse(model, denoiser, measured, full, calibrated, steps, budget, 1 / factor, NoBar())[-1]
            if found.reuse is None:
                continue
            count = found.schedule.count
            if factor == options.fewer[0]:
                host = host_microseconds(model, denoiser, found.reuse, FIRST_UNSEEN, steps)
            left_out = drawn(Reusable(denoiser, found.reuse), unseen, steps)
            other, by_limit = "–", "–"
            if factor in first:
                earlier = first[factor]
                schedule = best_schedules(earlier.found, found.reuse.found.timesteps, earlier.objective).get(count)
                if schedule is not None:
                    other = loss(drawn(Reusable(denoiser, Stated(schedule)), unseen, steps), expected)
                counted = Counted(denoiser)
                by_limit = loss(drawn(Reusable(counted, earlier), unseen, steps), expected)
                by_limit += f" with {counted.calls}"
            first.setdefault(factor, found.reuse)
            even = drawn(Reusable(denoiser, Stated(uniform(steps, count))), unseen, steps)
            plain = drawn(denoiser, unseen, count)
            if options.picture and (steps, factor) == (options.steps[0], options.fewer[0]):
                write_picture([expected, left_out, even, plain], options.picture)
            exact = loss(left_out, in_float32) if in_float32 is not None else "–"
            print(
                f"| {steps} | {count} ({steps / count:.2f}×) | {loss(left_out, expected)} | {other} | {by_limit} | "
                f"{loss(even, expected)} | {loss(plain, expected)} | {exact} |",
                flush=True,
            )
        print(
            f"<!-- {steps} steps: trajectories measured in {took:.0f} s; a skipped step of one sample takes {host:.0f} µs of "
            "the host -->",
            flush=True,
        )


def rivals(options: argparse.Namespace, device: str) -> None:
    """Prints the table of rivals."""
    unseen = range(FIRST_UNSEEN, FIRST_UNSEEN + options.unseen)

    def loaded() -> DiffusionModel:
        return on_device(models.load(recipe_of(options.model).model), device)

    plain = loaded()
    print("\n| steps | rival in full precision | computed | PSNR |")
    print("| ---: | --- | ---: | --- |")
    for steps in options.steps:
        expected = plain.sample(plain.denoiser, unseen, steps=steps, solver="ddim")
        for factor in options.fewer:
            count = int(steps / factor + 1e-9)
            drawn = dpm_samples(plain, options.model, unseen, count)
            print(f"| {steps} | DPM++ 2M | {count} ({steps / count:.2f}×) | {loss(drawn, expected)} |", flush=True)
        for taylor in (False, True):
            for threshold in THRESHOLDS:
                drawn, computed = cache_dit_samples(loaded(), unseen, steps, threshold, taylor)
                name = f"cache-dit DBCache F1B0, threshold {threshold}{', TaylorSeer' if taylor else ''}"
                print(
                    f"| {steps} | {name} | {computed} ({steps / computed:.2f}×) | {loss(drawn, expected)} |", flush=True
                )


def dpm_samples(model: DiffusionModel, name: str, seeds: range, steps: int) -> Tensor:
    """Draws by DPM-Solver++ 2M of diffusers, at the timesteps of our DDIM."""
    from diffusers import DPMSolverMultistepScheduler

    from trtconvert.models import digits_dit, emoji_dit

    of = {"digits": digits_dit, "emoji": emoji_dit}[name]
    scheduler = DPMSolverMultistepScheduler(
        num_train_timesteps=of.TIMESTEPS,
        trained_betas=ddpm_betas(of.TIMESTEPS, of.BETA_SCHEDULE).numpy(),
        prediction_type=of.PREDICTION,
        timestep_spacing="trailing",
    )
    scheduler.set_timesteps(steps)
    x = torch.zeros(0)

    def denoiser(noised: Tensor, timestep: Tensor, **conditions: Tensor) -> Tensor:
        """Draws the whole trajectory in the first call of our sampler, from the call's noise and conditions."""
        nonlocal x
        rows = len(seeds)
        x = noised[:rows].double()
        for at in scheduler.timesteps:
            given = torch.cat([x.float()] * (len(noised) // rows))
            prediction = model.denoiser(given, torch.full_like(timestep, float(at)), **conditions)
            if len(noised) > rows:
                unconditional, conditional = prediction.chunk(2)
                prediction = unconditional + GUIDANCE * (conditional - unconditional)
            x = scheduler.step(prediction.double().cpu(), at, x.cpu()).prev_sample.to(noised)
        return torch.zeros_like(noised)

    model.sample(denoiser, seeds, steps=1, solver="ddim")
    return ((x + 1) / 2).clamp(0, 1).float().cpu()


def cache_dit_samples(
    model: DiffusionModel, seeds: range, steps: int, threshold: float, taylor: bool
) -> tuple[Tensor, int]:
    """Draws with cache-dit; returns the samples, and the number of steps that computed the blocks behind the first."""
    import cache_dit

    network, calls = model.denoiser, []
    network.blocks[-1].norm_attn.register_forward_hook(lambda *_: calls.append(None))
    cache_dit.enable_cache(
        cache_dit.BlockAdapter(
            transformer=network,
            blocks=network.blocks,
            forward_pattern=cache_dit.ForwardPattern.Pattern_3,
            check_forward_pattern=False,
        ),
        cache_config=cache_dit.DBCacheConfig(
            Fn_compute_blocks=1,
            Bn_compute_blocks=0,
            max_warmup_steps=4,
            residual_diff_threshold=threshold,
            num_inference_steps=steps,
        ),
        calibrator_config=cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=1) if taylor else None,
    )
    return model.sample(network, seeds, steps=steps, solver="ddim"), len(calls)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
