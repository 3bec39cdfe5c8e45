"""The program for users: its speed, its output, and its samples."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from PIL import Image
from safetensors.torch import save_file
from support import REPOSITORY, contents, handled, partials, refusal, reused, run, start, tiny_recipe

from trtconvert import __version__, bundle, doctor, early
from trtconvert.bundle import check_files, read_manifest
from trtconvert.cli import main
from trtconvert.engine import backend_statuses
from trtconvert.evaluate.report import tiles

RECIPE = REPOSITORY / "recipes" / "digits-dit.yaml"


HEAVY = {"torch", "numpy", "onnx", "onnxruntime"}


def imported_by(*arguments: object) -> set[str]:
    """Return the heavy packages that a run of the program imports."""
    code = "import sys\nfrom trtconvert.cli import main\nmain(sys.argv[1:], standalone_mode=False)\nprint(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return HEAVY & set(output.stdout.splitlines()[-1].split())


def test_only_a_process_of_the_program_searches_for_garbage_less_often(monkeypatch, capsys):
    """Imports and exports make millions of objects that stay."""
    thresholds, ended = [], []
    monkeypatch.setattr(gc, "set_threshold", lambda *to: thresholds.append(to))
    monkeypatch.setattr(sys, "argv", ["trtconvert", "--version"])
    monkeypatch.setattr(early, "leave", ended.append)
    assert run("--version").exit_code == 0 and not thresholds, "another program's settings stay"
    main()
    assert ended == [0] and __version__ in capsys.readouterr().out
    ((first, *_),) = thresholds
    assert first > 10_000


@pytest.fixture(autouse=True)
def heeds_interrupts():
    """Programs started by tests do so too, because background jobs of a shell ignore signals."""
    with handled(signal.SIGINT, signal.default_int_handler):
        yield


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
        ("verify", {"seed": 5}, {"reference", "verify"}),
        ("verify", {"min_psnr": 1.0}, set()),
        ("verify", {"max_lpips": 0.5}, set()),
        ("output", {"grid": 1}, {"verify"}),
        ("engine", {"shapes": {"batch": [1, 1, 2]}}, {"plan", "export", "verify"}),
    ],
    ids=["verify", "gate", "lpips", "output", "engine"],
)
def test_a_changed_section_redoes_what_depends_on_it(tiny_build, tmp_path, section, fields, made):
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache")
    outcome = run("build", tiny_recipe(tmp_path, **{section: fields}), "-o", tmp_path / "bundle", "--cache", cache)
    assert outcome.exit_code == 0, outcome.output
    stages = reused(outcome)
    assert {"calibrate", "export", "verify"} <= stages.keys()
    assert {name for name, from_cache in stages.items() if not from_cache} == made


def test_another_calibration_or_other_weights_reuse_nothing(tiny_build, tmp_path):
    save_file(tiny_models.Tiny().state_dict(), tmp_path / "same.safetensors")
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache")
    recipe = tiny_recipe(tmp_path, model={"weights": "same.safetensors"}, calibration={"seed": 9})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", cache)
    assert outcome.exit_code == 0, outcome.output
    assert not any(reused(outcome).values())


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
    """Inside its folder, which may belong to another user, and not beside it."""
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
    """By the default output name, in the bundle's folder."""
    copy = shutil.copytree(digits_build.bundle, tmp_path / "bundle")
    (copy / "notes").mkdir()
    monkeypatch.chdir(copy)
    refusal(run("run", ".", "-n", 1, "--steps", 2, "-o", name), "would change the bundle", "give another file with -o")
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
    save_file(tiny_models.Tiny().state_dict(), "w.safetensors")
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
