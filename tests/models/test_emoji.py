"""The colour model that ships: its inputs and outputs, and the quality of its samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support import REPOSITORY

from trtconvert.errors import UserError
from trtconvert.evaluate.emoji import held_out_emoji, load_emoji_classifier
from trtconvert.evaluate.features import load_extractor
from trtconvert.evaluate.reference_set import load_reference
from trtconvert.models.emoji import draw_emoji, emoji_model, label_of_seed
from trtconvert.models.emoji_dit import CATEGORIES, CLASSES, NULL_LABEL, EmojiDiT
from trtconvert.shipped import shipped_folder

sys.path.append(str(REPOSITORY / "recipes"))

from emoji_data import category_accuracy, emoji_data

WEIGHTS = shipped_folder() / "emoji-dit.safetensors"


@pytest.fixture(scope="module")
def model():
    return emoji_model(WEIGHTS)


def test_the_file_is_small_enough_to_ship():
    assert WEIGHTS.stat().st_size <= 12_000_000


def test_one_step_from_pure_noise_is_an_emoji_on_white(model):
    # v at the last timestep is -x₀ up to a little noise: one step draws a mean of emoji.
    images = model.sample(model.denoiser, [0, 1], steps=1, solver="ddim")
    assert images.shape == (2, 3, 64, 64)
    corners = images[:, :, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.min() > 0.8, "corners are white"
    assert images[:, :, 24:40, 24:40].mean() < 0.8, "the middle is not"


def test_guidance_asks_for_both_halves_in_one_call(model):
    seen = []

    def denoiser(x, timestep, label):
        seen.append((x, label))
        return torch.zeros_like(x)

    model.sample(denoiser, [3, 4], steps=1, solver="ddim")
    (x, label), *more = seen
    assert not more and torch.equal(x[:2], x[2:])
    assert label.tolist() == [NULL_LABEL, NULL_LABEL, label_of_seed(3), label_of_seed(4)]


def test_seeds_draw_the_categories_by_turns():
    names = list(CATEGORIES)
    for seed in range(40):
        assert CLASSES[label_of_seed(seed)] in CATEGORIES[names[seed % len(names)]]


def test_captions_are_subgroups():
    assert draw_emoji.labels(["animal-bird", ""])["label"].tolist() == [CLASSES.index("animal-bird"), NULL_LABEL]
    with pytest.raises(ValueError, match="animal-mammal"):
        draw_emoji.labels(["a bird"])


def test_the_emoji_model_runs_at_other_sizes(model):
    with torch.no_grad():
        out = model.denoiser(torch.randn(1, 3, 32, 48), torch.tensor([10.0]), torch.tensor([0]))
    assert out.shape == (1, 3, 32, 48)


def test_the_classifier_knows_held_out_emoji():
    images = load_reference("emoji", torch.Size([3, 64, 64])).read(range(190))
    classifier = load_emoji_classifier(shipped_folder() / "emoji-classifier.safetensors")
    with torch.no_grad():
        sure = classifier(images).softmax(1).amax(1)
    assert images.shape == (190, 3, 64, 64) and images[:, :, 0, 0].mean() > 0.9
    assert sure.mean() > 0.6
    features = load_extractor("emoji-classifier")(images[:4])
    assert features.pooled.shape == (4, 128) and features.logits is not None and features.logits.shape == (4, 9)


def test_other_samples_than_emoji_are_told_apart_from_the_reference():
    with pytest.raises(UserError, match="'emoji' does not fit"):
        load_reference("emoji", torch.Size([1, 8, 8]))


def test_training_data_that_is_not_there_says_where_it_comes_from(tmp_path: Path):
    with pytest.raises(UserError) as error:
        emoji_data(tmp_path)
    assert "npm pack emoji-datasource-google" in error.value.remedy


def test_accuracy_is_of_categories():
    classifier = load_emoji_classifier(shipped_folder() / "emoji-classifier.safetensors")
    images = held_out_emoji()[:6]
    with torch.no_grad():
        category = classifier(images).argmax(1)
    first = torch.tensor([CLASSES.index(list(CATEGORIES.values())[c][0]) for c in category.tolist()])
    assert category_accuracy(classifier, images, first) == 1.0


def test_a_new_model_gives_zeros():
    """adaLN-Zero: before training the output is 0 for any input."""
    with torch.no_grad():
        out = EmojiDiT()(torch.randn(1, 3, 8, 8), torch.tensor([5.0]), torch.tensor([1]))
    assert torch.equal(out, torch.zeros_like(out))
