"""The shipped model as a bundle for ONNX Runtime, once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from support import WEIGHTS, tiny_recipe

from trtconvert.cache import Cache
from trtconvert.files import locked
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe


@pytest.fixture(scope="session")
def digits(request, tmp_path_factory) -> Path:
    base = tmp_path_factory.getbasetemp()
    folder = (
        base.parent if hasattr(request.config, "workerinput") else base
    ) / "served"  # one for all of xdist's workers
    (folder / "lock").mkdir(parents=True, exist_ok=True)  # a build locks the folder itself
    with locked(folder / "lock"):
        if not (folder / "digits").is_dir():
            recipe = tiny_recipe(folder, model={"source": "digits-dit", "weights": str(WEIGHTS)})
            build(load_recipe(recipe), folder / "digits", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return folder / "digits"
