"""Samplers that users write: what they raise and give is told as theirs."""

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
"""Files of ours whose functions a user's sampler calls: what they raise of its arguments is its own."""


class SamplerError(UserError):
    """A user's sampler fails, whatever it is asked for."""


@dataclass(frozen=True)
class OwnSampler:
    """A sampler of a user's function.

    Attributes:
        source: `package.module:function`, that made the model.
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
        """As `Sampler`, which has no `conditions` for models without them.

        Raises:
            SamplerError: the sampler failed, or what it gives is no image for each seed.
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
                f"the sampler of {self.source} seems to leave aside how many steps are asked for; expected: {steps} calls "
                f"of the denoiser by {solver}, or as many for each of several parts, got: {calls}; remedy: let the "
                "function that is the model's `sample` take as many steps as its argument `steps` says"
            )
        return images


def _fits(calls: int, steps: int) -> bool:
    """Whether so many calls of a denoiser may come from so many steps: one or two in each, the second of them perhaps not at an
    end, for all samples or for each of some parts of them."""
    return any(of and calls and calls % of == 0 for of in (steps - 1, steps, steps + 1, 2 * steps - 1))


def _is_ours(error: Exception) -> bool:
    """Whether it was raised below a function of this package that the sampler did not call by itself: a denoiser's."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return any(path.is_relative_to(_PACKAGE) and path not in _CALLED_BY_THEM for path in frames[1:])
