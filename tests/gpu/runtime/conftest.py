"""Fixtures of all tests of loaded TensorRT engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from support import WEIGHTS

from trtconvert import runtime
from trtconvert.cache import Cache
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe
from trtconvert.runtime.tensorrt import TensorRTComponent


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """The shipped model in FP16 as a refittable engine with two profiles."""
    folder = tmp_path_factory.mktemp("engine")
    recipe = folder / "recipe.yaml"
    sides = {"height": 8, "width": 8}
    sections = {
        "model": {"source": "digits-dit", "weights": str(WEIGHTS), "dtype": "float16"},
        "attention": {"modes": ["precision", "balanced"]},
        "layers": {"modes": "off"},
        "calibration": {"samples": 4, "batch": 2, "steps": 4, "bins": 2},
        "engine": {
            "backend": "tensorrt",
            "attention": "plugin",
            "refittable": True,
            "profiles": [{"batch": [1, 1, 2], **sides}, {"batch": [3, 8, 16], **sides}],
        },
        "verify": {"samples": 2, "steps": 4, "min_psnr": 20},
        "output": {"grid": 2},
    }
    recipe.write_text(json.dumps(sections))
    build(load_recipe(recipe), folder / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return folder / "bundle"


@pytest.fixture
def loaded(folder):
    with runtime.load(folder, backend="tensorrt") as bundle:
        yield bundle


@pytest.fixture
def denoiser(loaded) -> TensorRTComponent:
    return loaded["denoiser"]
