"""Progress of drawings: a model's sampler moves a bar with each call of the denoiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from trtconvert.bars import Steps
from trtconvert.diffusion_model import Denoiser, DiffusionModel, Sampler
from trtconvert.wrapped import WrappedDenoiser


def with_progress(model: DiffusionModel, bar: Steps, count: float = 1) -> DiffusionModel:
    """Returns a model that shows how far each drawing is, within one step of a bar. The caller ends the step.

    Args:
        count: number of the bar's steps that a drawing is.
    """
    return replace(model, sample=_ProgressSampler(model.sample, bar, count))


class WatchedSampler:
    """A sampler inside another sampler, with the attributes of the inner one."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def drawings(self, samples: range) -> list[range]:
        """Returns the samples that the sampler draws together: a pipeline draws a few at a time."""
        batch = getattr(self._sampler, "batch", None)
        size = batch if isinstance(batch, int) and batch > 0 else max(1, len(samples))
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def chunks(self, samples: int) -> int:
        """Returns the number of the denoiser's calls in a step, for so many samples."""
        return len(self.drawings(range(samples))) or 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _ProgressSampler(WatchedSampler):
    """A sampler that moves a bar.

    The number of calls of the denoiser is estimated at first: a pipeline draws in chunks, and calls the denoiser twice a step
    with some schedulers. After a drawing of as many samples in as many steps the number is known.
    """

    def __init__(self, sampler: Sampler, bar: Steps, count: float) -> None:
        super().__init__(sampler)
        self._bar, self._count = bar, count
        self._known: dict[tuple[int, int], int] = {}

    def __call__(self, denoiser: Denoiser, seeds: Sequence[int], *, steps: int, **named: Any) -> Tensor:
        drawing, calls = (len(seeds), steps), 0
        expected = self._known.get(drawing, max(1, steps * self.chunks(len(seeds))))

        def called() -> None:
            nonlocal calls
            calls += 1
            self._bar.within(calls / (expected * math.ceil(calls / expected)), self._count)

        drawn = self._sampler(CountedDenoiser(denoiser, called), seeds, steps=steps, **named)
        self._known[drawing] = max(1, calls)
        return drawn


class Stopped(BaseException):
    """Ends a sampler whose calls have told enough. No `Exception`, as samplers handle those."""


class CountedDenoiser(WrappedDenoiser):
    """A denoiser that reports its calls.

    Args:
        called: is called after each call of the denoiser.
    """

    def __init__(self, denoiser: Denoiser, called: Callable[[], None]) -> None:
        super().__init__(denoiser)
        self._called = called

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        output = self._denoiser(*inputs, **named)
        self._called()
        return output
