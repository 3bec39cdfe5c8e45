"""The U-Net of DDPM in the layout of its published CIFAR-10 checkpoints, without classes.

Architecture: Ho et al. 2020 (arXiv 2006.11239, appendix B). Names of weights are those of the PyTorch port of its checkpoints and
of the DDIM code (Song et al. 2021, arXiv 2010.02502), so that a file of either, such as `model-790000.ckpt`, loads as it is.
Timesteps are those of the training, 0 to 999, with the linear schedule; the output is the noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.errors import UserError, several
from trtconvert.models.checkpoint import require_fitting
from trtconvert.weights.weight_files import TORCH, load_torch, read_tensors

TIMESTEPS, BETA_SCHEDULE, PREDICTION = 1000, "linear", "epsilon"
"""The training of the published weights."""

IMAGE_SHAPE = (3, 32, 32)
"""Channels, height and width of CIFAR-10's images."""

_GROUPS, _EPSILON = 32, 1e-6  # of GroupNorm
_NESTED = ("ema", "model_ema", "ema_state_dict", "ema_model", "shadow", "state_dict", "model", "model_state_dict")
"""Entries of checkpoints that hold weights, averaged weights first."""

_OTHER_LAYOUTS = {
    "a UNet2DModel of diffusers": r"(down_blocks|mid_block|up_blocks)\.",
    "guided-diffusion's or Stable Diffusion's U-Net": r"(model\.diffusion_model\.)?(input_blocks|output_blocks|middle_block)\.",
    "the score SDE code's NCSN++ or DDPM": r"(module\.)?all_modules\.\d",
    "a U-Net of denoising-diffusion-pytorch": r"((online_model\.|ema_model\.)?model\.)?(downs|ups)\.\d",
    "a diffusion transformer": r"(blocks|transformer_blocks)\.\d",
}
"""Other layouts, by how the names of their weights begin."""


