"""Draws batches of images with a loaded bundle."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert import models, runtime
from trtconvert.errors import TrtconvertError, UserError, first_line, kind_and_first_line
from trtconvert.evaluate.grid import picture
from trtconvert.runtime.batches import AnyBatch
from trtconvert.serving.jobs import Answer, Batch, Drawn, ImageFormat, Offer, Order, Range, Refusal, Shape, refusal

_MOST_AT_ONCE = 64
"""Largest batch for a model's own sampler, which takes any number of images and needs memory for all of them."""


class Drawer:
    """Draws with a bundle, one batch at a time.

    Args:
        folder: the bundle; device: see `trtconvert.runtime.load`.

    Attributes:
        offer: sizes and conditions of the images.

    Raises:
        UserError: the folder is not a bundle, or its sampler cannot be loaded, see `trtconvert.models.load_sampler`.
        BackendUnavailable: the bundle cannot run on this machine.
    """

    def __init__(self, folder: Path, device: str | None = None) -> None:
        self._bundle = runtime.load(folder, device=device)
        self._denoiser = AnyBatch(self._bundle["denoiser"])
        self._draw: _Pipeline | _Sampler
        if self._bundle.manifest.pipeline:
            self._draw = _Pipeline(self._bundle)
        else:
            self._draw = _Sampler(self._bundle)
        self.offer = self._draw.offer
        self._own: tuple[int, int] | None = None  # drawn height and width of a model without known sizes

    def __call__(self, batch: Batch) -> list[Answer]:
        """Return an answer for each order. A refused order does not keep the others from being drawn."""
        answers: dict[int, Answer] = {}
        left = list[int]()
        for place, order in enumerate(batch.orders):
            problem = self._draw.refused(order)
            if problem is None:
                left.append(place)
            else:
                answers[place] = problem
        orders = [batch.orders[place] for place in left]
        answers |= dict(zip(left, self._answers(batch.shape, orders), strict=True))
        return [answers[place] for place in range(len(batch.orders))]

    def check_device(self) -> None:
        """Raise RuntimeError if an earlier error of a kernel ended this process's use of its GPU. Does not wait for the GPU."""
        if self._denoiser.device.type == "cuda":
            with torch.cuda.device(self._denoiser.device):
                torch.cuda.Event().record()

    def close(self) -> None:
        """Free the engines."""
        self._bundle.close()

    def _answers(self, shape: Shape, orders: Sequence[Order]) -> list[Answer]:
        if not orders:
            return []
        try:
            images = self._images(shape, orders)
            return [_answer(image, order) for image, order in zip(images, orders, strict=True)]
        except TrtconvertError as error:
            why = refusal(error)
        except (torch.OutOfMemoryError, MemoryError) as error:
            why = Refusal(
                "machine",
                "out of memory",
                "memory for a batch of images",
                first_line(error),
                "try again, or serve with a smaller --max-batch",
            )
        except Exception as error:
            why = _fault(error)
        if len(orders) > 1:  # one order may be the cause
            return [answer for order in orders for answer in self._answers(shape, [order])]
        return [why]

    def _images(self, shape: Shape, orders: Sequence[Order]) -> Tensor:
        """Draw the images. Raises UserError if the model draws another size."""
        told = {"height": self.offer.height is not None, "width": self.offer.width is not None}
        asked = [None if told[name] else getattr(shape, name) for name in told]
        if self._own is not None:  # known before drawing
            _require_size(asked, self._own, shape)
        # Sizes that the offer does not have are not passed on: a pipeline would try to draw them.
        plain = dataclasses.replace(shape, **{name: None for name in told if not told[name]})
        images = self._draw(self._denoiser, plain, orders)
        if not all(told.values()):
            self._own = images.shape[2], images.shape[3]
            _require_size(asked, self._own, shape)
        return images


def _answer(image: Tensor, order: Order) -> Answer:
    if not image.isfinite().all():  # a file of it would be black
        return Refusal(
            "fault",
            "the drawn image has NaN or Inf",
            "finite numbers",
            f"seed {order.seed}",
            "try another seed; if many fail, build the bundle with another model.dtype: FP16 ends at 65504",
        )
    return Drawn(encoded(image, order.format))


def _fault(error: Exception) -> Refusal:
    """Log an error of another kind, such as of a user's function, and return the refusal."""
    logging.getLogger("ray.serve").error("drawing failed", exc_info=error)
    return Refusal("fault", "drawing failed", "images", kind_and_first_line(error), "report it with the log")


