"""Runs samplers that users write, and attributes their errors and results to them."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert.diffusion_model import Denoiser, Sampler
from trtconvert.errors import TrtconvertError, UserError, kind_and_first_line, warn
from trtconvert.images import laid_out
from trtconvert.reuse.schedule import reuse_of
from trtconvert.wrapped import WrappedDenoiser, begin

_PACKAGE = Path(__file__).parents[1]
_CALLED_BY_THEM = {
    _PACKAGE / "models/drawings.py",
    _PACKAGE / "models/parametrisation.py",
    _PACKAGE / "models/samplers.py",
    _PACKAGE / "attention/schedules.py",
}
"""Our files whose functions a user's sampler calls: their errors about arguments are errors of the sampler."""


_SLACK = 0.01
"""How far samples may lie outside of [0, 1]: decoders overshoot."""


class SamplerError(UserError):
    """A user's sampler fails for any number of steps."""


@dataclass(frozen=True)
class OwnSampler:
    """The sampler of a model that a user's function made.

    Attributes:
        source: the function, `package.module:function`.
        sampler: see `Sampler`.
        inputs: names of the denoiser's inputs; timestep_input: the timestep's.
        batch: the number of samples that the denoiser takes, if it takes no other.
    """

    source: str
    sampler: Sampler
    inputs: tuple[str, ...]
    timestep_input: str
    batch: int | None = None

    def __call__(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        *,
        steps: int,
        solver: str,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Draws samples, see `Sampler`. The user's sampler takes no `conditions` for models without conditions. It gets `batch`
        seeds each time, the last ones repeated, and their images are dropped.

        Raises:
            SamplerError: the sampler failed, or does not return an image for each seed.
        """
        if self.batch is None:
            return self._drawn(denoiser, seeds, steps, solver, conditions)
        drawn = []
        for start in range(0, len(seeds), self.batch):
            rows = [min(row, len(seeds) - 1) for row in range(start, start + self.batch)]
            given = None if conditions is None else {name: x[rows] for name, x in conditions.items()}
            drawn.append(self._drawn(denoiser, [seeds[row] for row in rows], steps, solver, given))
        return torch.cat(drawn)[: len(seeds)]

    def _drawn(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        steps: int,
        solver: str,
        conditions: Mapping[str, Tensor] | None,
    ) -> Tensor:
        begin(denoiser)
        given = {} if conditions is None else {"conditions": conditions}
        watched = _WatchedDenoiser(denoiser, self.inputs, self.timestep_input)
        try:
            images = self.sampler(watched, seeds, steps=steps, solver=solver, **given)
        except TrtconvertError:
            raise
        except Exception as error:
            if _is_ours(error):
                raise
            raise SamplerError(
                f"the sampler of {self.source} failed",
                expected=f"images of {len(seeds)} seeds, by {solver} in {steps} steps",
                got=kind_and_first_line(error),
                remedy="correct the function that is the model's `sample`; --debug shows where it failed",
            ) from error
        if (
            not isinstance(images, Tensor)
            or images.dim() not in (3, 4, 5)
            or len(images) != len(seeds)
            or not images.is_floating_point()
        ):
            got = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise SamplerError(
                f"the sampler of {self.source} does not give an image for each seed",
                expected=f"a tensor [{len(seeds)}, C, H, W] of numbers in [0, 1]; of videos [{len(seeds)}, F, C, H, W], of "
                f"sounds [{len(seeds)}, C, S]",
                got=got.replace("torch.", ""),
                remedy="correct the function that is the model's `sample`",
            )
        if images.dim() > 3 and images.shape[-1] == 3 and images.shape[-3] not in (1, 3):
            raise SamplerError(
                f"the sampler of {self.source} gives images with their channels last",
                expected="a tensor [" + f"{len(seeds)}, " + "F, " * (images.dim() - 4) + "C, H, W]",
                got=str(list(images.shape)),
                remedy="return images.movedim(-1, -3) from the function that is the model's `sample`",
            )
        # A sampler that follows its trajectory does not call the denoiser at steps that are left out.
        if reuse_of(denoiser) is None and not _fits(got := watched.distinct_timesteps(), steps):
            warn(
                f"the sampler of {self.source} calls its denoiser at another number of timesteps than was asked for; expected: "
                f"{steps}, by {solver}, got: {got}; remedy: let the function that is the model's `sample` take as many steps as "
                "its argument `steps` says. A method that evaluates the denoiser within its steps is right as it is"
            )
        low, high = (float(end) for end in images.aminmax()) if images.numel() else (0.0, 1.0)
        if low < -_SLACK or high > 1 + _SLACK:  # false for NaN, which is refused elsewhere
            warn(
                f"the sampler of {self.source} gives samples outside of the full scale of PSNR; expected: numbers in [0, 1], "
                f"got: {low:.3g} to {high:.3g}; remedy: return ((x + 1) / 2).clamp(0, 1) of images in [-1, 1] from the function "
                "that is the model's `sample`, or (x / 8 + 0.5).clamp(0, 1) of latents of unit variance"
            )
        return laid_out(images)


class _WatchedDenoiser(WrappedDenoiser):
    """A denoiser that remembers the timestep of each call, as one number, on the device that it came on."""

    def __init__(self, denoiser: Denoiser, inputs: Sequence[str], timestep_input: str) -> None:
        super().__init__(denoiser)
        self._inputs, self._timestep_input = inputs, timestep_input
        self._seen: list[Tensor] = []

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        timestep = (dict(zip(self._inputs, inputs, strict=False)) | named).get(self._timestep_input)
        if isinstance(timestep, Tensor) and timestep.numel():
            self._seen.append(timestep.detach().max().double())
        return self._denoiser(*inputs, **named)

    def distinct_timesteps(self) -> int:
        return len({float(timestep) for timestep in self._seen})


def _fits(timesteps: int, steps: int) -> bool:
    """Whether a sampler that takes so many steps may call its denoiser at so many different timesteps.

    Heun's method adds the end of the last step, or a timestep within each step but the last. Calls at one timestep count once:
    guidance, and parts of the samples or of an image, call several times.
    """
    return timesteps in (steps - 1, steps, steps + 1, 2 * steps - 1)


def _is_ours(error: Exception) -> bool:
    """Whether an error comes from this package below a function that the sampler did not call itself: from a denoiser."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return any(path.is_relative_to(_PACKAGE) and path not in _CALLED_BY_THEM for path in frames[1:])
