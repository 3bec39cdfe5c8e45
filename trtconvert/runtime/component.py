"""What a loaded component is, whatever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.runtime.signature import Signature

if TYPE_CHECKING:
    from trtconvert.reuse.schedule import Reuse
    from trtconvert.runtime.loras import Loras
    from trtconvert.runtime.trajectory import Apart, Trajectory


class Component(Protocol):
    """A callable model of a loaded bundle.

    Attributes:
        signature: what it takes and gives.
        device: where it runs.
        reuse: which steps it leaves out for who follows a trajectory, see `trtconvert.runtime.follow`; None for none.
    """

    signature: Signature
    device: torch.device
    reuse: Reuse | None

    @property
    def weights_memory(self) -> int:
        """Bytes of device memory that loading it took."""
        ...

    @property
    def graphs_memory(self) -> int:
        """Bytes of device memory that recorded calls have to themselves."""
        ...

    @property
    def graphs_recorded(self) -> int:
        """Calls that were recorded, on the streams that are kept now."""
        ...

    @property
    def caches_memory(self) -> int:
        """Bytes of device memory of what layers that quantise deltas keep from step to step."""
        ...

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        """The output, or a tuple of several, for the inputs of the signature by position or by name."""
        ...

    def call(self, trajectory: Trajectory | None, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
        """As `__call__`, with the caches of a trajectory; None for the component's own."""
        ...

    def reset_cache(self, trajectory: Trajectory | None = None) -> None:
        """All samples begin anew in the next call, where layers quantise deltas from step to step. They do so by themselves
        where the batch is another, or timesteps go back to more noise."""
        ...

    def apart(self) -> Apart:
        """The component with caches of its own, for other samples between those of its calls."""
        ...

    def check_caches(self) -> None:
        """Raises UserError where NaN or Inf is in a cache of the component's own. Waits for the GPU."""
        ...

    def refit(self, weights: Mapping[str, Tensor] | str | Path) -> int:
        """Replace weights, where that can be done, by their names in the state dict; how many of the engine's were replaced."""
        ...

    def set_loras(self, loras: Loras) -> int:
        """LoRA files and their scales, instead of those before, where that can be done; how many weights were replaced."""
        ...

    def close(self) -> None:
        """Let go of it and of its memory. Further calls are refused."""
        ...


def was_closed() -> UserError:
    """The error of a call after `close`."""
    return UserError(
        "the component was closed",
        expected="a bundle that is open",
        got="a call after close() or after its `with` block",
        remedy="load the bundle again",
    )
