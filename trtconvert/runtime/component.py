"""The base of loaded components."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.runtime.signature import Signature
from trtconvert.runtime.trajectory import Apart, Trajectory, require_finite_caches

if TYPE_CHECKING:
    from trtconvert.reuse.schedule import Reuse
    from trtconvert.runtime.loras import Loras


class Component(ABC):
    """A callable model of a loaded bundle.

    Attributes:
        signature: inputs and outputs.
        device: the component's device.
        reuse: skipped steps for callers that follow a trajectory, see `trtconvert.runtime.follow`; None if no step is skipped.
    """

    signature: Signature
    device: torch.device
    reuse: Reuse | None = None
    _weights_memory = 0

    @property
    def weights_memory(self) -> int:
        """Device memory of the weights in bytes: the decrease of the driver's free memory during loading, by all processes.

        The figure is too small if the driver reuses memory of closed engines.
        """
        return self._weights_memory

    @property
    def graphs_memory(self) -> int:
        """Bytes of the CUDA graphs' inputs and outputs, on all devices."""
        return 0

    @property
    def graphs_recorded(self) -> int:
        """Number of recorded CUDA graphs, on the streams that are kept now."""
        return 0

    @property
    def caches_memory(self) -> int:
        """Bytes of MoDiff caches, on all streams that are kept now."""
        return 0

    @property
    def caches(self) -> dict[str, Tensor]:
        """MoDiff caches on the current stream, by the signature's names; empty before the first call.

        On a GPU the next call but one overwrites these tensors.
        """
        return {}

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        """Return the output, or a tuple of outputs, for the signature's inputs by position or by name.

        Raises:
            UserError: an input is missing, unknown, has a type or shape outside the signature and the engine's profiles, or has
                values that the model refuses.
            BackendUnavailable: the device is out of memory, or the backend fails.
        """
        return self.call(None, inputs, named)

    @abstractmethod
    def call(self, trajectory: Trajectory | None, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> Any:
        """Call with the caches of a trajectory; None for the component's own."""

    @abstractmethod
    def reset_cache(self, trajectory: Trajectory | None = None) -> None:
        """Reset MoDiff caches in the next call. Caches also reset if the batch changes, or timesteps go back to more noise.

        Raises:
            UserError: the argument is not a trajectory.
        """

    def apart(self) -> Apart:
        """Return the component with its own caches, for other samples between its calls."""
        return Apart(self)

    def check_caches(self) -> None:
        """Raise UserError if a cache of the component's own holds NaN or Inf. Waits for the GPU."""
        require_finite_caches(self.caches.items())

    @abstractmethod
    def refit(self, weights: Mapping[str, Tensor] | str | Path) -> int:
        """Replace weights by their names in the state dict, and return the number of replaced weights of the engine."""

    @abstractmethod
    def set_loras(self, loras: Loras) -> int:
        """Set LoRA files and their scales in place of the previous ones, and return the number of replaced weights."""

    @abstractmethod
    def close(self) -> None:
        """Free the component's memory. Further calls are refused."""


def was_closed() -> UserError:
    """Return the error for a call after `close`."""
    return UserError(
        "the component was closed",
        expected="an open bundle",
        got="a call after close() or after its `with` block",
        remedy="load the bundle again",
    )
