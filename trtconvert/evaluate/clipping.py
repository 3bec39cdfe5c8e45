"""Measures the share of queries, keys and values that a bundle's scales clip, on inputs outside of the calibration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.attention.modes import Mode, Scaling, scaling_at
from trtconvert.attention.ranges import LEVELS
from trtconvert.attention.reference import FP8_TOP, AttentionTables, timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.bundle import Manifest
from trtconvert.calib.calibration import load_of_bundle, modes_of_bundle
from trtconvert.calib.coverage import INSIDE


class Clipping:
    """Counts the full-precision elements that INT8 would clip in the mode of each sample's timestep.

    Dynamic scales (`dynamic`, and value tokens in `BALANCED`) and 16-bit tensors clip nothing.

    Args:
        tables: by site; scaling: of all sites, or by site; timestep_max, smooth_k: as the op's attributes.
    """

    def __init__(
        self, tables: Mapping[str, AttentionTables], scaling: Scaling, timestep_max: float, smooth_k: bool
    ) -> None:
        self._tables, self._scaling, self._timestep_max, self._smooth_k = dict(tables), scaling, timestep_max, smooth_k
        self._counts: dict[tuple[str, str], Tensor] = {}

    @staticmethod
    def of_bundle(folder: Path, manifest: Manifest, timestep_max: float) -> Clipping:
        """Returns the counter of a bundle's sites.

        Raises:
            UserError: see `load_of_bundle`.
        """
        tables = load_of_bundle(folder, manifest).with_modes(modes_of_bundle(manifest))
        return Clipping(tables, manifest.scalings, timestep_max, manifest.recipe.attention.smooth_k)

    def add(self, call: SiteCall) -> None:
        """Counts the elements of a call, without waiting for the device."""
        if call.name not in self._tables:
            return
        tables = self._tables[call.name] = self._tables[call.name].to(call.q.device)
        index = timestep_bin(call.timestep, self._timestep_max, len(tables.modes)).to(call.q.device)
        modes = tables.modes[index]
        measured = scaling_at(self._scaling, call.name) == "dynamic"
        static = (modes == Mode.AGGRESSIVE) if measured else (modes != Mode.FP16)
        offset = tables.k_offset[index][:, :, None] if self._smooth_k else 0
        values = call.v - tables.v_offset[index][:, :, None]
        self._count(call.name, "q", call.q, LEVELS * tables.q_scale[index][..., None, None], static)
        self._count(call.name, "k", call.k - offset, LEVELS * tables.k_scale[index][..., None, None], static)
        top = torch.where(modes == Mode.FP8, FP8_TOP, float(LEVELS))[:, None, None, None]
        scaled = (modes == Mode.AGGRESSIVE) | (modes == Mode.FP8)
        self._count(call.name, "v", values, top * tables.v_scale[index][:, :, None], scaled)

    def _count(self, site: str, tensor: str, x: Tensor, covered: Tensor, rows: Tensor) -> None:
        beyond = (x.abs() > INSIDE * covered) & rows[:, None, None, None]
        counts = torch.stack([beyond.sum(), rows.sum() * x[0].numel()])
        self._counts[site, tensor] = self._counts.get((site, tensor), torch.zeros_like(counts)) + counts

    def take(self) -> dict[tuple[str, str], Tensor]:
        """Returns, by site and tensor, clipped and seen elements [2] INT64 on the CPU, and resets the counts."""
        counts, self._counts = self._counts, {}
        return {key: x.cpu() for key, x in counts.items()}


def shares(counts: Mapping[tuple[str, str], Tensor]) -> dict[str, dict[str, float]]:
    """Returns the clipped share by site and tensor. Tensors with dynamic scales are left out."""
    found: dict[str, dict[str, float]] = {}
    for (site, tensor), (clipped, seen) in counts.items():
        of_site = found.setdefault(site, {})
        if seen:
            of_site[tensor] = float(clipped) / float(seen)
    return found