def _require_size(asked: Sequence[int | None], drawn: tuple[int, int], shape: Shape) -> None:
    """Raise UserError if the asked height and width, each None for any, differ from the drawn ones."""
    if any(size is not None and size != own for size, own in zip(asked, drawn, strict=True)):
        height, width = drawn
        raise UserError(
            "the model does not draw this size",
            expected=f"{width}x{height} or auto",
            got=f"{shape.width}x{shape.height}",
            remedy="ask for the expected size, or leave the size out",
        )


class _Sampler:
    """Draws with the sampler of a shipped model or of an entry point."""

    def __init__(self, bundle: runtime.LoadedBundle) -> None:
        self._sample, self._condition = models.load_conditional_sampler(bundle)
        shows = "seed" if self._condition is None else "caption"
        self.offer = Offer(shows, None, None, _MOST_AT_ONCE, bundle.backend)

    def refused(self, order: Order) -> Refusal | None:
        """Return why the model refuses the caption; None if it does not."""
        if order.prompt is None or self._condition is None:
            return None
        try:
            self._condition([order.prompt])
        except ValueError as error:
            return Refusal(
                "client",
                "the model does not take this prompt",
                first_line(error),
                repr(order.prompt),
                "correct the prompt, or leave it out to draw by the seed",
            )
        except TrtconvertError as error:
            return refusal(error)
        except Exception as error:
            return _fault(error)
        return None

    def __call__(self, denoiser: AnyBatch, shape: Shape, orders: Sequence[Order]) -> Tensor:
        conditions = None
        if shape.shown and self._condition is not None:
            conditions = dict(self._condition([order.prompt or "" for order in orders]))
        return self._sample(
            denoiser, [order.seed for order in orders], steps=shape.steps, solver="ddim", conditions=conditions
        )


class _Pipeline:
    """Draws with a diffusers pipeline of the bundle's components."""

    def __init__(self, bundle: runtime.LoadedBundle) -> None:
        from trtconvert.models.call_options import size_range
        from trtconvert.models.pipeline_sampler import PipelineSampler

        sampler = models.load_sampler(bundle)
        assert isinstance(sampler, PipelineSampler)
        self._sampler, self._caller = sampler, sampler.caller
        options = bundle.manifest.recipe.model.options

        def sizes(name: str) -> Range | None:
            given: Any = options.get(name)
            return None if given is None else Range(*size_range(name, given))

        by_class = "class_labels" in self._caller.parameters and not self._caller.takes_prompts
        shows = "prompt" if self._caller.takes_prompts else "label" if by_class else "seed"
        self.offer = Offer(shows, sizes("height"), sizes("width"), sampler.batch, bundle.backend)

    def refused(self, order: Order) -> Refusal | None:
        """Return None: prompts are any text, and the call itself refuses wrong labels."""
        return None

    def __call__(self, denoiser: AnyBatch, shape: Shape, orders: Sequence[Order]) -> Tensor:
        asked = {"height": shape.height, "width": shape.width}
        sizes = dict(self._sampler.sizes) | {name: size for name, size in asked.items() if size is not None}
        caller, captions = self._caller, None
        if isinstance(shape.shown, str):
            caller = copy.copy(caller)
            caller.arguments = caller.arguments | {"class_labels": [_label(shape.shown)]}
        elif shape.shown:
            captions = [order.prompt or "" for order in orders]
        sampler = dataclasses.replace(self._sampler, caller=caller, sizes=sizes)
        images = sampler.draw(denoiser, denoiser.device, [order.seed for order in orders], shape.steps, captions)
        if "frames" not in sizes:
            _require_size([shape.height, shape.width], (images.shape[2], images.shape[3]), shape)
        return images


def _label(text: str) -> int:
    """Parse the number of a class. Raises UserError for other texts."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UserError(
            "the prompt is not a class of the model",
            expected="the number of a class",
            got=repr(text),
            remedy="correct the prompt, or leave it out to draw by the seed",
        )
    return int(text)


def encoded(image: Tensor, kind: ImageFormat) -> bytes:
    """Encode an image [C, H, W] in [0, 1], C 1 or 3, as a file."""
    file = io.BytesIO()
    picture(image).save(file, kind.upper())
    return file.getvalue()
