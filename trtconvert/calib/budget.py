"""The budget of a plan: figures of its samples against full precision's samples, each with a limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Measure:
    """One figure.

    Attributes:
        name: such as "psnr".
        of: function of (samples, expected), [N, C, H, W] in [0, 1] each, that returns the figure. None: samples do not tell
            the figure.
        higher: true if more is better.
        limit: None for a figure that is only reported.
    """

    name: str
    of: Callable[[Tensor, Tensor], float] | None
    higher: bool
    limit: float | None

    def keeps(self, value: float) -> bool:
        """True if a figure is within the limit; NaN never is."""
        return self.limit is None or (value >= self.limit if self.higher else value <= self.limit)


Budget = Sequence[Measure]
"""All figures of a plan; the first is "psnr"."""

PREDICTION_ERROR = "prediction_error"
"""Figure of a plan: relative L2 error of its predictions, in the worst timestep bin."""


def squared_error(samples: Tensor, expected: Tensor) -> Tensor:
    """[N] FP64 mean squared error of each sample of [N, C, H, W]."""
    return (samples.double() - expected.double()).square().flatten(1).mean(1)


def figures(budget: Budget, samples: Tensor, expected: Tensor) -> dict[str, float]:
    """Returns every figure that samples tell."""
    return {measure.name: measure.of(samples, expected) for measure in budget if measure.of is not None}


def keeps_budget(budget: Budget, found: Mapping[str, float]) -> bool:
    """True if all figures are within their limits."""
    return all(measure.keeps(found[measure.name]) for measure in budget)


def limits(budget: Budget) -> dict[str, float]:
    """Returns the limits of the figures that have one."""
    return {measure.name: measure.limit for measure in budget if measure.limit is not None}


def limits_alone(budget: Budget) -> Budget:
    """Returns a budget for processes that get the figures from another one: it knows the limits and measures nothing."""
    return [replace(measure, of=_measured_elsewhere) for measure in budget]


def _measured_elsewhere(_samples: Tensor, _expected: Tensor) -> float:
    raise RuntimeError("this process does not measure figures")
