"""The parametrisation of a denoiser: its noise levels, its timestep input, and its prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.attention.schedules import (
    SIGMA_MAX,
    SIGMA_MIN,
    FlowSchedule,
    NoiseSchedule,
    SigmaRange,
    flow_noise_fractions,
    karras_sigmas,
)
from trtconvert.errors import UserError, unknown_name
from trtconvert.noise_input import NoiseInput

Schedule = NoiseSchedule | FlowSchedule | SigmaRange

SOLVERS = ("ddim", "euler", "heun")
FLOW, DENOISED, RAW = "flow", "denoised", "raw"
PREDICTIONS = ("epsilon", "v_prediction", "sample", FLOW, DENOISED, RAW)
"""Predictions of a denoiser. Given √ᾱ·x₀ + √(1-ᾱ)·n: the noise n, v = √ᾱ·n - √(1-ᾱ)·x₀, or x₀, by diffusers' names. Given
(1-s)·x₀ + s·n: the velocity n - x₀. Given x₀ + σ·n: the image x₀, with preconditioning inside (D of Karras et al. 2022). Given
(x₀ + σ·n) / √(σ² + σ_data²): F there, equation 7, which is multiplied by c_out and added to c_skip·(x₀ + σ·n) to give D."""

TIMESTEP, SIGMA = "timestep", "sigma"
NOISE_INPUTS = (TIMESTEP, "fraction", SIGMA, "log_sigma", "c_noise")
"""Contents of a timestep input: t in [0, T), t / T, σ, ln σ, or ln σ / 4 (Karras et al. 2022, table 1)."""


@dataclass(frozen=True)
class Parametrisation:
    """A denoiser's noise levels, its timestep input, and its prediction. Samplers and `DiffusionModel` read it:

        DiffusionModel(…, timestep_max=p.timestep_max, sigmas=p.sigmas, signal=p.signal, noise_input=p.noise_input)

    Attributes:
        schedule: the noise levels: DDPM's timesteps, flow matching, or a range of σ.
        prediction: one of `PREDICTIONS`.
        told: contents of the timestep input, one of `NOISE_INPUTS`.
        factor: multiplies these contents: 1000 with "c_noise" for consistency models in diffusers.
        consistency: the network maps any noise level to the image (Song et al. 2023, arXiv 2303.01469): samples are drawn in few
            steps, by denoising and adding new noise. Otherwise samples follow the probability flow.
        sigma_data: the standard deviation of images that the network's input is scaled for, in a range of σ: the input is
            (x₀ + σ·n) / √(σ² + sigma_data²). 1 for a denoiser that scales its input itself.
    Raises:
        UserError: there is no such prediction or timestep input, or they do not fit together.
    """

    schedule: Schedule
    prediction: str
    told: str = TIMESTEP
    factor: float = 1.0
    consistency: bool = False
    sigma_data: float = 1.0

    def __post_init__(self) -> None:
        for problem, got, known in (
            ("A denoiser cannot predict this.", self.prediction, PREDICTIONS),
            ("A denoiser's timestep input cannot hold this.", self.told, NOISE_INPUTS),
        ):
            if got not in known:
                raise unknown_name(problem, str(got), known, "give the value that the model was trained with")
        flows, of_sigma = isinstance(self.schedule, FlowSchedule), self.told not in (TIMESTEP, "fraction")
        in_range = isinstance(self.schedule, SigmaRange)
        if flows != (self.prediction == FLOW) or (self.prediction == RAW and not in_range):
            others = ", ".join(name for name in PREDICTIONS if name not in (FLOW, RAW))
            raise UserError(
                "The noise schedule and the prediction do not fit together.",
                expected=f"flow and flow, a range of σ and raw, which EDM defines, or any schedule but flow and {others}",
                got=f"{'flow' if flows else 'a range of σ' if in_range else 'another schedule'} and {self.prediction}",
                remedy="give the schedule and the prediction of the model's training",
            )
        if (flows and of_sigma) or (in_range and not of_sigma):
            raise UserError(
                "The noise schedule and the timestep input do not fit together.",
                expected="timestep or fraction"
                if flows
                else "sigma, log_sigma or c_noise, as a range of σ has no timesteps",
                got=self.told,
                remedy="fraction is the input from 0 to 1 that flow matching often calls sigma"
                if flows
                else "give DDPM's schedule, or flow matching's, for an input that holds timesteps",
            )
        if not 0 < self.sigma_data < math.inf or (
            self.sigma_data != 1 and (not in_range or self.prediction == DENOISED)
        ):
            raise UserError(
                "The denoiser's sigma_data does not fit.",
                expected="a positive number, with a range of σ and a network whose input is scaled outside of it; 1 otherwise",
                got=f"{self.sigma_data!r} with the prediction {self.prediction}",
                remedy="leave it out: a network that takes x₀ + σ·n, and predicts denoised, scales its input itself"
                if self.prediction == DENOISED
                else "give the standard deviation of the images in training, 0.5 in EDM, or leave it out",
            )

    @property
    def timestep_max(self) -> float:
        """See `DiffusionModel`."""
        return float(self.schedule.timesteps) if self._range is None else float(self._range.timesteps)

    @property
    def _range(self) -> SigmaRange | None:
        """The range of σ for inputs that are functions of σ; None for timesteps."""
        if self.told in (TIMESTEP, "fraction"):
            return None
        if isinstance(self.schedule, SigmaRange):
            return self.schedule
        return SigmaRange(float(self.schedule.sigmas[0]), float(self.schedule.sigmas[-1]))

    @property
    def noise_input(self) -> NoiseInput | None:
        """See `DiffusionModel`."""
        if self._range is None:
            if self.told == TIMESTEP and self.factor == 1:
                return None
            high = self.factor * (self.schedule.timesteps if self.told == TIMESTEP else 1)
            return NoiseInput(0.0, high, timestep_max=self.timestep_max)
        ends = (self._range.low, self._range.high)
        if self.told != SIGMA:
            ends = tuple(math.log(sigma) / (4 if self.told == "c_noise" else 1) for sigma in ends)
        return NoiseInput(ends[0] * self.factor, ends[1] * self.factor, self.told == SIGMA, self.timestep_max)

    @property
    def sigmas(self) -> Tensor:
        """See `DiffusionModel`."""
        return self.schedule.sigmas if self._range is None else self._range.sigmas

    @property
    def signal(self) -> Tensor | None:
        """See `DiffusionModel`."""
        if isinstance(self.schedule, FlowSchedule):
            return 1 - self.schedule.fractions
        if self.prediction == DENOISED:
            return torch.ones_like(self.sigmas)
        return None if self.sigma_data == 1 else (self.sigmas**2 + self.sigma_data**2).rsqrt()

    def input_at(self, sigma: Tensor) -> Tensor:
        """Returns the contents of the timestep input at σ, a scalar tensor. Float64."""
        if self._range is None:
            timestep = self.schedule.timestep(sigma)
            return timestep * (self.factor if self.told == TIMESTEP else self.factor / self.schedule.timesteps)
        if self.told == SIGMA:
            return sigma.double() * self.factor
        return sigma.double().log() / (4 if self.told == "c_noise" else 1) * self.factor

    def signal_at(self, sigma: Tensor) -> Tensor | float:
        """Returns the factor of x₀ + σ·n in the denoiser's input."""
        if self.prediction == DENOISED:
            return 1.0
        return 1 / (1 + sigma) if self.prediction == FLOW else (self.sigma_data**2 + sigma**2).rsqrt()

    def denoised(self, x: Tensor, sigma: Tensor, out: Tensor) -> Tensor:
        """Returns x₀, from x = x₀ + σ·n and the denoiser's output."""
        signal, scale = self.signal_at(sigma), self.sigma_data
        match self.prediction:
            case "epsilon":
                return x - sigma * out
            case "v_prediction":
                return x * (signal * scale) ** 2 - sigma * scale * signal * out
            case "raw":  # c_skip · x + c_out · F
                return x * (signal * scale) ** 2 + sigma * scale * signal * out
            case "flow":
                return x * signal - sigma * signal * out  # (1 − s)·x − s·(n − x₀), s = σ / (1 + σ)
        return out

    def first(self, sigma: Tensor) -> Tensor:
        """Returns the standard deviation of a sample at its first noise level: of noised data of unit variance, as for
        x_T ~ N(0, I) in DDPM; of noise alone in flow matching; σ in a range of σ (Karras et al. 2022, algorithm 1)."""
        if isinstance(self.schedule, SigmaRange):
            return sigma
        return 1 + sigma if self.prediction == FLOW else (1 + sigma**2).sqrt()

    def levels(self, solver: str, steps: int) -> Tensor:
        """Returns the σ that a solver visits, falling, with 0 at the end: [steps + 1]. See `solver_sigmas`.

        The one solver of a consistency model is "ddim". In a range of σ its levels are those of Karras et al., even in σ^(1/7),
        without the last; otherwise they are DDIM's.

        Raises:
            UserError: see `solver_sigmas`; or the solver is one of the probability flow, for a consistency model.
        """
        if self.consistency and solver != "ddim" and solver in SOLVERS:
            raise UserError(
                "A consistency model has a sampler of its own.",
                expected="ddim, which stands for this sampler: it denoises, and adds new noise",
                got=solver,
                remedy="leave the solver out",
            )
        visited = solver_sigmas(self.schedule, solver, steps)
        if self.consistency and isinstance(self.schedule, SigmaRange):
            visited = karras_sigmas(steps + 1, self.schedule.low, self.schedule.high)[:-1]
        return torch.cat([visited, torch.zeros(1, dtype=torch.float64)])


