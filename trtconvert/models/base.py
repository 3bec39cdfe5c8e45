"""What a conversion needs to know of a diffusion model, whatever library it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from trtconvert.attention.sites import Handler, InterceptedDenoiser

Denoiser = Callable[..., Tensor]
"""denoiser(x, timestep, **conditions) gives the prediction: a torch module, an ONNX Runtime session, an engine."""


class Sampler(Protocol):
    """Draws samples with any denoiser that takes and gives what the model's own does."""

    def __call__(self, denoiser: Denoiser, seeds: Sequence[int], *, steps: int, solver: str) -> Tensor:
        """Sample one image per seed.

        Args:
            seeds: one per sample; a sample depends on its seed only, whatever the batch.
            steps: denoising steps.
            solver: "ddim", "heun" or "euler".
        Returns:
            [len(seeds), C, H, W] in [0, 1].
        """
        ...


@dataclass(frozen=True)
class InputSpec:
    """One input of the denoiser.

    Attributes:
        name: of forward's parameter.
        dtype: "float32" or "int64". Floating-point inputs other than the timestep take the recipe's dtype in the engine.
        shape: sizes, and names of symbolic dimensions ("batch", "height", …).
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class DiffusionModel:
    """A denoiser with its schedule and a way to sample from it.

    Attributes:
        name: of the model, for people.
        denoiser: the module, in evaluation mode, full precision. Its attention goes through
            `torch.nn.functional.scaled_dot_product_attention`.
        inputs: forward's inputs, in order.
        output: what forward returns, in the same terms.
        timestep_input: which input is the timestep.
        timestep_max: timesteps lie in [0, timestep_max), from low noise up.
        sigmas: [timestep_max] noise-to-signal ratio of each timestep, rising.
        dims: symbolic dimension: (min, opt, max) that the model supports.
        sample: see `Sampler`.
    """

    name: str
    denoiser: nn.Module
    inputs: tuple[InputSpec, ...]
    output: InputSpec
    timestep_input: str
    timestep_max: float
    sigmas: Tensor
    dims: Mapping[str, tuple[int, int, int]]
    sample: Sampler

    def example(self, seed: int, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Random inputs of the given sizes: N(0, 1), small labels, timesteps spread over the schedule.

        Args:
            sizes: a size for every symbolic dimension.
        """
        generator = torch.Generator().manual_seed(seed)
        inputs = {}
        for spec in self.inputs:
            shape = [sizes[n] if isinstance(n, str) else n for n in spec.shape]
            if spec.name == self.timestep_input:
                # Stratified: whatever the batch, every part of the schedule is seen.
                count = max(1, int(torch.Size(shape).numel()))
                strata = (torch.arange(count) + torch.rand(count, generator=generator)) / count
                inputs[spec.name] = (strata * self.timestep_max).floor().reshape(shape).to(getattr(torch, spec.dtype))
            elif spec.dtype == "int64":
                inputs[spec.name] = torch.randint(0, 2, shape, generator=generator)
            else:
                inputs[spec.name] = torch.randn(shape, generator=generator)
        return inputs


def intercepted(model: DiffusionModel, handler: Handler) -> InterceptedDenoiser:
    """The model's denoiser with its attention calls going through a handler."""
    return InterceptedDenoiser(model.denoiser, [spec.name for spec in model.inputs], model.timestep_input, handler)
