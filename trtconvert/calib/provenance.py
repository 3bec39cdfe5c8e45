"""Where a calibration comes from, in its file's header. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Provenance(BaseModel):
    """Where a calibration comes from.

    Attributes:
        model: name of the model; weights: SHA-256 of its weights.
        data: "denoise", the function, or the name of the file or folder; data_hash: see `data_identity`.
        samples, batch, steps, seed, percentile, statistic, bins, timestep_max: as in the recipe.
        observed: denoiser calls seen per timestep bin.
        skipped: bad samples that were left out, with the reason.
        versions: of trtconvert and torch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    weights: str
    data: str
    data_hash: str
    samples: int
    batch: int
    steps: int
    seed: int
    percentile: float
    statistic: str
    bins: int
    timestep_max: float
    observed: list[int]
    skipped: list[str] = []
    versions: dict[str, str]


def read_provenance(path: Path) -> Provenance:
    """Of a file that `Calibration.save` wrote; nothing but the header is read.

    Source: the description of the safetensors format: the length of the header in 8 bytes, the header in JSON.
    """
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return Provenance.model_validate_json(header["__metadata__"]["provenance"])
