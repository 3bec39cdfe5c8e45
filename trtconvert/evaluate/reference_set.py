"""Reference sets: real images that sets of samples are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.evaluate.metrics import NEIGHBOURS
from trtconvert.files import sha256
from trtconvert.images import IMAGE_SUFFIXES, images_below, read_image


@dataclass(frozen=True)
class ReferenceSet:
    """Images that are read on demand.

    Attributes:
        name: to show.
        count: of images.
        identity: hash of the images and of their number of channels.
        read: reads a range of images, [N, C, H, W] FP32 in [0, 1].
    """

    name: str
    count: int
    identity: str
    read: Callable[[range], Tensor]


def load_reference(name: str, shape: torch.Size) -> ReferenceSet:
    """Opens a reference set.

    Args:
        name: "digits", the held-out fifth of scikit-learn's digits; "emoji", a held-out tenth of Noto's; or a folder of
            images, searched with its subfolders.
        shape: of a sample, [C, H, W]; the images must have its size. They are read with its number of channels.
    Raises:
        UserError: no such folder, or too few images in it. `read` raises it for images of another size.
    """
    if name in _SHIPPED:
        reference = _SHIPPED[name]()
        got = reference.read(range(1)).shape[1:]
        if got != shape:
            raise UserError(
                f"the reference set '{name}' does not fit the samples",
                expected=f"images of {list(shape)}",
                got=str(list(got)),
                remedy="give a folder of images with --reference",
            )
        return reference
    return _folder(Path(name), shape)


def _digits() -> ReferenceSet:
    from trtconvert.evaluate.classifier import digits_data

    return _in_memory("digits, held out", digits_data("test")[0])


def _emoji() -> ReferenceSet:
    from trtconvert.evaluate.emoji import held_out_emoji

    return _in_memory("emoji, held out", held_out_emoji())


def _in_memory(name: str, images: Tensor) -> ReferenceSet:
    identity = hashlib.sha256(images.numpy().tobytes()).hexdigest()
    return ReferenceSet(name, len(images), identity, lambda held: images[held.start : held.stop])


_SHIPPED = {"digits": _digits, "emoji": _emoji}


def _folder(folder: Path, shape: torch.Size) -> ReferenceSet:
    paths = images_below(folder) if folder.is_dir() else []
    if not paths:
        raise UserError(
            f"the reference set {folder} has no images",
            expected=f"'digits', 'emoji', or a folder with {', '.join(IMAGE_SUFFIXES)} files",
            got="an empty folder" if folder.is_dir() else "a file" if folder.exists() else "no such folder",
            remedy="correct --reference",
        )
    if len(paths) <= NEIGHBOURS:
        raise UserError(
            f"the reference set {folder} has too few images",
            expected=f"more than {NEIGHBOURS}; meaningful figures need thousands",
            got=str(len(paths)),
            remedy="give a folder with more images with --reference",
        )
    channels, height, width = shape
    # Models read the same files as grey or as colour.
    digest = hashlib.sha256(f"{channels} channels\n".encode())
    for path in paths:
        digest.update(f"{path.relative_to(folder)} {sha256(path)}\n".encode())

    def read_one(path: Path) -> Tensor:
        return read_image(lambda: Image.open(path), str(path), (channels, height, width), "remove it from the folder")

    def read(held: range) -> Tensor:
        return torch.stack([read_one(paths[index]) for index in held])

    return ReferenceSet(folder.name, len(paths), digest.hexdigest(), read)
