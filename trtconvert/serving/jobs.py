"""Orders and answers, as they travel between processes. Imports neither torch nor Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtconvert.errors import BackendUnavailable, TrtconvertError, UserError

ImageFormat = Literal["png", "jpeg", "webp"]
FORMATS: tuple[ImageFormat, ...] = ("png", "jpeg", "webp")


@dataclass(frozen=True)
class Range:
    """Sizes in pixels that a bundle takes, `low` to `high`, and the default `opt`."""

    low: int
    opt: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class Offer:
    """The images that a bundle can draw.

    Attributes:
        shows: the condition of an image beside its seed: a "prompt", which is required; a "caption" for the model's own function;
            the "label" of a class; or "seed" for none.
        height, width: sizes of images; None for a model of one unknown size: a replica refuses other sizes after its first image.
        batch: largest number of images of a batch.
        backend: description of the backend.
    """

    shows: Literal["prompt", "caption", "label", "seed"]
    height: Range | None
    width: Range | None
    batch: int
    backend: str


@dataclass(frozen=True)
class Shape:
    """The common properties of images in a batch.

    Attributes:
        height, width: in pixels; None for the bundle's.
        steps: denoising steps.
        shown: True if prompts or captions are given; or the label of the whole batch.
    """

    height: int | None
    width: int | None
    steps: int
    shown: bool | str


@dataclass(frozen=True)
class Order:
    """One image: its seed, its prompt, caption or label, and its file format."""

    seed: int
    prompt: str | None
    format: ImageFormat


@dataclass(frozen=True)
class Batch:
    shape: Shape
    orders: tuple[Order, ...]


@dataclass(frozen=True)
class Drawn:
    """The file of an image."""

    image: bytes


@dataclass(frozen=True)
class Refusal:
    """The reason why there is no image.

    Attributes:
        whose: "client" if another request helps, "machine" for a temporary condition, "fault" for a bug.
    """

    whose: Literal["client", "machine", "fault"]
    problem: str
    expected: str
    got: str
    remedy: str


Answer = Drawn | Refusal


def refusal(error: TrtconvertError) -> Refusal:
    """Convert an error to a refusal."""
    whose = (
        "client" if isinstance(error, UserError) else "machine" if isinstance(error, BackendUnavailable) else "fault"
    )
    return Refusal(whose, error.problem, error.expected, error.got, error.remedy)
