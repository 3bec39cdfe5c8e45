"""Deterministic samplers: one probability-flow ODE solver, three ways to step through it.

A sampler takes any callable as its denoiser (a torch module, an ONNX Runtime session, an engine), so that what is compared
differs in the denoiser alone. The ODE is dx/dσ = (x - D(x, σ))/σ with x = x₀ + σ·n (Karras et al. 2022, arXiv 2206.00364,
equation 1 with σ(t) = t), where D is the denoised image. DDIM with η = 0 is Euler's method on it (Song et al. 2021, arXiv
2010.02502, equation 13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.attention.schedules import SIGMA_MAX, SIGMA_MIN, NoiseSchedule, karras_sigmas
from trtconvert.errors import UserError
from trtconvert.guidance import guidance_of
from trtconvert.runtime.reuse import follow
from trtconvert.runtime.trajectory import begin

Denoiser = Callable[..., Tensor]
"""denoiser(x [B, C, H, W], timestep [B] FP32, **conditions [B, …]) → prediction [B, C, H, W]."""

SOLVERS = ("ddim", "euler", "heun")
PREDICTIONS = ("epsilon", "v_prediction", "sample")
"""What a denoiser may predict: the noise n, v = √ᾱ·n - √(1-ᾱ)·x₀, or x₀. The names are diffusers'."""


@dataclass(frozen=True)
class DenoiserCall:
    """One call of the denoiser, as it was made: with guidance, the unconditional half of the batch comes first."""

    index: int
    x: Tensor
    timestep: Tensor
    conditions: Mapping[str, Tensor]
    prediction: Tensor


def initial_noise(indices: Sequence[int], shape: Sequence[int], seed: int = 0) -> Tensor:
    """Standard normal noise for the samples of these numbers: a sample's noise depends on (seed, its number) alone.

    Args:
        shape: of one sample, [C, H, W].
    Returns:
        [len(indices), C, H, W] FP32 on the CPU, to be moved where it is needed, so that every device starts alike.
    """

    def one(index: int) -> Tensor:
        # Torch's CPU generator keeps 32 bits of its seed. The odd factor (2³² over the golden ratio) spreads the seeds.
        return torch.randn(
            *shape, dtype=torch.float32, generator=torch.Generator().manual_seed((seed * 0x9E3779B1 + index) % 2**32)
        )

    return torch.stack([one(index) for index in indices])


def class_labels(captions: Sequence[str], classes: Sequence[str], expected: str) -> dict[str, Tensor]:
    """A model's condition of captions that name its classes; an empty caption is the label after the last, which stands for none.

    Args:
        expected: what captions are, in words.
    Raises:
        ValueError: another caption.
    """
    known = {name: label for label, name in enumerate((*classes, ""))}
    if any(caption not in known for caption in captions):
        raise ValueError(expected)
    return {"label": torch.tensor([known[caption] for caption in captions])}


def solver_sigmas(schedule: NoiseSchedule, solver: str, steps: int) -> Tensor:
    """The noise levels that a solver visits, from high to low, the final 0 left out.

    "ddim" takes evenly spaced timesteps that end at the last, noisiest one (diffusers' "trailing", recommended by Lin et al.
    2024, arXiv 2305.08891, section 3.3); "euler" and "heun" take EDM's levels, limited to those that the model knows.

    Returns:
        [steps] float64.
    """
    if solver not in SOLVERS:
        raise UserError(
            "There is no such solver.", expected=f"one of {', '.join(SOLVERS)}", got=repr(solver), remedy="take ddim"
        )
    if not 1 <= steps <= schedule.timesteps:
        raise UserError(
            "The sampler cannot take so many steps.",
            expected=f"1 to {schedule.timesteps}, the timesteps of the model",
            got=str(steps),
            remedy="50 is usual for ddim, 20 for heun",
        )
    if solver == "ddim":
        spacing = schedule.timesteps / steps
        timesteps = (schedule.timesteps - spacing * torch.arange(steps, dtype=torch.float64)).round() - 1
        return schedule.sigma(timesteps)
    known = schedule.sigmas
    return karras_sigmas(steps, max(SIGMA_MIN, known[0].item()), min(SIGMA_MAX, known[-1].item()))


