"""Errors of a plan's predictions on the calls of a full-precision drawing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from trtconvert.calib.budget import squared_error
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.wrapped import begin

_OUTPUT = "prediction"


class Predictions:
    """The first call of each timestep bin of a drawing, with its output, on the device of the call.

    Args:
        model: of the drawing; bins: number of timestep bins.
    """

    def __init__(self, model: DiffusionModel, bins: int) -> None:
        self._model, self._bins = model, bins
        self._calls: dict[int, dict[str, Tensor]] = {}

    def around(self, denoiser: Denoiser) -> Denoiser:
        """Returns the denoiser with recording of its calls."""

        def watched(*inputs: Tensor, **named: Tensor) -> Tensor:
            output = denoiser(*inputs, **named)
            given = self._model.named(inputs, named)
            timestep = given[self._model.timestep_input].float().reshape(-1)[:1]
            call = self._calls.setdefault(int(self._model.bin_of(timestep, self._bins)[0]), {})
            if not call:
                call |= {spec.name: given[spec.name].clone() for spec in self._model.inputs} | {_OUTPUT: output.clone()}
            return output

        return watched

    def errors(self, denoiser: Denoiser, bins: Collection[int]) -> dict[int, float]:
        """Returns the relative L2 error of a denoiser's prediction in each of these timestep bins that has a call."""
        found = {}
        with torch.no_grad():
            for index in bins:
                if call := self._calls.get(index):
                    begin(denoiser)  # calls are independent: resets caches
                    expected = call[_OUTPUT]
                    got = denoiser(**{name: x for name, x in call.items() if name != _OUTPUT})
                    missed = squared_error(got, expected).mean()
                    found[index] = float((missed / expected.double().square().mean()).sqrt()) if missed else 0.0
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Returns the calls by names that `read` takes, on the CPU."""
        return {f"{index}/{name}": x.cpu() for index, call in self._calls.items() for name, x in call.items()}

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the calls of `tensors`."""
        for name, x in tensors.items():
            index, _, own = name.partition("/")
            self._calls.setdefault(int(index), {})[own] = x.to(self._model.device)
