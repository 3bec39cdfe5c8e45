"""Images are read as programs show them, turned by their EXIF data, from every source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from trtconvert.errors import UserError
from trtconvert.images import read_image, read_picture

_PIXELS = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40


def _saved(path: Path, orientation: int, pixels: np.ndarray = _PIXELS) -> Path:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(path, exif=exif)
    return path


def _read(path: Path, height: int, width: int) -> np.ndarray:
    image = read_image(lambda: Image.open(path), path.name, (1, height, width), "leave it out")
    return (image[0] * 255).round().numpy().astype(np.uint8)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_both_ways_to_read_an_image_turn_it_alike(orientation, tmp_path):
    path = _saved(tmp_path / "image.png", orientation)
    shown = np.asarray(ImageOps.exif_transpose(Image.open(path)))
    assert shown.shape == ((3, 2) if orientation > 4 else (2, 3))
    assert np.array_equal(_read(path, *shown.shape), shown)
    assert np.array_equal(np.asarray(read_picture(path, ""))[..., 0], shown)


def test_colours_are_turned_with_their_image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (2, 3, 3)).astype(np.uint8)
    path = _saved(tmp_path / "image.png", 6, pixels)
    image = read_image(lambda: Image.open(path), path.name, (3, 3, 2), "leave it out")
    expected = torch.from_numpy(np.rot90(pixels, -1).copy()).permute(2, 0, 1) / 255
    torch.testing.assert_close(image, expected)


def test_grey_of_16_bits_is_turned_too(tmp_path):
    path = _saved(tmp_path / "image.png", 6, _PIXELS.astype(np.uint16) << 8)
    assert np.array_equal(_read(path, 3, 2), np.rot90(_PIXELS, -1))
    assert np.array_equal(np.asarray(read_picture(path, ""))[..., 0], np.rot90(_PIXELS, -1))


def test_the_size_is_that_of_the_image_as_it_is_shown(tmp_path):
    path = _saved(tmp_path / "image.jpg", 8)
    with pytest.raises(UserError, match=r"(?s)expected: 3 × 2 pixels.*got: 2 × 3"):
        _read(path, 2, 3)


@pytest.mark.parametrize(
    "data", [b"Exif\0\0", b"Exif\0\0no TIFF at all", b"Exif\0\0MM\0*\0\0\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\x05"]
)
def test_an_image_with_damaged_exif_data_is_read_as_it_is(data, tmp_path):
    path = tmp_path / "image.jpg"
    Image.fromarray(_PIXELS).save(path, exif=data)
    assert _read(path, 2, 3).shape == np.asarray(read_picture(path, "")).shape[:2] == (2, 3)
