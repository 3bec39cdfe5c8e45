"""The denoisers that bench/engine.py runs: diffusers' own classes in the configurations of published models, with random
weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from trtconvert.diffusion_model import DiffusionModel, InputSpec

TIMESTEP_MAX = 1000.0


class UNet(nn.Module):
    """A U-Net as Stable Diffusion calls it; SDXL's also takes the pooled prompt, and the image's sizes."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.unet = UNet2DConditionModel(**config)

    def forward(
        self, x: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor | None = None, sizes: Tensor | None = None
    ) -> Tensor:
        """x [B, 4, H, W], timestep [B], text [B, 77, C], pooled [B, 1280], sizes [B, 6] → [B, 4, H, W]."""
        added = None if pooled is None else {"text_embeds": pooled, "time_ids": sizes}
        return self.unet(x, timestep, text, added_cond_kwargs=added, return_dict=False)[0]


class Flux(nn.Module):
    """Flux as its pipeline calls it, for square images. The positions of the tokens and the guidance are constants."""

    def __init__(self, side: int, text_tokens: int, **config: Any) -> None:
        super().__init__()
        self.transformer = FluxTransformer2DModel(guidance_embeds=True, **config)
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        positions = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
        self.register_buffer("image_positions", positions.float(), persistent=False)
        self.register_buffer("text_positions", torch.zeros(text_tokens, 3), persistent=False)
        self.register_buffer("guidance", torch.full((1,), 3.5), persistent=False)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        """x [1, side², 64], timestep [1], text [1, M, 4096], pooled [1, 768] → [1, side², 64]."""
        return self.transformer(
            x, text, pooled, timestep / TIMESTEP_MAX, self.image_positions, self.text_positions, self.guidance,
            return_dict=False,
        )[0]  # fmt: skip


class Wan(nn.Module):
    """Wan 2.1 as its pipeline calls it."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.transformer = WanTransformer3DModel(**config)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """x [B, 16, F, H, W], timestep [B], text [B, 512, 4096] → [B, 16, F, H, W]."""
        return self.transformer(x, timestep, text, return_dict=False)[0]


class PixArt(nn.Module):
    """PixArt-Σ as its pipeline calls it, with prompts that fill all tokens."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.transformer = PixArtTransformer2DModel(**config)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """x [B, 4, H, W], timestep [B], text [B, 300, 4096] → [B, 8, H, W]."""
        added = {"resolution": None, "aspect_ratio": None}
        return self.transformer(x, text, timestep, added_cond_kwargs=added, return_dict=False)[0]


class SD3(nn.Module):
    """Stable Diffusion 3 as its pipeline calls it."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.transformer = SD3Transformer2DModel(**config)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        """x [B, 16, H, W], timestep [B], text [B, 154, 4096], pooled [B, 2048] → [B, 16, H, W]."""
        return self.transformer(x, text, pooled, timestep, return_dict=False)[0]


@dataclass(frozen=True)
class Architecture:
    """A denoiser's constructor and the shapes of its inputs. The output has the shape of the first input, x, perhaps except for
    the channels."""

    what: str
    make: Callable[[], nn.Module]
    shapes: dict[str, tuple[int, ...]]


SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
"""stabilityai/stable-diffusion-xl-base-1.0, beside the class's defaults, which are those of SD 1.x."""

WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
"""Wan-AI/Wan2.1-T2V-1.3B, beside the class's defaults, which are those of the 14B model."""

PIXART = {"sample_size": 128, "num_layers": 28, "caption_channels": 4096, "use_additional_conditions": False}
"""PixArt-alpha/PixArt-Sigma-XL-2-1024-MS, beside the class's defaults."""

SD3_MEDIUM = {
    "sample_size": 128,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 192,
}
"""stabilityai/stable-diffusion-3-medium, beside the class's defaults."""


def wan(frames: int) -> Architecture:
    """Returns a video of 480 × 832: latents are 8 times smaller, and 4 times fewer frames after the first."""
    latent_frames = (frames - 1) // 4 + 1
    tokens = latent_frames * 30 * 52
    return Architecture(
        f"Wan 2.1 1.3B, {frames} frames of 480 × 832, all of it, {tokens:,} tokens",
        partial(Wan, **WAN),
        {"x": (1, 16, latent_frames, 60, 104), "timestep": (1,), "text": (1, 512, 4096)},
    )


# Batches of 2 are the two halves of guidance. Flux has no guidance; videos compute the halves one after the other.
ARCHITECTURES = {
    "sd15": Architecture(
        "SD 1.5 at 512², the whole U-Net",
        partial(UNet, cross_attention_dim=768),
        {"x": (2, 4, 64, 64), "timestep": (2,), "text": (2, 77, 768)},
    ),
    "sdxl": Architecture(
        "SDXL at 1024², the whole U-Net",
        partial(UNet, **SDXL),
        {"x": (2, 4, 128, 128), "timestep": (2,), "text": (2, 77, 2048), "pooled": (2, 1280), "sizes": (2, 6)},
    ),
    "flux": Architecture(
        "Flux at 1024²: 3 of 19 double and 6 of 38 single blocks, 4096 + 512 tokens",
        partial(Flux, side=64, text_tokens=512, num_layers=3, num_single_layers=6),
        {"x": (1, 4096, 64), "timestep": (1,), "text": (1, 512, 4096), "pooled": (1, 768)},
    ),
    "pixart": Architecture(
        "PixArt-Σ at 1024², all of it, 2 × 4096 tokens",
        partial(PixArt, **PIXART),
        {"x": (2, 4, 128, 128), "timestep": (2,), "text": (2, 300, 4096)},
    ),
    "sd3": Architecture(
        "SD 3 medium at 1024²: 12 of 24 blocks, 2 × 4250 tokens",
        partial(SD3, **SD3_MEDIUM, num_layers=12),
        {"x": (2, 16, 128, 128), "timestep": (2,), "text": (2, 154, 4096), "pooled": (2, 2048)},
    ),
    "video": wan(frames=41),
    "video-81": wan(frames=81),
}


def describe(name: str, device: str) -> DiffusionModel:
    """Returns the denoiser of an architecture, in FP32 on a device.

    Weights are random and pass signals on: the zeros of the classes' initialisation would hide attention.
    """
    torch.manual_seed(0)
    with torch.device(device):
        denoiser = ARCHITECTURES[name].make()
    for parameter in denoiser.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    inputs = tuple(InputSpec(what, "float32", shape) for what, shape in ARCHITECTURES[name].shapes.items())
    return DiffusionModel(
        name, denoiser.eval().requires_grad_(False), inputs, replace(inputs[0], name="out"), "timestep", TIMESTEP_MAX,
        torch.linspace(0.01, 100, int(TIMESTEP_MAX)), {}, no_sampler,
    )  # fmt: skip


def no_sampler(*_args: object, **_named: object) -> Tensor:
    raise NotImplementedError("random weights draw nothing")
