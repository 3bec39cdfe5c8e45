"""Scripts in bench/ import existing names of the package. Their other dependencies may be missing."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from support import REPOSITORY

FOLDER = REPOSITORY / "bench"


@pytest.fixture
def as_scripts(monkeypatch):
    """Scripts find each other, and leave no module behind."""
    monkeypatch.syspath_prepend(FOLDER)
    yield monkeypatch
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(FOLDER)):
            del sys.modules[name]


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_benches_import_what_there_is(as_scripts, file):
    as_scripts.setattr(sys, "argv", [str(file)])
    spec = importlib.util.spec_from_file_location(f"bench_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        assert error.name is not None and error.name.partition(".")[0] != "trtconvert", error
