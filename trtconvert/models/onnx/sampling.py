"""Samples of a denoiser that is known by its graph alone: the recipe has the noise levels of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trtconvert.attention.schedules import (
    BETA_SCHEDULES,
    SIGMA_DATA,
    SIGMA_MAX,
    SIGMA_MIN,
    FlowSchedule,
    NoiseSchedule,
    SigmaRange,
    ddpm_betas,
)
from trtconvert.diffusion_model import Denoiser, InputSpec, resized
from trtconvert.errors import UserError, first_line, unfit_option, unknown_name
from trtconvert.models.parametrisation import (
    DENOISED,
    FLOW,
    NOISE_INPUTS,
    PREDICTIONS,
    RAW,
    TIMESTEP,
    Parametrisation,
    Schedule,
)
from trtconvert.models.pipeline_sampler import as_images
from trtconvert.models.samplers import draw, followed, initial_noise
from trtconvert.runtime.batches import parts_of
from trtconvert.runtime.signature import shape_of
from trtconvert.wrapped import begin

EDM = "edm"
SCHEDULES = (*BETA_SCHEDULES, FLOW, EDM)
ODE, CONSISTENCY = "ode", "consistency"
RANDOM = "random"

_FITS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "timesteps": ("a whole number from 2", lambda x: type(x) is int and 2 <= x <= 1_000_000),
    "shift": ("a number from 1e-6 to 1e6", lambda x: _is_number(x) and 1e-6 <= x <= 1e6),
    **dict.fromkeys(
        ("sigma_min", "sigma_max", "sigma_data", "timestep_factor"),
        ("a number from 1e-9 to 1e9", lambda x: _is_number(x) and 1e-9 <= x <= 1e9),
    ),
}
"""Options that are numbers, and their ranges."""


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


@dataclass(frozen=True)
class Trained:
    """The model's training as the recipe describes it; None for options that it does not have.

    Attributes:
        schedule: one of `SCHEDULES`.
        prediction: one of `PREDICTIONS`.
        noise_input, timestep_factor: see `told` and `factor` of `Parametrisation`.
        timesteps: of the training, by default 1000.
        shift: of flow matching's steps.
        sigma_min, sigma_max: of a range of σ, by default EDM's.
        sampling: "ode" or "consistency".
        sigma_data: see `Parametrisation`; by default EDM's, 0.5, for the prediction raw.
    """

    schedule: str | None = None
    prediction: str | None = None
    noise_input: str | None = None
    timestep_factor: float = 1.0
    timesteps: int | None = None
    shift: float | None = None
    sigma_min: float | None = None
    sigma_max: float | None = None
    sampling: str = ODE
    sigma_data: float | None = None

    def parametrisation(self) -> Parametrisation:
        """Returns the parametrisation. Defaults are Stable Diffusion's schedule, or EDM's for an input of σ, and the schedule's
        usual prediction.

        Raises:
            UserError: an option does not fit.
        """
        told = self.noise_input or TIMESTEP
        schedule = self.schedule or ("scaled_linear" if told in (TIMESTEP, "fraction") else EDM)
        usual = FLOW if schedule == FLOW else DENOISED if schedule == EDM else "epsilon"
        prediction = self.prediction or usual
        for option, got, known in (
            ("schedule", schedule, SCHEDULES),
            ("prediction", prediction, PREDICTIONS),
            ("noise_input", told, NOISE_INPUTS),
            ("sampling", self.sampling, (ODE, CONSISTENCY)),
        ):
            if got not in known:
                raise unknown_name(
                    f"model.options.{option} is not known",
                    str(got),
                    known,
                    "give the value that the model was trained with",
                )
        self._refuse_unfit_numbers(schedule)
        consistency = self.sampling == CONSISTENCY
        scale = self.sigma_data or (SIGMA_DATA if prediction == RAW else 1.0)
        try:
            return Parametrisation(
                self._levels(schedule), prediction, told, float(self.timestep_factor), consistency, float(scale)
            )
        except UserError as error:
            options = "schedule, prediction, noise_input, sigma_min, sigma_max or sigma_data"
            raise error.about(f"model.options.{options}") from error

    def _levels(self, schedule: str) -> Schedule:
        if schedule == EDM:
            low, high = self.sigma_min or SIGMA_MIN, self.sigma_max or SIGMA_MAX
            return SigmaRange(float(low), float(high))
        timesteps = self.timesteps or 1000
        if schedule == FLOW:
            return FlowSchedule(timesteps, self.shift or 1.0)
        return NoiseSchedule(ddpm_betas(timesteps, schedule))

    def _refuse_unfit_numbers(self, schedule: str) -> None:
        of_range = ("sigma_min", "sigma_max", "sigma_data")
        without = {EDM: ("timesteps", "shift"), FLOW: of_range}.get(schedule, ("shift", *of_range))
        for option, (expected, fits) in _FITS.items():
            got = getattr(self, option)
            if got is not None and (option in without or not fits(got)):
                if option in without:
                    expected = f"none, with the schedule {schedule}"
                raise unfit_option(option, expected, got, "correct it or the schedule in the recipe, or leave it out")


@dataclass(frozen=True)
class Conditions:
    """Values of the denoiser's further inputs in samples.

    Attributes:
        specs: of these inputs.
        sizes: of symbolic dimensions.
        batch: name or number of the dimension of samples.
        values: numbers that fill inputs.
        rows: tensors from a file, by input.
    """

    specs: tuple[InputSpec, ...]
    sizes: Mapping[str, int]
    batch: int | str
    values: Mapping[str, float]
    rows: Mapping[str, Tensor]

    def of(self, seeds: Sequence[int]) -> dict[str, Tensor]:
        """Returns a row for each sample: the file's rows by turns, or noise that the sample's seed draws. Inputs that samples
        share have one row."""
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
        drawn = [
            torch.randint(0, 2, shape, generator=_seeded(place, seed))
            if spec.dtype == "int64"
            else torch.randn(tuple(shape), dtype=torch.float32, generator=_seeded(place, seed))
            for seed in (seeds if each else [0])
        ]
        return torch.stack(drawn) if each else drawn[0]

    def as_passed(self) -> dict[str, Tensor]:
        """Returns the inputs that are not noise: constant values, and of a file whole numbers and inputs that samples share."""
        passed = {}
        for spec in self.specs:
            shared = spec.shape[:1] != (self.batch,)
            if spec.name in self.values or (spec.name in self.rows and (shared or spec.dtype == "int64")):
                passed[spec.name] = self.of([0])[spec.name]
        return passed


def _seeded(place: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 0x9E3779B1 + place + 1) % 2**32)


def read_conditions(
    path: Path,
    specs: tuple[InputSpec, ...],
    sizes: Mapping[str, int],
    batch: int | str,
    conditions: str | None,
    values: Mapping[str, Any],
) -> Conditions:
    """Returns the values of the denoiser's further inputs as the recipe describes them.

    Args:
        path: of the model; a file of conditions is relative to its folder.
    Raises:
        UserError: the recipe lacks an input, or the file lacks one or has another shape.
    """
    names = [spec.name for spec in specs]
    if unknown := [name for name in values if name not in names]:
        raise unknown_name(
            f"{path} has no further input '{unknown[0]}'", unknown[0], names, "correct model.options.values"
        )
    if bad := [name for name, value in values.items() if not _is_number(value)]:
        raise unfit_option(f"values.{bad[0]}", "a number that fills the input", values[bad[0]])
    left = [spec for spec in specs if spec.name not in values]
    if left and conditions is None:
        raise UserError(
            f"the values of {', '.join(spec.name for spec in left)} of {path} are not given",
            expected="model.options.conditions: a .safetensors or .npz file with a row for each of some samples, or `random` "
            "for seeded noise, which calibrates worse",
            got="none",
            remedy="add `conditions: random`, or a file, under model.options; or `values: {NAME: NUMBER}` for constant inputs",
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
                remedy="record it with the sizes of model.options.sizes, or set its sizes there",
            )
    return {spec.name: found[spec.name] for spec in specs}


@dataclass(frozen=True)
class GraphSampler:
    """Draws samples, see `trtconvert.diffusion_model.Sampler`. A sample depends on its seed alone.

    Args:
        trained: the denoiser's training.
        sample, timestep: names of its inputs.
        shape: of one sample.
        batch: most samples of a call.
        exactly: whether each call must have that many samples.
        conditions: values of the other inputs.
    """

    trained: Parametrisation
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
        for rows, own in parts_of(len(seeds), self.batch if self.exactly else 1, self.batch):
            drawn.append(self._drawn(denoiser, [seeds[row] for row in rows], steps, solver)[:own])
        x = torch.cat(drawn)
        pixels = len(self.shape) == 3 and self.shape[0] in (1, 3)
        return ((x + 1) / 2).clamp(0, 1) if pixels else as_images(x, decoded=False)

    def _drawn(self, denoiser: Denoiser, seeds: Sequence[int], steps: int, solver: str) -> Tensor:
        begin(denoiser)
        levels, others = self.trained.levels(solver, steps), self.conditions.of(seeds)
        denoiser = followed(denoiser, self.trained, levels, solver)

        def predict(x: Tensor, timestep: Tensor) -> Tensor:
            return denoiser(**{self.sample: x, self.timestep: timestep, **others})

        def fresh(step: int) -> Tensor:
            return initial_noise(seeds, self.shape, seed=step)

        return draw(self.trained, predict, initial_noise(seeds, self.shape), levels, solver, fresh).float()
