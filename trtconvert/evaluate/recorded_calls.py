"""Recorded calls of full-precision trajectories. Engines are compared with their predictions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.documents import parse_json, require_plain_types, safetensors_header
from trtconvert.errors import UserError, first_line
from trtconvert.guidance import guidance_of
from trtconvert.wrapped import begin

_EXPECTED, _TYPE_ERRORS = "prediction", "type_errors"


@dataclass(frozen=True)
class RecordedCalls:
    """One denoiser call of each timestep bin of a trajectory.

    Attributes:
        inputs: by timestep bin, the inputs by name, in FP32 and INT64.
        expected: by timestep bin, the prediction in FP32.
        type_errors: [T] relative L2 error of the model's own type against FP32, None where it was not measured. Where it was,
            `expected` was computed in FP32.
    """

    inputs: Mapping[int, Mapping[str, Tensor]]
    expected: Mapping[int, Tensor]
    type_errors: list[float | None]

    def save(self, path: Path) -> None:
        """Writes the calls. A tensor that equals that of the last bin is not written again."""
        tensors: dict[str, Tensor] = {}
        last: dict[str, Tensor] = {}
        for index, inputs in self.inputs.items():
            for name, x in inputs.items():
                if name not in last or not torch.equal(last[name], x):
                    tensors[f"{index}/inputs/{name}"] = last[name] = x.contiguous()
            tensors[f"{index}/{_EXPECTED}"] = self.expected[index].contiguous()
        save_file(tensors, path, {_TYPE_ERRORS: json.dumps(self.type_errors)})

    @staticmethod
    def load(path: Path) -> RecordedCalls:
        """Reads a file that `save` wrote.

        Raises:
            UserError: `save` did not write the file, or it is damaged.
        """
        try:
            return _read(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(
                f"{path} does not hold recorded calls",
                expected="inputs and a prediction of each recorded timestep bin, as a build writes them",
                got=first_line(error),
                remedy="build the bundle again",
            ) from error

    def errors(self, denoiser: Denoiser) -> list[float | None]:
        """Returns [T] relative L2 errors of a denoiser's predictions, None for bins without a call.

        A denoiser with fused guidance gets the inputs by row, see `FusedGuidance.of_rows`.
        """
        found: list[float | None] = [None] * len(self.type_errors)
        guidance = guidance_of(denoiser)
        with torch.no_grad():
            for index, recorded in self.inputs.items():
                inputs = recorded if guidance is None else guidance.of_rows(recorded)
                begin(denoiser)  # calls are independent: resets caches
                found[index] = relative_error(denoiser(**inputs).float().cpu(), self.expected[index])
        return found


def _read(path: Path) -> RecordedCalls:
    header = safetensors_header(path)
    require_plain_types(header)
    metadata = header.pop("__metadata__", {})
    type_errors = parse_json(str(metadata.get(_TYPE_ERRORS, "null") if isinstance(metadata, dict) else "null"))
    if not isinstance(type_errors, list) or not all(x is None or isinstance(x, float) for x in type_errors):
        raise ValueError(f"{_TYPE_ERRORS} that are no list of an error or nothing for each timestep bin")
    inputs: dict[int, dict[str, Tensor]] = {}
    expected: dict[int, Tensor] = {}
    last: dict[str, Tensor] = {}
    with safe_open(path, "pt") as file:
        for index in range(len(type_errors)):
            prefix, prediction = f"{index}/inputs/", f"{index}/{_EXPECTED}"
            own = {name.removeprefix(prefix) for name in header if name.startswith(prefix)}
            if not own and prediction not in header:
                continue  # no step was in the bin
            last |= {name: file.get_tensor(prefix + name) for name in own}
            inputs[index], expected[index] = dict(last), file.get_tensor(prediction)
    if not expected:
        raise ValueError("no calls")
    return RecordedCalls(inputs, expected, type_errors)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Returns ‖got - expected‖ / ‖expected‖, and 0 for equal tensors: untrained models predict zeros."""
    missed = (got.double() - expected.double()).norm()
    return float(missed / expected.double().norm()) if missed else 0.0


class CallRecorder:
    """Keeps the first denoiser call of every timestep bin.

    Args:
        model: of the denoiser. bins: number of timestep bins.
        rows: kept of a call, spread evenly to include both halves of guidance.
    """

    def __init__(self, model: DiffusionModel, bins: int, rows: int) -> None:
        self._model, self._bins, self._rows = model, bins, rows
        self._inputs: dict[int, dict[str, Tensor]] = {}
        self._predictions: dict[int, Tensor] = {}

    def around(self, denoiser: Denoiser) -> Denoiser:
        """Returns the denoiser with recording of its calls."""

        def watched(*inputs: Tensor, **named: Tensor) -> Tensor:
            output = denoiser(*inputs, **named)
            self._add(self._model.named(inputs, named), output)
            return output

        return watched

    def _add(self, given: Mapping[str, Tensor], output: Tensor) -> None:
        timestep = given[self._model.timestep_input].float().reshape(-1)[:1]
        index = int(self._model.bin_of(timestep, self._bins)[0])
        if index in self._inputs:
            return
        batch = self._model.inputs[0].shape[0]
        count = len(output)
        rows = torch.arange(min(self._rows, count), device=output.device) * (count // min(self._rows, count))
        kept = {}
        for spec in self._model.inputs:
            x = given[spec.name]
            of_samples = x.dim() and spec.shape[:1] == (batch,) and len(x) == count
            x = x.index_select(0, rows.to(x.device)) if of_samples else x
            kept[spec.name] = x.float().cpu() if x.is_floating_point() else x.cpu()
        self._inputs[index] = kept
        self._predictions[index] = output.index_select(0, rows).float().cpu()

    def calls(self, exact: Callable[[], Denoiser | None]) -> RecordedCalls:
        """Returns the recorded calls.

        Args:
            exact: returns the denoiser in FP32, or None where the recorded one is in FP32 or FP32 does not fit.
        """
        in_float32 = exact()
        type_errors: list[float | None] = [None] * self._bins
        expected = dict(self._predictions)
        if in_float32 is not None:
            with torch.no_grad():
                for index, inputs in self._inputs.items():
                    device = next(in_float32.parameters()).device  # pyright: ignore[reportFunctionMemberAccess]
                    expected[index] = in_float32(**{n: x.to(device) for n, x in inputs.items()}).float().cpu()
                    type_errors[index] = relative_error(self._predictions[index], expected[index])
        in_order = sorted(self._inputs)
        return RecordedCalls({i: self._inputs[i] for i in in_order}, {i: expected[i] for i in in_order}, type_errors)
