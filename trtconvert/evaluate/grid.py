"""Contact sheets of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

TILE, COMPARED, GAP, LABEL_WIDTH = 64, 256, 6, 150
"""Pixels: side of enlarged small samples, largest side in comparisons, space between samples, width of the row labels."""

DIFFERENCE_GAIN = 10


def save_comparison(full: Tensor, int8: Tensor, path: Path) -> None:
    """Saves three rows of the same seeds: full precision, INT8, and ten times their difference.

    Args:
        full, int8: [N, C, H, W] in [0, 1].
    """
    difference = (full - int8).abs() * DIFFERENCE_GAIN
    rows = (("full precision", full), ("INT8", int8), (f"{DIFFERENCE_GAIN}x difference", difference))
    _save_rows(rows, path, COMPARED, LABEL_WIDTH)


def save_sheet(images: Tensor, path: Path) -> None:
    """Saves samples [N, C, H, W] in [0, 1], in rows of ten. A single large sample is saved as it is."""
    largest = max(images.shape[2:])
    if len(images) == 1 and largest >= TILE:
        picture(images[0]).save(path)
    else:
        _save_rows([("", row) for row in images.split(10)], path, largest, 0)


def _save_rows(rows: Sequence[tuple[str, Tensor]], path: Path, limit: int, label_width: int) -> None:
    """
    Args:
        limit: the longer side of a shown sample, at most; small ones are enlarged to `TILE`.
    """
    count = max(len(images) for _, images in rows)
    height, width = rows[0][1].shape[2:]
    scale = (TILE if max(height, width) < TILE else min(max(height, width), limit)) / max(height, width)
    height, width = max(1, round(height * scale)), max(1, round(width * scale))
    smooth = Image.Resampling.LANCZOS if scale < 1 else Image.Resampling.NEAREST
    size = (label_width + count * (width + GAP) + GAP, len(rows) * (height + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for r, (label, images) in enumerate(rows):
        top = GAP + r * (height + GAP)
        pen.text((GAP, top + height // 2), label, fill="black", anchor="lm", font_size=16)
        for c, image in enumerate(images):
            left = label_width + GAP + c * (width + GAP)
            sheet.paste(picture(image).resize((width, height), smooth), (left, top))
    sheet.save(path)


def picture(image: Tensor) -> Image.Image:
    """Converts an image [C, H, W] in [0, 1] to RGB: grey by the mean of the channels where there are not three."""
    image = image if len(image) == 3 else image.mean(0, keepdim=True)
    pixels = image.clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(np.repeat(pixels, 3, 2) if pixels.shape[2] == 1 else pixels)
