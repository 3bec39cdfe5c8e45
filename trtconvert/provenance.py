"""The provenance of a calibration, in the header of its file. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trtconvert.documents import parse_json, safetensors_header
from trtconvert.errors import UserError, first_line, first_problem

Count = Annotated[int, Field(ge=0)]


class Provenance(BaseModel):
    """The model and data of a calibration.

    Attributes:
        model: name of the model; weights: SHA-256 of its weights.
        data: "denoise", the function, or the name of the file or folder; data_hash: see `data_identity`.
        samples, batch, steps, seed, percentile, statistic, bins, timestep_max: as in the recipe.
        observed: number of denoiser calls per timestep bin.
        skipped: skipped samples, each with the reason.
        versions: of trtconvert and torch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    weights: str
    data: str
    data_hash: str
    samples: Count
    batch: Count
    steps: Count
    seed: Count
    percentile: float
    statistic: str
    bins: Annotated[int, Field(ge=1)]
    timestep_max: float
    observed: list[Count]
    skipped: list[str] = []
    versions: dict[str, str]


def read_provenance(path: Path) -> Provenance:
    """Reads the provenance of a file of `Calibration.save`; only the header is read.

    Raises:
        UserError: the file is missing, damaged, or not a calibration.
    """
    try:
        return provenance_in(safetensors_header(path))
    except (OSError, ValueError) as error:
        raise not_a_calibration(path, error) from error


def provenance_in(header: dict[str, Any]) -> Provenance:
    """Returns the provenance in a safetensors header.

    Raises:
        ValueError: the provenance is missing or incomplete.
    """
    metadata = header.get("__metadata__")
    text = metadata.get("provenance") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ValueError("no provenance in the header")
    try:
        made = Provenance.model_validate(parse_json(text))
    except ValidationError as error:
        raise ValueError(f"the provenance: {first_problem(error)}") from error
    if len(made.observed) != made.bins:
        raise ValueError(f"calls of {len(made.observed)} timestep bins in place of {made.bins}")
    if not any(made.observed):
        raise ValueError("no call in any timestep bin")
    return made


def not_a_calibration(path: Path, error: Exception) -> UserError:
    """Returns the error for a file that is not a calibration."""
    reason = error.strerror if isinstance(error, OSError) else None
    return UserError(
        f"{path} is not a calibration",
        expected="a safetensors file written by trtconvert",
        got="no file" if isinstance(error, FileNotFoundError) else reason or first_line(error),
        remedy="copy the file again, or make a new one by `trtconvert calibrate` or a build without calibration.from",
    )
