"""What is asked of a bundle and what comes back, as it travels between processes. Free of torch and of Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trtconvert.errors import BackendUnavailable, TrtconvertError, UserError

ImageFormat = Literal["png", "jpeg", "webp"]
FORMATS: tuple[ImageFormat, ...] = ("png", "jpeg", "webp")


@dataclass(frozen=True)
class Range:
    """Sizes in pixels that a bundle takes: from `low` to `high`, `opt` where none is asked for."""

    low: int
    opt: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class Offer:
    """What a bundle draws.

    Attributes:
        shows: what decides on an image beside its seed: a "prompt"; a "caption", which the model's own function reads; the
            "label" of a class; or nothing, "seed". Only the first has to be given.
        height, width: of images; None where the model draws one size, which it does not say beforehand: a replica takes requests
            of any, and refuses those of others.
        batch: images drawn at once, at most.
        backend: what runs it, in words.
    """

    shows: Literal["prompt", "caption", "label", "seed"]
    height: Range | None
    width: Range | None
    batch: int
    backend: str


@dataclass(frozen=True)
class Shape:
    """What images that are drawn together have in common.

    Attributes:
        height, width: in pixels; None for those of the bundle.
        steps: of denoising.
        shown: whether prompts, captions or labels are given; and the label, one for the whole batch.
    """

    height: int | None
    width: int | None
    steps: int
    shown: bool | str


@dataclass(frozen=True)
class Order:
    """One image: its seed, what it shows, and the file that it becomes."""

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
    """Why there is no image.

    Attributes:
        whose: "client" for what another request would mend, "machine" for what passes, "fault" for what should not be.
    """

    whose: Literal["client", "machine", "fault"]
    problem: str
    expected: str
    got: str
    remedy: str


Answer = Drawn | Refusal


def refusal(error: TrtconvertError) -> Refusal:
    """An error as what is answered."""
    whose = (
        "client" if isinstance(error, UserError) else "machine" if isinstance(error, BackendUnavailable) else "fault"
    )
    return Refusal(whose, error.problem, error.expected, error.got, error.remedy)
