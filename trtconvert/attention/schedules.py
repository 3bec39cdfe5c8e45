"""Noise schedules, and the rule that turns a timestep's noise level into a precision mode.

σ is the noise-to-signal ratio throughout: a network at timestep t sees a multiple of x₀ + σ(t)·n with n ~ N(0, I).
Tables are indexed by timestep from low noise (0) up, as in diffusers.
Tables are float64 on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import timestep_bin
from trtconvert.errors import UserError
from trtconvert.noise_input import PLACES, NoiseInput

SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0
"""EDM's noise range and the exponent of its schedule (Karras et al. 2022, arXiv 2206.00364, table 1)."""

SIGMA_DATA = 0.5
"""EDM's standard deviation of images in [-1, 1] (Karras et al. 2022, table 1)."""

AGGRESSIVE_ABOVE, PRECISION_BELOW = 5.0, 0.1
"""Thresholds of σ/σ_mid, see `sigma_rule_modes`. Their origin is the project's first report, part 9.2 (docs/design/seeds.md)."""

BETA_SCHEDULES = ("linear", "scaled_linear", "cosine")
SIGMA_SCHEDULES = ("karras", *BETA_SCHEDULES, "flow")


def karras_sigmas(steps: int, sigma_min: float = SIGMA_MIN, sigma_max: float = SIGMA_MAX) -> Tensor:
    """Returns EDM's noise levels in sampling order, from `sigma_max` down to `sigma_min`.

    Returns:
        [steps]. One step gives `sigma_max` alone.
    Source: Karras et al. 2022, equation 5.
    """
    _check_count("steps", steps)
    if not 0 < sigma_min < sigma_max < math.inf:
        raise UserError(
            "the range of the Karras schedule is not valid",
            expected="0 < sigma_min < sigma_max, both finite",
            got=f"sigma_min {sigma_min}, sigma_max {sigma_max}",
            remedy=f"use EDM's {SIGMA_MIN} and {SIGMA_MAX}",
        )
    ramp = torch.linspace(0, 1, steps, dtype=torch.float64)
    return (sigma_max ** (1 / RHO) + ramp * (sigma_min ** (1 / RHO) - sigma_max ** (1 / RHO))) ** RHO


def ddpm_betas(timesteps: int = 1000, kind: str = "linear") -> Tensor:
    """Returns the variances β that a DDPM adds per timestep, with diffusers' default constants.

    Args:
        kind: "linear" from 0.0001 to 0.02 (Ho et al. 2020, arXiv 2006.11239, section 4; DiT); "scaled_linear", linear in
            √β from 0.00085 to 0.012 (Stable Diffusion); "cosine" (Nichol and Dhariwal 2021, arXiv 2102.09672, equation
            17, with β at most 0.999; diffusers calls it squaredcos_cap_v2).
    Returns:
        [timesteps].
    """
    _check_count("timesteps", timesteps)
    match kind:
        case "linear":
            return torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64)
        case "scaled_linear":
            return torch.linspace(0.00085**0.5, 0.012**0.5, timesteps, dtype=torch.float64) ** 2
        case "cosine":
            edges = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
            kept = torch.cos((edges + 0.008) / 1.008 * math.pi / 2) ** 2
            return (1 - kept[1:] / kept[:-1]).clamp_max(0.999)
    raise _unknown_kind(kind, BETA_SCHEDULES)


def alphas_cumprod(betas: Tensor) -> Tensor:
    """Returns ᾱ(t) = Π (1 - β), the signal's share of the variance at timestep t. [T] → [T]."""
    return (1 - betas.double()).cumprod(0)


def ddpm_sigmas(alpha_bar: Tensor) -> Tensor:
    """Returns σ(t) = √((1 - ᾱ)/ᾱ), the noise-to-signal ratio of √ᾱ·x₀ + √(1-ᾱ)·n. [T] → [T] (Karras et al. 2022, C.3)."""
    return ((1 - alpha_bar) / alpha_bar).sqrt()


def flow_noise_fractions(steps: int, shift: float = 1.0) -> Tensor:
    """Returns noise fractions s of flow matching, x = (1-s)·x₀ + s·n, in sampling order, from 1 down, without 0.

    diffusers calls s "sigma" and passes s·1000 as the timestep. A shift therefore changes which timesteps are visited, but not
    how noisy a timestep is.

    Args:
        shift: s' = shift·s / (1 + (shift-1)·s); a shift above 1 spends more steps at high noise.
    Returns:
        [steps].
    Source: Lipman et al. 2023 (arXiv 2210.02747); shift: Esser et al. 2024 (Stable Diffusion 3, arXiv 2403.03206),
        equation 23.
    """
    _check_count("steps", steps)
    if not 0 < shift < math.inf:
        raise UserError(
            "the shift of flow matching is not valid",
            expected="a positive finite number",
            got=str(shift),
            remedy="use 1 for even steps, or 3 as Stable Diffusion 3 does",
        )
    s = torch.arange(steps, 0, -1, dtype=torch.float64) / steps
    return shift * s / (1 + (shift - 1) * s)


