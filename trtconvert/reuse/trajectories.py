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
from torch.nn.functional import pad

KNOTS = 4
"""Calibrated timesteps of one interpolation."""

UNSEEN = 0.2
"""Share of the error of interpolating a calibrated timestep that interpolations lack half way between two. For noise σ² that is
independent from step to step, evenly spaced cubics miss a calibrated timestep by 1.94 σ², and keep 0.64 σ² half way."""


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

    def interpolation(self, timesteps: Tensor, count: int = KNOTS) -> Tensor:
        """[M, N] FP64 weights of the calibrated predictions in those at timesteps [M] within the calibrated range, by Lagrange
        polynomials through `count` neighbours."""
        count = min(count, len(self.timesteps))
        order = self.timesteps.argsort()
        grid = self.timesteps[order]
        first = (torch.searchsorted(grid, timesteps.double().contiguous()) - count // 2).clamp(0, len(grid) - count)
        return _lagrange(self.timesteps, order[first[:, None] + torch.arange(count)], timesteps)

    def unseen(self, timesteps: Tensor) -> Tensor:
        """[S, M] squared size of what interpolated predictions lack: 0 at calibrated timesteps; half way between two, the share
        `UNSEEN` of the error of interpolating a calibrated timestep from its neighbours. 0 for fewer than 5 calibrated
        timesteps."""
        steps = len(self.timesteps)
        if steps <= KNOTS:
            return self.products.new_zeros(len(self.products), len(timesteps))
        order = self.timesteps.argsort()
        grid, inner = self.timesteps[order], torch.arange(1, steps - 1)
        near = (inner - KNOTS // 2).clamp(0, steps - KNOTS - 1)[:, None] + torch.arange(KNOTS)
        near += near >= inner[:, None]
        missed = torch.eye(steps, dtype=torch.float64)[order[inner]] - _lagrange(
            self.timesteps, order[near], grid[inner]
        )
        squared = torch.einsum("mi,sij,mj->sm", missed, self.products[:, :steps, :steps], missed)
        squared = pad(squared.clamp_min(0), (1, 1), mode="replicate")
        high = torch.searchsorted(grid, timesteps.double().contiguous()).clamp(1, steps - 1)
        share = (timesteps - grid[high - 1]) / (grid[high] - grid[high - 1])
        reached = (4 * share * (1 - share)).clamp(0, 1).square()
        return UNSEEN * reached * (squared[:, high - 1] + squared[:, high]) / 2

    def weights(self, timesteps: Tensor) -> Tensor:
        """[M] FP64 shift of the final sample by a unit of error in each step's prediction, for Gaussian data; timesteps: [M] in
        the order of denoising, which ends without noise."""
        # The angle, from 0 to π/2, is bounded and nearly linear in the timestep. The noise level itself and its logarithm rise so
        # steeply at the first timesteps that polynomials through them oscillate.
        sigma = (self.interpolation(timesteps, 2) @ self.sigmas.clamp_min(1e-6).atan()).tan()
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


def _lagrange(timesteps: Tensor, near: Tensor, wanted: Tensor) -> Tensor:
    """[M, N] weights of values at timesteps [N] in polynomials at wanted timesteps [M]; near: [M, knots] indices of the
    knots."""
    knots, weights = timesteps[near], torch.ones(near.shape, dtype=torch.float64)
    for k in range(near.shape[1]):
        for other in range(near.shape[1]):
            if other != k:
                weights[:, k] *= (wanted - knots[:, other]) / (knots[:, k] - knots[:, other])
    return torch.zeros(len(wanted), len(timesteps), dtype=torch.float64).scatter_(1, near, weights)