def solve_ode(denoised: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor, second_order: bool) -> Tensor:
    """Follows the probability flow from the first noise level to the last.

    Args:
        denoised: D(x, σ), σ a scalar tensor.
        x: x₀ + σ₀·n, any shape.
        sigmas: [S], falling; only the last may be 0.
        second_order: Heun's correction after each step, but for a step to σ = 0, where the slope is not defined.
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


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    noise: Tensor,
    schedule: NoiseSchedule,
    *,
    prediction: str,
    solver: str = "ddim",
    steps: int = 50,
    conditions: Mapping[str, Tensor] | None = None,
    null_conditions: Mapping[str, Tensor] | None = None,
    guidance: float = 1.0,
    on_call: Callable[[DenoiserCall], None] | None = None,
) -> Tensor:
    """Images from noise.

    Args:
        denoiser: see `Denoiser`. It is called `steps` times, 2·steps - 1 times by "heun". One that applies guidance inside is
            given both halves of the conditions and the scale, and gives one prediction.
        noise: [B, C, H, W] standard normal, see `initial_noise`. Its type is that of the denoiser's input; the state between
            calls is float64. Both are on the denoiser's device where it has a `device`, else on the noise's.
        schedule: the noise that the denoiser was trained with.
        prediction: what it predicts, one of `PREDICTIONS`.
        solver: "ddim", "euler" or "heun", see `solver_sigmas`.
        conditions: passed to the denoiser by name, each [B, …].
        null_conditions: the same names for no condition; needed when `guidance` is not 1, or the denoiser applies it.
        guidance: w in p(∅) + w·(p(c) - p(∅)), classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598, with
            diffusers' weight: 1 is no guidance). Both predictions come from one call with a batch of 2·B, or their sum
            from the denoiser.
        on_call: sees every call of the denoiser, in order.
    Returns:
        [B, C, H, W] FP32 in [0, 1], for models of images in [-1, 1], on the device that the noise came from.
    """
    if prediction not in PREDICTIONS:
        raise UserError(
            "A denoiser cannot predict this.",
            expected=f"one of {', '.join(PREDICTIONS)}",
            got=repr(prediction),
            remedy="take the prediction_type that the model was trained with",
        )
    try:
        guidance = float(guidance)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            "There is no such guidance.",
            expected="a number, for all samples",
            got=repr(guidance),
            remedy="give one; a denoiser that applies guidance inside takes one for each sample as its own input",
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

    def denoised(x: Tensor, sigma: Tensor) -> Tensor:
        nonlocal calls
        signal = (1 + sigma**2).rsqrt()  # √ᾱ
        x_in = (x * signal).to(noise.dtype)
        if guided:
            x_in = torch.cat([x_in, x_in])
        timestep = schedule.timestep(sigma).float().to(noise.device).expand(len(x_in)).contiguous()
        out = denoiser(x_in, timestep, **conditions)
        if on_call is not None:
            on_call(DenoiserCall(calls, x_in, timestep, conditions, out))
        calls += 1
        out = out.to(x.device, torch.float64)
        if guided:
            unconditional, conditional = out.chunk(2)
            out = unconditional + guidance * (conditional - unconditional)
        if prediction == "epsilon":
            return x - sigma * out
        if prediction == "v_prediction":
            return x * signal**2 - sigma * signal * out
        return out

    sigmas = torch.cat([solver_sigmas(schedule, solver, steps), torch.zeros(1, dtype=torch.float64)])
    if solver != "heun":  # whose second call of a step is no step of the trajectory
        denoiser = follow(denoiser, schedule.timestep(sigmas[:-1]).float())
    # The marginal at the first level of images of unit variance, as for x_T ~ N(0, I) in DDPM.
    x = noise.double() * (1 + sigmas[0] ** 2).sqrt()
    x = solve_ode(denoised, x, sigmas, second_order=solver == "heun")
    return ((x + 1) / 2).clamp(0, 1).float().to(home)
