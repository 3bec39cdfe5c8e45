"""A model whose attention is local by its weights, so that block masks have something to leave out."""

from __future__ import annotations

import math
from dataclasses import replace

import tiny_models
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.diffusion_model import InputSpec
from trtconvert.models import DiffusionModel
from trtconvert.models.samplers import initial_noise, sample

WIDTH, HEADS, HEIGHT = 32, 2, 16


class Local(nn.Module):
    """Two attentions over height × 40 pixels. In one head tokens see those near them, the nearer the less noise there is; in the
    other one they see all."""

    def __init__(self, masked: bool = False, windows: int = 1) -> None:
        super().__init__()
        self.masked, self.windows = masked, windows
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Linear(1, HEADS * WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(2))
        self.out = nn.Linear(HEADS * WIDTH, 1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """x [B, 1, H, W], timestep [B] → [B, 1, H, W]."""
        batch, _, height, width = x.shape
        place = torch.arange(height * width, device=x.device)[:, None]
        angles = place * (2 * math.pi / 1000) * torch.arange(1, WIDTH // 2 + 1, device=x.device)
        near = torch.cat([angles.cos(), angles.sin()], 1) * torch.exp(-((angles[1] / angles[1, 8]) ** 2) / 2).repeat(2)
        reach = torch.stack([4.5 - 3 * timestep / 1000, torch.zeros_like(timestep)], 1)[:, :, None, None]
        q = k = (near * reach).to(x.dtype)  # [B, heads, tokens, WIDTH]
        tokens = self.embed(x.flatten(2).transpose(1, 2))
        mask = torch.ones(1, 1, height * width, height * width, dtype=torch.bool) if self.masked else None
        for block in self.blocks:
            v = block(tokens).unflatten(2, (HEADS, WIDTH)).transpose(1, 2)
            parts = [y.unflatten(2, (self.windows, -1)).transpose(1, 2).flatten(0, 1) for y in (q, k, v)]
            parts = [q, k, v] if self.windows == 1 else parts
            seen = F.scaled_dot_product_attention(*parts, mask)
            if self.windows > 1:
                seen = seen.unflatten(0, (batch, self.windows)).transpose(1, 2).flatten(2, 3)
            tokens = tokens + seen.transpose(1, 2).flatten(2)
        return 0.5 * self.out(F.layer_norm(tokens, tokens.shape[-1:])).transpose(1, 2).reshape(x.shape) - 0.5 * x


def build(
    varying: bool = False, height: int = HEIGHT, masked: bool = False, windows: int = 1, pixels: int | None = None
) -> DiffusionModel:
    """
    Args:
        varying: heights may vary; height: of a sample; pixels: height of the samples that are drawn, where it is another.
        masked, windows: attention has a mask of its own, or is that of so many windows of each sample.
    """
    drawn = (1, height if pixels is None else pixels, 40)

    def draw(denoiser, seeds, *, steps, solver):
        noise = initial_noise(seeds, drawn)
        return sample(denoiser, noise, tiny_models.SCHEDULE, prediction="v_prediction", solver=solver, steps=steps)

    shape = ("batch", 1, "height", 40)
    return replace(
        tiny_models.build(),
        name="local",
        denoiser=Local(masked, windows).eval().requires_grad_(False),
        inputs=(InputSpec("x", "float32", shape), InputSpec("timestep", "float32", ("batch",))),
        output=InputSpec("prediction", "float32", shape),
        dims={"batch": (1, 2, 4), "height": (height, height, height + 8 if varying else height)},
        sample=draw,
    )
