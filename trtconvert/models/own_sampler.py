"""Runs samplers that users write, and attributes their errors and results to them."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert.diffusion_model import Denoiser, DiffusionModel, Sampler
from trtconvert.errors import TrtconvertError, UserError, kind_and_first_line, warn
from trtconvert.guidance import guidance_of
from trtconvert.images import laid_out
from trtconvert.reuse.schedule import reuse_of
from trtconvert.runtime.batches import parts_of
from trtconvert.runtime.signature import fits
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
        sampler: see `Sampler`. model: that it draws with.
    """

    source: str
    sampler: Sampler
    model: DiffusionModel

    @property
    def batch(self) -> int | None:
        """The number of samples that the denoiser takes, if it takes no other."""
        batch = self.model.sample_spec.shape[0]
        least, _, most = self.model.dims[batch] if isinstance(batch, str) else (batch, batch, batch)
        return most if least == most else None

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
            SamplerError: the sampler failed, calls the denoiser with other inputs or not at all, or does not return an image for
                each seed.
        """
        if self.batch is None:
            return self._drawn(denoiser, seeds, steps, solver, conditions)
        drawn = []
        for rows, own in parts_of(len(seeds), self.batch, self.batch):
            given = None if conditions is None else {name: x[rows] for name, x in conditions.items()}
            drawn.append(self._drawn(denoiser, [seeds[row] for row in rows], steps, solver, given)[:own])
        return torch.cat(drawn)

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
        watched = _WatchedDenoiser(denoiser, self.source, self.model)
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
        if reuse_of(denoiser) is None:  # a sampler that follows its trajectory leaves steps out
            self._check_timesteps(watched.timesteps(), steps, solver)
        low, high = (float(end) for end in images.aminmax()) if images.numel() else (0.0, 1.0)
        if low < -_SLACK or high > 1 + _SLACK:  # false for NaN, which is refused elsewhere
            warn(
                f"the sampler of {self.source} gives samples outside of the full scale of PSNR; expected: numbers in [0, 1], "
                f"got: {low:.3g} to {high:.3g}; remedy: return ((x + 1) / 2).clamp(0, 1) of images in [-1, 1] from the function "
                "that is the model's `sample`, or (x / 8 + 0.5).clamp(0, 1) of latents of unit variance"
            )
        return laid_out(images)

    def _check_timesteps(self, seen: Sequence[float], steps: int, solver: str) -> None:
        """Warns of another number of timesteps, and of timesteps in other units; refuses a drawing without a call."""
        end, found = self.model.timestep_max, len(set(seen))
        if not seen:
            raise SamplerError(
                f"the sampler of {self.source} does not call its denoiser",
                expected=f"a call of its first argument in each of {steps} steps",
                got="samples without a call",
                remedy="call the denoiser that `sample` gets, which a conversion replaces, in place of the model's own module",
            )
        if not _fits(found, steps):
            warn(
                f"the sampler of {self.source} calls its denoiser at another number of timesteps than was asked for; expected: "
                f"{steps}, by {solver}, got: {found}; remedy: let the function that is the model's `sample` take as many steps "
                "as its argument `steps` says. A method that evaluates the denoiser within its steps is right as it is"
            )
        in_shares = max(seen) <= 1 < end and steps > 2
        if self.model.noise_input is None and (min(seen) < 0 or max(seen) > end or in_shares):
            warn(
                f"the sampler of {self.source} passes timesteps that do not fit its model's timestep_max, so that timestep bins "
                f"are of no use; expected: numbers in [0, {end:g}), got: {min(seen):g} to {max(seen):g}; remedy: pass timesteps "
                "in these units and convert them in the forward, or describe them by noise_input, see docs/sigma.md"
            )


class _WatchedDenoiser(WrappedDenoiser):
    """A denoiser that takes the inputs that a model describes, and remembers the timesteps on the device that they came on.

    Args:
        source: of the model, for messages.
    """

    def __init__(self, denoiser: Denoiser, source: str, model: DiffusionModel) -> None:
        super().__init__(denoiser)
        self._source, self._model = source, model
        self._seen: list[Tensor] = []

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """
        Raises:
            SamplerError: an input is missing or unknown, no tensor, or has another shape.
        """
        if guidance_of(self._denoiser) is None:  # which has other inputs
            inputs, named = self._taken(inputs, named)
        timestep = self._model.named(inputs, named)[self._model.timestep_input]
        if timestep.numel():
            self._seen.append(timestep.detach().max().double())
        return self._denoiser(*inputs, **named)

    def _taken(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call, with a timestep for each sample where there is one for all."""
        model, given = self._model, self._model.named(inputs, named)
        name, place = model.timestep_input, model.timestep_place
        sample, timestep = given.get(model.sample_input), given.get(name)
        if isinstance(sample, Tensor) and sample.dim():
            if isinstance(timestep, (int, float)):
                given[name] = timestep = torch.tensor(float(timestep), device=sample.device)
            if isinstance(timestep, Tensor) and timestep.numel() == 1 and timestep.dim() < 2:
                given[name] = timestep.reshape(1).expand(len(sample))
        if len(inputs) > len(model.inputs) or not self._fits(given):
            wanted = (f"{spec.name} [{', '.join(map(str, spec.shape))}]" for spec in model.inputs)
            raise SamplerError(
                f"the sampler of {self._source} calls its denoiser with other inputs than the model describes",
                expected=", ".join(wanted),
                got=(", ".join(f"{name} {_shown(x)}" for name, x in given.items()) or "no inputs")
                + (f", and {len(inputs) - len(model.inputs)} more" if len(inputs) > len(model.inputs) else ""),
                remedy="pass such tensors in the function that is the model's `sample`, or correct the model's `inputs`",
            )
        if name in named:
            return inputs, named | {name: given[name]}
        return (*inputs[:place], given[name], *inputs[place + 1 :]), named

    def _fits(self, given: Mapping[str, Any]) -> bool:
        sizes: dict[str, int] = {}
        for spec in self._model.inputs:
            x = given.get(spec.name)
            if not isinstance(x, Tensor) or not fits(spec.shape, x.shape, sizes):
                return False
        return len(given) == len(self._model.inputs)

    def timesteps(self) -> list[float]:
        """Returns the largest timestep of each call."""
        return [float(timestep) for timestep in self._seen]


def _shown(x: Any) -> str:
    return str(list(x.shape)) if isinstance(x, Tensor) else f"{type(x).__name__} {x}"[:80]


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
