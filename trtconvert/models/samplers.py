"""Deterministic samplers: three solvers of one probability-flow ODE, and the sampler of consistency models.

A sampler takes any callable as its denoiser (a torch module, an ONNX Runtime session, an engine), so that comparisons differ in
the denoiser alone. The ODE is dx/dσ = (x - D(x, σ))/σ with x = x₀ + σ·n (Karras et al. 2022, arXiv 2206.00364, equation 1 with
σ(t) = t), where D is the denoised image. DDIM with η = 0 is Euler's method on it (Song et al. 2021, arXiv 2010.02502, equation
13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.attention.schedules import NoiseSchedule, SigmaRange
from trtconvert.errors import UserError
from trtconvert.guidance import guidance_of
from trtconvert.models.parametrisation import Parametrisation
from trtconvert.runtime.reuse import follow
from trtconvert.wrapped import begin

Denoiser = Callable[..., Tensor]
"""denoiser(x [B, C, H, W], timestep [B] FP32, **conditions [B, …]) → prediction [B, C, H, W]."""

Fresh = Callable[[int], Tensor]
"""Maps a step from 1 up to standard normal noise of the initial noise's shape; each sample's noise depends on its seed alone."""


@dataclass(frozen=True)
class DenoiserCall:
    """One call of the denoiser. With guidance the unconditional half of the batch comes first."""

    index: int
    x: Tensor
    timestep: Tensor
    conditions: Mapping[str, Tensor]
    prediction: Tensor


def initial_noise(indices: Sequence[int], shape: Sequence[int], seed: int = 0) -> Tensor:
    """Returns standard normal noise for samples: a sample's noise depends on (seed, index) alone.

    Args:
        indices: of the samples.
        shape: of one sample, [C, H, W].
    Returns:
        [len(indices), C, H, W] FP32. It is drawn on the CPU, so that it is the same for every device.
    """

    def one(index: int) -> Tensor:
        # Torch's CPU generator keeps 32 bits of its seed. The odd factor (2³² over the golden ratio) spreads the seeds.
        return torch.randn(
            *shape, dtype=torch.float32, generator=torch.Generator().manual_seed((seed * 0x9E3779B1 + index) % 2**32)
        )

    return torch.stack([one(index) for index in indices])


def solve_ode(denoised: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor, second_order: bool) -> Tensor:
    """Integrates the probability flow from the first noise level to the last.

    Args:
        denoised: D(x, σ), σ a scalar tensor.
        x: x₀ + σ₀·n, any shape.
        sigmas: [S], falling; only the last may be 0.
        second_order: apply Heun's correction after each step but one to σ = 0, where the slope is not defined.
    Source: Karras et al. 2022, algorithm 1.
    """
    for sigma, target in zip(sigmas[:-1], sigmas[1:], strict=True):
        slope = (x - denoised(x, sigma)) / sigma
        stepped = x + (target - sigma) * slope
        if second_order and target > 0:
            slope = (slope + (stepped - denoised(stepped, target)) / target) / 2
            stepped = x + (target - sigma) * slope
        x = stepped
    return x


def solve_consistency(
    denoised: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor, fresh: Fresh, least: float
) -> Tensor:
    """Denoises at each noise level, and adds new noise up to the next one.

    Args:
        denoised: D(x, σ), σ a scalar tensor.
        x: x₀ + σ₀·n, any shape.
        sigmas: [S], falling, the last 0.
        least: noise level of denoised images, ε in the paper.
    Source: Song et al. 2023 (arXiv 2303.01469), algorithm 1.
    """
    for step, sigma in enumerate(sigmas[:-1]):
        x = denoised(x if step == 0 else x + (sigma**2 - least**2).sqrt() * fresh(step).to(x), sigma)
    return x


def draw(
    parametrisation: Parametrisation,
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    levels: Tensor,
    solver: str,
    fresh: Fresh | None,
) -> Tensor:
    """Returns samples in the denoiser's range, float64.

    Args:
        predict: maps the denoiser's first input and its timestep input [B] FP32 to the prediction. Both have the type and the
            device of the noise.
        noise: [B, …] standard normal.
        levels: see `Parametrisation.levels`.
        solver: of the levels.
        fresh: for consistency models in several steps.
    Raises:
        UserError: `fresh` is missing.
    """

    def denoised(x: Tensor, sigma: Tensor) -> Tensor:
        told = parametrisation.input_at(sigma).float().to(noise.device).expand(len(x)).contiguous()
        out = predict((x * parametrisation.signal_at(sigma)).to(noise.dtype), told)
        return parametrisation.denoised(x, sigma, out.to(x.device, torch.float64))

    x = noise.double() * parametrisation.first(levels[0])
    if not parametrisation.consistency:
        return solve_ode(denoised, x, levels, second_order=solver == "heun")
    if fresh is None and len(levels) > 2:
        raise UserError(
            "A consistency model adds noise in each step but the first.",
            expected="the argument `fresh`, which returns this noise",
            got=f"none, in {len(levels) - 1} steps",
            remedy="pass fresh=lambda step: initial_noise(seeds, shape, seed=step), or take 1 step",
        )
    schedule = parametrisation.schedule
    least = schedule.low if isinstance(schedule, SigmaRange) else 0.0
    return solve_consistency(denoised, x, levels, fresh or (lambda _: torch.zeros_like(noise)), least)


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    noise: Tensor,
    schedule: NoiseSchedule | Parametrisation,
    *,
    prediction: str | None = None,
    solver: str = "ddim",
    steps: int = 50,
    conditions: Mapping[str, Tensor] | None = None,
    null_conditions: Mapping[str, Tensor] | None = None,
    guidance: float = 1.0,
    on_call: Callable[[DenoiserCall], None] | None = None,
    fresh: Fresh | None = None,
) -> Tensor:
    """Draws images from noise.

    Args:
        denoiser: see `Denoiser`. It is called `steps` times, 2·steps - 1 times by "heun". A denoiser that applies guidance itself
            gets both halves of the conditions and the scale, and returns one prediction.
        noise: [B, C, H, W] standard normal, see `initial_noise`. Its type is that of the denoiser's input; the state between
            calls is float64. Both are on the denoiser's `device` where it has one, else on the noise's device.
        schedule: the noise levels of the denoiser's training; a `Parametrisation` also has the prediction and the timestep input.
        prediction: one of `PREDICTIONS`, for a schedule that is not a `Parametrisation`.
        solver: "ddim", "euler" or "heun", see `solver_sigmas`.
        conditions: passed to the denoiser by name, each [B, …].
        null_conditions: the same names for the empty condition; needed when `guidance` is not 1, or the denoiser applies it.
        guidance: w in p(∅) + w·(p(c) - p(∅)), classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598, with
            diffusers' weight: 1 is no guidance). Both predictions come from one call with a batch of 2·B, or the denoiser returns
            their sum.
        on_call: gets every call of the denoiser, in order.
        fresh: for consistency models in several steps, see `Fresh`.
    Returns:
        [B, C, H, W] FP32 in [0, 1] on the noise's device, for models of images in [-1, 1].
    Raises:
        UserError: an argument does not fit the others.
    """
    if isinstance(schedule, Parametrisation) and prediction not in (None, schedule.prediction):
        raise UserError(
            "The prediction is given twice.",
            expected=f"{schedule.prediction}, as in the parametrisation",
            got=repr(prediction),
            remedy="leave prediction out",
        )
    trained = schedule if isinstance(schedule, Parametrisation) else Parametrisation(schedule, str(prediction))
    try:
        guidance = float(guidance)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            "The guidance is not a number.",
            expected="one number for all samples",
            got=repr(guidance),
            remedy="give one number; a denoiser that applies guidance itself takes one for each sample as its own input",
        ) from None
    home, device = noise.device, getattr(denoiser, "device", None)
    if isinstance(device, torch.device):
        noise = noise.to(device)
    fused = guidance_of(denoiser)
    guided = guidance != 1 and fused is None
    conditions = dict(conditions or {})
    if guided or fused is not None:
        null_conditions = dict(null_conditions or {})
        if not conditions or null_conditions.keys() != conditions.keys():
            raise UserError(
                "Guidance needs each condition twice.",
                expected=f"null_conditions with the names {sorted(conditions) or 'of at least one condition'}",
                got=str(sorted(null_conditions)),
                remedy="pass the model's empty condition, or guidance=1",
            )
        if fused is not None:
            scales = torch.full((len(noise),), guidance, dtype=torch.float32)
            conditions = fused.inputs(null_conditions, conditions, scales)
        else:
            conditions = {name: torch.cat([null_conditions[name], conditions[name]]) for name in conditions}
    conditions = {name: x.to(noise.device) for name, x in conditions.items()}
    begin(denoiser)
    calls = 0

    def predict(x: Tensor, timestep: Tensor) -> Tensor:
        nonlocal calls
        if guided:
            x, timestep = torch.cat([x, x]), torch.cat([timestep, timestep])
        out = denoiser(x, timestep, **conditions)
        if on_call is not None:
            on_call(DenoiserCall(calls, x, timestep, conditions, out))
        calls += 1
        if not guided:
            return out
        unconditional, conditional = out.to(x.device, torch.float64).chunk(2)
        return unconditional + guidance * (conditional - unconditional)

    levels = trained.levels(solver, steps)
    denoiser = followed(denoiser, trained, levels, solver)
    x = draw(trained, predict, noise, levels, solver, fresh)
    return ((x + 1) / 2).clamp(0, 1).float().to(home)


def followed(denoiser: Denoiser, parametrisation: Parametrisation, levels: Tensor, solver: str) -> Denoiser:
    """Returns the denoiser with the timestep inputs of the trajectory, see `follow`.

    With Heun, which calls the denoiser twice a step, and with consistency models, which add noise between steps, the denoiser is
    returned unchanged.
    """
    if solver == "heun" or parametrisation.consistency:
        return denoiser
    return follow(denoiser, parametrisation.input_at(levels[:-1]).float())
