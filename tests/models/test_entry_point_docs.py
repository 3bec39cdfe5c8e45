"""The entry point that docs/entry-points.md prints converts."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support import REPOSITORY


@pytest.mark.slow
def test_the_documented_entry_point_builds(tmp_path):
    page = (REPOSITORY / "docs/entry-points.md").read_text(encoding="utf-8")
    code, recipe = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "yaml"))
    assert code and recipe
    (tmp_path / "mymodel.py").write_text(code[1], encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(recipe[1] + "engine: {backend: onnxruntime}\n", encoding="utf-8")
    command = [sys.executable, "-m", "trtconvert.cli", "build", "recipe.yaml", "-o", "bundle"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 found, 1 in INT8" in done.stdout
