"""Trajectories of denoiser calls, which decide the MoDiff caches that a call reads and writes.

Caches are inputs and outputs of the model, see `ComponentRecord.caches`; the runtime passes the outputs of a call to the next
call. The model compares timesteps to reset samples: the timestep `FORGOTTEN` in the cache resets all of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.reuse.schedule import reuse_of
from trtconvert.weights.finite import require_finite

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trtconvert.runtime.component import Component

FORGOTTEN = -math.inf
"""Initial value of the first cache, which holds timesteps."""


class Trajectory:
    """Consecutive calls of a component, or of an `Apart`."""


def whose(trajectory: Trajectory | None, own: Trajectory) -> Trajectory:
    """Return the caller's trajectory, or the component's own for None.

    Raises:
        UserError: the argument is not a trajectory.
    """
    if trajectory is None or isinstance(trajectory, Trajectory):
        return trajectory or own
    raise UserError(
        "reset_cache resets all samples of a trajectory",
        expected="reset_cache() for the component's own calls",
        got=f"reset_cache({trajectory!r})",
        remedy="leave the argument out; denoiser.apart() gives other samples their own caches",
    )


class Apart:
    """A component with its own caches, for calls between other calls: with other samples, or other conditions."""

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


def require_finite_caches(caches: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UserError if a cache, by name, holds NaN or Inf; the first cache, of timesteps, may hold `FORGOTTEN`."""
    for index, (name, cache) in enumerate(caches):
        if index:
            remedy = (
                "call reset_cache(), and find the overflow; with model.dtype float32 or bfloat16, caches are float32"
            )
            require_finite(f"the cache {name} holds numbers that are not finite", cache, remedy)
