"""What is known of a model's trajectories: enough to price every way of leaving steps out, of any sampler and number of steps.

At a step that is left out, the prediction is extrapolated from the last two that were computed, at t_a and t_b,

    p̂(t) = p(t_b) + α · (p(t_b) − p(t_a)),

where α, fitted to the calibrated trajectories, is near (t − t_b) / (t_b − t_a). The next computed prediction, at t_n, shows how
far the extrapolation was off. The denoiser gives p(t_n) + κ · (p(t_n) − p̂(t_n)) there: κ is fitted so that the step takes back
what the gap has moved the sample by. All of this is linear in predictions. So are predictions between calibrated timesteps, by
cubic interpolation. The squared norm of any sum of such errors is therefore a quadratic form of ⟨p(t_i), p(t_j)⟩. These
numbers, one small matrix for each sample, are all that is kept.

A unit of error in the prediction moves the sample by Δσ times a factor of the noise level, and what is computed later answers
the move. For data of unit variance that are Gaussian the answer is known, and its product over the steps gives a weight. How much
the model at hand differs from that is measured, by noise level: `gain`.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Self

import torch
from torch import Tensor

KNOTS = 4
"""Calibrated timesteps that an interpolation is made of."""


@dataclass(frozen=True, eq=False)
class Trajectories:
    """S trajectories of N steps, all of them computed.

    Attributes:
        timesteps: [N] FP64, as the denoiser is given them, or their places where these are no timesteps (see
            `trtconvert.noise_input`), in the order of denoising.
        products: [S, N, N] FP64, ⟨p(t_i), p(t_j)⟩ by element of the prediction.
        sigmas: [N] FP64 noise-to-signal ratios.
        gain: [N] FP64, what an error in the prediction moves the sample by, beside what Gaussian data say.
        predicts_noise: whether predictions are the noise, whose errors weigh √(1 + σ²) of those of a velocity.
        fitted: whether extrapolations go as far as fits the products; by the timestep alone in bundles of before.
        correction: share of the correction of a gap that is made; 0 for none, as in bundles of before.
    """

    timesteps: Tensor
    products: Tensor
    sigmas: Tensor
    gain: Tensor
    predicts_noise: bool
    fitted: bool = False
    correction: float = 0.0

    def tensors(self) -> dict[str, Tensor]:
        """By name, for `of_tensors`."""
        return {field.name: torch.as_tensor(getattr(self, field.name)).contiguous() for field in fields(self)}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """What `tensors` gave, of a file's. Bundles of before have none of those with a default.

        Raises:
            ValueError: they are other tensors.
        """
        known = {field.name: field.default for field in fields(cls)}
        needed = {name for name, default in known.items() if default is MISSING}
        if not needed <= tensors.keys() <= known.keys():
            raise ValueError(f"tensors {', '.join(sorted(tensors)) or 'none'}, where {', '.join(known)} are needed")
        steps, samples = tensors["timesteps"].numel(), len(tensors["products"]) if tensors["products"].dim() else 0
        shapes = {"timesteps": (steps,), "products": (samples, steps, steps), "sigmas": (steps,), "gain": (steps,)}
        for name, shape in shapes.items():
            x = tensors[name]
            if x.shape != shape or 0 in shape or x.dtype != torch.float64 or not x.isfinite().all():
                raise ValueError(f"{name} that are no finite numbers in FP64 of the shape {list(shape)}")
        if tensors["timesteps"].unique().numel() != steps:
            raise ValueError("timesteps of which two are equal")
        scalars = {name: tensors[name] for name in tensors.keys() - shapes.keys()}
        for name, x in scalars.items():
            if x.numel() != 1 or (x.dtype == torch.bool) != (name != "correction") or not 0 <= float(x) <= 1:
                raise ValueError(f"{name} that is no {'share from 0 to 1' if name == 'correction' else 'boolean'}")
        return cls(**tensors | {name: x.item() for name, x in scalars.items()})  # type: ignore[arg-type]

    def covers(self, timesteps: Tensor) -> Tensor:
        """[M] whether each timestep lies among the calibrated ones."""
        low, high = self.timesteps.aminmax()
        room = 1e-6 * (high - low)
        return (timesteps >= low - room) & (timesteps <= high + room)

    def interpolation(self, timesteps: Tensor) -> Tensor:
        """[M, N] FP64: what the predictions at other timesteps are made of, by cubic Lagrange polynomials.

        Args:
            timesteps: [M], which `covers` has.
        """
        count = min(KNOTS, len(self.timesteps))
        order = self.timesteps.argsort()
        grid = self.timesteps[order]
        first = (torch.searchsorted(grid, timesteps.double().contiguous()) - count // 2).clamp(0, len(grid) - count)
        near = first[:, None] + torch.arange(count)  # [M, knots]
        knots, weights = grid[near], torch.ones(len(timesteps), count, dtype=torch.float64)
        for k in range(count):
            for other in range(count):
                if other != k:
                    weights[:, k] *= (timesteps - knots[:, other]) / (knots[:, k] - knots[:, other])
        return torch.zeros(len(timesteps), len(grid), dtype=torch.float64).scatter_(1, order[near], weights)

    def weights(self, timesteps: Tensor) -> Tensor:
        """[M] FP64: what a unit of error in the prediction of each step moves the final sample by, for Gaussian data.

        Args:
            timesteps: [M] of a trajectory, in the order of denoising, which ends without noise.
        """
        through = self.interpolation(timesteps)
        # Noise levels span decades; their logarithms are as smooth as predictions.
        sigma = (through @ self.sigmas.clamp_min(1e-6).log()).exp()
        target = torch.cat([sigma[1:], sigma.new_zeros(1)])
        part = (target - sigma) / sigma
        signal = (1 + sigma**2).rsqrt()
        kept = 1 + part * (1 - signal**2)  # of a move, after the step
        later = torch.cat([kept.flip(0).cumprod(0).flip(0)[1:], kept.new_ones(1)])
        moved = part * sigma * (1 if self.predicts_noise else signal)
        return moved * later

    def gain_at(self, timesteps: Tensor) -> Tensor:
        """[M] FP64: of the calibrated timestep next to each."""
        return self.gain[(timesteps[:, None] - self.timesteps).abs().argmin(1)]
