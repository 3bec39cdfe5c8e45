"""Models that another process exports while the GPU computes."""

import importlib
import sys
import time

import pytest
import torch
from converted_pipelines import recipe_of, save
from rich.console import Console
from support import tiny_recipe

from trtconvert import pipeline
from trtconvert.cache import Cache
from trtconvert.errors import UserError
from trtconvert.models.placed import Place
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe
from trtconvert.stages import ahead
from trtconvert.stages.ahead import ExportAhead
from trtconvert.stages.build import Build
from trtconvert.stages.components import component_stages

ENCODER = "export text_encoder"


def small_build(folder, place, components):
    recipe = recipe_of(folder, "stable_diffusion", components)
    return Build(recipe, "weights", place, Cache(folder / "cache"), Reporter(Console(quiet=True)))


def ahead_of(build):
    return ExportAhead(build, "components", component_stages)


@pytest.fixture
def everywhere(monkeypatch):
    """Exports ahead on a CPU too."""
    for module in (pipeline, ahead):
        monkeypatch.setattr(module, "pays", lambda build: True)


@pytest.mark.soak  # tests/gpu has builds that do so
def test_another_process_exports_components_into_the_cache(tmp_path, everywhere):
    save(tmp_path / "pipeline", "stable_diffusion")
    build = small_build(tmp_path, Place("cpu", "float32", ""), {"text_encoder": {}})
    with ahead_of(build).ended() as exports:
        exports.start()
        exports.wait()
    assert component_stages(build)["text_encoder"].reused


@pytest.mark.soak
def test_a_build_with_exports_ahead_calibrates_first(tmp_path, everywhere):
    save(tmp_path / "pipeline", "stable_diffusion")
    report = Reporter(Console(quiet=True))
    recipe = recipe_of(tmp_path, "stable_diffusion", {"text_encoder": {}})
    made = pipeline.build(recipe, tmp_path / "bundle", Cache(tmp_path / "cache"), report)
    assert ENCODER in report.reused and "calibrate" not in report.reused
    stages = list(report.seconds)
    assert (
        stages.index("calibrate") < stages.index(ENCODER) < stages.index("search" if "search" in stages else "export")
    )
    assert "text_encoder" in made.manifest.components


@pytest.mark.soak
def test_another_process_exports_the_denoiser_beside_the_reference(tmp_path, everywhere):
    report = Reporter(Console(quiet=True))
    cache, recipe = Cache(tmp_path / "cache"), load_recipe(tiny_recipe(tmp_path))
    pipeline.build(recipe, tmp_path / "bundle", cache, report)
    assert "export" in report.reused and "reference" not in report.reused
    again = Reporter(Console(quiet=True))
    pipeline.build(recipe, tmp_path / "bundle", cache, again)  # a process would take longer than reading the cache
    assert "export denoiser" in report.seconds and "export denoiser" not in again.seconds


NOTES = """
import os

def load(build):
    (build.cache.folder.parent / "loaded").touch()

def fail(build):
    raise RuntimeError("no model")

def export(build, text):
    (build.cache.folder.parent / "exported").write_text(f"{text} {os.environ['OMP_NUM_THREADS']}")
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """A module that both processes import."""
    (tmp_path / "notes_of_exports.py").write_text(NOTES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield importlib.import_module("notes_of_exports")
    del sys.modules["notes_of_exports"]


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_a_prepared_process_loads_and_then_waits_for_what_to_export(tmp_path, everywhere, notes, four_threads):
    build = small_build(tmp_path, Place("cpu", "float32", ""), {})
    with ExportAhead(build, "notes", notes.export, notes.load).ended() as exports:
        assert not exports.prepared
        exports.prepare()
        assert exports.prepared and torch.get_num_threads() == 2
        end = time.monotonic() + 60
        while not (tmp_path / "loaded").exists():
            assert exports._process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        assert not (tmp_path / "exported").exists()
        exports.start("found")
        exports.start("another")
        exports.wait()
        assert torch.get_num_threads() == 4
    assert (tmp_path / "exported").read_text() == "found 2"


def test_a_process_that_fails_to_load_leaves_the_export_to_the_build(tmp_path, everywhere, notes, four_threads):
    with ExportAhead(
        small_build(tmp_path, Place("cpu", "float32", ""), {}), "", notes.export, notes.fail
    ).ended() as exports:
        exports.prepare()
        exports._process.wait(60)
        exports.start("found")
        exports.wait()
    assert not (tmp_path / "exported").exists() and torch.get_num_threads() == 4


def test_a_build_prints_the_errors_of_exports_that_another_process_met(tmp_path, everywhere, monkeypatch):
    save(tmp_path / "pipeline", "stable_diffusion")
    build = small_build(tmp_path, Place("cpu", "float32", ""), {"text_encoder_9": {}})
    for program in ("false", "no such program"):
        monkeypatch.setattr(sys, "executable", program)
        with ahead_of(build).ended() as exports:
            exports.start()
            exports.wait()
    with pytest.raises(UserError, match="has no text_encoder_9"):
        component_stages(build)


def test_the_process_ends_with_the_build(tmp_path, everywhere, monkeypatch):
    build = small_build(tmp_path, Place("cpu", "float32", ""), {"text_encoder": {}})
    (tmp_path / "waiting").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "waiting").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "waiting"))
    exports = ahead_of(build)
    with pytest.raises(UserError), exports.ended():
        exports.start()
        raise UserError("no", expected="yes", got="no", remedy="yes")
    assert exports._process.returncode < 0


@pytest.mark.parametrize(
    ("place", "cores", "expected"),
    [
        (Place("cuda", "float16", ""), 16, True),
        (Place("cuda", "float16", ""), 2, False),
        (Place("cuda", "float16", "", offload=True), 16, False),
        (Place("cpu", "float32", ""), 16, False),
    ],
)
def test_another_process_exports_where_a_gpu_computes(tmp_path, monkeypatch, place, cores, expected):
    monkeypatch.setattr(ahead, "threads", lambda: cores)
    assert ahead.pays(small_build(tmp_path, place, {"all": {}})) == expected
