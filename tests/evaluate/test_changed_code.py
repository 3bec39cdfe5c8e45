"""Bundles of a function whose code changes after the build."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from trtconvert.entry_point import source_identity
from trtconvert.errors import UserError
from trtconvert.evaluate.evaluation import full_precision
from trtconvert.models.identity import identity
from trtconvert.recipe import load_recipe

CODE = """
from trtconvert.models.digits import digits_model
from pathlib import Path

def load(weights: Path, width: int = 1):
    return digits_model(weights)
"""


@pytest.fixture
def made(tmp_path, monkeypatch, request):
    """A bundle of a model function, and the file of the function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"changing_{request.node.name}".replace("[", "_").replace("]", "_")
    module = tmp_path / f"{name}.py"
    module.write_text(CODE)
    weights = request.config.rootpath / "recipes/digits-dit.safetensors"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {{source: '{name}:load', weights: '{weights}'}}\n")
    section = load_recipe(recipe).model
    manifest = SimpleNamespace(
        recipe=load_recipe(recipe), weights=identity(section), code=source_identity(section.source)
    )
    return SimpleNamespace(folder=tmp_path, manifest=manifest), module, weights


def test_a_further_function_is_only_told(made):
    bundle, module, weights = made
    module.write_text(CODE + "\ndef unrelated():\n    return 1\n")
    with pytest.warns(RuntimeWarning, match="has changed since the bundle was built"):
        assert full_precision(bundle, weights) is not None


def test_bundles_that_do_not_tell_their_code_are_refused(made):
    bundle, module, weights = made
    bundle.manifest.code = ""
    module.write_text(CODE + "\n# a word\n")
    with pytest.raises(UserError, match="is not what the bundle was made from"):
        full_precision(bundle, weights)


def test_other_options_are_refused(made):
    bundle, _, weights = made
    bundle.manifest.recipe.model.options["width"] = 2
    with pytest.raises(UserError, match="is not what the bundle was made from"):
        full_precision(bundle, weights)
