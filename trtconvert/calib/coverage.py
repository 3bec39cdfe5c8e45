"""Coverage of scales: magnitudes relative to the calibrated ranges, head by head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trtconvert.attention.ranges import spread
from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.sites import SiteCall
from trtconvert.calib.histogram import LEVELS, OCTAVES, Histogram, rows_of
from trtconvert.diffusion_model import Denoiser, DiffusionModel

INSIDE = 1 + 2.0**-20
"""Factor on ranges, so that the element that defined a range lies inside it, however a quotient rounds."""


class InputRanges:
    """The largest magnitudes of the floating-point inputs of a model's denoiser, by timestep bin."""

    def __init__(self, model: DiffusionModel, bins: int) -> None:
        self._model, self._bins = model, bins
        self._found: dict[str, Tensor] = {}

    def around(self, denoiser: Denoiser) -> Denoiser:
        """Returns the denoiser, with its inputs observed."""
        names = [spec.name for spec in self._model.inputs]

        def watched(*inputs: Tensor, **named: Tensor) -> Tensor:
            self._add(dict(zip(names, inputs, strict=False)) | named)
            return denoiser(*inputs, **named)

        return watched

    def _add(self, named: Mapping[str, Tensor]) -> None:
        timestep = named[self._model.timestep_input].float().reshape(-1)
        index = self._model.bin_of(timestep, self._bins).cpu()
        for name, x in named.items():
            if name == self._model.timestep_input or not x.is_floating_point() or not x.numel():
                continue
            of_samples = x.dim() > 0 and len(x) == len(index)
            largest = x.abs().reshape(len(x), -1).amax(1) if of_samples else x.abs().amax().expand(len(index))
            found = self._found.setdefault(name, torch.full((self._bins,), -1.0))
            found.scatter_reduce_(0, index, largest.float().cpu(), "amax")

    def found(self) -> dict[str, Tensor]:
        """[T] FP32 of each input that was seen; a bin without calls takes the value of the nearest bin with calls."""
        return {
            name: spread({i: x[i] for i in range(self._bins) if x[i] >= 0}, self._bins)
            for name, x in self._found.items()
        }


class CoverageObserver:
    """A handler that counts elements by the octave of their magnitude over their range, and runs the model's own attention.

    Elements in octave 0 and above exceed the range: INT8 clips them. Memory is a few kilobytes per site.

    Args:
        tables: site: the scales and offsets of `AttentionTables`.
        timestep_max: see `timestep_bin`.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, Tensor]], timestep_max: float) -> None:
        self._tables, self._timestep_max = dict(tables), timestep_max
        self._counts: dict[str, dict[str, Histogram]] = {}

    def __call__(self, call: SiteCall) -> Tensor:
        if call.name in self._tables:
            device = call.q.device
            table = self._tables[call.name] = {name: x.to(device) for name, x in self._tables[call.name].items()}
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
        """Returns the share of elements that the scales clip, for the sites that were called.

        Returns:
            site: {"q_outliers": [T, H], "k_outliers": [T, Hkv], "v_outliers": [T, Hkv]}, FP32; 0 in bins without calls.
        """
        return {
            site: {
                f"{name}_outliers": (x[..., -OCTAVES.start :].sum(-1) / x.sum(-1).clamp_min(1)).float()
                for name, x in self._by_bin(site).items()
            }
            for site in self._counts
        }

    def magnitudes(self) -> dict[str, dict[str, Tensor]]:
        """Returns counts by octave of the magnitude over the range, over all timesteps, for the sites that were called.

        Returns:
            site: {"q_octaves": [H, len(OCTAVES)], "k_octaves": [Hkv, …], "v_octaves": [Hkv, …]}, INT64.
        """
        return {site: {f"{name}_octaves": x.sum(0) for name, x in self._by_bin(site).items()} for site in self._counts}

    def _by_bin(self, site: str) -> dict[str, Tensor]:
        """[T, heads, len(OCTAVES)] of each tensor."""
        bins = len(self._tables[site]["k_scale"])
        return {name: found.counts.cpu().view(bins, -1, len(OCTAVES)) for name, found in self._counts[site].items()}
