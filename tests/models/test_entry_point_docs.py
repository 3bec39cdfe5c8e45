"""The entry point that docs/entry-points.md prints converts."""

from __future__ import annotations

import re

import pytest
from support import REPOSITORY, run


@pytest.mark.slow
def test_the_documented_entry_point_builds(tmp_path, monkeypatch):
    page = (REPOSITORY / "docs/entry-points.md").read_text(encoding="utf-8")
    code, recipe = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "yaml"))
    assert code and recipe
    (tmp_path / "mymodel.py").write_text(code[1], encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(recipe[1] + "engine: {backend: onnxruntime}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    outcome = run("build", "recipe.yaml", "-o", "bundle", "--cache", "cache")
    assert outcome.exit_code == 0, outcome.output
    assert "1 found, 1 in INT8" in outcome.output
