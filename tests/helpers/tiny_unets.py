"""Stable Diffusion's kind of U-Net with random weights, as the model that is exported of it."""

from __future__ import annotations

import functools
from dataclasses import replace

import onnx_ir as ir
import tiny_models
import tiny_pipelines
import torch
from torch import Tensor, nn

from trtconvert.diffusion_model import InputSpec


class UNet(nn.Module):
    """As Stable Diffusion calls it."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.unet = tiny_pipelines.unet(use_linear_projection=linear)
        generator = torch.Generator().manual_seed(0)
        for module in self.unet.modules():
            if isinstance(module, nn.GroupNorm):  # each has its own weights, neither ones nor zeros
                nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
                nn.init.normal_(module.bias, std=0.2, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """x [B, 4, H, W], timestep [B], text [B, 7, 32] → as x."""
        return self.unet(x, timestep, text, return_dict=False)[0]


UNETS = [(False, ()), (False, ("batch",)), (False, ("batch", "height", "width")), (True, ("batch", "height", "width"))]
"""Whether linear layers project to tokens, as in SDXL, and back, or convolutions, as in SD 1.5; and what varies."""


@functools.cache
def _unet(linear: bool, varying: tuple[str, ...]) -> ir.Model:
    shapes = {"x": ("batch", 4, "height", "width"), "timestep": ("batch",), "text": ("batch", 7, tiny_pipelines.WIDTH)}
    sizes = {"batch": (1, 2, 4), "height": (8, 8, 16), "width": (8, 12, 16)}
    model = replace(
        tiny_models.build(), denoiser=UNet(linear).eval().requires_grad_(False),
        inputs=tuple(InputSpec(name, "float32", shape) for name, shape in shapes.items()),
        output=InputSpec("prediction", "float32", shapes["x"]),
        dims={name: size if name in varying else (size[1],) * 3 for name, size in sizes.items()},
    )  # fmt: skip
    return tiny_models.traced(model, torch.float16)


def unet(linear: bool = True, varying: tuple[str, ...] = UNETS[-1][1]) -> ir.Model:
    return _unet(linear, varying).clone()
