"""How well scales cover what they are for: magnitudes relative to the calibrated ranges, head by head."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.calib.histogram import LEVELS, OCTAVES, Histogram, rows_of

INSIDE = 1 + 2.0**-20
"""Ranges are taken as so much larger, so that the element a range was made of lies inside it whatever way a quotient rounds."""


class CoverageObserver:
    """A handler that counts elements by the octave of their magnitude over their range, and runs the model's own attention.

    Elements in octave 0 and above are beyond the range: INT8 clips them. A few kilobytes per site, whatever the model.

    Args:
        tables: site: the scales and offsets of `AttentionTables`.
        timestep_max: see `timestep_bin`.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, Tensor]], timestep_max: float) -> None:
        self._tables, self._timestep_max = tables, timestep_max
        self._counts: dict[str, dict[str, Histogram]] = {}

    def __call__(self, call: SiteCall) -> Tensor:
        if call.name in self._tables:
            device = call.q.device
            table = {name: x.to(device) for name, x in self._tables[call.name].items()}
            bins, kv_heads = table["k_scale"].shape
            heads = {"q": call.q.shape[1], "k": kv_heads, "v": kv_heads}
            index = timestep_bin(call.timestep, self._timestep_max, bins).to(device)
            values = {
                "q": call.q,
                "k": call.k - table["k_offset"][index][:, :, None],
                "v": call.v - table["v_offset"][index][:, :, None],
            }
            counts = self._counts.setdefault(call.name, {n: Histogram(bins * heads[n], bits=0) for n in heads})
            for name, x in values.items():
                covered = (LEVELS * INSIDE * table[f"{name}_scale"][index]).view(len(index), heads[name], 1, -1)
                counts[name].add(x.float() / covered, rows_of(index, heads[name]))
        return call.exact()

    def outliers(self) -> dict[str, dict[str, Tensor]]:
        """Share of elements that the scales clip, of the sites that were called.

        Returns:
            site: {"q_outliers": [T, H], "k_outliers": [T, Hkv], "v_outliers": [T, Hkv]}, FP32; 0 where nothing was seen.
        """
        return {
            site: {
                f"{name}_outliers": (x[..., -OCTAVES.start :].sum(-1) / x.sum(-1).clamp_min(1)).float()
                for name, x in self._by_bin(site).items()
            }
            for site in self._counts
        }

    def magnitudes(self) -> dict[str, dict[str, Tensor]]:
        """Counts by octave of the magnitude over the range, over all timesteps, of the sites that were called.

        Returns:
            site: {"q_octaves": [H, len(OCTAVES)], "k_octaves": [Hkv, …], "v_octaves": [Hkv, …]}, INT64.
        """
        return {site: {f"{name}_octaves": x.sum(0) for name, x in self._by_bin(site).items()} for site in self._counts}

    def _by_bin(self, site: str) -> dict[str, Tensor]:
        """[T, heads, len(OCTAVES)] of each tensor."""
        bins = len(self._tables[site]["k_scale"])
        return {name: found.counts.cpu().view(bins, -1, len(OCTAVES)) for name, found in self._counts[site].items()}
