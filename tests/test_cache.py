"""The build cache: a stage is made when what it reads changed, or when its files are not what they were."""

import json

import pytest
from support import contents, partials

from trtconvert import cache as cache_module
from trtconvert.cache import Cache, default_folder

MADE = {"a.bin": b"\x00\x01", "b.txt": b"text"}


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def make(folder):
    for name, content in MADE.items():
        (folder / name).write_bytes(content)


def must_not_be_made(_):
    pytest.fail("the stage was made again")


def test_a_stage_is_made_once(cache):
    first = cache.stage("one", {"x": 1, "y": [2]}, make)
    second = cache.stage("one", {"y": [2], "x": 1}, must_not_be_made)
    assert (first.reused, second.reused) == (False, True)
    assert first.key == second.key
    assert {name: data for name, data in contents(second.folder).items() if name in MADE} == MADE


@pytest.mark.parametrize(("name", "reads"), [("one", {"x": 2}), ("one", {"x": 1, "y": None}), ("two", {"x": 1})])
def test_another_name_or_other_reads_are_another_stage(cache, name, reads):
    first = cache.stage("one", {"x": 1}, make)
    second = cache.stage(name, reads, make)
    assert not second.reused
    assert first.key != second.key and first.folder != second.folder


def test_other_code_is_another_stage(cache, monkeypatch):
    cache.stage("one", {"x": 1}, make)
    monkeypatch.setattr(cache_module, "code_identity", lambda: "of another version")
    assert not cache.stage("one", {"x": 1}, make).reused


def damage(folder, how):
    path = folder / "a.bin"
    if how == "altered":
        path.write_bytes(b"\x00\x02")
    elif how == "truncated":
        path.write_bytes(b"\x00")
    elif how == "missing":
        path.unlink()
    elif how == "no index":
        (folder / "stage.json").unlink()
    elif how == "index cut off":
        (folder / "stage.json").write_text('{"a.bin": "')
    elif how == "index of another kind":
        (folder / "stage.json").write_text(json.dumps(["a.bin"]))


@pytest.mark.parametrize(
    "how", ["altered", "truncated", "missing", "no index", "index cut off", "index of another kind"]
)
def test_a_damaged_stage_is_made_again(cache, how):
    folder = cache.stage("one", {}, make).folder
    damage(folder, how)
    again = cache.stage("one", {}, make)
    assert not again.reused
    assert cache.stage("one", {}, must_not_be_made).reused
    assert contents(folder)["a.bin"] == MADE["a.bin"]


def test_a_stage_that_fails_leaves_nothing_and_can_be_made_later(cache):
    def fail(folder):
        make(folder)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        cache.stage("one", {}, fail)
    assert contents(cache.folder) == {}
    assert partials(cache.folder) == []
    assert not cache.stage("one", {}, make).reused


def test_the_default_folder_follows_the_xdg_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "trtconvert"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_folder()) == "/home/someone/.cache/trtconvert"
