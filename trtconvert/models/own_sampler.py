"""Runs samplers that users write, and attributes their errors and results to them."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trtconvert.diffusion_model import Denoiser, Sampler
from trtconvert.errors import TrtconvertError, UserError, kind_and_first_line, warn
from trtconvert.models.drawings import CountedDenoiser
from trtconvert.reuse.schedule import reuse_of
from trtconvert.runtime.trajectory import begin

_PACKAGE = Path(__file__).parents[1]
_CALLED_BY_THEM = {
    _PACKAGE / "models/drawings.py",
    _PACKAGE / "models/parametrisation.py",
    _PACKAGE / "models/samplers.py",
    _PACKAGE / "attention/schedules.py",
}
"""Our files whose functions a user's sampler calls: their errors about arguments are errors of the sampler."""


class SamplerError(UserError):
    """A user's sampler fails for any number of steps."""


@dataclass(frozen=True)
class OwnSampler:
    """The sampler of a model that a user's function made.

    Attributes:
        source: the function, `package.module:function`.
        sampler: see `Sampler`.
    """

    source: str
    sampler: Sampler

    def __call__(
        self,
        denoiser: Denoiser,
        seeds: Sequence[int],
        *,
        steps: int,
        solver: str,
        conditions: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Draws samples, see `Sampler`. The user's sampler takes no `conditions` for models without conditions.

        Raises:
            SamplerError: the sampler failed, or does not return an image for each seed.
        """
        begin(denoiser)
        given = {} if conditions is None else {"conditions": conditions}
        calls = 0

        def called() -> None:
            nonlocal calls
            calls += 1

        try:
            images = self.sampler(CountedDenoiser(denoiser, called), seeds, steps=steps, solver=solver, **given)
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
            or images.dim() < 3
            or len(images) != len(seeds)
            or not images.is_floating_point()
        ):
            got = f"{images.dtype} {list(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
            raise SamplerError(
                f"the sampler of {self.source} does not give an image for each seed",
                expected=f"a tensor [{len(seeds)}, C, H, W] of numbers in [0, 1]",
                got=got.replace("torch.", ""),
                remedy="correct the function that is the model's `sample`",
            )
        # A sampler that follows its trajectory does not call the denoiser at steps that are left out.
        if reuse_of(denoiser) is None and not _fits(calls, steps):
            warn(
                f"the sampler of {self.source} seems to ignore the number of steps; expected: {steps} calls of the denoiser by "
                f"{solver}, or as many for each of several parts, got: {calls}; remedy: let the function that is the model's "
                "`sample` take as many steps as its argument `steps` says"
            )
        return images


def _fits(calls: int, steps: int) -> bool:
    """Whether so many steps may need so many calls of a denoiser: one or two a step, perhaps one less or more at an end, for all
    samples or for each of several parts."""
    return any(of and calls and calls % of == 0 for of in (steps - 1, steps, steps + 1, 2 * steps - 1))


def _is_ours(error: Exception) -> bool:
    """Whether an error comes from this package below a function that the sampler did not call itself: from a denoiser."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return any(path.is_relative_to(_PACKAGE) and path not in _CALLED_BY_THEM for path in frames[1:])
