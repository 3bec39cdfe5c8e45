"""A small classifier of emoji, and held-out emoji.

Its features also serve for Fréchet distances: Inception was not made for drawings of 64 pixels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from trtconvert.models.checkpoint import load_weights
from trtconvert.models.emoji_dit import CATEGORIES, IMAGE_SHAPE
from trtconvert.shipped import shipped_folder

FEATURES = 128


def held_out_emoji() -> Tensor:
    """Returns the shipped held-out emoji without skin tones, [N, 3, 64, 64] FP32 in [0, 1]."""
    _, height, width = IMAGE_SHAPE
    with Image.open(shipped_folder() / "emoji-held-out.png") as sheet:
        pixels = torch.from_numpy(np.array(sheet.convert("RGB")))  # a grid of images
    tiles = pixels.unflatten(0, (-1, height)).unflatten(2, (-1, width)).permute(0, 2, 4, 1, 3).flatten(0, 1)
    return tiles.float() / 255


class EmojiClassifier(nn.Module):
    """Four stages of two convolutions, a mean over the image and one linear layer; 0.6 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (IMAGE_SHAPE[0], 32, 64, 96, FEATURES)
        self.body = nn.Sequential(*(_stage(*pair) for pair in zip(widths, widths[1:], strict=False)))
        self.head = nn.Linear(FEATURES, len(CATEGORIES))

    def maps(self, images: Tensor) -> Tensor:
        """[B, 3, 64, 64] in [0, 1] → [B, FEATURES, 4, 4]."""
        return self.body(images * 2 - 1)

    def features(self, images: Tensor) -> Tensor:
        """[B, 3, 64, 64] in [0, 1] → [B, FEATURES]."""
        return self.maps(images).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, 64, 64] in [0, 1] → logits [B, 9], in the order of `CATEGORIES`."""
        return self.head(self.features(images))


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def load_emoji_classifier(path: Path) -> EmojiClassifier:
    """Loads the trained classifier, stored in FP16, as FP32 in evaluation mode on the CPU.

    Raises:
        UserError: the file is missing, damaged, or not for this classifier.
    """
    classifier = EmojiClassifier().half()
    load_weights(classifier, path)
    return classifier.float().eval().requires_grad_(False)
