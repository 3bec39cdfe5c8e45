"""A tiny network that is told σ and gives the denoised image, as improved-diffusion's with EDM's preconditioning around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_graphs
import torch
from torch import Tensor, nn
from torch.nn import functional

SIGMA_DATA = 0.5
SIZE, WIDTH, HEADS = 8, 64, 2


class SigmaUNet(nn.Module):
    """D(x; σ) = c_skip·x + c_out·F(c_in·x; ln σ / 4) (Karras et al. 2022, equation 7), with attention by two einsums.

    Args:
        told: what the second input of the network is, by the names of `NOISE_INPUTS`.
        raw: without the preconditioning, F alone: the first input is c_in·x then.
    """

    def __init__(self, told: str = "sigma", raw: bool = False) -> None:
        super().__init__()
        self.told, self.raw = told, raw
        self.noise, self.label = nn.Linear(16, WIDTH), nn.Linear(1, WIDTH)
        self.conv_in, self.norm = nn.Conv2d(1, WIDTH, 3, padding=1), nn.GroupNorm(8, WIDTH)
        self.qkv, self.proj = nn.Conv1d(WIDTH, 3 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.conv_out = nn.Conv2d(WIDTH, 1, 3, padding=1)  # a bias of one number
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            std = 0.2 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, noisy: Tensor, level: Tensor, difficulty: Tensor) -> Tensor:
        """noisy [B, 1, 8, 8], level [B], difficulty [B] → as noisy."""
        sigma = {"sigma": lambda x: x, "log_sigma": torch.exp, "c_noise": lambda x: (4 * x).exp()}[self.told](level)
        scale = (sigma**2 + SIGMA_DATA**2).sqrt()
        waves = (sigma.log() / 4)[:, None] * torch.exp(torch.linspace(3, -3, 8))
        embedding = self.noise(torch.cat([waves.sin(), waves.cos()], 1)) + self.label(difficulty[:, None])
        x = self.conv_in(noisy if self.raw else noisy / scale[:, None, None, None])
        x = functional.silu(self.norm(x) + embedding[:, :, None, None])
        q, k, v = self.qkv(x.flatten(2)).reshape(-1, 3 * WIDTH // HEADS, SIZE * SIZE).chunk(3, 1)
        root = (WIDTH // HEADS) ** -0.25
        weight = torch.einsum("bct,bcs->bts", q * root, k * root).softmax(-1)
        tokens = torch.einsum("bts,bcs->bct", weight, v).reshape(-1, WIDTH, SIZE * SIZE)
        x = x + self.proj(tokens).unflatten(2, (SIZE, SIZE))
        skip, out = (SIGMA_DATA**2 / scale**2), sigma * SIGMA_DATA / scale
        network = self.conv_out(x).tanh()
        return network if self.raw else skip[:, None, None, None] * noisy + out[:, None, None, None] * network


def sigma_unet(path: Path, told: str = "sigma", **named: Any) -> Path:
    """The network as an ONNX file. Inputs are noisy, the level under its own name, or another, and difficulty."""
    level = named.get("level", told)
    names = ["noisy", level, "difficulty"]
    inputs = (torch.randn(2, 1, SIZE, SIZE), torch.full((2,), 0.5), torch.tensor([0.1, 0.9]))
    varying = {name: {0: "batch"} for name in names}
    module = SigmaUNet(told, named.get("raw", False)).eval()
    return onnx_graphs.exported(path, module, inputs, names, varying, output=named.get("output", "denoised"))
