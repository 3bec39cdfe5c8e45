"""Images: reads those of users, and lays out videos and sounds as images."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torch.nn.functional import pad

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
"""Transposition that turns an image upright, by its EXIF orientation."""

SOUND_ROW = 256
"""Amplitudes in a row of the image that shows a sound."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def laid_out(samples: Tensor) -> Tensor:
    """Returns samples in [0, 1] as images [N, C, H, W].

    Args:
        samples: images [N, C, H, W]; videos [N, F, C, H, W], whose frames lie one below the other; or sounds [N, C, S], as grey
            images with the rows of all channels, filled up by 0.5.
    """
    if samples.dim() == 5:
        return samples.transpose(1, 2).flatten(2, 3)
    if samples.dim() == 3:
        filled = pad(samples, (0, -samples.shape[2] % SOUND_ROW), value=0.5)
        return filled.unflatten(2, (-1, SOUND_ROW)).flatten(1, 2)[:, None]
    return samples


def images_below(folder: Path) -> list[Path]:
    """Returns the image files in a folder and its subfolders, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file())


def read_image(opened: Callable[[], Image.Image], name: str, shape: tuple[int, int, int], otherwise: str) -> Tensor:
    """Reads an image as [C, H, W] FP32 in [0, 1], turned upright, with colours converted to C channels.

    Args:
        opened: opens the image.
        name: name of the image in messages.
        shape: required [C, H, W] of the upright image.
        otherwise: the user's alternative to correcting the image, for messages.
    Raises:
        UserError: the image cannot be read or has another size.
    """
    channels, height, width = shape
    with _readable(name, otherwise), opened() as image:
        pixels = np.asarray(_as_shown(image).convert("L" if channels == 1 else "RGB"), dtype=np.float32)
    if pixels.shape[:2] != (height, width):
        raise UserError(
            f"the image {name} has the wrong size",
            expected=f"{width} × {height} pixels",
            got=f"{pixels.shape[1]} × {pixels.shape[0]}",
            remedy=f"scale or crop the image as in the model's training, or {otherwise}",
        )
    return torch.from_numpy(pixels.reshape(height, width, channels).transpose(2, 0, 1) / np.float32(255))


def read_picture(path: Path, otherwise: str) -> Image.Image:
    """Reads an image in RGB, turned upright.

    Args:
        otherwise: the user's alternative to correcting the image, for messages.
    Raises:
        UserError: the image cannot be read.
    """
    with _readable(str(path), otherwise), Image.open(path) as image:
        return _as_shown(image).convert("RGB")


@contextmanager
def _readable(name: str, otherwise: str) -> Iterator[None]:
    try:
        yield
    # Pillow raises these for damaged files.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = first_line(error)
        raise UserError(
            f"cannot read the image {name}",
            expected="an image that Pillow reads",
            got=error.strerror or reason if isinstance(error, OSError) else reason,
            remedy=f"replace the file, or {otherwise}",
        ) from error


def _as_shown(image: Image.Image) -> Image.Image:
    """Turns an image upright by its EXIF data and converts it to 8 bits.

    Raises:
        ValueError: the range of the image's values is unknown.
    """
    image.load()
    try:
        turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except (OSError, ValueError, SyntaxError, TypeError, KeyError, struct.error):  # damaged EXIF data
        turn = None
    return _in_8_bits(image if turn is None else image.transpose(turn))


def _in_8_bits(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ValueError(f"an image of Pillow's mode {image.mode}, which has no known value of white")
    if not image.mode.startswith("I;16"):
        return image
    # Pillow would clip 16-bit grey.
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
