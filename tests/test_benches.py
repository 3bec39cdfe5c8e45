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
        if str(getattr(module, "__file__", None) or "").startswith((str(FOLDER), str(REPOSITORY / "recipes"))):
            del sys.modules[name]


def load(file):
    """Imports a script, and registers it as a script's dependency would be."""
    spec = importlib.util.spec_from_file_location(f"bench_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_benches_import_what_there_is(as_scripts, file):
    as_scripts.setattr(sys, "argv", [str(file)])
    try:
        load(file)
    except ModuleNotFoundError as error:
        assert error.name is not None and error.name.partition(".")[0] != "trtconvert", error


@pytest.mark.soak
def test_skipped_steps_of_a_unet_that_was_trained_for_it(as_scripts, tmp_path, capsys):
    def run(name, *options):
        as_scripts.setattr(sys, "argv", [name, *options])
        load(FOLDER / f"{name}.py").main()
        return capsys.readouterr().out

    sizes = ["--channels", "32", "--blocks", "1", "--multipliers", "1", "1", "--attention", "1"]
    run("train_unet", "--out", str(tmp_path), "--steps", "2", "--batch", "4", *sizes)
    assert (tmp_path / "unet.png").is_file()
    recipe = str(tmp_path / "unet.yaml")
    seeds = ["--calibrated", "2", "--unseen", "2", "--device", "cpu"]
    table = run("reuse", "--model", recipe, "--steps", "8", "--fewer", "2", *seeds)
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| 8 ")]
    assert [row[1] for row in rows] == ["8 (1.00×), rounded samples", "4 (2.00×)"]
    with pytest.raises(SystemExit):
        run("reuse", "--model", recipe, "--peers")
    assert "leave --peers out" in capsys.readouterr().err