def solver_sigmas(schedule: Schedule, solver: str, steps: int) -> Tensor:
    """Returns the noise levels that a solver visits, from high to low, without the final 0.

    "ddim" visits evenly spaced timesteps that end at the last, noisiest one (diffusers' "trailing", recommended by Lin et al.
    2024, arXiv 2305.08891, section 3.3); "euler" and "heun" visit EDM's levels, limited to those that the model knows. In a range
    of σ every solver visits EDM's levels, and in flow matching those of `flow_noise_fractions`.

    Returns:
        [steps] float64.
    Raises:
        UserError: there is no such solver, or too many steps.
    """
    if solver not in SOLVERS:
        raise unknown_name("There is no such solver.", str(solver), SOLVERS, "take ddim")
    if not 1 <= steps <= schedule.timesteps:
        raise UserError(
            "The sampler cannot take so many steps.",
            expected=f"1 to {schedule.timesteps}, the timesteps of the model",
            got=str(steps),
            remedy="50 is usual for ddim, 20 for heun",
        )
    if isinstance(schedule, SigmaRange):
        return karras_sigmas(steps, schedule.low, schedule.high)
    if isinstance(schedule, FlowSchedule):
        shares = flow_noise_fractions(steps, schedule.shift).clamp_max(1 - 0.5 / schedule.timesteps)
        return shares / (1 - shares)
    if solver == "ddim":
        spacing = schedule.timesteps / steps
        timesteps = (schedule.timesteps - spacing * torch.arange(steps, dtype=torch.float64)).round() - 1
        return schedule.sigma(timesteps)
    known = schedule.sigmas
    return karras_sigmas(steps, max(SIGMA_MIN, known[0].item()), min(SIGMA_MAX, known[-1].item()))
