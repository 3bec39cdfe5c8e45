"""Batches drawn by bundles of the shipped model and of an entry point; pipelines are in tests/models/test_pipeline_bundles.py."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from trtconvert import runtime
from trtconvert.errors import UserError
from trtconvert.models.digits import draw_digits
from trtconvert.runtime.batches import AnyBatch
from trtconvert.serving.drawing import Drawer
from trtconvert.serving.jobs import Batch, Drawn, Order, Refusal, Shape

STEP = 1
"""Largest difference of 8-bit values by rounding in batches of other sizes."""


def pixels(answer: object) -> np.ndarray:
    assert isinstance(answer, Drawn), answer
    return np.asarray(Image.open(io.BytesIO(answer.image)).convert("RGB"), dtype=np.int16)


def test_digits_are_drawn_by_caption_or_by_seed(digits):
    """Images equal the sampler's, and do not depend on the rest of the batch."""
    drawer = Drawer(digits, "cpu")
    assert (drawer.offer.shows, drawer.offer.height) == ("caption", None) and "ONNX Runtime" in drawer.offer.backend
    with runtime.load(digits, device="cpu") as bundle:
        denoiser = AnyBatch(bundle["denoiser"])
        expected = draw_digits(
            denoiser, [5, 6, 7], steps=4, solver="ddim", conditions=draw_digits.labels(["3", "", "9"])
        )
        by_seed = draw_digits(denoiser, [5], steps=4, solver="ddim")
    shown = [Order(5, "3", "png"), Order(6, "", "webp"), Order(7, "9", "png")]
    answers = drawer(Batch(Shape(None, None, 4, True), tuple(shown)))
    alone = drawer(Batch(Shape(None, None, 4, True), (shown[2],)))
    (seeded,) = drawer(Batch(Shape(None, None, 4, False), (Order(5, None, "png"),)))

    def near(answer: object, image: torch.Tensor) -> bool:
        return bool(np.abs(pixels(answer) - image.mul(255).round().numpy().transpose(1, 2, 0)).max() <= STEP)

    assert near(answers[0], expected[0]) and near(answers[2], expected[2]) and near(alone[0], expected[2])
    assert near(seeded, by_seed[0])
    assert isinstance(answers[1], Drawn) and answers[1].image[8:12] == b"WEBP"
    drawer.close()


def test_one_caption_that_is_none_is_refused_alone(digits):
    drawer = Drawer(digits, "cpu")
    orders = [Order(seed, prompt, "png") for seed, prompt in enumerate(["1", "a cat", "12", "2"])]
    answers = drawer(Batch(Shape(None, None, 2, True), tuple(orders)))
    assert [isinstance(answer, Drawn) for answer in answers] == [True, False, False, True]
    assert isinstance(answers[1], Refusal) and answers[1].whose == "client"
    assert (answers[1].expected, answers[1].got) == ("one of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, or nothing", "'a cat'")
    drawer.close()


def test_the_size_that_a_bundle_draws_can_be_asked_for(digits, monkeypatch):
    """The first drawing reveals the size; later requests for other sizes are refused without drawing."""
    drawer = Drawer(digits, "cpu")
    (image,) = drawer(Batch(Shape(8, 8, 2, True), (Order(1, "1", "png"),)))
    assert pixels(image).shape == (8, 8, 3)
    monkeypatch.setattr(drawer._draw, "_sample", None)
    for height, width in ((16, 8), (8, 99_999)):
        answers = drawer(Batch(Shape(height, width, 2, True), (Order(1, "1", "png"), Order(2, "2", "png"))))
        for answer in answers:
            assert isinstance(answer, Refusal) and answer.whose == "client"
            assert answer.expected.startswith("8x8 ") and answer.got == f"{width}x{height}"
    drawer.close()


def test_another_size_than_a_bundle_draws_is_refused_before_any_is_known(digits):
    drawer = Drawer(digits, "cpu")
    (answer,) = drawer(Batch(Shape(16, 16, 2, True), (Order(1, "1", "png"),)))
    assert isinstance(answer, Refusal) and answer.expected.startswith("8x8 ") and answer.got == "16x16"
    drawer.close()


def test_memory_that_runs_out_is_no_fault_of_the_request(digits, monkeypatch):
    drawer = Drawer(digits, "cpu")

    def full(*_arguments: object, **_named: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(drawer._draw, "_sample", full)
    for answer in drawer(Batch(Shape(None, None, 2, True), (Order(1, "1", "png"), Order(2, "2", "png")))):
        assert isinstance(answer, Refusal) and answer.whose == "machine" and "--max-batch" in answer.remedy
    drawer.close()


def test_a_caption_that_fails_otherwise_is_refused_alone(digits, monkeypatch):
    """A function of the user's may look captions up in a dictionary."""
    drawer = Drawer(digits, "cpu")
    table = {"1": 1, "": 10}
    monkeypatch.setattr(
        drawer._draw, "_condition", lambda captions: {"label": torch.tensor([table[caption] for caption in captions])}
    )
    first, second = drawer(Batch(Shape(None, None, 2, True), (Order(1, "2", "png"), Order(2, "1", "png"))))
    assert isinstance(first, Refusal) and first.whose == "fault" and first.got == "KeyError: '2'"
    assert isinstance(second, Drawn)
    drawer.close()


def test_an_image_with_nan_is_no_black_image(digits, monkeypatch):
    drawer = Drawer(digits, "cpu")
    drawn = torch.stack([torch.full((1, 8, 8), value) for value in (0.5, float("nan"))])
    monkeypatch.setattr(drawer._draw, "_sample", lambda *_, **__: drawn)
    first, second = drawer(Batch(Shape(None, None, 2, False), (Order(1, None, "png"), Order(2, None, "png"))))
    assert isinstance(first, Drawn) and isinstance(second, Refusal)
    assert second.whose == "fault" and "NaN" in second.problem and second.got == "seed 2"
    drawer.close()


def test_an_entry_points_bundle_draws_by_its_seeds(tiny_build):
    """Independent of the sampler. The model has no captions, and the offer says so."""
    drawer = Drawer(tiny_build.bundle, "cpu")
    answers = drawer(Batch(Shape(None, None, 2, False), (Order(1, None, "png"), Order(2, None, "jpeg"))))
    assert drawer.offer.shows == "seed" and pixels(answers[0]).ndim == 3
    assert isinstance(answers[1], Drawn) and answers[1].image[:2] == b"\xff\xd8"
    drawer.close()


def test_a_folder_that_is_no_bundle_is_refused(tmp_path):
    with pytest.raises(UserError):
        Drawer(tmp_path, "cpu")
