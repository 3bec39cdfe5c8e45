"""Images of users: one way to read them, with one set of messages."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor

from trtconvert.errors import UserError, first_line

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by the orientation that its EXIF data tell."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def images_below(folder: Path) -> list[Path]:
    """The image files in a folder and all below it, by name."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())


def read_image(opened: Callable[[], Image.Image], name: str, shape: tuple[int, int, int], otherwise: str) -> Tensor:
    """An image as [C, H, W] FP32 in [0, 1], turned as its EXIF data say; colours are converted, sizes are not.

    Args:
        opened: opens the image.
        name: where it is, for messages.
        shape: [C, H, W] that it must have, once it is turned.
        otherwise: what a user can do instead of correcting the image.
    Raises:
        UserError: it cannot be read, or has another size.
    """
    channels, height, width = shape
    with _readable(name, otherwise), opened() as image:
        pixels = np.asarray(_as_shown(image).convert("L" if channels == 1 else "RGB"), dtype=np.float32)
    if pixels.shape[:2] != (height, width):
        raise UserError(
            f"the image {name} has the wrong size",
            expected=f"{width} × {height} pixels",
            got=f"{pixels.shape[1]} × {pixels.shape[0]}",
            remedy=f"scale or crop it as the model's training did, or {otherwise}",
        )
    return torch.from_numpy(pixels.reshape(height, width, channels).transpose(2, 0, 1) / np.float32(255))


def read_picture(path: Path, otherwise: str) -> Image.Image:
    """An image in RGB as programs show it: turned as its EXIF data say.

    Args:
        otherwise: what a user can do instead of correcting the image.
    Raises:
        UserError: it cannot be read.
    """
    with _readable(str(path), otherwise), Image.open(path) as image:
        return _as_shown(image).convert("RGB")


@contextmanager
def _readable(name: str, otherwise: str) -> Iterator[None]:
    """
    Raises:
        UserError: Pillow cannot read the image.
    """
    try:
        yield
    # What Pillow raises for damaged files of its formats.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = first_line(error)
        raise UserError(
            f"cannot read the image {name}",
            expected="an image that Pillow reads",
            got=error.strerror or reason if isinstance(error, OSError) else reason,
            remedy=f"replace the file, or {otherwise}",
        ) from error


def _as_shown(image: Image.Image) -> Image.Image:
    """An image in 8 bits, turned as its EXIF data say, before they are lost.

    Raises:
        ValueError: its values have no range that is known.
    """
    image.load()
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (
        OSError,
        ValueError,
        SyntaxError,
        TypeError,
        KeyError,
        struct.error,
    ):  # damaged: programs show such images as they are
        turn = None
    return _in_8_bits(image if turn is None else image.transpose(turn))


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 bits in 8: Pillow would clip it.

    Raises:
        ValueError: its values have no range that is known.
    """
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of Pillow's mode {image.mode}, in which nothing tells what is white")
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
