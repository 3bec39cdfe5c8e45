"""A bundle's INT8 attention inside the torch model it was made from: the kernels on a GPU, the specification on a CPU."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.attention import kernel
from trtconvert.attention.sites import SiteCall
from trtconvert.bundle import Manifest
from trtconvert.calib.calibration import Calibration
from trtconvert.models.base import Denoiser, DiffusionModel, intercepted


def torch_int8(model: DiffusionModel, folder: Path, manifest: Manifest) -> Denoiser:
    """The model in the bundle's type, on its own device, with the bundle's scales and modes at every converted site.

    Args:
        folder: of the bundle; manifest: its own.
    """
    device = next(model.denoiser.parameters()).device
    attention, dtype = manifest.recipe.attention, getattr(torch, manifest.recipe.model.dtype)
    sites = [site for component in manifest.components.values() for site in component.sites if site.modes]
    modes = {site.name: torch.tensor(site.modes, dtype=torch.int32) for site in sites}
    tables = {
        name: table.to(device)
        for name, table in Calibration.load(folder / manifest.calibration).with_modes(modes).items()
    }

    def handler(call: SiteCall) -> Tensor:
        if call.name not in tables:
            return call.exact()
        return kernel.int8_attention(
            call.q,
            call.k,
            call.v,
            call.timestep,
            **vars(tables[call.name]),
            mask=call.mask,
            softmax_scale=call.scale,
            timestep_max=model.timestep_max,
            scaling=attention.scaling,
            smooth_k=attention.smooth_k,
        )

    denoiser = copy.deepcopy(intercepted(model, handler)).to(dtype)
    kept = {model.timestep_input}

    def typed(name: str, x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and name not in kept else x

    def denoise(*inputs: Tensor, **named: Tensor) -> Tensor:
        given = dict(zip((spec.name for spec in model.inputs), inputs, strict=False)) | named
        with torch.no_grad():
            return denoiser(**{name: typed(name, x) for name, x in given.items()})

    return denoise
