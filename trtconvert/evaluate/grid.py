"""Pictures of samples for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

TILE, GAP, LABEL_WIDTH = 64, 6, 150
"""Pixels: side of a shown sample, space between samples, width of the rows' labels."""

DIFFERENCE_GAIN = 10


def save_comparison(full: Tensor, int8: Tensor, path: Path) -> None:
    """Three rows of the same seeds: full precision, INT8, and ten times their difference.

    Args:
        full, int8: [N, C, H, W] in [0, 1], C 1 or 3.
    """
    difference = (full - int8).abs() * DIFFERENCE_GAIN
    rows = (("full precision", full), ("INT8 attention", int8), (f"{DIFFERENCE_GAIN}x difference", difference))
    _save_rows(rows, path)


def save_sheet(images: Tensor, path: Path, columns: int = 10) -> None:
    """All samples in rows of `columns`. images: [N, C, H, W] in [0, 1], C 1 or 3."""
    _save_rows([("", row) for row in images.split(columns)], path, label_width=0)


def _save_rows(rows: Sequence[tuple[str, Tensor]], path: Path, label_width: int = LABEL_WIDTH) -> None:
    count = max(len(images) for _, images in rows)
    size = (label_width + count * (TILE + GAP) + GAP, len(rows) * (TILE + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for r, (label, images) in enumerate(rows):
        top = GAP + r * (TILE + GAP)
        pen.text((GAP, top + TILE // 2), label, fill="black", anchor="lm", font_size=16)
        for c, image in enumerate(images):
            pixels = (image.clamp(0, 1).mul(255).round().byte().permute(1, 2, 0)).numpy()
            picture = Image.fromarray(np.repeat(pixels, 3, 2) if pixels.shape[2] == 1 else pixels)
            sheet.paste(picture.resize((TILE, TILE), Image.Resampling.NEAREST), (label_width + c * (TILE + GAP), top))
    sheet.save(path)
