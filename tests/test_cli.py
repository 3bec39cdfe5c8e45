"""The program as its users meet it: what it prints, what it leaves, how it refuses, and what happens when it is stopped."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest
import tiny_models
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file, save_file
from support import REPOSITORY, WEIGHTS, contents, finish, handled, partials, refusal, reused, run, start, tiny_recipe

from trtconvert import __version__, bundle, cli, doctor, pipeline
from trtconvert.bundle import MANIFEST, EngineRecord, check_files, read_manifest, write_manifest
from trtconvert.cli import main
from trtconvert.engine import backend_statuses
from trtconvert.evaluate.report import tiles
from trtconvert.files import sha256
from trtconvert.progress import Reporter, say

RECIPE = REPOSITORY / "recipes" / "digits-dit.yaml"
HEAVY = {"torch", "numpy", "onnx", "onnxruntime"}


def imported_by(*arguments: object) -> set[str]:
    """The heavy packages that a run of the program imports."""
    code = "import sys\nfrom trtconvert.cli import main\nmain(sys.argv[1:], standalone_mode=False)\nprint(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return HEAVY & set(output.stdout.splitlines()[-1].split())


@pytest.fixture(autouse=True)
def heeds_interrupts():
    """Programs that tests start do, too: the jobs that a shell runs in the background ignore them."""
    with handled(signal.SIGINT, signal.default_int_handler):
        yield


# What is fast ---------------------------------------------------------------------------------------------------------


def test_help_loads_no_library():
    assert imported_by("--version") == set()
    outcome = run("--help")
    assert outcome.exit_code == 0
    for command in ("build", "doctor", "inspect", "run", "schema"):
        assert command in outcome.output


def test_an_unchanged_build_loads_no_library_and_gives_the_same_bundle(digits_build, tmp_path):
    arguments = ("build", digits_build.recipe, "-o", tmp_path / "again", "--cache", digits_build.cache)
    assert imported_by(*arguments) == set()
    assert contents(tmp_path / "again") == contents(digits_build.bundle)


@pytest.mark.parametrize(
    ("section", "fields", "made"),
    [
        ("verify", {"seed": 5}, {"verify"}),
        ("output", {"grid": 1}, {"verify"}),
        ("engine", {"shapes": {"batch": [1, 1, 2]}}, {"export", "verify"}),
    ],
    ids=["verify", "output", "engine"],
)
def test_a_changed_section_redoes_what_depends_on_it(tiny_build, tmp_path, section, fields, made):
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache")
    outcome = run("build", tiny_recipe(tmp_path, **{section: fields}), "-o", tmp_path / "bundle", "--cache", cache)
    assert outcome.exit_code == 0, outcome.output
    stages = reused(outcome)
    assert {"calibrate", "export", "verify"} <= stages.keys()
    assert {name for name, from_cache in stages.items() if not from_cache} == made


def test_another_calibration_or_other_weights_reuse_nothing(tiny_build, tmp_path):
    save_file(tiny_models.Tiny(False).state_dict(), tmp_path / "same.safetensors")
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache")
    recipe = tiny_recipe(tmp_path, model={"weights": "same.safetensors"}, calibration={"seed": 9})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", cache)
    assert outcome.exit_code == 0, outcome.output
    assert not any(reused(outcome).values())


# What is shown --------------------------------------------------------------------------------------------------------


def test_a_build_says_what_it_did(digits_build, tmp_path):
    outcome = run("build", digits_build.recipe, "-o", tmp_path / "again", "--cache", digits_build.cache)
    assert outcome.exit_code == 0, outcome.output
    for part in (
        "6 found, 6 in INT8",
        "1 × precision, 2 × balanced, 1 × aggressive",
        "PSNR",
        "onnxruntime",
        "samples.png",
    ):
        assert part in outcome.output


def test_inspect_checks_and_shows_a_bundle(digits_build):
    outcome = run("inspect", digits_build.bundle)
    assert outcome.exit_code == 0, outcome.output
    for part in ("digits-dit", "6 found, 6 in INT8", "all as built"):
        assert part in outcome.output


def test_sites_that_the_plan_leaves_in_fp16_are_not_called_int8(tmp_path):
    recipe = tiny_recipe(tmp_path, attention={"modes": "fp16"})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert "1 found, 0 in INT8, 1 in FP16 by the plan" in outcome.output, outcome.output
    shown = {tile.label: tile.figure for tile in tiles(read_manifest(tmp_path / "bundle"), None)}
    assert shown["Sites in INT8"] == "0 of 1"


def test_inspect_prints_the_manifest_as_json(digits_build):
    outcome = run("inspect", digits_build.bundle, "--json")
    assert json.loads(outcome.output) == json.loads((digits_build.bundle / bundle.MANIFEST).read_text())


def test_doctor_names_a_remedy_for_what_is_missing():
    outcome = run("doctor")
    assert outcome.exit_code == 0, outcome.output
    words = " ".join(outcome.output.replace("│", " ").split())
    for status in backend_statuses():
        assert f"backend {status.name}" in words
        assert status.available or status.remedy.split()[0] in words
    assert "onnxruntime" in words and "cache" in words


def test_doctor_tries_the_cache_where_a_build_writes(tmp_path, monkeypatch):
    """Inside of its folder, which may be another user's, and not beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor._cache().good and not list(tmp_path.iterdir())
    (tmp_path / "trtconvert").write_text("no folder")
    found = doctor._cache()
    assert found.good is False and "XDG_CACHE_HOME" in found.remedy


