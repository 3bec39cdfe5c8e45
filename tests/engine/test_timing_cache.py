"""The timing cache: kept by GPU and version; its failures do not end a build."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rtx_builds import LINEAR, Watch, build, model_of

from trtconvert.engine import timing_cache


def test_timings_are_kept_by_gpu_and_version(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = timing_cache.timing_cache_path("NVIDIA H200", "10.6.0.post2")
    assert path == tmp_path / "trtconvert/timing/nvidia-h200-tensorrt-10.6.0.post2.cache"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorRT-RTX keeps the calls and has nothing to time
def test_a_timing_cache_is_kept_and_read_again(tmp_path):
    path, watch = tmp_path / "deep" / "a.cache", Watch()
    for _ in range(2):
        build(model_of(*LINEAR), watch=watch, timing_cache=path)
    assert path.stat().st_size > 32 and watch.notices == []
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:40] + b"?" + b[41:]])
def test_a_damaged_timing_cache_is_dropped_with_a_notice(tmp_path, damage):
    path, watch = tmp_path / "a.cache", Watch()
    build(model_of(*LINEAR), timing_cache=path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    build(model_of(*LINEAR), watch=watch, timing_cache=path)
    assert any("is damaged: it is not used" in notice and str(path) in notice for notice in watch.notices)
    assert path.read_bytes() == whole


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_builds_that_end_at_the_same_time_lose_no_timings(tmp_path):
    """Timings that were added after this build read the file are kept; a file that is unchanged since is not merged."""
    merged = []

    class Timings:
        def __init__(self, content=b""):
            self.parts = set(content.split(b"+")) - {b""}

        def combine(self, other, ignore_mismatch):
            merged.append(other.parts)
            self.parts |= other.parts
            return True

        def serialize(self):
            return b"+".join(sorted(self.parts))

    path, watch = tmp_path / "a.cache", Watch()
    for mine, loaded in ((b"first", b""), (b"second", b""), (b"first", b""), (b"first+second+third", b"first+second")):
        config = SimpleNamespace(get_timing_cache=lambda mine=mine: Timings(mine), create_timing_cache=Timings)
        timing_cache.store_timings(config, path, loaded, watch.notice)
    assert timing_cache._read(path, watch.notice) == b"first+second+third" and watch.notices == []
    assert merged == [{b"first"}, {b"first", b"second"}]


def test_a_timing_cache_that_cannot_be_kept_ends_no_build(tmp_path):
    (tmp_path / "file").write_text("")
    watch = Watch()
    assert build(model_of(*LINEAR), watch=watch, timing_cache=tmp_path / "file" / "a.cache")
    assert len(watch.notices) == 2 and "is not kept" in watch.notices[1]
