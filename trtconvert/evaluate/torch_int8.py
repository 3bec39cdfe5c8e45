"""Runs a bundle's INT8 attention and layers in torch, see `trtconvert.quant.forward`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.attention.sites import SiteCall, attention_hooks
from trtconvert.bundle import LayerRecord, Manifest
from trtconvert.calib.calibration import load_of_bundle, masks_of_bundle, modes_of_bundle
from trtconvert.calib.layer_scales import LayerScales, layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.linear.sites import ConvertedLayer, LayerCall, LayerFinder, layer_hooks, with_input_groups_among
from trtconvert.models.denoiser import DenoiserInType, intercepted
from trtconvert.models.offloading import tables_device
from trtconvert.quant.forward import Int8Layers, Int8Sites
from trtconvert.reuse.schedule import Scheduler


class NonfiniteCounts:
    """Counts, by name, the sample calls that gave NaN or Inf."""

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}

    def add(self, name: str, out: Tensor) -> None:
        """Counts the samples of an output [samples, …] that are not finite."""
        rows = (~out.flatten(1).isfinite().all(1)).sum()  # stays on the device
        self._counts[name] = self._counts.get(name, torch.zeros_like(rows)) + rows

    def take(self) -> dict[str, Tensor]:
        """Returns the counts, and resets them."""
        counts, self._counts = self._counts, {}
        return counts


class TorchInt8:
    """The torch model in the bundle's type, with INT8 arithmetic at every converted site and layer.

    Args:
        model: that the bundle was made from.
        folder, manifest: of the bundle.

    Attributes:
        reuse: the schedule of reused steps. The caller may set it.
    """

    reuse: Scheduler | None = None

    def __init__(self, model: DiffusionModel, folder: Path, manifest: Manifest) -> None:
        device = model.device
        calibration = load_of_bundle(folder, manifest)
        tables = {name: of.to(device) for name, of in calibration.with_modes(modes_of_bundle(manifest)).items()}
        smooth_k = manifest.recipe.attention.smooth_k
        masks = {name: mask.to(device) for name, mask in masks_of_bundle(manifest, calibration).items()}
        self._sites = Int8Sites(tables, model.timestep_max, manifest.scalings, smooth_k, masks=masks)
        records = next(component.layers for component in manifest.components.values() if component.is_denoiser)
        of_layers = converted_layers(model, records, calibration.layers)
        self._layers = Int8Layers(
            {name: layer.tables for name, layer in of_layers.items()},
            model.timestep_max,
            {name: scale for name, layer in of_layers.items() if (scale := layer.delta_scale) is not None},
            model.timesteps_fall,
        )
        self._nonfinite = {"site": NonfiniteCounts(), "layer": NonfiniteCounts()}
        hooks = dict(attention_hooks(self._attend))
        if of_layers:
            hooks |= layer_hooks(self._compute)
        self._denoiser = DenoiserInType(model, getattr(torch, manifest.recipe.model.dtype), hooks)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self._denoiser(*inputs, **named)

    def reset_cache(self) -> None:
        """Resets the caches of layers that quantise deltas."""
        self._layers.reset_cache()

    def take_nonfinite(self) -> dict[str, dict[str, int]]:
        """Returns, by kind ("site", "layer") and name, the sample calls that gave NaN or Inf, and resets the counts."""
        return {
            kind: {name: int(count) for name, count in counts.take().items()}
            for kind, counts in self._nonfinite.items()
        }

    def _attend(self, call: SiteCall) -> Tensor:
        if call.name not in self._sites.tables:
            return call.exact()
        out = self._sites.attention(call)
        self._nonfinite["site"].add(call.name, out)
        return out

    def _compute(self, call: LayerCall) -> Tensor:
        if call.name not in self._layers.tables:
            return call.exact()
        out = self._layers.output(call)
        self._nonfinite["layer"].add(call.name, out.reshape(len(call.timestep), -1))
        return out


def converted_layers(
    model: DiffusionModel, records: Sequence[LayerRecord], scales: Mapping[str, LayerScales]
) -> dict[str, ConvertedLayer]:
    """Returns a bundle's INT8 layers by name, with their tables.

    Args:
        model: that the bundle was made from.
        records: of its denoiser's layers; scales: of its calibration.
    """
    modes = {record.name: torch.tensor(record.modes, dtype=torch.int32) for record in records if record.in_int8}
    if not modes:
        return {}
    finder = LayerFinder(model.denoiser)
    device = next(model.denoiser.parameters()).device
    inputs = model.example(0, {name: opt for name, (_, opt, _) in model.dims.items()})
    with torch.no_grad():
        intercepted(model, layers=finder)(**{name: x.to(device) for name, x in inputs.items()})
    # Scales are filed by input group, among all layers that can be INT8.
    able = {record.name for record in records if not record.reason}
    layers = with_input_groups_among([layer for layer in finder.layers() if layer.name in able])
    chosen, modulated = [layer for layer in layers if layer.name in modes], {r.name for r in records if r.modulated}
    tables = layer_tables(model.denoiser, chosen, scales, modes, tables_device(model, chosen))
    return {
        layer.name: ConvertedLayer(
            layer, tables[layer.name], scales[layer.input_group].change_scale if layer.name in modulated else None
        )
        for layer in chosen
    }