def test_every_field_of_the_schema_says_what_it_means():
    schema = json.loads(run("schema").output)
    for name, section in schema["$defs"].items():
        for field, described in section.get("properties", {}).items():
            assert described.get("description"), f"{name}.{field}"


def test_schema_is_json_schema():
    schema = json.loads(run("schema").output)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["properties"].keys() >= {"model", "attention", "calibration", "engine", "verify", "output"}


def test_version():
    assert __version__ in run("--version").output


def test_a_reader_that_leaves_is_no_fault():
    process = start("schema")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.wait(60)
    assert "error" not in errors.lower() and "Traceback" not in errors


# Sampling -------------------------------------------------------------------------------------------------------------


def test_run_samples_the_same_picture_again(digits_build, tmp_path):
    for name in ("one", "two"):
        outcome = run("run", digits_build.bundle, "-n", 3, "--steps", 3, "-o", tmp_path / name / "s.png")
        assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "one/s.png").read_bytes() == (tmp_path / "two/s.png").read_bytes()
    other = run("run", digits_build.bundle, "-n", 3, "--steps", 3, "--seed", 3, "-o", tmp_path / "three.png")
    assert other.exit_code == 0
    first, third = (np.asarray(Image.open(tmp_path / name)) for name in ("one/s.png", "three.png"))
    assert first.shape == third.shape and (first != third).any()
    assert contents(tmp_path).keys() == {"one/s.png", "two/s.png", "three.png"}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["-o", "samples.txt"], ["a file that ends in .png", "got: .txt"]),
        (["-o", "samples"], ["a file that ends in .png", "got: no ending"]),
        (["-o", "/proc/samples.png"], ["cannot write /proc/samples.png"]),
        (["--steps", "1001"], ["1 to 1000", "got: 1001"]),
    ],
    ids=["another ending", "no ending", "unwritable", "steps"],
)
def test_run_refuses(digits_build, tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    refusal(run("run", digits_build.bundle, *arguments), *parts)
    assert contents(tmp_path) == {} and partials(tmp_path) == []


@pytest.mark.parametrize("name", ["samples.png", "notes/../samples.png"])
def test_run_does_not_write_over_a_file_of_the_bundle(digits_build, tmp_path, monkeypatch, name):
    """As it would by its default, in the bundle's folder."""
    copy = shutil.copytree(digits_build.bundle, tmp_path / "bundle")
    (copy / "notes").mkdir()
    monkeypatch.chdir(copy)
    refusal(run("run", ".", "-n", 1, "--steps", 2, "-o", name), "a file of the bundle", "give another file with -o")
    check_files(copy, read_manifest(copy))
    assert run("run", ".", "-n", 1, "--steps", 2, "-o", "notes/mine.png").exit_code == 0


def test_run_asks_for_the_weights_that_a_users_own_sampler_needs(tiny_build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    manifest = read_manifest(copy)
    model = manifest.recipe.model.model_copy(update={"weights": Path("w.safetensors")})
    recipe = manifest.recipe.model_copy(update={"model": model})
    bundle.write_manifest(copy, manifest.model_copy(update={"recipe": recipe}))
    refusal(run("run", copy), "w.safetensors in the current folder")
    save_file(tiny_models.Tiny(False).state_dict(), "w.safetensors")
    assert run("run", copy, "--steps", 2, "-n", 1).exit_code == 0
    assert Path("samples.png").is_file()


@pytest.mark.parametrize("command", ["run", "inspect"])
def test_a_damaged_bundle_is_refused(tiny_build, tmp_path, command):
    copy = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    with (copy / "calibration.safetensors").open("ab") as file:
        file.write(b"\0")
    refusal(run(command, copy), "calibration.safetensors in the bundle")
    refusal(run(command, tmp_path / "none"), "is not a bundle")
    refusal(run(command, tiny_build.recipe), "is not a bundle")


# Bad input ------------------------------------------------------------------------------------------------------------


class Trap:
    """An object whose unpickling leaves a file behind."""

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
        ("another shape", "does not fit"),
        ("truncated", "whole safetensors file"),
        ("empty", "whole safetensors file"),
        ("folder", "Is a directory"),
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
    """A file of calibration data for the tiny model; its name."""
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
        ({"model": {"source": "digits-dit"}}, ["model.weights is missing"]),
        ({"model": {"source": "no_such_module:f"}}, ["No module named 'no_such_module'", "PYTHONPATH"]),
        ({"model": {"source": "tiny_models:bild"}}, ["has no attribute 'bild'"]),
        ({"model": {"source": ":build"}}, ["cannot be imported"]),
        ({"model": {"source": "tiny_models:NOT_A_FUNCTION"}}, ["3 is not a callable object"]),
        ({"model": {"source": "tiny_models:fails"}}, ["RuntimeError: no such checkpoint"]),
        ({"model": {"source": "tiny_models:another_thing"}}, ["got: Identity"]),
        ({"model": {"options": {"size": 3}}}, ["model.options", "got: size"]),
        ({"model": {"options": {"handwritten": True}}}, ["no attention was found", "scaled_dot_product_attention"]),
        ({"attention": {"include": ["blocks.*"]}}, ["'blocks.*' matches no attention site", "denoiser"]),
        ({"attention": {"exclude": ["denoiser", "x"]}}, ["'x' matches no attention site"]),
        ({"attention": {"exclude": ["*"]}}, ["no attention site can be converted", "the recipe excludes it"]),
        ({"calibration": {"steps": 1001}}, ["calibration.steps", "1 to 1000", "got: 1001"]),
        ({"verify": {"steps": 2000}}, ["verify.steps", "1 to 1000", "got: 2000"]),
    ],
    ids=lambda value: None if isinstance(value, list) else json.dumps(value),
)
def test_what_the_model_does_not_have_is_refused(tmp_path, sections, parts):
    recipe = tiny_recipe(tmp_path, **sections)
    refusal(run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache"), *parts)
    assert contents(tmp_path).keys() == {"recipe.yaml"}
    assert partials(tmp_path, tmp_path / "cache") == []


def test_nan_in_the_weights_of_a_users_own_model_is_refused(tmp_path):
    state = tiny_models.Tiny(False).state_dict()
    state["qkv.bias"][5] = torch.nan
    save_file(state, tmp_path / "w.safetensors")
    recipe = tiny_recipe(tmp_path, model={"weights": "w.safetensors"})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(outcome, "the weight qkv.bias of tiny is damaged", "got: 1 of 96 are NaN or Inf")


@pytest.mark.parametrize(
    ("shapes", "parts"),
    [
        ({"batch": [1, 2, 5]}, ["more of 'batch'", "expected: 1 to 4", "got: 1 to 5"]),
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


def test_a_missed_gate_ends_the_build_and_keeps_the_earlier_bundle(tiny_build, tmp_path):
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache")
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    before = contents(output)
    recipe = tiny_recipe(tmp_path, verify={"min_site_sqnr": 200})
    outcome = run("build", recipe, "-o", output, "--cache", cache)
    assert outcome.exit_code == 1
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


# Places that cannot be written ----------------------------------------------------------------------------------------


def test_what_is_not_ours_is_not_replaced(tiny_build, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("mine too")
    for place, got in (("mine", "a folder with other files"), ("file", "a file")):
        outcome = run("build", tiny_build.recipe, "-o", tmp_path / place, "--cache", tiny_build.cache)
        refusal(outcome, "exists and is not a bundle", f"got: {got}")
    assert contents(tmp_path) == {"mine/thesis.txt": b"years of work", "file": b"mine too"}


@pytest.mark.parametrize("content", ['{"name": "a web app", "icons": []}', "not JSON", '{"format": 1}'])
def test_a_folder_with_a_manifest_of_something_else_is_not_replaced(tiny_build, tmp_path, content):
    mine = {"mine/thesis.txt": b"years of work", "mine/manifest.json": content.encode()}
    (tmp_path / "mine").mkdir()
    for name, text in mine.items():
        (tmp_path / name).write_bytes(text)
    outcome = run("build", tiny_build.recipe, "-o", tmp_path / "mine", "--cache", tiny_build.cache)
    refusal(outcome, "exists and is not a bundle", "a manifest.json that is not a bundle's, or damaged", "-o")
    assert contents(tmp_path) == mine


def test_what_users_put_into_a_bundle_outlives_the_next_build(tiny_build, tmp_path):
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    assert run("report", output, "-o", output / "report.html").exit_code == 0
    (output / "notes").mkdir()
    (output / "notes" / "mine.txt").write_text("mine")
    outcome = run("build", tiny_build.recipe, "-o", output, "--cache", tiny_build.cache)
    assert outcome.exit_code == 0, outcome.output
    assert contents(output).keys() == contents(tiny_build.bundle).keys() | {"report.html", "notes/mine.txt"}
    manifest = read_manifest(output)
    assert "report.html" not in manifest.files
    check_files(output, manifest)


def test_engines_that_a_new_bundle_has_not_are_named(tiny_build, tmp_path):
    """They were compiled on another machine, of a model that may be another one now."""
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    manifest = read_manifest(output)
    record = EngineRecord.of("denoiser", "tensorrt", "10.6.0", "sm90", "NVIDIA H200")
    (output / record.file).parent.mkdir(exist_ok=True)
    (output / record.file).write_bytes(b"plan")
    denoiser = manifest.components["denoiser"]
    denoiser = denoiser.model_copy(update={"engines": [*denoiser.engines, record]})
    (output / MANIFEST).unlink()
    write_manifest(output, manifest.model_copy(update={"components": {"denoiser": denoiser}}))
    arguments = ("build", tiny_build.recipe, "-o", output, "--cache", tiny_build.cache)
    outcome = run(*arguments)
    assert outcome.exit_code == 0, outcome.output
    assert "has not: denoiser-tensorrt-sm90-nvidia-h200; run `trtconvert compile`" in outcome.output
    assert contents(output) == contents(tiny_build.bundle)
    assert "notice: engines" not in run(*arguments).output


def test_what_comes_into_the_place_of_a_bundle_while_it_is_built_stays(tiny_build, tmp_path, monkeypatch):
    def leave_something(*arguments, **options):
        (tmp_path / "bundle").mkdir()
        (tmp_path / "bundle" / "thesis.txt").write_text("years of work")
        return verify_stage(*arguments, **options)

    verify_stage = pipeline.verify_stage
    monkeypatch.setattr(pipeline, "verify_stage", leave_something)
    outcome = run("build", tiny_build.recipe, "-o", tmp_path / "bundle", "--cache", tiny_build.cache)
    refusal(outcome, "exists and is not a bundle")
    assert contents(tmp_path) == {"bundle/thesis.txt": b"years of work"}


def test_a_bundle_is_built_again_from_inside_of_it(tiny_build, tmp_path, monkeypatch):
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    monkeypatch.chdir(output)
    outcome = run("build", tiny_build.recipe, "-o", ".", "--cache", tiny_build.cache)
    assert outcome.exit_code == 0, outcome.output
    assert contents(output) == contents(tiny_build.bundle)


def test_a_build_without_a_cache_keeps_nothing(tiny_build, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    outcome = finish(start("build", tiny_build.recipe, "-o", tmp_path / "bundle", "--no-cache"))
    assert outcome.exit_code == 0, outcome.output
    assert contents(tmp_path / "bundle").keys() == contents(tiny_build.bundle).keys()
    assert not list((tmp_path / "temporary").glob("*trtconvert*"))


@pytest.mark.parametrize("place", ["/proc/bundle", "file/bundle"])
def test_an_unwritable_output_is_refused_before_anything_is_done(tiny_build, tmp_path, place):
    (tmp_path / "file").write_text("")
    outcome = run("build", tiny_build.recipe, "-o", tmp_path / place, "--cache", tmp_path / "cache")
    refusal(outcome, f"cannot write {tmp_path / place}")
    assert not (tmp_path / "cache").exists()


def test_an_unwritable_cache_is_refused(tiny_build, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = run("build", tiny_build.recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "file")
    refusal(outcome, f"cannot write {tmp_path / 'file'}", "--cache")
    assert contents(tmp_path).keys() == {"file"} and partials(tmp_path) == []


@pytest.mark.parametrize("warm", [True, False], ids=["bundle", "stage"])
def test_a_file_that_does_not_fit_ends_the_build_with_nothing_half_written(tiny_build, tmp_path, warm):
    """A limit on the size of files acts like a quota: it lets the calibration pass, and stops the ONNX file."""
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache") if warm else tmp_path / "cache"
    limit = (tiny_build.bundle / "denoiser.onnx").stat().st_size // 2
    assert (tiny_build.bundle / "calibration.safetensors").stat().st_size < limit
    process = start(
        *("build", tiny_build.recipe, "-o", tmp_path / "bundle", "--cache", cache),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    refusal(finish(process), "the disk is full", "File too large")
    assert not (tmp_path / "bundle").exists()
    assert partials(tmp_path, cache) == []
    assert_whole_stages(cache)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_ends_the_build_and_keeps_the_earlier_bundle(tiny_build, small_disk):
    output = shutil.copytree(tiny_build.bundle, small_disk / "bundle")
    before = contents(output)
    refusal(run("build", tiny_build.recipe, "-o", output, "--cache", tiny_build.cache), "the disk is full", "MiB free")
    assert contents(small_disk) == {f"bundle/{name}": data for name, data in before.items()}
    assert partials(small_disk) == []


def test_a_full_cache_ends_the_build_with_nothing_half_written(tmp_path, small_disk):
    with pytest.raises(OSError), (small_disk / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    outcome = run("build", tiny_recipe(tmp_path), "-o", tmp_path / "bundle", "--cache", small_disk)
    refusal(outcome, "the disk is full")
    assert [path.name for path in small_disk.iterdir()] == ["filling"]
    assert not (tmp_path / "bundle").exists()


# Stopped builds -------------------------------------------------------------------------------------------------------


def assert_whole_stages(cache: Path) -> None:
    """Every stage that bears its own name is as its index says."""
    for stage in cache.iterdir():
        if not stage.name.startswith("."):  # as what is not finished, and its lock
            hashes = json.loads((stage / "stage.json").read_text())
            assert hashes == {path.name: sha256(path) for path in stage.iterdir() if path.name != "stage.json"}


def stop_in(process: subprocess.Popen[str], cache: Path, stage: str, number: signal.Signals, delay: float) -> None:
    """Signal a build some time after it began a stage."""
    while not any(name.startswith(f".{stage}-") for name in partials(cache)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(number)


def test_builds_that_are_killed_leave_the_earlier_bundle_and_the_next_one_succeeds(tiny_build, tmp_path):
    cache, output = tmp_path / "cache", shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    before = contents(output)
    recipe = tiny_recipe(tmp_path, output={"grid": 1})
    arguments = ("build", recipe, "-o", output, "--cache", cache)
    delays = random.Random(0)
    for stage, longest in (("calibrate", 0.5), ("export", 1.0), ("verify", 0.02)):
        process = start(*arguments)
        stop_in(process, cache, stage, signal.SIGKILL, delays.uniform(0, longest))
        assert finish(process).exit_code == -signal.SIGKILL
        assert contents(output) == before
        assert_whole_stages(cache)
        assert len(partials(tmp_path)) == 1  # the build before swept those of the builds before it
    outcome = run(*arguments)
    assert outcome.exit_code == 0, outcome.output
    assert reused(outcome)["calibrate"], "what killed builds had finished is used"
    assert partials(tmp_path, cache) == []
    assert contents(output) != before
    check_files(output, read_manifest(output))


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_build_clears_up_at_once(tiny_build, tmp_path, number, exit_code):
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    before = contents(output)
    # Everything before the export is there already.
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache", ignore=shutil.ignore_patterns("export-*", "verify-*"))
    process = start("build", tiny_build.recipe, "-o", output, "--cache", cache)
    stop_in(process, cache, "export", number, random.Random(exit_code).uniform(0, 1.0))
    outcome = finish(process)
    assert outcome.exit_code == exit_code, outcome.output
    assert "Traceback" not in outcome.output
    assert contents(output) == before
    assert partials(tmp_path, cache) == []
    assert_whole_stages(cache)


def signalling_recipe(folder: Path) -> Path:
    """A recipe whose model sends its process SIGINT, while it is imported."""
    code = "import os, signal\nfrom tiny_models import build as load\nos.kill(os.getpid(), signal.SIGINT)\n"
    (folder / "signalling.py").write_text(code)
    return tiny_recipe(folder, model={"source": "signalling:load"})


def test_an_interrupt_during_an_import_ends_the_program_as_any_other(tmp_path, monkeypatch):
    """Though it is asked about again and again until the import is over, and heard elsewhere first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe = signalling_recipe(tmp_path)
    for _ in range(3):
        outcome = finish(start("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache"))
        assert outcome.exit_code == 130 and "interrupted" in outcome.output, outcome.output


def test_a_second_interrupt_does_not_cut_the_way_out_short(monkeypatch):
    """What clears up on the way runs to its end."""
    cleared = []

    @click.command()
    def slow() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            cleared.append(True)

    monkeypatch.setitem(main.commands, "slow", slow)
    assert run("slow").exit_code == 130 and cleared


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_lost_on_its_way_up_is_not_the_last(monkeypatch):
    """Python drops what is raised in a finalizer."""
    monkeypatch.setattr(cli, "_CLEARING_SECONDS", 0.05)

    @click.command()
    def losing() -> None:
        class Owner:
            def __del__(self) -> None:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

        Owner()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setitem(main.commands, "losing", losing)
    started = time.monotonic()
    assert run("losing").exit_code == 143 and time.monotonic() - started < 4


def test_what_the_process_ignores_stays_ignored(tmp_path, monkeypatch):
    """As Ctrl-C in the jobs that a shell runs in the background."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe = signalling_recipe(tmp_path)
    with handled(signal.SIGINT, signal.SIG_IGN):
        process = start("build", recipe, "-o", tmp_path / "bundle", "--no-cache")
    outcome = finish(process)
    assert outcome.exit_code == 0, outcome.output


def test_two_builds_into_one_folder_at_once_leave_one_whole_bundle(digits_build, tmp_path):
    arguments = ("build", digits_build.recipe, "-o", tmp_path / "bundle", "--cache", digits_build.cache)
    for outcome in [finish(process) for process in [start(*arguments) for _ in range(3)]]:
        assert outcome.exit_code == 0, outcome.output
    assert contents(tmp_path / "bundle") == contents(digits_build.bundle)
    assert partials(tmp_path) == []


def test_brackets_in_what_a_builder_tells_are_no_markup():
    """TensorRT names layers so, and rich would end what was never begun."""
    report = Reporter(Console(file=io.StringIO(), force_terminal=True, width=200))
    with pytest.raises(ZeroDivisionError), report.live(), report.stage("engine [/of] sm90") as bar:
        bar.share("costs of {ForeignNode[/blocks.0/MatMul.../blocks.0/Add]}", 0.3)
        raise ZeroDivisionError
    assert "ForeignNode[/blocks.0/MatMul" in report.console.file.getvalue()


def test_lines_that_name_files_keep_their_paths_whole():
    file = io.StringIO()
    path = Path("/tmp") / ("long" * 40) / "[red]" / "samples.png"
    say(Console(file=file, width=80), f"look at {path}")
    assert file.getvalue() == f"look at {path}\n"
