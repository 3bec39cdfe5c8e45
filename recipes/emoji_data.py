"""The emoji that the second shipped model and its classifier are trained on."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.evaluate.emoji import EmojiClassifier
from trtconvert.models.emoji_dit import CATEGORIES, CLASSES, IMAGE_SHAPE

HELD_OUT = 10
"""One in so many emoji is held out, with all its skin tones."""

CATEGORY_OF = torch.tensor([index for index, subgroups in enumerate(CATEGORIES.values()) for _ in subgroups])
"""[98]: the category of each class, an index into `CATEGORIES`."""


@dataclass(frozen=True)
class EmojiData:
    """Images of emoji with labels.

    Attributes:
        images: [N, 3, 64, 64] UINT8, on white.
        labels: [N] INT64, indices into `CLASSES`.
        weights: [N] FP64, one over the number of variants of the emoji: all emoji are equally likely, whatever their skin tones.
        held_out: [N] BOOL.
    """

    images: Tensor
    labels: Tensor
    weights: Tensor
    held_out: Tensor

    def part(self, held_out: bool) -> EmojiData:
        """Returns the held-out images, or the others."""
        kept = self.held_out == held_out
        return EmojiData(self.images[kept], self.labels[kept], self.weights[kept], self.held_out[kept])


def emoji_data(package: Path) -> EmojiData:
    """Reads Noto's emoji from the npm package `emoji-datasource-google`: 3,781 images of 1,906 emoji.

    Args:
        package: folder of the unpacked package, with `emoji.json` and `img/google/64`. Skin-tone swatches are skipped.
    Raises:
        UserError: a file is missing, or its images have another size.
    """
    remedy = "run `npm pack emoji-datasource-google`, unpack the archive, and give the folder `package` in it"
    index, folder = package / "emoji.json", package / "img" / "google" / "64"
    if not index.is_file() or not folder.is_dir():
        raise UserError(
            f"there are no emoji in {package}",
            expected="emoji.json and img/google/64 of the npm package emoji-datasource-google",
            got="neither" if not index.is_file() and not folder.is_dir() else "one of the two",
            remedy=remedy,
        )
    known = {name: label for label, name in enumerate(CLASSES)}
    images: list[Tensor] = []
    labels: list[int] = []
    weights: list[float] = []
    held_out: list[bool] = []
    for emoji in sorted(json.loads(index.read_text("utf-8")), key=lambda emoji: emoji["unified"]):
        if emoji["subcategory"] not in known:
            continue
        variants = [emoji, *emoji.get("skin_variations", {}).values()]
        for variant in variants:
            images.append(_on_white(folder / variant["image"], remedy))
            labels.append(known[emoji["subcategory"]])
            weights.append(1 / len(variants))
            held_out.append(zlib.crc32(emoji["unified"].encode()) % HELD_OUT == 0)
    return EmojiData(
        torch.stack(images), torch.tensor(labels), torch.tensor(weights, dtype=torch.float64), torch.tensor(held_out)
    )


def _on_white(path: Path, remedy: str) -> Tensor:
    """Reads an image [3, 64, 64] UINT8 over white."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGBA")
    except OSError as error:
        raise UserError(f"cannot read {path}", expected="a PNG image", got=str(error), remedy=remedy) from error
    if image.size != IMAGE_SHAPE[:0:-1]:
        expected = f"{IMAGE_SHAPE[2]} x {IMAGE_SHAPE[1]} pixels"
        raise UserError(f"{path} has another size", expected=expected, got=f"{image.size}", remedy=remedy)
    white = Image.new("RGBA", image.size, "white")
    return torch.from_numpy(np.array(Image.alpha_composite(white, image).convert("RGB"))).permute(2, 0, 1)


@torch.no_grad()
def category_accuracy(classifier: EmojiClassifier, images: Tensor, labels: Tensor) -> float:
    """Returns the share of images [B, 3, 64, 64] in [0, 1] that are assigned the category of their labels [B]."""
    wanted = CATEGORY_OF.to(labels.device)[labels]
    seen = torch.cat([classifier(part).argmax(1) for part in images.split(500)])
    return (seen == wanted).double().mean().item()
