"""Calibration data: seeded denoising runs, or a file of recorded denoiser inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trtconvert.calib.observer import Drive
from trtconvert.errors import UserError
from trtconvert.models.base import Denoiser, DiffusionModel
from trtconvert.recipe import CalibrationSection

Progress = Callable[[], None]
"""Called once per batch of samples or inputs that is done."""


def batches_of(count: int, size: int) -> list[range]:
    """range(count) in pieces of at most `size`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def calibration_drive(model: DiffusionModel, section: CalibrationSection, done: Progress) -> Drive:
    """What calls a denoiser on the calibration data that a recipe asks for.

    Raises:
        UserError: the file of inputs does not fit the model.
    """
    if section.data == "denoise":

        def denoise(denoiser: Denoiser) -> None:
            for batch in batches_of(section.samples, section.batch):
                seeds = [section.seed + i for i in batch]
                model.sample(denoiser, seeds, steps=section.steps, solver="ddim")
                done()

        return denoise

    inputs = _recorded(model, Path(section.data), section.samples)

    def replay(denoiser: Denoiser) -> None:
        for batch in batches_of(section.samples, section.batch):
            denoiser(**{name: x[batch.start : batch.stop] for name, x in inputs.items()})
            done()

    return replay


def _recorded(model: DiffusionModel, path: Path, samples: int) -> dict[str, Tensor]:
    """The model's inputs from a .safetensors or .npz file: one array per input, samples first."""
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: torch.from_numpy(file[name]) for name in file.files}
        else:
            arrays = load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"cannot read the calibration data {path}",
            expected="a .safetensors or .npz file without pickled objects",
            got="no such file" if not path.exists() else str(error).splitlines()[0],
            remedy="correct calibration.data in the recipe",
        ) from error
    inputs: dict[str, Tensor] = {}
    for spec in model.inputs:
        if spec.name not in arrays:
            raise UserError(
                f"{path} has no '{spec.name}'",
                expected="arrays " + ", ".join(s.name for s in model.inputs),
                got=", ".join(sorted(arrays)) or "none",
                remedy="record every input of the denoiser",
            )
        x = arrays[spec.name]
        fixed = tuple(x.shape[i] if isinstance(n, str) and i < x.dim() else n for i, n in enumerate(spec.shape))
        if tuple(x.shape) != fixed:
            raise UserError(
                f"'{spec.name}' in {path} has the wrong shape",
                expected="[" + ", ".join(map(str, spec.shape)) + "]",
                got=str(list(x.shape)),
                remedy="record the inputs of this model",
            )
        if len(x) < samples:
            raise UserError(
                f"'{spec.name}' in {path} has too few samples",
                expected=f"{samples}, as calibration.samples asks",
                got=str(len(x)),
                remedy="lower calibration.samples, or record more",
            )
        if not torch.isfinite(x.float()).all():
            raise UserError(
                f"'{spec.name}' in {path} is damaged",
                expected="finite numbers",
                got=f"{int((~torch.isfinite(x.float())).sum())} of {x.numel()} are NaN or Inf",
                remedy="record the inputs again",
            )
        inputs[spec.name] = x.to(getattr(torch, spec.dtype))
    return inputs
