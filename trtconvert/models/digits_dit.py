"""A class-conditional diffusion transformer for 8 × 8 digits, small enough to ship: the demonstration model.

Its attention is a plain `scaled_dot_product_attention`, as in any diffusers model: this module does not use trtconvert's
attention. Architecture: DiT with adaLN-Zero (Peebles and Xie 2023, arXiv 2212.09748, figure 3) at patch size 1.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.models.checkpoint import load_weights

CLASSES = 10
NULL_LABEL = CLASSES
"""The label that stands for no class, for classifier-free guidance."""

IMAGE_SHAPE = (1, 8, 8)
"""Channels, height and width of a digit."""

TIMESTEPS, BETA_SCHEDULE, PREDICTION = 1000, "linear", "v_prediction"
"""The training of the shipped weights: the DDPM schedule, and v = √ᾱ·n - √(1-ᾱ)·x₀ as the prediction."""


class DigitsDiT(nn.Module):
    """Predicts v for noisy digits. 6 blocks of 2 heads × 64, 1.85 million parameters.

    Args:
        width: channels of a token; a multiple of 4 · heads.
        heads: attention heads.
        depth: transformer blocks.
    """

    def __init__(self, width: int = 128, heads: int = 2, depth: int = 6) -> None:
        super().__init__()
        self.width = width
        self.embed_pixel = nn.Linear(1, width)
        self.embed_timestep = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.embed_label = nn.Embedding(CLASSES + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(width, 2 * width)
        self.project_out = nn.Linear(width, 1)
        init_weights(self)

    def forward(self, x: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        """
        Args:
            x: [B, 1, H, W], √ᾱ·x₀ + √(1-ᾱ)·n with x₀ in [-1, 1]. Trained at 8 × 8; any size runs.
            timestep: [B] FP32 in [0, 1000), fractions allowed.
            label: [B] INT64, 0 to 9, or `NULL_LABEL`.
        Returns:
            v, [B, 1, H, W].
        """
        _, _, height, width = x.shape
        tokens = self.embed_pixel(x.flatten(2).transpose(1, 2))  # [B, H·W, width]
        tokens = tokens + grid_positions(height, width, self.width, x.device).to(x.dtype)
        condition = self.embed_timestep(sinusoids(timestep, self.width).to(x.dtype)) + self.embed_label(label)
        condition = F.silu(condition)[:, None]  # [B, 1, width]
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(condition).chunk(2, -1)
        out = self.project_out(self.norm(tokens) * (1 + scale) + shift)
        return out.transpose(1, 2).unflatten(2, (height, width))


def init_weights(model: Any) -> None:
    """Initialises a DiT by adaLN-Zero: every block starts as the identity, and the whole model as zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.normal_(model.embed_label.weight, std=0.02)
    for name, parameter in model.named_parameters():
        if name.endswith(("modulation.weight", "modulation_out.weight", "project_out.weight")):
            nn.init.zeros_(parameter)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each shifted, scaled and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(width, heads)
        self.norm_mlp = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """tokens [B, N, width], condition [B, 1, width] → [B, N, width]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(condition).chunk(6, -1)
        tokens = tokens + gate_a * self.attn(self.norm_attn(tokens) * (1 + scale_a) + shift_a)
        return tokens + gate_m * self.mlp(self.norm_mlp(tokens) * (1 + scale_m) + shift_m)


class SelfAttention(nn.Module):
    """Multi-head self-attention over all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, N, width] → [B, N, width]."""
        q, k, v = self.qkv(tokens).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, heads, N, D]
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def sinusoids(position: Tensor, width: int) -> Tensor:
    """Returns sine and cosine features of scalar positions. [B] → [B, width] FP32 (Vaswani et al. 2017, section 3.5)."""
    half = width // 2
    frequency = torch.exp(torch.arange(half, dtype=torch.float32, device=position.device) * (-math.log(10000) / half))
    angle = position.float()[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1)


def grid_positions(height: int, width: int, channels: int, device: torch.device) -> Tensor:
    """Returns features of a row-major pixel grid, half the channels for rows and half for columns: [height · width, channels].

    They are computed at every call, so that an exported graph serves any size.
    """
    rows = sinusoids(torch.arange(height, device=device), channels // 2)[:, None].expand(height, width, -1)
    columns = sinusoids(torch.arange(width, device=device), channels // 2)[None].expand(height, width, -1)
    return torch.cat([rows, columns], -1).flatten(0, 1)


def load_digits_dit(path: Path) -> DigitsDiT:
    """Loads the model with trained weights, in evaluation mode, on the CPU.

    Raises:
        UserError: the file is missing, damaged, or not for this model.
    """
    model = DigitsDiT()
    load_weights(model, path)
    return model.eval().requires_grad_(False)
