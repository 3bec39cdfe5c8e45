"""The denoiser of a model with INT8 attention and layers, for drawings."""

from __future__ import annotations

from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.denoiser import intercepted
from trtconvert.quant.forward import Int8Layers, Int8Sites


def int8_denoiser(model: DiffusionModel, sites: Int8Sites, layers: Int8Layers) -> Denoiser:
    """Returns the model's denoiser with these sites and layers in INT8, recorded in CUDA graphs if the model is on a GPU. Layers
    that quantise deltas keep caches between calls, and are not recorded."""
    denoiser = intercepted(model, sites.handler(), layers.handler() if layers.tables else None)
    return denoiser if layers.delta_scales else graphed(model, denoiser)
