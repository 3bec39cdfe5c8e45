"""Recorded calls of full-precision trajectories. Engines are compared with their predictions."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
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
        inputs: by timestep bin, the inputs by name.
        expected: by timestep bin, the prediction.
        type_errors: [T] relative L2 error of the model's own type against FP32, None where it was not measured. Where it was,
            `expected` was computed in FP32.
    """

    inputs: Mapping[int, Mapping[str, Tensor]]
    expected: Mapping[int, Tensor]
    type_errors: list[float | None]

    def save(self, path: Path) -> None:
        """Writes the calls."""
        save_file(self.tensors(), path, {_TYPE_ERRORS: json.dumps(self.type_errors)})

    def tensors(self) -> dict[str, Tensor]:
        """Returns the calls by names that `of_tensors` takes. A tensor that equals that of the last bin is not repeated."""
        tensors: dict[str, Tensor] = {}
        last: dict[str, Tensor] = {}
        for index, inputs in self.inputs.items():
            for name, x in inputs.items():
                if name not in last or not torch.equal(last[name], x):
                    tensors[f"{index}/inputs/{name}"] = last[name] = x.contiguous()
            tensors[f"{index}/{_EXPECTED}"] = self.expected[index].contiguous()
        return tensors

    @staticmethod
    def of_tensors(tensors: Mapping[str, Tensor], type_errors: list[float | None]) -> RecordedCalls:
        """Takes the calls of `tensors`; type_errors: see the attribute. ValueError if a prediction is missing."""
        inputs: dict[int, dict[str, Tensor]] = {}
        expected: dict[int, Tensor] = {}
        last: dict[str, Tensor] = {}
        for index in range(len(type_errors)):
            prefix, prediction = f"{index}/inputs/", f"{index}/{_EXPECTED}"
            own = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
            if not own and prediction not in tensors:
                continue  # no step was in the bin
            if prediction not in tensors:
                raise ValueError(f"inputs without a prediction in timestep bin {index}")
            last |= own
            inputs[index], expected[index] = dict(last), tensors[prediction]
        return RecordedCalls(inputs, expected, type_errors)

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

    def errors(self, denoiser: Denoiser, bins: Collection[int] | None = None) -> list[float | None]:
        """Returns [T] relative L2 errors of a denoiser's predictions, None for bins without a call.

        A denoiser with fused guidance gets the inputs by row, see `FusedGuidance.of_rows`.

        Args:
            bins: to measure, by default all; the others have None.
        """
        found: list[float | None] = [None] * len(self.type_errors)
        guidance = guidance_of(denoiser)
        with torch.no_grad():
            for index, recorded in self.inputs.items():
                if bins is not None and index not in bins:
                    continue
                expected = self.expected[index]
                inputs = recorded if guidance is None else guidance.of_rows(recorded)
                begin(denoiser)  # calls are independent: resets caches
                found[index] = relative_error(denoiser(**inputs).float().to(expected.device), expected)
        return found


def _read(path: Path) -> RecordedCalls:
    header = safetensors_header(path)
    require_plain_types(header)
    metadata = header.pop("__metadata__", {})
    type_errors = parse_json(str(metadata.get(_TYPE_ERRORS, "null") if isinstance(metadata, dict) else "null"))
    if not isinstance(type_errors, list) or not all(x is None or isinstance(x, float) for x in type_errors):
        raise ValueError(f"{_TYPE_ERRORS} that are no list of an error or nothing for each timestep bin")
    with safe_open(path, "pt") as file:
        calls = RecordedCalls.of_tensors({name: file.get_tensor(name) for name in header}, type_errors)
    if not calls.expected:
        raise ValueError("no calls")
    return calls


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Returns ‖got - expected‖ / ‖expected‖, and 0 for equal tensors: untrained models predict zeros."""
    missed = (got.double() - expected.double()).norm()
    return float(missed / expected.double().norm()) if missed else 0.0


class CallRecorder:
    """Keeps the first denoiser call of every timestep bin.

    Args:
        model: of the denoiser. bins: number of timestep bins.
        rows: kept of a call, in FP32 on the CPU, spread evenly to include both halves of guidance. None: the whole call as it is,
            on its device.
    """

    def __init__(self, model: DiffusionModel, bins: int, rows: int | None) -> None:
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
        given = {spec.name: given[spec.name] for spec in self._model.inputs}
        if self._rows is None:
            self._inputs[index] = {name: self._kept(name, x) for name, x in given.items()}
            self._predictions[index] = output.clone()
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

    def _kept(self, name: str, x: Tensor) -> Tensor:
        """Returns a copy, or the equal tensor of the last recorded call, as prompts stay the same."""
        last = next(reversed(self._inputs.values()))[name] if self._inputs else None
        same = last is not None and (last.device, last.dtype) == (x.device, x.dtype) and torch.equal(last, x)
        return last if last is not None and same else x.clone()

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
