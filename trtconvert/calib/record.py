"""Recording of denoiser inputs at stratified timesteps, each with the inputs of the preceding step.

A recording serves as `calibration.data`. The modulation of activations between steps (MoDiff) needs the pairs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor

from trtconvert.calib.data import BadSamples, batches_of, open_data
from trtconvert.calib.identity import Kind, data_kind
from trtconvert.calib.recorded_inputs import is_shared
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError
from trtconvert.models.drawings import with_progress
from trtconvert.recipe import CalibrationSection
from trtconvert.weights.tensor_files import NAMES, raw_bytes

if TYPE_CHECKING:
    from trtconvert.progress import Bar

PREVIOUS = "prev_"
"""Prefix of the inputs of the preceding step."""


class RowWriter:
    """Writes a safetensors file row by row, in any order, without the whole file in memory.

    Source: the description of the safetensors format: the length of the header, the header in JSON, the tensors' bytes.

    Args:
        file: written from its start.
        rows: number of rows of every tensor in `like`.
        like: a row of each tensor, for its shape and type.
        whole: tensors without rows, written at once.
        metadata: written to the header.
    """

    def __init__(
        self,
        file: IO[bytes],
        rows: int,
        like: Mapping[str, Tensor],
        whole: Mapping[str, Tensor],
        metadata: Mapping[str, str],
    ) -> None:
        self._file, self._start, self._row_bytes = file, {}, {}
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        shapes = {name: (row, [rows, *row.shape]) for name, row in like.items()}
        for name, (row, shape) in (shapes | {name: (x, list(x.shape)) for name, x in whole.items()}).items():
            start, end = end, end + math.prod(shape) * row.element_size()
            self._start[name], self._row_bytes[name] = start, row.nbytes
            header[name] = {"dtype": NAMES[row.dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the format requires tensors to start at a multiple of 8
        file.write(len(text).to_bytes(8, "little") + text)
        self._data = file.tell()
        file.truncate(self._data + end)
        for name, x in whole.items():
            self.write(name, 0, x)

    def write(self, name: str, row: int, value: Tensor) -> None:
        """Writes one row of one tensor."""
        self._file.seek(self._data + self._start[name] + row * self._row_bytes[name])
        self._file.write(raw_bytes(value))


class _Recorder:
    """A denoiser that records some of its calls, each with the call of the preceding step.

    A step is one call, or several calls at the same timestep: some pipelines call the denoiser once with the prompt and once
    without. A run is the part of one sample in one of these calls. A sample has as many runs as it has places in a step's calls.

    Args:
        picks: [samples, per_run] INT64 steps of a run to record, never the first step.
        file, metadata: see `RowWriter`.

    Attributes:
        runs_per_sample: number of times that a step calls the denoiser for each sample: twice with guidance.
    """

    def __init__(self, model: DiffusionModel, picks: Tensor, file: IO[bytes], metadata: Mapping[str, str]) -> None:
        self._model, self._picks, self._file, self._metadata = model, picks, file, metadata
        self._shared: dict[str, Tensor] = {}
        self._writer: RowWriter | None = None
        self._first_run = 0
        self.runs_per_sample = 1

    def start(self, samples: int) -> None:
        """Starts further samples; the next call is their first."""
        self._samples, self._step = samples, 0
        self._previous: list[dict[str, Tensor]] = []  # calls of the preceding step
        self._current: list[dict[str, Tensor]] = []

    def finish(self, steps: int) -> None:
        """Ends the samples since `start`; UserError if the sampler took other numbers of steps or of calls per step."""
        if self._current:
            self._end_step()
        if self._step != steps:
            raise self._not_by_steps(f"{self._step} timesteps, where {steps} were asked for")
        self._first_run += self._samples * self.runs_per_sample

    def __call__(self, *inputs: Tensor, **by_name: Tensor) -> Tensor:
        named = self._model.named(inputs, by_name)
        runs = len(named[self._model.inputs[0].name])
        timestep = named[self._model.timestep_input].reshape(-1).expand(runs)
        self._keep_shared(named)
        by_sample = {name: x for name, x in named.items() if name not in self._shared}
        recorded = {name: x.clone() for name, x in (by_sample | {self._model.timestep_input: timestep}).items()}
        call = self._number_in_step(recorded)
        if self._previous:
            values = recorded | {PREVIOUS + name: x for name, x in self._previous[call].items()}
            if self._writer is None:
                self.runs_per_sample = len(self._previous) * runs // self._samples
                rows = self._picks.numel() * self.runs_per_sample
                like = {name: x[0] for name, x in values.items()}
                self._writer = RowWriter(self._file, rows, like, self._shared, self._metadata)
            numbers = self._first_run + call * runs + torch.arange(runs)
            picks = self._picks[numbers % len(self._picks)]
            for run, pick in (picks == self._step).nonzero().tolist():
                for name, x in values.items():
                    self._writer.write(name, int(numbers[run]) * picks.shape[1] + pick, x[run])
        return self._model.denoiser(**named)

    def _number_in_step(self, recorded: dict[str, Tensor]) -> int:
        """Returns the number of the next call within its step. A step starts when the timestep changes."""
        timestep = self._model.timestep_input
        if self._current and not torch.equal(self._current[0][timestep], recorded[timestep]):
            self._end_step()
        self._current.append(recorded)
        if self._previous and len(self._current) > len(self._previous):
            raise self._not_by_steps(f"{len(self._previous)}, then {len(self._current)} calls at a timestep")
        return len(self._current) - 1

    def _end_step(self) -> None:
        if self._previous and len(self._current) < len(self._previous):
            raise self._not_by_steps(f"{len(self._previous)}, then {len(self._current)} calls at a timestep")
        self._previous, self._current, self._step = self._current, [], self._step + 1

    def _keep_shared(self, named: Mapping[str, Tensor]) -> None:
        """Stores the inputs that belong to no sample; UserError if one changed since the first call."""
        for spec in self._model.inputs:
            if is_shared(self._model, spec):
                x = named[spec.name]
                if not torch.equal(self._shared.setdefault(spec.name, x.clone()), x):
                    raise UserError(
                        f"the sampler of {self._model.name} cannot be recorded",
                        expected=f"the same '{spec.name}' in all calls, as it belongs to no sample",
                        got="another value than in the first call",
                        remedy="build without a recording (calibration.data: denoise), or give the input a dimension of samples",
                    )

    def _not_by_steps(self, got: str) -> UserError:
        return UserError(
            f"the sampler of {self._model.name} cannot be recorded",
            expected="as many timesteps as calibration.steps, with the same number of the denoiser's calls at each",
            got=got,
            remedy="build without a recording: set calibration.data to denoise or to the prompts",
        )


def record(model: DiffusionModel, section: CalibrationSection, per_run: int, weights: str, path: Path, bar: Bar) -> int:
    """Writes the denoiser's inputs at `per_run` steps of each run, one step in each of `per_run` equal parts of the run.

    The file holds the model's inputs by name, and those of the preceding step with the prefix `prev_`. The rows of a run are
    adjacent, so that any part of the file spans the schedule. Inputs without samples, such as positions, are stored once.

    Args:
        section: its data ("denoise" or prompts), samples, batch, steps and seed define the runs.
        weights: SHA-256 of the model, stored in the metadata.
        path: of the safetensors file.
    Returns:
        The number of rows.
    Raises:
        UserError: the data has no runs, or the runs have too few steps.
    """
    if data_kind(section.data) not in (Kind.DENOISE, Kind.PROMPTS):
        raise UserError(
            f"there are no denoising runs in {section.data}",
            expected="denoise, or a file of prompts",
            got=data_kind(section.data),
            remedy="correct calibration.data in the recipe, or --data",
        )
    if not 1 <= per_run < section.steps:
        raise UserError(
            f"{per_run} steps cannot be recorded of a run of {section.steps}",
            expected=f"1 to {section.steps - 1}, as the first step has no preceding step",
            got=str(per_run),
            remedy="lower --per-run, or raise calibration.steps",
        )
    generator = torch.Generator().manual_seed(section.seed)
    drawn = torch.arange(per_run) + torch.rand(section.samples, per_run, generator=generator)
    # FP32 may round a draw near the end of the last part up to the end.
    picks = 1 + (drawn / per_run * (section.steps - 1)).long().clamp_max(section.steps - 2)
    metadata = {"model": model.name, "weights": weights, "steps": str(section.steps), "seed": str(section.seed)}
    data = open_data(with_progress(model, bar), section, BadSamples())
    pieces = batches_of(section.samples, section.batch)
    bar.total(len(pieces))
    with path.open("wb") as file, torch.no_grad():
        recorder = _Recorder(model, picks, file, metadata)
        for piece, batch in zip(pieces, data.batches, strict=True):
            recorder.start(len(piece))
            batch(recorder)
            recorder.finish(section.steps)
            bar.step()
    return picks.numel() * recorder.runs_per_sample
