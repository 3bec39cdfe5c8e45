"""Samples of a denoiser of which nothing is known but its graph: the recipe says the noise that it was trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trtconvert.attention.schedules import BETA_SCHEDULES, NoiseSchedule, ddpm_betas, flow_noise_fractions
from trtconvert.diffusion_model import Denoiser, InputSpec, resized
from trtconvert.errors import UserError, did_you_mean, first_line
from trtconvert.models.diffusers import as_images
from trtconvert.models.samplers import PREDICTIONS, SOLVERS, initial_noise, solve_ode, solver_sigmas
from trtconvert.runtime.reuse import follow
from trtconvert.runtime.signature import shape_of
from trtconvert.runtime.trajectory import begin

FLOW = "flow"
SCHEDULES = (*BETA_SCHEDULES, FLOW)
RANDOM = "random"


@dataclass(frozen=True)
class Noise:
    """What timesteps mean.

    Attributes:
        timesteps: of the training.
        prediction: of `PREDICTIONS`, or "flow", n − x₀.
        ddpm: its schedule; None for flow matching.
        shift: of flow matching's steps.
    """

    timesteps: int
    prediction: str
    ddpm: NoiseSchedule | None
    shift: float

    @property
    def sigmas(self) -> Tensor:
        """See `DiffusionModel`."""
        return self.ddpm.sigmas if self.ddpm is not None else self._shares() / (1 - self._shares())

    @property
    def signal(self) -> Tensor | None:
        """See `DiffusionModel`."""
        return None if self.ddpm is not None else 1 - self._shares()

    def _shares(self) -> Tensor:
        # The ends, where the ratio is 0 or infinite, move by half a timestep.
        places = torch.arange(self.timesteps, dtype=torch.float64)
        return places.clamp(0.5, self.timesteps - 0.5) / self.timesteps

    def levels(self, solver: str, steps: int) -> Tensor:
        """The σ that a solver visits, falling, with 0 at the end.

        Raises:
            UserError: it cannot take so many steps, or there is no such solver.
        """
        if self.ddpm is not None:
            levels = solver_sigmas(self.ddpm, solver, steps)
        else:
            if solver not in SOLVERS or not 1 <= steps <= self.timesteps:
                raise UserError(
                    "the sampler cannot do this",
                    expected=f"{', '.join(SOLVERS)}, and 1 to {self.timesteps} steps",
                    got=f"{solver}, {steps} steps",
                    remedy="take ddim and 20 steps",
                )
            shares = flow_noise_fractions(steps, self.shift).clamp_max(1 - 0.5 / self.timesteps)
            levels = shares / (1 - shares)
        return torch.cat([levels, torch.zeros(1, dtype=torch.float64)])

    def timestep(self, sigma: Tensor) -> Tensor:
        if self.ddpm is not None:
            return self.ddpm.timestep(sigma)
        return (sigma / (1 + sigma) * self.timesteps).clamp_max(self.timesteps - 1)

    def factor(self, sigma: Tensor) -> Tensor:
        """What the denoiser sees x₀ + σ·n multiplied by."""
        return (1 + sigma**2).rsqrt() if self.ddpm is not None else 1 / (1 + sigma)

    def clean(self, x: Tensor, sigma: Tensor, out: Tensor) -> Tensor:
        """x₀ as the denoiser's output says it, of x = x₀ + σ·n."""
        factor = self.factor(sigma)
        match self.prediction:
            case "epsilon":
                return x - sigma * out
            case "v_prediction":
                return x * factor**2 - sigma * factor * out
            case "sample":
                return out
        return x * factor - sigma * factor * out  # (1 − s)·x − s·(n − x₀), s = σ / (1 + σ)


