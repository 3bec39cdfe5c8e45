"""Whose caches a call of a denoiser reads and writes, where its layers quantise deltas from step to step (MoDiff).

Caches are inputs and outputs of the model, see `ComponentRecord.caches`; the runtime gives each call what the call before it
gave. The model itself finds samples that begin, by their timesteps: with `FORGOTTEN` in the place of those of the call before
all of them begin.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.reuse.schedule import reuse_of
from trtconvert.weights.finite import is_finite

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trtconvert.runtime.component import Component

FORGOTTEN = -math.inf
"""What the first cache, of timesteps, holds before the first call."""


class Trajectory:
    """Calls that follow each other: those of a component by itself, or of an `Apart`."""


def whose(trajectory: Trajectory | None, own: Trajectory) -> Trajectory:
    """A trajectory that a caller names; the component's own where none is named.

    Raises:
        UserError: it is none.
    """
    if trajectory is None or isinstance(trajectory, Trajectory):
        return trajectory or own
    raise UserError(
        "caches are forgotten for all samples of a trajectory",
        expected="reset_cache(), for the component's own calls",
        got=f"reset_cache({trajectory!r})",
        remedy="leave the argument out; samples that begin by themselves get caches of their own by denoiser.apart()",
    )


class Apart:
    """A component with caches of its own, for calls between those of somebody else: other samples, or other conditions of the
    same ones. Where a component has no caches it is called as it is.
    """

    def __init__(self, component: Component) -> None:
        self._component, self._trajectory = component, Trajectory()
        self.signature, self.device = component.signature, component.device
        self.reuse = reuse_of(component)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        """See the component."""
        return self._component.call(self._trajectory, inputs, named)

    def reset_cache(self) -> None:
        """All samples begin anew in the next call."""
        self._component.reset_cache(self._trajectory)

    def apart(self) -> Apart:
        """Another one."""
        return Apart(self._component)


def require_finite(caches: Iterable[tuple[str, Tensor]]) -> None:
    """
    Args:
        caches: by name; of the first one, of timesteps, `FORGOTTEN` is a number.
    Raises:
        UserError: NaN or Inf is in one.
    """
    for index, (name, cache) in enumerate(caches):
        if index and not is_finite(cache):
            raise UserError(
                f"there are numbers in the cache {name} that are not finite",
                expected="finite numbers",
                got=f"{int((~cache.isfinite()).sum())} of {cache.numel()} are NaN or Inf",
                remedy="call reset_cache(), and look for what overflows: with model.dtype float32 or bfloat16 caches are float32",
            )


def apart(denoiser: Any) -> Any:
    """A denoiser with caches of its own, where it has some; else itself."""
    return denoiser.apart() if hasattr(denoiser, "apart") else denoiser


def begin(denoiser: Any) -> None:
    """Tell a denoiser, where it has caches, that a sampler begins."""
    reset = getattr(denoiser, "reset_cache", None)
    if callable(reset):
        reset()
