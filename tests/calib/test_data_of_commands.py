"""Calibration data in the commands: refusals, skipped and listed samples, recordings, and files."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import tiny_models
import torch
from calibration_data import RECIPE, write_images, write_inputs
from found_sites import sites_to_convert
from rich.console import Console
from safetensors.torch import load_file
from support import Quiet, environment, finish, refusal, run, start, tiny_recipe

from trtconvert.calib.calibrate import calibrate
from trtconvert.calib.calibration import Calibration
from trtconvert.errors import UserError
from trtconvert.progress import Reporter
from trtconvert.recipe import AttentionSection, CalibrationSection, load_recipe
from trtconvert.stages.calibrate import _refuse_unfit_steps as refuse_unfit_steps


@pytest.mark.parametrize(
    ("name", "change", "parts"),
    [
        ("label", lambda x: x + 20, ["digits-dit cannot take samples 0 to 3 of", "IndexError"]),
        ("label", lambda x: x + 0.5, ["'label' in", "damaged at sample 0", "expected: whole numbers", "got: 0.5"]),
        ("x", lambda x: torch.zeros(4, 1, 8, 17), ["'x' in", "width 4 to 16", "got: [4, 1, 8, 17]"]),
        ("x", lambda x: torch.zeros(4, 3, 8, 8), ["'x' in", "got: [4, 3, 8, 8]"]),
        ("timestep", lambda x: x[:3], ["'timestep' in", "too few samples", "got: 3"]),
    ],
)
def test_mismatched_recordings_are_refused(digits, tmp_path, name, change, parts):
    inputs = digits.example(5, {"batch": 4, "height": 8, "width": 8})
    inputs["label"] = torch.arange(4)
    path = write_inputs(tmp_path / "a.safetensors", inputs | {name: change(inputs[name])})
    arguments = ("--data", path, "-n", 4, "-o", tmp_path / "c.safetensors", "--cache", tmp_path / "cache")
    refusal(run("calibrate", RECIPE, *arguments), "a.safetensors", *parts)


def test_nothing_but_bad_samples_is_nothing_to_calibrate_on(tmp_path):
    write_images(tmp_path / "images", count=3, size=(9, 9))
    arguments = (
        "--data",
        tmp_path / "images",
        "-n",
        3,
        "-o",
        tmp_path / "c.safetensors",
        "--cache",
        tmp_path / "cache",
    )
    refusal(
        run("calibrate", RECIPE, *arguments, "--skip-bad"),
        "there is nothing to calibrate on",
        "3 bad samples",
        "00.png",
    )


def test_unfit_data_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "a.md").write_text("x")
    (tmp_path / "none.txt").write_text("\n")
    (tmp_path / "few.txt").write_text("1\n")
    (tmp_path / "data.csv").write_text("1\n")
    (tmp_path / "lines").mkdir()
    write_images(tmp_path / "lines")
    (tmp_path / "lines" / "metadata.jsonl").write_text('{"file_name": "00.png"}\n')
    for data, *parts in [
        ("empty", "there is no image in", "an empty folder"),
        ("others", "there is no image in", "other files"),
        ("none.txt", "there is no prompt in"),
        ("few.txt", "too few samples", "got: 1", "--samples"),
        ("data.csv", "cannot read the calibration data", "'.csv'"),
        ("lines", "metadata.jsonl:1 does not describe an image"),
        ("absent.pt", "No such file or folder"),
        ("x" * 300 + ".pt", "File name too long"),
    ]:
        arguments = (
            "--data",
            tmp_path / data,
            "-n",
            2,
            "-o",
            tmp_path / "c.safetensors",
            "--cache",
            tmp_path / "cache",
        )
        refusal(run("calibrate", RECIPE, *arguments), *parts)
    assert not (tmp_path / "c.safetensors").exists()


def test_a_model_without_encoder_or_condition_says_so(tmp_path):
    write_images(tmp_path / "images", size=(4, 4))
    (tmp_path / "prompts.txt").write_text("1\n2\n")
    recipe = tiny_recipe(tmp_path)
    for data, part in (("images", "cannot take the image"), ("prompts.txt", "cannot take captions")):
        refusal(run("calibrate", recipe, "--data", tmp_path / data, "--cache", tmp_path / "cache"), part)


def test_skipped_samples_are_counted_and_listed(tmp_path):
    write_images(tmp_path / "images", count=8)
    (tmp_path / "images" / "03.png").write_bytes(b"no image")
    output = tmp_path / "c.safetensors"
    arguments = ("--data", tmp_path / "images", "-n", 8, "-o", output, "--cache", tmp_path / "cache")
    outcome = run("calibrate", RECIPE, *arguments, "--skip-bad")
    assert outcome.exit_code == 0, outcome.output
    assert "1 skipped as bad:" in outcome.output and "03.png" in outcome.output
    made = Calibration.load(output)
    assert len(made.provenance.skipped) == 1
    # The default statistic counts clipped elements, too.
    assert made.outliers.keys() == made.tables.keys() and "clipped elements: at most" in outcome.output


@pytest.mark.soak
def test_a_build_leaves_bad_samples_out_only_when_it_is_asked_to(tmp_path, digits):
    inputs = digits.example(5, {"batch": 6, "height": 8, "width": 8})
    inputs["x"][2, 0, 0, 0] = torch.nan
    write_inputs(tmp_path / "inputs.safetensors", inputs)
    sections = {
        "model": {"source": "digits-dit", "weights": str(RECIPE.with_suffix(".safetensors"))},
        "attention": {"modes": "balanced"},
        "layers": {"modes": "off"},
        "calibration": {"data": "inputs.safetensors", "samples": 6, "bins": 2},
        "engine": {"backend": "onnxruntime"},
        "verify": {"samples": 1, "steps": 2, "min_psnr": 10, "min_site_sqnr": 5},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(sections))
    arguments = ("build", tmp_path / "recipe.yaml", "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(run(*arguments), "is damaged at sample 2", "--skip-bad")
    outcome = run(*arguments, "--skip-bad")
    assert outcome.exit_code == 0, outcome.output
    assert len(Calibration.load(tmp_path / "bundle" / "calibration.safetensors").provenance.skipped) == 1
    for told in (outcome.output, run("inspect", tmp_path / "bundle").output):
        assert "1 skipped as bad:" in " ".join(told.replace("│", " ").split())
    # A build that skips nothing does not reuse a calibration with skipped samples.
    refusal(run(*arguments), "is damaged at sample 2")


def test_samples_that_an_interrupted_run_skipped_are_refused_without_skip_bad(tmp_path, digits, inputs):
    """A run with --skip-bad was interrupted; a run without resumes from its batches."""
    inputs["x"][1, 0, 0, 0] = torch.nan
    section = CalibrationSection(data=write_inputs(tmp_path / "a.safetensors", inputs), samples=6, batch=2, bins=2)
    sites, _ = sites_to_convert(digits, AttentionSection())

    def made(**options):
        return calibrate(digits, section, "weights", sites, tmp_path / "work", Quiet(), **options)

    assert len(made(skip_bad=True).provenance.skipped) == 1
    with pytest.raises(UserError, match="is damaged at sample 1"):
        made()
    assert len(made(skip_bad=True).provenance.skipped) == 1


def test_a_recipe_takes_a_calibration(tmp_path):
    recipe, output = tiny_recipe(tmp_path), tmp_path / "c.safetensors"
    assert run("calibrate", recipe, "-o", output, "--cache", tmp_path / "cache").exit_code == 0
    made = Calibration.load(output)

    def building(**sections):
        (tmp_path / "taking").mkdir(exist_ok=True)
        taking = tiny_recipe(tmp_path / "taking", **sections)
        document = json.loads(taking.read_text())
        document["calibration"] = {"from": "../c.safetensors", "bins": 2} | sections.get("calibration", {})
        taking.write_text(json.dumps(document))
        return run("build", taking, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")

    assert building().exit_code == 0
    bundled = Calibration.load(tmp_path / "bundle" / "calibration.safetensors")
    assert bundled.provenance == made.provenance
    for name, table in made.tables["denoiser"].items():
        assert torch.equal(bundled.tables["denoiser"][name], table)
    assert run("inspect", tmp_path / "bundle").exit_code == 0  # the manifest's recipe reads back

    refusal(building(model={"source": "tiny_models:another_build"}), "was calibrated for another model", "hash")
    refusal(building(calibration={"bins": 3}, attention={"modes": "fp16"}), "has other timestep bins")
    message = building(calibration={"samples": 3}).output
    assert "'from' alone, without samples" in message
    output.write_bytes(output.read_bytes()[:-8])
    refusal(building(), "is not a calibration")
    output.unlink()
    refusal(building(), "is not a calibration", "no file")


def test_recorded_inputs_serve_as_calibration_data(tmp_path):
    recipe, output = tiny_recipe(tmp_path, calibration={"samples": 6, "steps": 9}), tmp_path / "inputs.safetensors"
    outcome = run("record", recipe, "-o", output, "--per-run", 4)
    assert outcome.exit_code == 0, outcome.output
    assert "24 inputs of tiny" in outcome.output
    inputs = load_file(output)
    assert {name: list(x.shape) for name, x in inputs.items()} == {
        "x": [24, 1, 4, 4], "timestep": [24], "prev_x": [24, 1, 4, 4], "prev_timestep": [24],
    }  # fmt: skip
    # Every run gives one step of each quarter; the preceding step is one step noisier.
    spacing = 1000 / 9
    assert ((inputs["prev_timestep"] - inputs["timestep"]) - spacing).abs().max() <= 1
    steps = ((999 - inputs["timestep"]) / spacing).round().view(6, 4)
    assert (((steps - 1) / 8 * 4).floor() == torch.arange(4)).all()
    replayed = run(
        "calibrate", recipe, "--data", output, "-n", 24, "-o", tmp_path / "c.safetensors", "--cache", tmp_path / "cache"
    )
    assert replayed.exit_code == 0, replayed.output


def test_a_recorded_step_is_the_sampler_s_own(digits, tmp_path):
    from trtconvert.calib.record import record

    section = CalibrationSection(samples=3, batch=2, steps=4)
    record(digits, section, 3, "weights", tmp_path / "i.safetensors", Quiet())
    inputs = load_file(tmp_path / "i.safetensors")
    calls = []

    def denoiser(x, timestep, **conditions):
        calls.append((x, timestep, conditions["label"]))
        return digits.denoiser(x, timestep, **conditions)

    digits.sample(denoiser, [2], steps=4, solver="ddim")
    # Of sample 2, the three steps after the first, in order.
    for row, (before, after) in enumerate(zip(calls, calls[1:], strict=False), start=6):
        torch.testing.assert_close(inputs["x"][row], after[0][0])
        torch.testing.assert_close(inputs["prev_x"][row], before[0][0])
        assert inputs["timestep"][row] == after[1] and inputs["label"][row] == 2


def test_every_row_of_a_recording_is_written(tmp_path, monkeypatch):
    """Also with the largest random number below 1, and from a sampler with FP64 timesteps."""
    from trtconvert.calib.record import record

    tiny = tiny_models.build()

    def sample(denoiser, seeds, **options):
        return tiny.sample(lambda x, t: denoiser(x, t.double()).float(), seeds, **options)

    monkeypatch.setattr(torch, "rand", lambda *shape, generator=None: torch.full(shape, 1 - 2.0**-24))
    section = CalibrationSection(samples=2, batch=2, steps=5)
    record(replace(tiny, sample=sample), section, 4, "weights", tmp_path / "i.safetensors", Quiet())
    inputs = load_file(tmp_path / "i.safetensors")
    assert inputs["x"].flatten(1).any(1).all()
    assert (inputs["prev_timestep"] > inputs["timestep"]).all()


def test_unfit_recordings_are_refused(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_images(tmp_path / "images")
    refusal(run("record", recipe, "-o", tmp_path / "a.npz"), "inputs cannot be written as 'a.npz'")
    refusal(run("record", recipe, "-o", tmp_path / "a.SAFETENSORS"), "expected: a file that ends in .safetensors")
    refusal(run("record", recipe, "-o", tmp_path / "a.safetensors", "--per-run", 4), "1 to 3", "--per-run")
    images = ("--data", tmp_path / "images")
    refusal(run("record", recipe, "-o", tmp_path / "a.safetensors", *images), "there are no denoising runs")
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.soak
def test_a_full_disk_keeps_what_was_finished(tmp_path):
    recipe = tiny_recipe(tmp_path, calibration={"samples": 8, "statistic": "elements"})
    # Rows are small and counts of elements are large: a limit on the size of files simulates a full disk.
    limited = subprocess.run(
        ["bash", "-c", 'ulimit -f 20; trap "" XFSZ; exec "$0" -m trtconvert.cli "$@"', sys.executable, "calibrate",
         str(recipe), "-o", str(tmp_path / "c.safetensors"), "--cache", str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=120, env=environment(),
    )  # fmt: skip
    assert limited.returncode == 2, limited.stderr
    for part in ("the disk is full", "remedy: ", "4 batches finished and kept in"):
        assert part in limited.stderr
    outcome = finish(start("calibrate", recipe, "-o", tmp_path / "c.safetensors", "--cache", tmp_path / "cache"))
    assert outcome.exit_code == 0


@pytest.mark.soak
def test_two_calibrations_of_the_same_take_turns(tmp_path):
    recipe = tiny_recipe(tmp_path, calibration={"samples": 24, "batch": 1, "steps": 20})
    outputs = [tmp_path / f"{number}.safetensors" for number in range(3)]
    running = [start("calibrate", recipe, "-o", output, "--cache", tmp_path / "cache") for output in outputs]
    for outcome in map(finish, running):
        assert outcome.exit_code == 0, outcome.output
    # Each observed all of the data, not the rest of another.
    assert len({output.read_bytes() for output in outputs}) == 1
    assert sum(Calibration.load(outputs[0]).provenance.observed) == 24 * 20
    assert not list((tmp_path / "cache").iterdir())


def test_options_of_the_command_line_replace_the_recipe_s(tmp_path):
    from trtconvert.cli import _with_data

    recipe = load_recipe(RECIPE)
    changed = _with_data(RECIPE, "package.module:function", 5, Reporter(Console(quiet=True))).calibration
    assert (changed.data, changed.samples, changed.steps) == ("package.module:function", 5, recipe.calibration.steps)


def test_numbers_of_steps_are_checked_where_the_calibration_draws(tmp_path):
    """A file of a calibration has no steps, and the recipe could not set any."""

    def few(denoiser, seeds, **options):
        if options["steps"] > 10:
            raise UserError("too many steps", expected="1 to 10", got=str(options["steps"]), remedy="lower it")
        return model.sample(denoiser, seeds, **options)

    model = tiny_models.build()
    limited = replace(model, sample=few)
    (tmp_path / "a.txt").write_text("a house\n")
    made = {"from": "made.safetensors", "bins": 2}
    for section, refused in (({"data": "a.txt", "steps": 20}, True), ({"data": "a.txt", "steps": 4}, False)):
        recipe = load_recipe(tiny_recipe(tmp_path, calibration=section))
        with pytest.raises(UserError, match=r"calibration\.steps") if refused else nullcontext():
            refuse_unfit_steps(recipe, limited)
    path = tiny_recipe(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"calibration": made}))
    refuse_unfit_steps(load_recipe(path), limited)