class DDPMUNet(nn.Module):
    """Predicts the noise in images. 35.7 million parameters with the defaults of `build`.

    Args:
        channels: of the first level, a multiple of 32. multipliers: of these, for each level; each level but the last halves the
            image. blocks: residual blocks of a level. attention: levels whose blocks are followed by attention, 0 the first one.
        image_channels: of the images. dropout: in training, in residual blocks.
    """

    def __init__(
        self,
        channels: int,
        multipliers: Sequence[int],
        blocks: int,
        attention: Iterable[int],
        image_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.channels = channels
        attends, embedded = frozenset(attention), 4 * channels
        self.temb: Any = nn.Module()  # nested modules, for names such as temb.dense.0
        self.temb.dense = nn.ModuleList([nn.Linear(channels, embedded), nn.Linear(embedded, embedded)])
        self.conv_in = nn.Conv2d(image_channels, channels, 3, padding=1)

        widths = [channels * multiplier for multiplier in multipliers]
        width, last = channels, len(widths) - 1
        skips = [channels]  # channels of the skip connections from the way down to the way up
        self.down = nn.ModuleList()
        for level, wide in enumerate(widths):
            sizes = [width] + [wide] * (blocks - 1)
            part = _Level([ResidualBlock(size, wide, embedded, dropout) for size in sizes], level in attends, wide)
            width = wide
            skips += [wide] * blocks
            if level < last:
                part.downsample = Downsample(wide)
                skips.append(wide)
            self.down.append(part)

        self.mid: Any = nn.Module()
        self.mid.block_1 = ResidualBlock(width, width, embedded, dropout)
        self.mid.attn_1 = Attention(width)
        self.mid.block_2 = ResidualBlock(width, width, embedded, dropout)

        up: list[_Level] = []
        for level, wide in reversed(list(enumerate(widths))):
            sizes = [width] + [wide] * blocks
            part = _Level(
                [ResidualBlock(size + skips.pop(), wide, embedded, dropout) for size in sizes], level in attends, wide
            )
            width = wide
            if level:
                part.upsample = Upsample(wide)
            up.insert(0, part)
        self.up = nn.ModuleList(up)

        self.norm_out = _norm(width)
        self.conv_out = nn.Conv2d(width, image_channels, 3, padding=1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        """
        Args:
            x: [B, C, H, W], √ᾱ·x₀ + √(1-ᾱ)·n with x₀ in [-1, 1]; sizes are multiples of 2^(levels − 1).
            timestep: [B] of any number type, 0 to 999, fractions allowed.
        Returns:
            n, [B, C, H, W].
        """
        dense = self.temb.dense
        embedding = timestep_embedding(timestep, self.channels).to(x.dtype)
        condition = dense[1](F.silu(dense[0](embedding)))
        h = self.conv_in(x)
        skips = [h]
        for level in cast(list[Any], self.down):
            for block, attention in _pairs(level):
                h = attention(block(h, condition))
                skips.append(h)
            if hasattr(level, "downsample"):
                h = level.downsample(h)
                skips.append(h)
        h = self.mid.block_1(h, condition)
        h = self.mid.block_2(self.mid.attn_1(h), condition)
        for level in reversed(cast(list[Any], self.up)):
            for block, attention in _pairs(level):
                h = attention(block(torch.cat([h, skips.pop()], 1), condition))
            if hasattr(level, "upsample"):
                h = level.upsample(h)
        return self.conv_out(F.silu(self.norm_out(h)))


class _Level(nn.Module):
    """Residual blocks of one size of images, each followed by attention or by nothing."""

    def __init__(self, blocks: Sequence[ResidualBlock], attends: bool, width: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(blocks)
        self.attn = nn.ModuleList(Attention(width) for _ in blocks if attends)


def _pairs(level: Any) -> Iterable[tuple[nn.Module, nn.Module]]:
    return zip(level.block, level.attn if len(level.attn) else [nn.Identity()] * len(level.block), strict=True)


class ResidualBlock(nn.Module):
    """Two convolutions, with the timestep added between them, and a 1 × 1 convolution as shortcut where widths differ."""

    def __init__(self, inputs: int, outputs: int, embedded: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = _norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.temb_proj = nn.Linear(embedded, outputs)
        self.norm2 = _norm(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        if inputs != outputs:
            self.nin_shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x [B, inputs, H, W], condition [B, embedded] → [B, outputs, H, W]."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.temb_proj(F.silu(condition))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + h


class Attention(nn.Module):
    """Self-attention of one head over an image's pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[B, width, H, W] → the same."""
        h = self.norm(x)
        q, k, v = (project(h).flatten(2).transpose(1, 2)[:, None] for project in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v)[:, 0]  # [B, H·W, width]
        return x + self.proj_out(attended.transpose(1, 2).unflatten(2, x.shape[2:]))


class Downsample(nn.Module):
    """Halves the height and width by a convolution that pads on the right and below, like the original."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width, H, W] → [B, width, H / 2, W / 2]."""
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Doubles the height and width: nearest neighbours, then a convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width, H, W] → [B, width, 2·H, 2·W]."""
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(_GROUPS, width, eps=_EPSILON)


def timestep_embedding(timestep: Tensor, width: int) -> Tensor:
    """Returns sines, then cosines, of frequencies from 1 down to 1 / 10000, both included, as in DDPM. [B] → [B, width] FP32."""
    half = width // 2
    power = torch.arange(half, dtype=torch.float32, device=timestep.device) / (half - 1)
    angle = timestep.float()[:, None] * torch.exp(-math.log(10000) * power)
    return torch.cat([angle.sin(), angle.cos()], 1)


def build(
    *,
    channels: int = 128,
    multipliers: Sequence[int] = (1, 2, 2, 2),
    blocks: int = 2,
    attention: Iterable[int] = (1,),
    image_channels: int = 3,
    dropout: float = 0.1,
) -> DDPMUNet:
    """Makes a model with random weights, for training; by default CIFAR-10's, with attention at 16 × 16 of 32 × 32 pixels.

    Args:
        channels, multipliers, blocks, attention, image_channels, dropout: see `DDPMUNet`.
    """
    return DDPMUNet(channels, multipliers, blocks, attention, image_channels, dropout)


def load(path: Path) -> DDPMUNet:
    """Loads a checkpoint, in evaluation mode, FP32, on the CPU. The model's sizes follow from the weights' shapes.

    Averaged weights (EMA) are preferred where a checkpoint has both. No code in the file is executed.

    Args:
        path: safetensors, or torch's own (.ckpt, .pt, .pth, .bin): weights by name, these under `ema`, `state_dict` or the like,
            or the DDIM code's list of model, optimizer, epoch, step and EMA.
    Raises:
        UserError: the file is missing, damaged, holds code, or has the weights of another layout; a weight is missing, has
            another shape, or is NaN or Inf.
    """
    weights = _weights(path)
    _require_layout(weights, path)
    try:
        with torch.device("meta"):
            model = build(**_sizes(weights), dropout=0.0)
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(
            f"the weights in {path} are not those of a whole U-Net",
            expected="all weights of a U-Net whose widths are multiples of 32",
            got=str(error),
            remedy="get the file again, or give a checkpoint of a model that `ddpm_unet.build` or the DDIM code made",
        ) from error
    require_fitting(model, weights, path)
    model.load_state_dict({name: x.float().clone() for name, x in weights.items()}, assign=True)
    return model.eval().requires_grad_(False)


def _weights(path: Path) -> dict[str, Tensor]:
    """Returns the weights in a checkpoint, preferably the averaged ones, by the names of this module's weights."""
    of_torch = path.suffix.lower() in TORCH and path.is_file()
    found: Any = load_torch(path) if of_torch else read_tensors([path])
    if isinstance(found, Sequence) and not isinstance(found, str):
        # The DDIM code saves [model, optimizer, epoch, step], and the averages as the last entry where it averages.
        states = [entry for entry in found if isinstance(entry, Mapping) and _tensors(entry)]
        found = states[-1] if states else {}
    while not _tensors(found):
        entries = found if isinstance(found, Mapping) else {}
        inner = next((entries[key] for key in _NESTED if isinstance(entries.get(key), Mapping)), None)
        if inner is None:
            raise UserError(
                f"{path} holds no weights of a model",
                expected=f"weights by name, or these under one of {', '.join(_NESTED)}, or the DDIM code's list",
                got=f"{type(found).__name__} of {several([str(key) for key in entries], 5) or 'nothing of that kind'}",
                remedy="give the checkpoint of the model itself; or save its state_dict alone, with torch.save",
            )
        found = inner
    return {name.removeprefix("module."): x for name, x in _tensors(found).items()}


def _tensors(entry: Any) -> dict[str, Tensor]:
    named = entry.items() if isinstance(entry, Mapping) else ()
    return {name: x for name, x in named if isinstance(name, str) and isinstance(x, Tensor)}


def _require_layout(weights: Mapping[str, Tensor], path: Path) -> None:
    if {"temb.dense.0.weight", "conv_in.weight", "down.0.block.0.conv1.weight"} <= weights.keys():
        return
    other = next((layout for layout, begins in _OTHER_LAYOUTS.items() if any(re.match(begins, x) for x in weights)), "")
    raise UserError(
        f"{path} has the weights of another model",
        expected="the layout of DDPM's CIFAR-10 checkpoints: temb.dense.0, conv_in, down.0.block.0.conv1, …",
        got=(f"{other}: " if other else "") + (several(sorted(weights), 3) or "no weights"),
        remedy="give a checkpoint of the DDIM code, such as model-790000.ckpt"
        + ("; `model.source: diffusers` in a recipe reads pipelines of diffusers" if "diffusers" in other else ""),
    )


def _sizes(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the arguments of `build` for a model of these weights.

    Raises:
        KeyError, ValueError, IndexError: weights that have the sizes are missing.
    """
    places = {tuple(map(int, x)) for name in weights for x in re.findall(r"^down\.(\d+)\.block\.(\d+)\.", name)}
    first, image = weights["conv_in.weight"].shape[:2]
    levels = 1 + max(level for level, _ in places)
    widths = [weights[f"down.{level}.block.0.conv1.weight"].shape[0] for level in range(levels)]
    if any(width % first for width in widths) or first % _GROUPS:
        raise ValueError(f"widths {widths} of levels after {first}")
    return {
        "channels": first,
        "multipliers": [width // first for width in widths],
        "blocks": 1 + max(block for _, block in places),
        "attention": [level for level in range(levels) if f"down.{level}.attn.0.q.weight" in weights],
        "image_channels": image,
    }