def noise_of(schedule: str, timesteps: int, prediction: str | None, shift: float) -> Noise:
    """
    Raises:
        UserError: an option of the recipe does not fit.
    """
    predictions = (*PREDICTIONS, FLOW)
    prediction = prediction or (FLOW if schedule == FLOW else "epsilon")
    for option, got, known in (("schedule", schedule, SCHEDULES), ("prediction", prediction, predictions)):
        if got not in known:
            raise UserError(
                f"model.options.{option} is not known",
                expected="one of " + ", ".join(known),
                got=repr(got),
                remedy=did_you_mean(str(got), known, "take what the model was trained with"),
            )
    if (schedule == FLOW) != (prediction == FLOW):
        raise UserError(
            "model.options.schedule and prediction do not fit together",
            expected="flow and flow, or a schedule of betas and " + ", ".join(PREDICTIONS),
            got=f"{schedule} and {prediction}",
            remedy="correct them in the recipe",
        )
    for option, got, fits in (
        ("timesteps", timesteps, type(timesteps) is int and 2 <= timesteps <= 1_000_000),
        ("shift", shift, isinstance(shift, (int, float)) and 0 < shift < 1e6),
    ):
        if not fits:
            raise UserError(
                f"model.options.{option} does not fit",
                expected="a whole number from 2" if option == "timesteps" else "a positive number",
                got=repr(got),
                remedy="correct it in the recipe",
            )
    return Noise(
        timesteps, prediction, None if schedule == FLOW else NoiseSchedule(ddpm_betas(timesteps, schedule)), shift
    )


@dataclass(frozen=True)
class Conditions:
    """What the denoiser's further inputs hold in samples.

    Attributes:
        specs: of these inputs; sizes: of symbolic dimensions.
        batch: name or number of the dimension of samples.
        values: numbers that fill inputs; rows: tensors from a file, by input.
    """

    specs: tuple[InputSpec, ...]
    sizes: Mapping[str, int]
    batch: int | str
    values: Mapping[str, float]
    rows: Mapping[str, Tensor]

    def of(self, seeds: Sequence[int]) -> dict[str, Tensor]:
        """A row for each sample, of a file's by turns; noise that follows the seed where there is no file. Inputs that samples
        share are there once."""
        return {spec.name: self._of(place, spec, seeds) for place, spec in enumerate(self.specs)}

    def _of(self, place: int, spec: InputSpec, seeds: Sequence[int]) -> Tensor:
        kind = getattr(torch, spec.dtype)
        each = spec.shape[:1] == (self.batch,)
        shape = shape_of(spec.shape[1:] if each else spec.shape, self.sizes)
        if spec.name in self.values:
            return torch.full((len(seeds), *shape) if each else shape, self.values[spec.name], dtype=kind)
        if (rows := self.rows.get(spec.name)) is not None:
            chosen = rows[torch.tensor([seed % len(rows) for seed in seeds])] if each else rows
            return resized(
                chosen, InputSpec(spec.name, spec.dtype, spec.shape), {**self.sizes, str(self.batch): len(seeds)}
            ).to(kind)
        if spec.dtype == "int64":
            drawn = [torch.randint(0, 2, shape, generator=_seeded(place, seed)) for seed in (seeds if each else [0])]
        else:
            drawn = [_normal(shape, _seeded(place, seed)) for seed in (seeds if each else [0])]
        return torch.stack(drawn) if each else drawn[0]

    def as_passed(self) -> dict[str, Tensor]:
        """What is no noise: values, and of the file whole numbers and what samples share."""
        passed = {}
        for spec in self.specs:
            shared = spec.shape[:1] != (self.batch,)
            if spec.name in self.values or (spec.name in self.rows and (shared or spec.dtype == "int64")):
                passed[spec.name] = self.of([0])[spec.name]
        return passed


def _seeded(place: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 0x9E3779B1 + place + 1) % 2**32)


def _normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), dtype=torch.float32, generator=generator)


