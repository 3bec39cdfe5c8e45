"""A class-conditional diffusion transformer for 64 × 64 colour emoji: the second model that ships, with 1,024 tokens.

Its attention is a plain `scaled_dot_product_attention`, as in any diffusers model: this module does not use trtconvert's
attention. Architecture: DiT at patch size 2 (Peebles and Xie 2023, arXiv 2212.09748) with adaLN-single (Chen et al. 2024,
PixArt-α, arXiv 2310.00426, section 2.3): all blocks share one modulation of the condition, and each has a learned offset. The
parameters saved, a third of a block's, go to one more block.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.models.checkpoint import load_weights
from trtconvert.models.digits_dit import SelfAttention, grid_positions, init_weights, sinusoids

CATEGORIES = {
    "Activities": ("arts & crafts", "award-medal", "event", "game", "sport"),
    "Animals & Nature": (
        "animal-amphibian", "animal-bird", "animal-bug", "animal-mammal", "animal-marine", "animal-reptile", "plant-flower",
        "plant-other",
    ),
    "Flags": ("country-flag", "flag", "subdivision-flag"),
    "Food & Drink": (
        "dishware", "drink", "food-asian", "food-fruit", "food-prepared", "food-sweet", "food-vegetable",
    ),
    "Objects": (
        "book-paper", "clothing", "computer", "household", "light & video", "lock", "mail", "medical", "money", "music",
        "musical-instrument", "office", "other-object", "phone", "science", "sound", "tool", "writing",
    ),
    "People & Body": (
        "body-parts", "family", "hand-fingers-closed", "hand-fingers-open", "hand-fingers-partial", "hand-prop",
        "hand-single-finger", "hands", "person", "person-activity", "person-fantasy", "person-gesture", "person-resting",
        "person-role", "person-sport", "person-symbol",
    ),
    "Smileys & Emotion": (
        "cat-face", "emotion", "face-affection", "face-concerned", "face-costume", "face-glasses", "face-hand", "face-hat",
        "face-negative", "face-neutral-skeptical", "face-sleepy", "face-smiling", "face-tongue", "face-unwell", "heart",
        "monkey-face",
    ),
    "Symbols": (
        "alphanum", "arrow", "av-symbol", "currency", "gender", "geometric", "keycap", "math", "other-symbol", "punctuation",
        "religion", "transport-sign", "warning", "zodiac",
    ),
    "Travel & Places": (
        "hotel", "place-building", "place-geographic", "place-map", "place-other", "place-religious", "sky & weather", "time",
        "transport-air", "transport-ground", "transport-water",
    ),
}  # fmt: skip
"""Unicode's groups of emoji, and the subgroups of each."""

CLASSES = tuple(subgroup for subgroups in CATEGORIES.values() for subgroup in subgroups)
"""The 98 subgroups. A label, the condition of a sample, is an index into them."""

NULL_LABEL = len(CLASSES)
"""The label that stands for no class, for classifier-free guidance."""

IMAGE_SHAPE = (3, 64, 64)
"""Channels, height and width of an emoji, on white."""

TIMESTEPS, BETA_SCHEDULE, PREDICTION = 1000, "cosine", "v_prediction"
"""The training of the shipped weights."""

PATCH = 2


class EmojiDiT(nn.Module):
    """Predicts v for noisy emoji. 6 blocks of 4 heads × 64, 5.3 million parameters.

    Args:
        width: channels of a token; a multiple of 4 · heads.
        heads: attention heads.
        depth: transformer blocks.
    """

    def __init__(self, width: int = 256, heads: int = 4, depth: int = 6) -> None:
        super().__init__()
        self.width = width
        pixels = IMAGE_SHAPE[0] * PATCH * PATCH
        self.patchify = nn.Conv2d(IMAGE_SHAPE[0], width, PATCH, PATCH)
        self.embed_timestep = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.embed_label = nn.Embedding(len(CLASSES) + 1, width)
        self.modulation = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation_out = nn.Linear(width, 2 * width)
        self.project_out = nn.Linear(width, pixels)
        init_weights(self)

    def forward(self, x: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        """
        Args:
            x: [B, 3, H, W], √ᾱ·x₀ + √(1-ᾱ)·n with x₀ in [-1, 1]. Trained at 64 × 64; any even size runs.
            timestep: [B] FP32 in [0, 1000), fractions allowed.
            label: [B] INT64, an index into `CLASSES`, or `NULL_LABEL`.
        Returns:
            v, [B, 3, H, W].
        """
        _, channels, height, width = x.shape
        rows, columns = height // PATCH, width // PATCH
        tokens = self.patchify(x).flatten(2).transpose(1, 2)  # [B, rows · columns, width]
        tokens = tokens + grid_positions(rows, columns, self.width, x.device).to(x.dtype)
        condition = self.embed_timestep(sinusoids(timestep, self.width).to(x.dtype)) + self.embed_label(label)
        condition = F.silu(condition)[:, None]  # [B, 1, width]
        modulation = self.modulation(condition)
        for block in self.blocks:
            tokens = block(tokens, modulation)
        shift, scale = self.modulation_out(condition).chunk(2, -1)
        out = self.project_out(self.norm(tokens) * (1 + scale) + shift)
        return F.pixel_shuffle(out.transpose(1, 2).reshape(-1, channels * PATCH * PATCH, rows, columns), PATCH)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each shifted, scaled and gated by the modulation (adaLN-single)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(6 * width))
        self.norm_attn = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = SelfAttention(width, heads)
        self.norm_mlp = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor, modulation: Tensor) -> Tensor:
        """tokens [B, N, width], modulation [B, 1, 6 · width] → [B, N, width]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (modulation + self.offset).chunk(6, -1)
        tokens = tokens + gate_a * self.attn(self.norm_attn(tokens) * (1 + scale_a) + shift_a)
        return tokens + gate_m * self.mlp(self.norm_mlp(tokens) * (1 + scale_m) + shift_m)


def load_emoji_dit(path: Path) -> EmojiDiT:
    """Loads the model with trained weights, which are stored in FP16, as FP32, in evaluation mode, on the CPU.

    Raises:
        UserError: the file is missing, damaged, or not for this model.
    """
    model = EmojiDiT().half()
    load_weights(model, path)
    return model.float().eval().requires_grad_(False)
