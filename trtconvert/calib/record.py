"""Recording of denoiser inputs at stratified timesteps, each with the inputs of the step before it.

A recording serves as `calibration.data`, and modulation of activations between steps (MoDiff) needs its pairs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from trtconvert.calib.data import BadSamples, batches_of, open_data
from trtconvert.calib.identity import Kind, data_kind
from trtconvert.errors import UserError
from trtconvert.models.base import DiffusionModel
from trtconvert.progress import Bar
from trtconvert.recipe import CalibrationSection

PREVIOUS = "prev_"
"""What the names of the step before begin with."""

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


class RowWriter:
    """A safetensors file whose rows come in any order, and are never all in memory.

    Source: the description of the safetensors format: the length of the header, the header in JSON, the tensors' bytes.

    Args:
        file: to write to from its start.
        rows: of every tensor.
        like: a row of each tensor, for its shape and type.
        metadata: goes into the header.
    """

    def __init__(self, file: IO[bytes], rows: int, like: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self._file, self._start, self._row_bytes = file, {}, {}
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for name, row in like.items():
            start, end = end, end + rows * row.nbytes
            self._start[name], self._row_bytes[name] = start, row.nbytes
            header[name] = {"dtype": _DTYPES[row.dtype], "shape": [rows, *row.shape], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8, as the format asks
        file.write(len(text).to_bytes(8, "little") + text)
        self._data = file.tell()
        file.truncate(self._data + end)

    def write(self, name: str, row: int, value: Tensor) -> None:
        """One row of one tensor."""
        self._file.seek(self._data + self._start[name] + row * self._row_bytes[name])
        self._file.write(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


class _Recorder:
    """A denoiser that writes down some of its calls, each with the one before it.

    Args:
        picks: [samples, per_run] INT64 calls of a run to record, none of them the first.
        file, metadata: see `RowWriter`.

    Attributes:
        runs_per_sample: how often the denoiser sees each sample at once: twice with guidance.
    """

    def __init__(self, model: DiffusionModel, picks: Tensor, file: IO[bytes], metadata: Mapping[str, str]) -> None:
        self._model, self._picks, self._file, self._metadata = model, picks, file, metadata
        self._writer: RowWriter | None = None
        self._first_run = 0
        self.runs_per_sample = 1

    def start(self, samples: int) -> None:
        """The next call is the first one for so many further samples."""
        self._samples, self._calls, self._previous = samples, 0, {}

    def finish(self, steps: int) -> None:
        """The samples since `start` are done.

        Raises:
            UserError: the sampler did not call the denoiser once per step.
        """
        if self._calls != steps:
            raise UserError(
                f"the sampler of {self._model.name} cannot be recorded",
                expected=f"one call of the denoiser per step, {steps} in all",
                got=str(self._calls),
                remedy="record with a model whose 'ddim' takes single steps",
            )
        self._first_run += self._samples * self.runs_per_sample

    def __call__(self, *inputs: Tensor, **by_name: Tensor) -> Tensor:
        named = dict(zip((spec.name for spec in self._model.inputs), inputs, strict=False)) | by_name
        runs = len(named[self._model.inputs[0].name])
        timestep = named[self._model.timestep_input].reshape(-1).expand(runs)
        recorded = named | {self._model.timestep_input: timestep}
        if self._previous:
            values = recorded | {PREVIOUS + name: x for name, x in self._previous.items()}
            if self._writer is None:
                self.runs_per_sample = runs // self._samples
                rows = self._picks.numel() * self.runs_per_sample
                self._writer = RowWriter(self._file, rows, {n: x[0] for n, x in values.items()}, self._metadata)
            numbers = self._first_run + torch.arange(runs)
            picks = self._picks[numbers % len(self._picks)]
            for run, pick in (picks == self._calls).nonzero().tolist():
                for name, x in values.items():
                    self._writer.write(name, int(numbers[run]) * picks.shape[1] + pick, x[run])
        self._previous = {name: x.clone() for name, x in recorded.items()}
        self._calls += 1
        return self._model.denoiser(**named)


def record(model: DiffusionModel, section: CalibrationSection, per_run: int, weights: str, path: Path, bar: Bar) -> int:
    """Write the denoiser's inputs at `per_run` steps of each run, one in each of as many equal parts of the run.

    The file holds the model's inputs by name, and those of the step before as `prev_` and the name; rows of one run are
    neighbours, so that any piece of the file spans the schedule.

    Args:
        section: its data ("denoise" or prompts), samples, batch, steps and seed decide the runs.
        weights: SHA-256 of the model, kept in the metadata.
        path: of the safetensors file.
    Returns:
        The rows written.
    Raises:
        UserError: the data is no such, or the runs have too few steps.
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
            expected=f"1 to {section.steps - 1}: the first step has none before it",
            got=str(per_run),
            remedy="lower --per-run, or raise calibration.steps",
        )
    generator = torch.Generator().manual_seed(section.seed)
    drawn = torch.arange(per_run) + torch.rand(section.samples, per_run, generator=generator)
    picks = 1 + (drawn / per_run * (section.steps - 1)).long()
    metadata = {"model": model.name, "weights": weights, "steps": str(section.steps), "seed": str(section.seed)}
    data = open_data(model, section, BadSamples())
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
