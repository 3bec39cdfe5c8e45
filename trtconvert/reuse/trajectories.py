"""Measured trajectories of a model: the data that prices every schedule, of any sampler and number of steps.

The prediction of a skipped step is extrapolated from the last two computed predictions, at t_a and t_b, and from the noisy
sample x(t), which the skipped call is given,

    p̂(t) = α · p(t_b) + β · p(t_a) + γ · x(t),

with factors fitted to the calibrated trajectories. The next computed prediction, at t_n, shows the error of the extrapolation.
There the denoiser returns p(t_n) + κ · (p(t_n) − p̂(t_n)): κ is fitted so that the step undoes the gap's shift of the sample.
Extrapolations and corrections are linear in predictions and samples, and so is the cubic interpolation between calibrated
timesteps. The squared norm of any sum of such errors is therefore a quadratic form of the products of predictions and samples:
one small matrix for each sample is stored, and no prediction.

A unit of error in the prediction shifts the sample by Δσ times a factor of the noise level, and later predictions respond to the
shift. For Gaussian data of unit variance the response is known, and its product over the steps gives a weight. `gain` is the
model's deviation from the weight, measured by noise level.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

KNOTS = 4
"""Calibrated timesteps of one interpolation."""


@dataclass(frozen=True, eq=False)
class Trajectories:
    """S trajectories of N steps, all computed.

    Attributes:
        timesteps: [N] FP64, the denoiser's timesteps, or their places (see `trtconvert.noise_input`), in the order of denoising.
        products: [S, N, N] FP64, ⟨p(t_i), p(t_j)⟩ per element of the prediction; with samples [S, 2·N, 2·N], of the N
            predictions and the N noisy samples.
        sigmas: [N] FP64 noise-to-signal ratios.
        gain: [N] FP64, shift of the sample by an error in the prediction, relative to Gaussian data.
        predicts_noise: true if predictions are the noise: its errors weigh √(1 + σ²) times those of a velocity.
        fitted: true if extrapolations are fitted to the products; false in older bundles: linear in the timestep.
        correction: share of a gap's correction that is applied; 0, as in older bundles: no correction.
        with_samples: true if extrapolations read the noisy sample; false in older bundles, and for predictions of another shape.
    """

    timesteps: Tensor
    products: Tensor
    sigmas: Tensor
    gain: Tensor
    predicts_noise: bool
    fitted: bool = False
    correction: float = 0.0
    with_samples: bool = False

    def tensors(self) -> dict[str, Tensor]:
        """Returns the attributes as tensors by name, for `of_tensors`."""
        return {field.name: torch.as_tensor(getattr(self, field.name)).contiguous() for field in fields(self)}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """Makes trajectories from the tensors of a file; ValueError if they do not fit. Older bundles lack the attributes with a
        default."""
        known = {field.name: field.default for field in fields(cls)}
        needed = {name for name, default in known.items() if default is MISSING}
        if not needed <= tensors.keys() <= known.keys():
            raise ValueError(f"tensors {', '.join(sorted(tensors)) or 'none'}, where {', '.join(known)} are needed")
        steps, samples = tensors["timesteps"].numel(), len(tensors["products"]) if tensors["products"].dim() else 0
        size = steps * (2 if bool(tensors.get("with_samples", torch.tensor(False)).any()) else 1)
        shapes = {"timesteps": (steps,), "products": (samples, size, size), "sigmas": (steps,), "gain": (steps,)}
        for name, shape in shapes.items():
            x = tensors[name]
            if x.shape != shape or 0 in shape or x.dtype != torch.float64 or not x.isfinite().all():
                raise ValueError(f"{name} other than finite FP64 numbers of the shape {list(shape)}")
        if tensors["timesteps"].unique().numel() != steps:
            raise ValueError("timesteps that are not all different")
        scalars = {name: tensors[name] for name in tensors.keys() - shapes.keys()}
        for name, x in scalars.items():
            if x.numel() != 1 or (x.dtype == torch.bool) != (name != "correction") or not 0 <= float(x) <= 1:
                raise ValueError(f"{name} that is no {'share from 0 to 1' if name == 'correction' else 'boolean'}")
        return cls(**tensors | {name: x.item() for name, x in scalars.items()})  # type: ignore[arg-type]

    def without_samples(self) -> Self:
        """Returns trajectories with extrapolations that do not read the noisy sample."""
        steps = len(self.timesteps)
        return replace(self, products=self.products[:, :steps, :steps].contiguous(), with_samples=False)

    def covers(self, timesteps: Tensor) -> Tensor:
        """[M] true for timesteps within the calibrated range."""
        low, high = self.timesteps.aminmax()
        room = 1e-6 * (high - low)
        return (timesteps >= low - room) & (timesteps <= high + room)

    def interpolation(self, timesteps: Tensor) -> Tensor:
        """[M, N] FP64 weights of the calibrated predictions in those at timesteps [M] within the calibrated range, by cubic
        Lagrange polynomials."""
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
        """[M] FP64 shift of the final sample by a unit of error in each step's prediction, for Gaussian data; timesteps: [M] in
        the order of denoising, which ends without noise."""
        through = self.interpolation(timesteps)
        # Logarithms of noise levels are smooth enough to interpolate; the levels span decades.
        sigma = (through @ self.sigmas.clamp_min(1e-6).log()).exp()
        target = torch.cat([sigma[1:], sigma.new_zeros(1)])
        part = (target - sigma) / sigma
        signal = (1 + sigma**2).rsqrt()
        kept = 1 + part * (1 - signal**2)  # share of a shift that remains after the step
        later = torch.cat([kept.flip(0).cumprod(0).flip(0)[1:], kept.new_ones(1)])
        moved = part * sigma * (1 if self.predicts_noise else signal)
        return moved * later

    def gain_at(self, timesteps: Tensor) -> Tensor:
        """[M] FP64 gain of the nearest calibrated timestep."""
        return self.gain[(timesteps[:, None] - self.timesteps).abs().argmin(1)]