def read_conditions(
    path: Path,
    specs: tuple[InputSpec, ...],
    sizes: Mapping[str, int],
    batch: int | str,
    conditions: str | None,
    values: Mapping[str, Any],
) -> Conditions:
    """What the recipe says of the denoiser's further inputs.

    Args:
        path: of the model; a file of conditions lies relative to its folder.
    Raises:
        UserError: it says nothing of one, or the file lacks one, or it is of another shape.
    """
    names = [spec.name for spec in specs]
    if unknown := [name for name in values if name not in names]:
        raise UserError(
            f"{path} has no further input '{unknown[0]}'",
            expected=", ".join(names) or "no values: it takes nothing else",
            got=", ".join(unknown),
            remedy=did_you_mean(unknown[0], names, "correct model.options.values"),
        )
    if bad := [
        name for name, value in values.items() if isinstance(value, bool) or not isinstance(value, (int, float))
    ]:
        raise UserError(
            f"model.options.values.{bad[0]} is no number",
            expected="a number that fills the input",
            got=repr(values[bad[0]]),
            remedy="correct it in the recipe",
        )
    left = [spec for spec in specs if spec.name not in values]
    if left and conditions is None:
        raise UserError(
            f"what {', '.join(spec.name for spec in left)} of {path} hold is not said",
            expected="model.options.conditions: a .safetensors or .npz file with a row for each of some samples, or `random` "
            "for seeded noise, which calibrates worse",
            got="none",
            remedy="add `conditions: random`, or a file, under model.options; or `values: {NAME: NUMBER}` for what is constant",
        )
    rows = {} if conditions in (None, RANDOM) else _read_rows(path.parent / str(conditions), left, sizes, batch)
    return Conditions(specs, sizes, batch, {name: float(value) for name, value in values.items()}, rows)


def _read_rows(path: Path, specs: Sequence[InputSpec], sizes: Mapping[str, int], batch: int | str) -> dict[str, Tensor]:
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                found = {name: torch.from_numpy(file[name]) for name in file.files}
        else:
            found = load_file(path)
    except (OSError, ValueError, SafetensorError, TypeError) as error:
        raise UserError(
            f"cannot read the conditions {path}",
            expected=f"{RANDOM}, or a .safetensors or .npz file of arrays; the path is relative to the ONNX file",
            got=first_line(error),
            remedy="correct model.options.conditions",
        ) from error
    for spec in specs:
        each = spec.shape[:1] == (batch,)
        wanted = shape_of(spec.shape[1:] if each else spec.shape, sizes)
        got = tuple(found[spec.name].shape) if spec.name in found else None
        if got is None or (got[1:] if each else got) != tuple(wanted) or (each and not got[0]):
            raise UserError(
                f"{path} does not fit '{spec.name}'",
                expected=f"an array of {['samples', *wanted] if each else list(wanted)}",
                got="no such array" if got is None else str(list(got)),
                remedy="record it with the sizes of model.options.sizes, or set those",
            )
    return {spec.name: found[spec.name] for spec in specs}


@dataclass(frozen=True)
class GraphSampler:
    """See `trtconvert.diffusion_model.Sampler`. A sample depends on its seed alone.

    Args:
        noise: what the denoiser was trained with; sample, timestep: names of its inputs.
        shape: of one sample.
        batch: most samples of a call; exactly: whether there have to be as many.
        conditions: what the other inputs hold.
    """

    noise: Noise
    sample: str
    timestep: str
    shape: tuple[int, ...]
    batch: int
    exactly: bool
    conditions: Conditions

    @torch.no_grad()
    def __call__(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        *,
        steps: int,
        solver: str,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        drawn = []
        for start in range(0, len(seeds), self.batch):
            chunk = list(seeds[start : start + self.batch])
            padded = chunk + [chunk[-1]] * (self.batch - len(chunk) if self.exactly else 0)
            drawn.append(self._drawn(denoiser, padded, steps, solver)[: len(chunk)])
        x = torch.cat(drawn)
        pixels = len(self.shape) == 3 and self.shape[0] in (1, 3)
        return ((x + 1) / 2).clamp(0, 1) if pixels else as_images(x, decoded=False)

    def _drawn(self, denoiser: Denoiser, seeds: Sequence[int], steps: int, solver: str) -> Tensor:
        begin(denoiser)
        levels, others = self.noise.levels(solver, steps), self.conditions.of(seeds)
        if solver != "heun":  # whose second call of a step is no step of the trajectory
            denoiser = follow(denoiser, self.noise.timestep(levels[:-1]).float())

        def denoised(x: Tensor, sigma: Tensor) -> Tensor:
            timestep = self.noise.timestep(sigma).float().expand(len(x)).contiguous()
            given = {self.sample: (x * self.noise.factor(sigma)).float(), self.timestep: timestep, **others}
            return self.noise.clean(x, sigma, denoiser(**given).double())

        x = initial_noise(seeds, self.shape).double() / self.noise.factor(levels[0])
        return solve_ode(denoised, x, levels, second_order=solver == "heun").float()
