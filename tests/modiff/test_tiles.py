"""Candidate tiles of a size, and measurements kept between processes."""

from __future__ import annotations

import json

import pytest

from trtconvert.cache import timing_path
from trtconvert.modiff.tiles import TILES, Choices, Tiles, candidates

PROCESSORS = 132


@pytest.mark.parametrize("pixels", [1, 64, 1000, 4096, 65536, 1 << 22])
@pytest.mark.parametrize(("outputs", "widths"), [(16, [32]), (128, [128]), (256, [256, 128]), (3072, [768])])
def test_few_tiles_are_tried(pixels, outputs, widths):
    tried = candidates(pixels, outputs, widths, PROCESSORS)
    assert 4 <= len(tried) <= 6 and set(tried) <= set(TILES) and len(set(tried)) == len(tried)


def test_large_products_take_large_tiles_and_small_ones_small():
    large, small = candidates(1 << 20, 1024, [1024], PROCESSORS), candidates(256, 128, [256], PROCESSORS)
    assert min(one.rows * one.strip for one in large) >= 128 * 128
    assert small[0] == TILES[-1] and small[0].rows < small[-1].rows * 2


def test_strips_are_no_wider_than_they_must_be():
    assert all(one.strip <= 128 for one in candidates(1 << 18, 128, [128], PROCESSORS))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_choices_are_kept_between_processes(home):
    first, second = (Choices("NVIDIA H100", "3.9.0", "kernel") for _ in range(2))
    first.add("64 128", TILES[3])
    second.add("64 256", TILES[4])  # knew nothing of the first one's
    assert second.get("64 128") is None
    later = Choices("NVIDIA H100", "3.9.0", "kernel")
    assert (later.get("64 128"), later.get("64 256")) == (TILES[3], TILES[4])
    assert Choices("NVIDIA L4", "3.9.0", "kernel").get("64 128") is None


def test_choices_of_another_kernel_are_forgotten(home):
    Choices("a GPU", "3.9.0", "old").add("64", TILES[0])
    changed = Choices("a GPU", "3.9.0", "new")
    assert changed.get("64") is None
    changed.add("128", TILES[1])
    assert Choices("a GPU", "3.9.0", "new").get("128") == TILES[1]
    assert Choices("a GPU", "3.9.0", "old").get("64") is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kernel": "k"}', '{"kernel": "k", "tiles": [1]}', "\0"])
def test_damaged_choices_are_made_anew(home, content):
    path = timing_path("a GPU modiff triton 3.9.0", ".json")
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(content)
    choices = Choices("a GPU", "3.9.0", "k")
    assert choices.get("64") is None
    choices.add("64", TILES[0])
    assert Choices("a GPU", "3.9.0", "k").get("64") == TILES[0]


def test_tiles_that_are_not_tried_any_more_are_no_choice(home):
    Choices("a GPU", "3.9.0", "k").add("64", Tiles(8, 8, 8, 1, 1))
    assert Choices("a GPU", "3.9.0", "k").get("64") is None


def test_choices_where_nothing_can_be_written(home):
    (home / "trtconvert").write_text("")  # a file in the folder's place
    choices = Choices("a GPU", "3.9.0", "k")
    choices.add("64", TILES[2])
    assert choices.get("64") == TILES[2]


def test_a_choice_is_text(home):
    Choices("a GPU", "3.9.0", "k").add("64", TILES[0])
    path = timing_path("a GPU modiff triton 3.9.0", ".json")
    assert path is not None and path.name == "a-gpu-modiff-triton-3.9.0.json"
    assert json.loads(path.read_text()) == {"kernel": "k", "tiles": {"64": [128, 128, 128, 8, 3]}}
