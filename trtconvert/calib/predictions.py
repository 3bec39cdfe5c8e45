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
        self._last: dict[str, Tensor] = {}

    def around(self, denoiser: Denoiser) -> Denoiser:
        """Returns the denoiser with recording of its calls."""

        def watched(*inputs: Tensor, **named: Tensor) -> Tensor:
            output = denoiser(*inputs, **named)
            given = self._model.named(inputs, named)
            timestep = given[self._model.timestep_input].float().reshape(-1)[:1]
            index = int(self._model.bin_of(timestep, self._bins)[0])
            if index not in self._calls:
                call = {spec.name: given[spec.name] for spec in self._model.inputs} | {_OUTPUT: output}
                self._calls[index] = self._last = {name: self._kept(name, x) for name, x in call.items()}
            return output

        return watched

    def _kept(self, name: str, x: Tensor) -> Tensor:
        """Returns a copy, or the equal tensor of the last recorded call, as prompts stay the same."""
        last = self._last.get(name)
        same = last is not None and last.device == x.device and last.dtype == x.dtype and torch.equal(last, x)
        return last if last is not None and same else x.clone()

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
        """Returns the calls by names that `read` takes, on the CPU. Tensors of an earlier call are not repeated."""
        found: dict[str, Tensor] = {}
        last: dict[str, Tensor] = {}
        for number, (index, call) in enumerate(self._calls.items()):
            new = {name: x for name, x in call.items() if last.get(name) is not x}
            found |= {f"{number}/{index}/{name}": x.cpu() for name, x in new.items()}
            last = call
        return found

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the calls of `tensors`."""
        by_call: dict[tuple[int, int], dict[str, Tensor]] = {}
        for name, x in tensors.items():
            number, index, own = name.split("/", 2)
            by_call.setdefault((int(number), int(index)), {})[own] = x.to(self._model.device)
        for (_, index), new in sorted(by_call.items()):
            self._calls[index] = self._last = self._last | new
