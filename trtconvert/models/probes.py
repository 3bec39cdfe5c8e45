"""What a pipeline does with a stand-in for its denoiser: nothing is denoised, and next to nothing computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trtconvert.bundle import DiffusersRecord
from trtconvert.errors import UserError
from trtconvert.models.pipelines import Called, PipelineCaller
from trtconvert.runtime.diffusers import DiffusersDenoiser
from trtconvert.runtime.signature import shape_like


def first_inputs(
    caller: PipelineCaller,
    record: DiffusersRecord,
    timestep: str,
    seeds: Sequence[int],
    sizes: Mapping[str, int],
    captions: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """What a converted denoiser is given by the pipeline's first call of it.

    Raises:
        UserError: see `PipelineCaller.until_called`; or the pipeline wants of its model what a converted one does not have.
    """

    def stop(**named: Tensor) -> Tensor:
        raise Called(named)

    with caller.denoising_with(stand_in(stop, record, timestep)):
        return caller.until_called(seeds, sizes, captions)


def first_timesteps(
    caller: PipelineCaller,
    record: DiffusersRecord,
    timestep: str,
    sizes: Mapping[str, int],
    prediction: Sequence[int | str],
) -> list[float]:
    """The first two timesteps that the pipeline gives its denoiser, in order; one where it has no other.

    Args:
        prediction: symbolic shape of what the denoiser gives.
    Raises:
        UserError: see `first_inputs`.
    """
    seen: list[float] = []
    zeros = no_noise(timestep, prediction)

    def seeing(**named: Tensor) -> Tensor:
        at = float(named[timestep].flatten()[0])
        if seen and at != seen[0]:
            raise Called({"timestep": at})
        seen[:] = [at]
        return zeros(**named)

    with caller.denoising_with(stand_in(seeing, record, timestep)):
        try:
            second = caller.until_called([0], sizes)["timestep"]
        except UserError:
            if not seen:  # else it has drawn to its end
                raise
            return seen
    return [*seen, second]


def no_noise(timestep: str, prediction: Sequence[int | str]) -> Callable[..., Tensor]:
    """A denoiser that costs nothing, and finds no noise in anything.

    Args:
        timestep: name of this input; prediction: see `first_timesteps`.
    """

    def zeros(**named: Tensor) -> Tensor:
        first = next(x for name, x in named.items() if name != timestep)
        return torch.zeros(shape_like(prediction, first))

    return zeros


def stand_in(denoiser: Callable[..., Tensor], record: DiffusersRecord, timestep: str) -> DiffusersDenoiser:
    """A function of named tensors in the place of the denoiser."""
    return DiffusersDenoiser(denoiser, record, timestep, dtype=torch.float32, device=torch.device("cpu"))
