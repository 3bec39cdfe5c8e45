"""Reference sets: the images that samples should look like."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.files import sha256

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True)
class ReferenceSet:
    """Images that are read when they are asked for.

    Attributes:
        name: for people.
        count: of images.
        identity: hash of the images.
        read: a range of them, [N, C, H, W] FP32 in [0, 1].
    """

    name: str
    count: int
    identity: str
    read: Callable[[range], Tensor]


def load_reference(name: str, shape: torch.Size) -> ReferenceSet:
    """
    Args:
        name: "digits", the held-out fifth of scikit-learn's digits, or a folder of images, searched with its subfolders.
        shape: of a sample, [C, H, W]; the images must have its size, and are read with its number of channels.
    Raises:
        UserError: no such folder, no images in it, or they have another size than the samples.
    """
    if name == "digits":
        reference = _digits()
        got = reference.read(range(1)).shape[1:]
        if got != shape:
            raise UserError(
                "the reference set 'digits' does not fit the samples",
                expected=f"images of {list(shape)}",
                got=str(list(got)),
                remedy="give a folder of images with --reference",
            )
        return reference
    return _folder(Path(name), shape)


def _digits() -> ReferenceSet:
    from trtconvert.evaluate.classifier import digits_data

    images, _ = digits_data("test")
    identity = hashlib.sha256(images.numpy().tobytes()).hexdigest()
    return ReferenceSet("digits, held out", len(images), identity, lambda held: images[held.start : held.stop])


def _folder(folder: Path, shape: torch.Size) -> ReferenceSet:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not paths:
        raise UserError(
            f"the reference set {folder} has no images",
            expected=f"'digits', or a folder with {', '.join(SUFFIXES)} files",
            got="an empty folder" if folder.is_dir() else "a file" if folder.exists() else "no such folder",
            remedy="correct --reference",
        )
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(folder)} {sha256(path)}\n".encode())

    def read(held: range) -> Tensor:
        return torch.stack([_image(paths[index], shape) for index in held])

    return ReferenceSet(folder.name, len(paths), digest.hexdigest(), read)


def _image(path: Path, shape: torch.Size) -> Tensor:
    channels, height, width = shape
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"), dtype=np.float32) / 255
    # Pillow's decoders raise SyntaxError and others for damaged files.
    except Exception as error:
        raise UserError(
            f"cannot read the reference image {path}",
            expected="an image",
            got=f"{type(error).__name__}: {error}",
            remedy="replace it, or take it out of the folder",
        ) from error
    if pixels.shape[:2] != (height, width):
        raise UserError(
            f"the reference image {path} has another size than the samples",
            expected=f"{width} × {height} pixels",
            got=f"{pixels.shape[1]} × {pixels.shape[0]}",
            remedy="resize the reference set to the samples' size, by the way that the published figures used",
        )
    return torch.from_numpy(pixels.reshape(height, width, -1)).permute(2, 0, 1)
