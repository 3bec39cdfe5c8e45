"""Refusals of the program: weights, data, recipes and machines that do not fit, each with expected, got and remedy."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from support import WEIGHTS, contents, partials, refusal, run, tiny_recipe

from trtconvert import bundle
from trtconvert.engine import backend_statuses


class Trap:
    """An object whose unpickling writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def write_weights(path: Path, kind: str) -> None:
    state = load_file(WEIGHTS)
    name = sorted(state)[0]
    if kind == "nan":
        state[name].view(-1)[1] = torch.nan
        save_file(state, path)
    elif kind == "inf":
        state[name].view(-1)[-1] = -torch.inf
        save_file(state, path)
    elif kind == "incomplete":
        del state[name]
        save_file(state, path)
    elif kind == "another shape":
        save_file(state | {name: torch.zeros(3)}, path)
    elif kind == "truncated":
        path.write_bytes(WEIGHTS.read_bytes()[:-100])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Trap(path.with_name("executed"))))
    elif kind == "torch":
        torch.save({name: Trap(path.with_name("executed"))}, path)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("nan", "1 of"),
        ("inf", "1 of"),
        ("incomplete", "1 missing"),
        ("another shape", "of shape ["),
        ("truncated", "whole safetensors file"),
        ("empty", "whole safetensors file"),
        ("folder", "got: a folder"),
        ("missing", "No such file"),
        ("pickle", "whole safetensors file"),
        ("torch", "whole safetensors file"),
    ],
)
def test_unfit_weights_are_refused_and_never_executed(tmp_path, kind, part):
    write_weights(tmp_path / "w.safetensors", kind)
    recipe = tiny_recipe(tmp_path, model={"source": "digits-dit", "weights": "w.safetensors"})
    before = contents(tmp_path)
    refusal(run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache"), "w.safetensors", part)
    assert contents(tmp_path) == before  # so no trap went off, and nothing half-written is left
    assert partials(tmp_path, tmp_path / "cache") == []


def write_data(folder: Path, kind: str) -> str:
    """Write a file of calibration data for the tiny model, and return its name."""
    x, timestep = np.zeros((2, 1, 4, 4), np.float32), np.array([10, 900], np.float32)
    if kind == "nan":
        x[1, 0, 2, 2] = np.nan
    elif kind == "inf":
        timestep[0] = np.inf
    elif kind == "shape":
        x = np.zeros((2, 3, 4, 4), np.float32)
    elif kind == "few":
        x, timestep = x[:1], timestep[:1]
    elif kind == "garbage":
        (folder / "d.safetensors").write_bytes(b"garbage")
        return "d.safetensors"
    elif kind == "not an archive":
        (folder / "d.npz").write_bytes(b"garbage")
        return "d.npz"
    elif kind == "folder":
        (folder / "d.npz").mkdir()
        return "d.npz"
    elif kind == "missing":
        return "d.npz"
    arrays = {"x": x} if kind == "input" else {"x": x, "timestep": timestep}
    if kind == "pickle":
        arrays["x"] = np.array([Trap(folder / "executed")], dtype=object)
    np.savez(folder / "d.npz", **arrays)
    return "d.npz"


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("nan", "got: 1 of 16 are NaN or Inf"),
        ("inf", "got: 1 of 1 are NaN or Inf"),
        ("shape", "got: [2, 3, 4, 4]"),
        ("few", "too few samples"),
        ("input", "has no 'timestep'"),
        ("garbage", "cannot read the calibration data"),
        ("not an archive", "cannot read the calibration data"),
        ("pickle", "cannot read the calibration data"),
        ("folder", "there is no image in"),
        ("missing", "No such file"),
    ],
)
def test_unfit_calibration_data_is_refused(tmp_path, kind, part):
    recipe = tiny_recipe(tmp_path, calibration={"data": write_data(tmp_path, kind)})
    before = contents(tmp_path)
    refusal(run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache"), part)
    assert contents(tmp_path) == before
    assert partials(tmp_path, tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"model": {"source": "digits-dti"}}, ["unknown model source 'digits-dti'", "'digits-dit'"]),
        ({"model": {"source": "digits-dit"}}, ["model.weights is missing", "trtconvert init digits-dit"]),
        ({"model": {"source": "no_such_module:f"}}, ["No module named 'no_such_module'", "PYTHONPATH"]),
        ({"model": {"source": "tiny_models:bild"}}, ["has no attribute 'bild'"]),
        ({"model": {"source": ":build"}}, ["cannot be imported"]),
        ({"model": {"source": "tiny_models:NOT_A_FUNCTION"}}, ["3 is not a callable object"]),
        ({"model": {"source": "tiny_models:fails"}}, ["RuntimeError: no such checkpoint"]),
        ({"model": {"source": "tiny_models:another_thing"}}, ["got: Identity"]),
        ({"model": {"options": {"size": 3}}}, ["model.options", "got: size"]),
        ({"model": {"options": {"attention": "none"}}}, ["no attention was found", "scaled_dot_product_attention"]),
        ({"attention": {"include": ["blocks.*"]}}, ["'blocks.*' matches no attention site", "denoiser"]),
        ({"attention": {"exclude": ["denoiser", "x"]}}, ["'x' matches no attention site"]),
        ({"attention": {"exclude": ["*"]}}, ["no attention site can be converted", "the recipe excludes it"]),
        ({"calibration": {"steps": 1001}}, ["calibration.steps", "1 to 1000", "got: 1001"]),
        ({"verify": {"steps": 2000}}, ["verify.steps", "1 to 1000", "got: 2000"]),
    ],
    ids=lambda value: None if isinstance(value, list) else json.dumps(value),
)
def test_names_that_the_model_lacks_are_refused(tmp_path, sections, parts):
    recipe = tiny_recipe(tmp_path, **sections)
    refusal(run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache"), *parts)
    assert contents(tmp_path).keys() == {"recipe.yaml"}
    assert partials(tmp_path, tmp_path / "cache") == []


def test_nan_in_the_weights_of_a_users_own_model_is_refused(tmp_path):
    state = tiny_models.Tiny().state_dict()
    state["qkv.bias"][5] = torch.nan
    save_file(state, tmp_path / "w.safetensors")
    recipe = tiny_recipe(tmp_path, model={"weights": "w.safetensors"})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(outcome, "the weight qkv.bias of tiny is damaged", "got: 1 of 96 are NaN or Inf")


@pytest.mark.parametrize(
    ("shapes", "parts"),
    [
        ({"batch": [1, 2, 5]}, ["the range of 'batch'", "expected: 1 to 4", "got: 1 to 5"]),
        ({"frames": 8}, ["the dimension 'frames'", "expected: batch"]),
    ],
    ids=["too many", "unknown"],
)
def test_shapes_outside_the_models_are_refused(tiny_build, tmp_path, shapes, parts):
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache")
    recipe = tiny_recipe(tmp_path, engine={"shapes": shapes})
    refusal(run("build", recipe, "-o", tmp_path / "bundle", "--cache", cache), "engine.shapes", *parts)
    assert not (tmp_path / "bundle").exists()
    assert partials(tmp_path, cache) == []
    # Nobody waits for a calibration to hear it.
    anew = tmp_path / "anew"
    refusal(run("build", recipe, "-o", tmp_path / "bundle", "--cache", anew), "engine.shapes", *parts)
    assert not list(anew.glob("calibrate-*"))


def test_a_cache_in_the_bundle_is_refused_before_anything_is_done(tmp_path):
    recipe, output = tiny_recipe(tmp_path), tmp_path / "bundle"
    for cache in (output, output / "cache"):
        refusal(run("build", recipe, "-o", output, "--cache", cache), "lies in the bundle", "--cache")
    assert not output.exists()


def test_a_backend_that_this_machine_lacks_is_refused_with_the_way_to_it(tmp_path):
    missing = next((status for status in backend_statuses() if not status.available), None)
    if missing is None:
        pytest.skip("this machine has every backend")
    recipe = tiny_recipe(tmp_path, engine={"backend": missing.name})
    refusal(run("build", recipe, "-o", tmp_path / "bundle"), missing.name, missing.detail, missing.remedy)


def test_a_recipe_is_refused_by_the_program_too(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {source: digits-dit}\ncalibration:\n  sampels: 3\n")
    refusal(run("build", recipe, "-o", tmp_path / "bundle"), "recipe.yaml:3", "did you mean 'samples'?")
    refusal(run("build", tmp_path / "none.yaml", "-o", tmp_path / "bundle"), "none.yaml", "No such file")
    assert contents(tmp_path).keys() == {"recipe.yaml"}


@pytest.mark.parametrize("has_place", [True, False])
def test_a_missed_gate_ends_the_build_and_keeps_the_earlier_bundle(tiny_build, tmp_path, has_place):
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache")
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    before = contents(output)
    if not has_place:
        (tmp_path / "bundle.missed").write_text("a file of the user")
    recipe = tiny_recipe(tmp_path, verify={"min_site_sqnr": 200})
    outcome = run("build", recipe, "-o", output, "--cache", cache)
    assert outcome.exit_code == 1
    assert ("could not be kept" in outcome.output) != has_place
    for part in ("gate missed", "expected: >= 200", "got: ", "the worst site is denoiser in timestep bin", "remedy: "):
        assert part in outcome.output
    assert contents(output) == before
    assert partials(tmp_path, cache) == []


def test_a_traceback_is_shown_on_demand_only(tmp_path):
    refusal(run("inspect", tmp_path))
    outcome = run("--debug", "inspect", tmp_path)
    assert outcome.exit_code == 2
    assert "Traceback" in outcome.output and "error: " in outcome.output


def test_a_fault_of_ours_says_so(monkeypatch):
    def fail(_):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(bundle, "read_manifest", fail)
    outcome = run("inspect", "anything")
    assert outcome.exit_code == 1
    assert "internal error: ZeroDivisionError: division by zero" in outcome.output
    assert "please report it" in outcome.output and "Traceback" not in outcome.output


def test_host_memory_that_runs_out_is_no_fault_of_ours(monkeypatch):
    def fail(_):
        raise MemoryError

    monkeypatch.setattr(bundle, "read_manifest", fail)
    outcome = run("inspect", "anything")
    assert outcome.exit_code == 1 and "internal error" not in outcome.output
    for part in ("error: the host's memory ran out", "expected: ", "got: MemoryError", "remedy: end other programs"):
        assert part in outcome.output


def test_a_prompt_that_is_no_text_is_refused_before_anything_is_loaded(tmp_path):
    """The command line reads bytes outside of the terminal's encoding like this."""
    outcome = run("run", tmp_path / "none", "-p", "a cat", "-p", "caf\udce9", "-o", tmp_path / "grid.png")
    refusal(outcome, "half of a surrogate pair", r"'caf\udce9'", "remedy: type the prompt again")


@pytest.mark.parametrize(
    "arguments",
    [("build", "{}", "-o", "b"), ("init", "{}", "-o", "r.yaml"), ("quantize", WEIGHTS, "-o", "{}")],
    ids=str,
)
def test_paths_that_the_system_refuses_are_told_as_such(tmp_path, arguments):
    """As those in folders that the user may not enter."""
    place = str(tmp_path / ("n" * 300) / "x")
    refusal(run(*(str(part).format(place) for part in arguments)), f"{place} cannot be used", "File name too long")
