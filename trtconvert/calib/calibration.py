"""From recorded ranges to the scales of the op's tables, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trtconvert.attention.reference import AttentionTables
from trtconvert.calib.observer import BinRecords, Histogram, Records
from trtconvert.errors import UserError

CHANNEL_FLOOR = 1e-4
"""Smallest range of a value channel relative to its head's largest. A channel of zeros would divide by zero otherwise."""

RANGE_FLOOR = 1e-8
"""Smallest range at all: what a head of zeros gets."""

TABLES = ("q_scale", "k_scale", "v_scale", "k_offset", "v_offset")


class Provenance(BaseModel):
    """Where a calibration comes from.

    Attributes:
        model: name of the model; weights: SHA-256 of its weights.
        data: "denoise" or the file's name; data_hash: SHA-256 of that file, empty for "denoise".
        samples, batch, steps, seed, percentile, statistic, bins, timestep_max: as in the recipe.
        observed: batches seen per timestep bin.
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
    versions: dict[str, str]


@dataclass(frozen=True)
class Calibration:
    """Scales and offsets per site; `AttentionTables` without the modes.

    Attributes:
        tables: site: the five tensors named in `TABLES`, shapes as in `AttentionTables`.
        provenance: how they were made.
    """

    tables: Mapping[str, Mapping[str, Tensor]]
    provenance: Provenance

    def with_modes(self, modes: Mapping[str, Tensor]) -> dict[str, AttentionTables]:
        """The op's tables for each site, given [T] modes for each."""
        return {site: AttentionTables(**tables, modes=modes[site]) for site, tables in self.tables.items()}

    def save(self, path: Path) -> None:
        """One safetensors file with the provenance as JSON in its metadata."""
        tensors = {
            f"{site}/{name}": t.contiguous() for site, tables in self.tables.items() for name, t in tables.items()
        }
        # Written by Python, whose errors say when a disk is full; safetensors' own do not.
        path.write_bytes(save(tensors, {"provenance": self.provenance.model_dump_json()}))

    @staticmethod
    def load(path: Path) -> Calibration:
        """Exactly what was saved.

        Raises:
            UserError: the file is missing, damaged, or not a calibration.
        """
        try:
            with safe_open(path, framework="pt") as file:
                provenance = Provenance.model_validate(json.loads((file.metadata() or {})["provenance"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError, KeyError, ValueError, ValidationError) as error:
            raise UserError(
                f"{path} is not a calibration",
                expected="a safetensors file written by trtconvert",
                got="no file" if not path.exists() else str(error).splitlines()[0],
                remedy="build again; the calibration is made anew",
            ) from error
        tables: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            site, _, name = key.rpartition("/")
            tables.setdefault(site, {})[name] = tensor
        return Calibration(tables, provenance)


def scales(
    records: Records, percentile: float, histograms: Mapping[str, list[dict[str, Histogram]]] | None = None
) -> dict[str, dict[str, Tensor]]:
    """Tables of every site.

    A range is the percentile over batches of the batches' maxima, or, given histograms, of all elements' magnitudes.
    A bin that saw nothing takes the ranges of the nearest one that did.

    Args:
        records: see `observe`.
        percentile: in (0, 100].
        histograms: see `observe_histograms`.
    Returns:
        site: {name: FP32 tensor}, shapes as in `AttentionTables`.
    """
    tables = {}
    for site, per_bin in records.items():
        seen = [index for index, record in enumerate(per_bin) if record.tokens]
        made = {
            index: _bin_tables(per_bin[index], percentile, histograms[site][index] if histograms else None)
            for index in seen
        }
        nearest = [min(seen, key=lambda j, i=i: abs(j - i)) for i in range(len(per_bin))]
        tables[site] = {name: torch.stack([made[j][name] for j in nearest]) for name in TABLES}
    return tables


def _bin_tables(record: BinRecords, percentile: float, histograms: dict[str, Histogram] | None) -> dict[str, Tensor]:
    k_offset, v_offset = record.mean("k"), record.mean("v")
    if histograms is None:

        def over_batches(rows: Tensor) -> Tensor:
            return torch.quantile(rows, percentile / 100, dim=0)

        q_range = over_batches(torch.stack(record.q_amax))
        k_range = over_batches(record.amax("k", k_offset).amax(-1))
        v_range = over_batches(record.amax("v", v_offset))
    else:
        q_range, k_range = (histograms[name].percentile(percentile) for name in ("q", "k"))
        v_range = histograms["v"].percentile(percentile).view_as(v_offset)
    v_range = torch.maximum(v_range, v_range.amax(-1, keepdim=True) * CHANNEL_FLOOR)
    return {
        "q_scale": q_range.clamp_min(RANGE_FLOOR) / 127,
        "k_scale": k_range.clamp_min(RANGE_FLOOR) / 127,
        "v_scale": v_range.clamp_min(RANGE_FLOOR) / 127,
        "k_offset": k_offset,
        "v_offset": v_offset,
    }
