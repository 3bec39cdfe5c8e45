"""The shipped model as a bundle for ONNX Runtime, once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from support import WEIGHTS, tiny_recipe

from trtconvert.cache import Cache
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe


@pytest.fixture(scope="session")
def digits(made_once) -> Path:
    def fill(folder: Path) -> None:
        recipe = tiny_recipe(folder, model={"source": "digits-dit", "weights": str(WEIGHTS)})
        build(load_recipe(recipe), folder / "digits", Cache(folder / "cache"), Reporter(Console(quiet=True)))

    return made_once("served", fill) / "digits"
