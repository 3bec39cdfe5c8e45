"""Users' images and captions: a folder of images, a file of prompts, a Hugging Face dataset on disk.

All are streams of `Example`s. Images are opened on use, so that only names are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from trtconvert.errors import UserError, first_line
from trtconvert.images import IMAGE_SUFFIXES, images_below, read_image

METADATA, CAPTION_KEYS = "metadata.jsonl", ("text", "caption", "label")
"""As in the image folders of Hugging Face's datasets; the first key that exists counts."""

_SKIP_BAD = "leave bad samples out with --skip-bad"


@dataclass(frozen=True)
class Example:
    """One sample of a user's data.

    Attributes:
        name: path and place, for messages.
        caption: empty if there is none.
        image: opens the image; None for a prompt.
    """

    name: str
    caption: str
    image: Callable[[], Image.Image] | None = None


@dataclass(frozen=True)
class Examples:
    """A stream of examples that can be read repeatedly.

    Attributes:
        count: number of examples.
        read: starts at the first example. An example that cannot be read is yielded as its error.
    """

    count: int
    read: Callable[[], Iterator[Example | UserError]]


def load_image(example: Example, shape: tuple[int, int, int]) -> Tensor:
    """Loads an example's image, see `read_image`."""
    assert example.image is not None
    return read_image(example.image, example.name, shape, _SKIP_BAD)


def image_folder(folder: Path) -> Examples:
    """Opens the images below a folder, sorted by name, with captions from `metadata.jsonl` or from .txt files of the same names.

    Raises:
        UserError: there is no image, or the captions are incomplete.
    """
    files = images_below(folder)
    if not files:
        raise UserError(
            f"there is no image in {folder}",
            expected="files that end in " + ", ".join(IMAGE_SUFFIXES),
            got="an empty folder" if not any(folder.iterdir()) else "other files",
            remedy="correct calibration.data in the recipe, or --data",
        )
    described = _metadata(folder) if (folder / METADATA).is_file() else None
    beside = described is None and any(file.with_suffix(".txt").is_file() for file in files)

    def caption(file: Path) -> str:
        if described is not None:
            name = file.relative_to(folder).as_posix()
            if name not in described:
                raise _no_caption(file, f"a line of {folder / METADATA} with the file_name '{name}'")
            return described[name]
        return _text(file.with_suffix(".txt"), file) if beside else ""

    def read() -> Iterator[Example | UserError]:
        for file in files:
            try:
                yield Example(str(file), caption(file), lambda file=file: Image.open(file))
            except UserError as error:
                yield error

    return Examples(len(files), read)


def _metadata(folder: Path) -> dict[str, str]:
    captions = {}
    with (folder / METADATA).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line.decode())
                key = next(key for key in CAPTION_KEYS if key in entry)
                captions[entry["file_name"]] = str(entry[key])
            except (ValueError, KeyError, TypeError, StopIteration) as error:
                raise UserError(
                    f"{folder / METADATA}:{number} does not describe an image",
                    expected='a JSON object in UTF-8 such as {"file_name": "0001.png", "text": "a red house"}',
                    got=line[:80].decode(errors="replace").strip(),
                    remedy="correct the line",
                ) from error
    return captions


def _text(path: Path, image: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _no_caption(image, f"a UTF-8 file {path.name} beside it") from error


def _no_caption(image: Path, expected: str) -> UserError:
    return UserError(
        f"the image {image} has no caption, but others have one",
        expected=expected,
        got="no readable caption",
        remedy=f"add the caption, or {_SKIP_BAD}",
    )


def _has_text(line: bytes) -> bool:
    """True if a line holds more than whitespace and a byte order mark."""
    return bool(line.decode("utf-8-sig", errors="replace").strip())


def prompts_file(path: Path) -> Examples:
    """Opens a UTF-8 file with a prompt per line; empty lines are ignored. UserError if there is no prompt."""
    with path.open("rb") as file:
        count = sum(1 for line in file if _has_text(line))
    if not count:
        raise UserError(
            f"there is no prompt in {path}",
            expected="one prompt per line, in UTF-8",
            got="an empty file",
            remedy="correct calibration.data in the recipe, or --data",
        )

    def read() -> Iterator[Example | UserError]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if _has_text(line):
                    try:
                        yield Example(f"{path}:{number}", line.decode("utf-8-sig").strip())
                    except UnicodeDecodeError as error:
                        yield UserError(
                            f"{path}:{number} is not UTF-8",
                            expected="UTF-8",
                            got=f"byte 0x{line[error.start]:02x} at column {error.start + 1}",
                            remedy=f"convert the file, for example with iconv, or {_SKIP_BAD}",
                        )

    return Examples(count, read)


def dataset_folder(folder: Path) -> Examples:
    """Opens a dataset that `datasets.Dataset.save_to_disk` wrote, memory-mapped: a column `image`, or captions only.

    A dictionary of splits gives "train", or the first split.

    Raises:
        UserError: the library is missing, or the folder or its columns do not fit.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports] (optional)
    except ImportError as error:
        raise UserError(
            f"{folder} is a Hugging Face dataset, but the library that reads it is missing",
            expected="the Python package datasets",
            got="not installed",
            remedy="pip install datasets (trtconvert[datasets]), or give a folder of images",
        ) from error
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # datasets and Arrow raise kinds of their own
        raise UserError(
            f"cannot read the dataset {folder}",
            expected="a folder that datasets.save_to_disk wrote",
            got=first_line(error),
            remedy="save it again",
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    caption_key = next((key for key in CAPTION_KEYS if key in loaded.column_names), None)
    has_image = "image" in loaded.column_names
    if not has_image and caption_key is None:
        raise UserError(
            f"the dataset {folder} has no column to calibrate on",
            expected="image, " + " or ".join(CAPTION_KEYS),
            got=", ".join(loaded.column_names),
            remedy="rename the columns of the dataset to these names",
        )
    if has_image:
        # Not decoded here: a damaged image must fail when it is opened.
        loaded = loaded.cast_column("image", datasets.Image(decode=False))

    def read() -> Iterator[Example | UserError]:
        row: Any  # a dictionary, for a dataset without a format
        for number, row in enumerate(loaded):
            caption = str(row[caption_key]) if caption_key else ""
            image = (lambda stored=row["image"]: _stored_image(stored)) if has_image else None
            yield Example(f"{folder}[{number}]", caption, image)

    return Examples(len(loaded), read)


def _stored_image(stored: dict) -> Image.Image:
    import io

    return Image.open(io.BytesIO(stored["bytes"]) if stored["bytes"] is not None else stored["path"])