def compute_sigma_schedule(timesteps: int = 1000, kind: str = "karras") -> Tensor:
    """Returns σ of every timestep, from low noise up: entry t belongs to the denoiser's timestep t.

    Args:
        kind: "karras", a DDPM schedule of `ddpm_betas`, or "flow", where timestep t is the noise fraction t/timesteps.
    Returns:
        [timesteps], rising.
    """
    _check_count("timesteps", timesteps)
    if kind == "karras":
        return karras_sigmas(timesteps).flip(0)
    if kind == "flow":
        s = torch.arange(timesteps, dtype=torch.float64) / timesteps
        return s / (1 - s)
    if kind in BETA_SCHEDULES:
        return ddpm_sigmas(alphas_cumprod(ddpm_betas(timesteps, kind)))
    raise _unknown_kind(kind, SIGMA_SCHEDULES)


def compute_adaptive_scales(sigmas: Tensor, sigma_data: float = SIGMA_DATA) -> Tensor:
    """Returns the factor of each timestep's scale relative to the middle timestep, for use without a calibration.

    The magnitude of x₀ + σ·n is its standard deviation √(σ² + σ_data²): σ alone would clip the image 250-fold at σ = 0.002. The
    factors hold for networks that see x₀ + σ·n unnormalised; networks that normalise
    their input need a calibration.

    Args:
        sigmas: [T], rising, as `compute_sigma_schedule` returns them.
        sigma_data: standard deviation of the images.
    Returns:
        [T], 1 at T // 2.
    Raises:
        UserError: a σ is negative or not finite.
    """
    check_sigmas(sigmas)
    if not 0 <= sigma_data < math.inf:
        raise UserError(
            "the standard deviation of the images is not valid",
            expected="a finite sigma_data of 0 or more",
            got=str(sigma_data),
            remedy=f"use EDM's {SIGMA_DATA}",
        )
    magnitude = (sigmas.square() + sigma_data**2).sqrt()
    return magnitude / magnitude[len(magnitude) // 2]


def sigma_rule_modes(sigmas: Tensor, bins: int) -> Tensor:
    """Returns the mode of every timestep bin by its noise relative to the middle of the schedule.

    σ/σ_mid above 5 is aggressive, below 0.1 precision, otherwise balanced. A bin that spans a threshold takes the more careful
    mode.

    Args:
        sigmas: [T], rising or falling; entry t belongs to timestep t.
        bins: number of equal parts of [0, T); at most T.
    Returns:
        [bins] int32, values of `Mode`.
    Raises:
        UserError: a σ is negative or not finite; or there are more bins than timesteps.
    """
    check_sigmas(sigmas)
    if not 1 <= bins <= len(sigmas):
        raise UserError(
            "the number of timestep bins does not fit the schedule",
            expected=f"1 to {len(sigmas)} bins, so that every bin holds a timestep",
            got=str(bins),
            remedy="8 to 16 bins are usual",
        )
    ratio = sigmas / sigmas[len(sigmas) // 2]
    modes = torch.full((len(sigmas),), int(Mode.BALANCED), dtype=torch.int32)
    modes[ratio > AGGRESSIVE_ABOVE] = int(Mode.AGGRESSIVE)
    modes[ratio < PRECISION_BELOW] = int(Mode.PRECISION)
    index = timestep_bin(torch.arange(len(sigmas)), len(sigmas), bins)
    # Among the three, a smaller value is the more careful mode.
    return torch.full((bins,), int(Mode.AGGRESSIVE), dtype=torch.int32).scatter_reduce(0, index, modes, "amin")


def check_sigmas(sigmas: Tensor) -> None:
    """Raises a UserError if a σ is NaN, infinite or less than 0."""
    wrong = sigmas[~(sigmas.isfinite() & (sigmas >= 0))]
    if len(wrong):
        raise UserError(
            "a noise schedule has an invalid σ",
            expected="finite sigmas of 0 or more",
            got=f"{wrong[0].item():g}; {len(wrong)} of {sigmas.numel()} are invalid",
            remedy="use compute_sigma_schedule; a last step of pure noise needs a large, finite σ",
        )


class SchedulerNoise(NamedTuple):
    """Noise of the timesteps of a diffusers scheduler.

    Attributes:
        sigmas: [T], rising; σ of the places if there is a `noise_input`.
        flow: true for flow matching, x = (1 - s)·x₀ + s·n with s = t / T.
        noise_input: maps timesteps to places; None if timesteps are DDPM timesteps.
        sigma_data: except in flow matching: the network's input is (x₀ + σ·n) / √(σ² + sigma_data²).
    """

    sigmas: Tensor
    flow: bool
    noise_input: NoiseInput | None = None
    sigma_data: float = 1.0

    @property
    def signal(self) -> Tensor | None:
        """[T] factor of x₀ in the network's input, see `DiffusionModel`; None if the input preserves variance."""
        if self.flow:
            return 1 / (1 + self.sigmas)
        return None if self.sigma_data == 1 else (self.sigmas**2 + self.sigma_data**2).rsqrt()


def scheduler_sigmas(scheduler: Any) -> SchedulerNoise | None:
    """Returns the noise of a diffusers scheduler's timesteps; None if it is unknown."""
    timesteps = int(scheduler.config.get("num_train_timesteps", 1000))
    # SCM: Sana Sprint's model receives TrigFlow's angle as sin/(cos + sin), the share of noise, as in flow matching.
    kinds = ("FlowMatch", "FlowMap", "SCM")
    if any(kind in type(scheduler).__name__ for kind in kinds) or scheduler.config.get("use_flow_sigmas"):
        # x = (1 - σ)·x₀ + σ·n with σ = t / timesteps (Lipman et al. 2023, arXiv 2210.02747, the path of section 4.1). The ends,
        # where the ratio is 0 or infinite, move by half a timestep.
        share = torch.arange(timesteps + 1, dtype=torch.float64).clamp(0.5, timesteps - 0.5) / timesteps
        return SchedulerNoise(share / (1 - share), True)
    if (noise := _noise_of_sigma_timesteps(scheduler)) is not None:
        return noise
    if getattr(scheduler, "alphas_cumprod", None) is not None:
        return SchedulerNoise(_table_sigmas(scheduler), False)
    return None


def _table_sigmas(scheduler: Any) -> Tensor:
    """σ of a scheduler's table; schedules with zero terminal SNR end at ᾱ = 0."""
    return ddpm_sigmas(scheduler.alphas_cumprod.double().clamp_min(1e-8))


def _noise_of_sigma_timesteps(scheduler: Any) -> SchedulerNoise | None:
    """Returns the noise of a scheduler whose timesteps are functions of σ; None for other schedulers. diffusers' classes are
    matched by name, as their configurations do not tell."""
    name, config = type(scheduler).__name__.removesuffix("Scheduler"), scheduler.config
    # With other predictions than v, diffusers' EulerDiscrete passes places of its table even if "continuous".
    continuous = config.get("timestep_type") == "continuous" and config.get("prediction_type") == "v_prediction"
    if name not in ("EDMEuler", "EDMDPMSolverMultistep", "CosineDPMSolverMultistep", "CMStochasticIterative"):
        if not continuous:
            return None
        table = _table_sigmas(scheduler)
        low, high = (config.get(end) or float(table[at]) for end, at in (("sigma_min", 0), ("sigma_max", -1)))
    else:
        low, high = config["sigma_min"], config["sigma_max"]
    sigma_data = float(config.get("sigma_data") or 1.0)
    if name == "CosineDPMSolverMultistep":  # the input is 2/π · atan σ; places are even in the angle
        noise_input = NoiseInput(math.atan(low) / math.pi * 2, math.atan(high) / math.pi * 2)
        angles = noise_input.at(torch.arange(PLACES, dtype=torch.float64)) * math.pi / 2
        return SchedulerNoise(angles.tan(), False, noise_input, sigma_data)
    return log_sigma_noise(low, high, 250.0 if name == "CMStochasticIterative" else 0.25, sigma_data)


def log_sigma_noise(low: float, high: float, factor: float = 0.25, sigma_data: float = 1.0) -> SchedulerNoise:
    """Returns the noise of timesteps that are factor · ln σ, by default c_noise of EDM, for σ from low to high."""
    noise_input = NoiseInput(factor * math.log(low), factor * math.log(high))
    return SchedulerNoise(SigmaRange(low, high).sigmas, False, noise_input, sigma_data)


class NoiseSchedule:
    """A DDPM schedule as a continuous map between timesteps and σ, for solvers that work in σ.

    log σ is linear between two timesteps, as in k-diffusion's DiscreteSchedule.

    Args:
        betas: [T], at least two.
    Raises:
        UserError: fewer than two, or betas that give invalid noise levels.
    """

    def __init__(self, betas: Tensor) -> None:
        if len(betas) < 2:
            raise UserError(
                "a noise schedule cannot be interpolated",
                expected="at least 2 timesteps",
                got=str(len(betas)),
                remedy="pass the betas of the schedule that the model was trained with",
            )
        self.sigmas = ddpm_sigmas(alphas_cumprod(betas))
        check_sigmas(self.sigmas)
        self._log_sigmas = self.sigmas.log()

    @property
    def timesteps(self) -> int:
        """T: the denoiser is trained on timesteps in [0, T)."""
        return len(self.sigmas)

    def sigma(self, timestep: Tensor) -> Tensor:
        """Returns σ of each timestep in [0, T-1], fractions included; clamps to this range. Any shape, float64."""
        log_sigmas = self._log_sigmas.to(timestep.device)
        t = timestep.double().clamp(0, self.timesteps - 1)
        low = t.floor().long().clamp_max(self.timesteps - 2)
        return torch.lerp(log_sigmas[low], log_sigmas[low + 1], t - low).exp()

    def timestep(self, sigma: Tensor) -> Tensor:
        """Returns the timestep, fractions included, that the denoiser expects at σ; clamps to [0, T-1]. Float64."""
        log_sigmas = self._log_sigmas.to(sigma.device)
        wanted = sigma.double().log().clamp(log_sigmas[0], log_sigmas[-1])
        low = torch.searchsorted(log_sigmas, wanted, right=True).sub(1).clamp(0, self.timesteps - 2)
        return low + (wanted - log_sigmas[low]) / (log_sigmas[low + 1] - log_sigmas[low])


class FlowSchedule:
    """Flow matching, x = (1-s)·x₀ + s·n; timestep t is the noise fraction s = t/T (Lipman et al. 2023, arXiv 2210.02747).

    Args:
        timesteps: T.
        shift: see `flow_noise_fractions`.
    """

    def __init__(self, timesteps: int = 1000, shift: float = 1.0) -> None:
        _check_count("timesteps", timesteps)
        self.timesteps, self.shift = timesteps, shift

    @property
    def fractions(self) -> Tensor:
        """[T] the noise fraction of each timestep. The ends, where σ is 0 or infinite, move by half a timestep."""
        places = torch.arange(self.timesteps, dtype=torch.float64)
        return places.clamp(0.5, self.timesteps - 0.5) / self.timesteps

    @property
    def sigmas(self) -> Tensor:
        """[T] σ of each timestep."""
        return self.fractions / (1 - self.fractions)

    def timestep(self, sigma: Tensor) -> Tensor:
        """Returns the timestep, fractions included, that the denoiser expects at σ. Float64."""
        return (sigma / (1 + sigma) * self.timesteps).clamp_max(self.timesteps - 1)


@dataclass(frozen=True)
class SigmaRange:
    """Noise levels without timesteps: the network receives σ itself, any value of a range (EDM, consistency models).

    Attributes:
        low, high: the least and the largest σ.
    Raises:
        UserError: the range is not valid.
    Source: Karras et al. 2022, table 1.
    """

    low: float = SIGMA_MIN
    high: float = SIGMA_MAX

    def __post_init__(self) -> None:
        of_float32 = torch.finfo(torch.float32)
        if not of_float32.smallest_normal <= self.low < self.high <= of_float32.max:
            raise UserError(
                "the range of σ is not valid",
                expected="0 < the least σ < the largest, both normal numbers of FP32",
                got=f"{self.low:g} and {self.high:g}",
                remedy=f"use the range that the model was trained with; EDM's is {SIGMA_MIN} to {SIGMA_MAX}",
            )

    @property
    def timesteps(self) -> int:
        """Number of places in the range, see `NoiseInput`."""
        return PLACES

    @property
    def sigmas(self) -> Tensor:
        """[timesteps] σ of each place, even in log σ, float64."""
        share = torch.arange(PLACES, dtype=torch.float64) / PLACES
        return self.low * (self.high / self.low) ** share

    def timestep(self, sigma: Tensor) -> Tensor:
        """Returns the place of σ. Float64."""
        return (sigma.double() / self.low).log() / math.log(self.high / self.low) * PLACES


def _check_count(name: str, count: int) -> None:
    if count < 1:
        raise UserError(
            f"a schedule cannot have {count} {name}", expected="at least 1", got=str(count), remedy=f"raise {name}"
        )


def _unknown_kind(kind: str, known: tuple[str, ...]) -> UserError:
    return UserError(
        "the kind of noise schedule is unknown",
        expected=f"one of {', '.join(known)}",
        got=repr(kind),
        remedy="use the kind that the model was trained with; its scheduler's configuration names it",
    )
