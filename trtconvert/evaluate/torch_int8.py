"""A bundle's INT8 attention inside the torch model it was made from: the kernels on a GPU, the specification on a CPU."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.attention import kernel
from trtconvert.attention.sites import SiteCall, attention_hooks
from trtconvert.bundle import Manifest
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.sensitivity import Int8Sites
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.interception import InterceptedDenoiser


class TorchInt8:
    """The model in the bundle's type, on its own device, with the bundle's scales and modes at every converted site.

    Args:
        model: that the bundle was made from.
        folder: of the bundle; manifest: its own.
    """

    def __init__(self, model: DiffusionModel, folder: Path, manifest: Manifest) -> None:
        device = next(model.denoiser.parameters()).device
        sites = [site for site in manifest.sites if site.modes]
        modes = {site.name: torch.tensor(site.modes, dtype=torch.int32) for site in sites}
        calibration = Calibration.load(folder / manifest.calibration)
        tables = {name: table.to(device) for name, table in calibration.with_modes(modes).items()}
        attention = manifest.recipe.attention
        self._sites = Int8Sites(
            tables, model.timestep_max, attention.scaling, attention.smooth_k, compute=kernel.attention
        )
        self._dtype = getattr(torch, manifest.recipe.model.dtype)
        self._floating = {s.name for s in model.inputs if s.dtype == "float32" and s.name != model.timestep_input}
        self._names = [spec.name for spec in model.inputs]
        self._nonfinite: dict[str, Tensor] = {}
        denoiser = copy.deepcopy(model.denoiser).to(self._dtype)
        self._denoiser = InterceptedDenoiser(denoiser, self._names, model.timestep_input, attention_hooks(self._attend))

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        given = dict(zip(self._names, inputs, strict=False)) | named
        with torch.no_grad():
            return self._denoiser(
                **{name: x.to(self._dtype) if name in self._floating else x for name, x in given.items()}
            )

    def take_nonfinite(self) -> dict[str, int]:
        """Converted site: for how many calls on a sample it gave a NaN or Inf, since this was asked last."""
        found, self._nonfinite = self._nonfinite, {}
        return {site: int(count) for site, count in found.items()}

    def _attend(self, call: SiteCall) -> Tensor:
        if call.name not in self._sites.tables:
            return call.exact()
        out = self._sites.attention(call)
        rows = (~out.flatten(1).isfinite().all(1)).sum()  # stays on the device: nothing waits
        self._nonfinite[call.name] = self._nonfinite.get(call.name, torch.zeros_like(rows)) + rows
        return out
