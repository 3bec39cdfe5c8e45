"""How far drawings are: a model whose sampler moves a bar along with each call of the denoiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from trtconvert.bars import Steps
from trtconvert.diffusion_model import Denoiser, DiffusionModel, Sampler
from trtconvert.runtime.trajectory import apart


def with_progress(model: DiffusionModel, bar: Steps, count: float = 1) -> DiffusionModel:
    """A model that shows how far each drawing is, within one step of a bar: whoever draws tells the bar of the step's end.

    Args:
        count: of the bar's steps that a drawing is.
    """
    return replace(model, sample=_Telling(model.sample, bar, count))


class WatchedSampler:
    """A sampler inside another one, which passes its other attributes on."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def chunks(self, samples: int) -> int:
        """In how many calls of the denoiser so many samples make a step."""
        batch = getattr(self._sampler, "batch", None)
        return math.ceil(samples / batch) if isinstance(batch, int) and batch > 0 else 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _Telling(WatchedSampler):
    """A sampler that tells how far it is.

    How often it calls the denoiser nobody knows before: a pipeline draws in chunks, and calls it twice a step with some
    schedulers. After the first drawing of as many samples in as many steps it is known.
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


class CountedDenoiser:
    """A denoiser that tells of its calls, and passes every other attribute of the denoiser inside on.

    Args:
        called: is called after each call of the denoiser.
    """

    def __init__(self, denoiser: Denoiser, called: Callable[[], None]) -> None:
        self._denoiser, self._called = denoiser, called

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        output = self._denoiser(*inputs, **named)
        self._called()
        return output

    def apart(self) -> CountedDenoiser:
        """See `trtconvert.runtime.trajectory.apart`."""
        return CountedDenoiser(apart(self._denoiser), self._called)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._denoiser, name)
