"""Device memory that stages on a GPU leave to the stages after them."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from support import tiny_recipe

from trtconvert.cache import Cache
from trtconvert.models import placed
from trtconvert.models.placed import Place
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe
from trtconvert.stages import reference
from trtconvert.stages.build import Build, Source
from trtconvert.stages.common import run_stage

GPU = Place("cuda", "float16", "")


@pytest.fixture
def build(tmp_path):
    recipe = load_recipe(tiny_recipe(tmp_path))
    return Build(recipe, "", GPU, Cache(tmp_path / "cache"), Reporter(Console(quiet=True)))


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_a_stage_frees_models_that_refer_to_themselves(build):
    left = []

    def make(folder, bar):
        left.append(weakref.ref(Cycle()))

    gc.disable()
    try:
        build.stage("some", {}, make)
    finally:
        gc.enable()
    assert left[0]() is None


def test_freeing_memory_changes_no_key(build):
    def make(folder, bar):
        pass

    plain = run_stage("some", {}, make, build.cache, build.report, build.code)
    assert build.stage("some", {}, make).key == plain.key


@pytest.mark.parametrize("beside", [True, False])
def test_full_precision_is_alone_on_a_gpu_that_does_not_hold_both_copies(build, monkeypatch, beside):
    source = Source(build.recipe, replace(GPU, device="cpu"), build.report)
    weights = sum(x.numel() * 4 for x in source.model().denoiser.parameters())
    free = [2 * weights if beside else weights]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 4 * weights))
    monkeypatch.setattr(source, "leave_gpu", lambda: free.__setitem__(0, 3 * weights))
    monkeypatch.setattr(placed, "denoiser_in_float32", lambda model: free[0])
    assert reference._in_float32(source) == (2 if beside else 3) * weights
