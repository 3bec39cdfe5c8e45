"""`trtconvert modiff`, and the scripts bench/modiff_study.py and bench/modiff_speed.py, on the digits model in a few steps."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from support import REPOSITORY, WEIGHTS, Outcome, refusal, run

from trtconvert.errors import UserError
from trtconvert.models.digits import digits_model
from trtconvert.modiff import Calibration
from trtconvert.modiff.modulated import Modulated
from trtconvert.modiff.rounding import AdaRound
from trtconvert.modiff.workspace import METHODS, Variant, Workspace, typed_call

sys.path.append(str(REPOSITORY / "bench"))

import modiff_speed
import modiff_study
from modiff_study import Row, markdown, parse_variants

FEW = ("--steps", "3", "--batch", "10", "--calibration-samples", "4", "--rounding-iterations", "0")


def script(module, *arguments):
    """A script of bench/ in this process."""
    result = CliRunner().invoke(module.main, [str(a) for a in arguments])
    return Outcome(result.exit_code, result.output)


def rows_of(outcome):
    """Returns the rows of the result in JSON lines."""
    assert outcome.exit_code == 0, outcome.output
    found = [json.loads(line) for line in outcome.output.splitlines()]
    return next(line["rows"] for line in found if "rows" in line)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The shared work folder of this module's commands."""
    return tmp_path_factory.mktemp("modiff")


def test_variants_are_all_methods_at_all_bits_and_full_precision_once():
    variants = parse_variants(list(METHODS), ["8/8", "4/8"])
    assert len(variants) == 1 + 2 * (len(METHODS) - 1) and variants.count(Variant("full")) == 1
    assert Variant("naive").settings().bins == 1 and not Variant("qdiff").settings().modulation
    for wrong in ("8-4", "8/2", "5/8", "/8"):
        with pytest.raises(UserError):
            parse_variants(["qdiff"], [wrong])


def test_a_table_of_variants_and_going_on_with_it(work, tmp_path):
    arguments = ["digits-dit", *FEW, "--work", work, "-n", "10", "--bits", "8/4"]
    arguments += ["--method", "qdiff", "--method", "qdiff-modiff", "--json"]
    outcome = script(modiff_study, *arguments, "-o", tmp_path / "first.md")
    rows = {row["variant"]["method"]: row for row in rows_of(outcome)}
    assert rows["full"]["psnr"] is None and rows["full"]["fid_full"] is None
    # Modulation compensates 4 bits.
    assert rows["qdiff-modiff"]["psnr"] > rows["qdiff"]["psnr"] + 2
    kept = {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
    assert script(modiff_study, *arguments, "-o", tmp_path / "second.md").exit_code == 0
    assert (tmp_path / "first.md").read_text() == (tmp_path / "second.md").read_text()
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")} == kept, "nothing is drawn again"


def test_samples_by_a_calibration_of_a_file(work, tmp_path):
    file = tmp_path / "digits.safetensors"
    outcome = run("modiff", "calibrate", "digits-dit", *FEW, "--work", work, "--act-bits", "4", "-o", file)
    assert outcome.exit_code == 0, outcome.output
    assert Calibration.load(file).settings.activation_bits == 4
    arguments = ["modiff", "sample", "digits-dit", *FEW, "--calibration", file, "-n", "2", "-o", tmp_path / "drawn"]
    outcome = run(*arguments, "--act-bits", "4")
    assert outcome.exit_code == 0, outcome.output
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["000000.png", "000001.png"]
    assert Image.open(tmp_path / "drawn" / "000000.png").size == (8, 8)
    refusal(run(*arguments, "--act-bits", "6"), "the calibration is for other bits", "leave --act-bits out")
    assert run(*arguments).exit_code == 0, "as the message says: the file has the bits"


@pytest.mark.soak
def test_times_of_a_step(work):
    outcome = script(modiff_speed, "digits-dit", *FEW, "--batch", "2", "--work", work, "--runs", "2", "--json")
    what = [row["what"] for row in rows_of(outcome)]
    assert any("FP32" in name for name in what) and any("MoDiff" in name for name in what)
    assert any("simulated" in name for name in what)
    # With one step, the script adds more: only later steps are timed.
    one = script(
        modiff_speed, "digits-dit", *FEW, "--steps", "1", "--batch", "2", "--work", work, "--runs", "1", "--json"
    )
    assert len(rows_of(one)) == len(what)


def test_a_model_of_one_s_own_needs_judges(tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("model:\n  source: trtconvert.models.ddpm:ddpm_model\n  weights: none.safetensors\n")
    refusal(script(modiff_study, recipe), "need a feature extractor and a reference set", "--features inception")


@pytest.mark.parametrize(
    ("model", "remedy"),
    [
        ("emoji-dti", "did you mean 'emoji-dit'"),
        ("sdxl", "trtconvert init sdxl"),
        ("none.yaml", "relative to the current folder"),
    ],
)
def test_a_model_that_is_not_there(model, remedy):
    refusal(script(modiff_speed, model), f"there is no model '{model}'", remedy)


def test_places_that_cannot_be_written_are_told_before_anything_else(tmp_path):
    file = tmp_path / "file"
    file.touch()
    arguments = ["digits-dit", *FEW, "--work", file]
    outcomes = [run("modiff", command, *arguments) for command in ("calibrate", "sample")]
    outcomes += [script(module, *arguments) for module in (modiff_study, modiff_speed)]
    for outcome in outcomes:
        refusal(outcome, f"cannot write {file}", "with --work")
    refusal(run("modiff", "sample", "digits-dit", *FEW, "-o", file), f"cannot write {file}", "with -o")
    # An existing folder that refuses files.
    refusal(run("modiff", "sample", "digits-dit", *FEW, "-o", "/proc"), "cannot write /proc", "with -o")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_before_references_are_read(tmp_path):
    outcome = script(modiff_study, "digits-dit", *FEW, "--device", "cuda", "--work", tmp_path, "-o", tmp_path / "a.md")
    refusal(outcome, "there is no GPU to run the model on")
    assert not list(tmp_path.iterdir())


def test_weights_of_features_that_are_not_there(tmp_path):
    arguments = ("--work", tmp_path, "-o", tmp_path / "a.md", "--features-weights", tmp_path / "none")
    refusal(script(modiff_study, "digits-dit", *FEW, *arguments), "there are no weights at")


def test_seeds_that_no_integer_holds(tmp_path):
    seed = ("--seed", str(2**63))
    commands = (("modiff", "sample", "digits-dit"), ("evaluate", tmp_path))
    outcomes = [run(*command, *seed) for command in commands] + [script(modiff_study, "digits-dit", *seed)]
    for outcome in outcomes:
        assert outcome.exit_code == 2 and "is not in the range" in outcome.output


def test_recipes_of_models_that_ship_have_their_judges(work, tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"model: {{source: digits-dit, weights: {WEIGHTS}}}\n")
    arguments = [*FEW, "--work", work, "-n", "10", "--method", "full", "--json", "-o", tmp_path / "a.md"]
    (row,) = rows_of(script(modiff_study, recipe, *arguments, "--dtype", "bfloat16"))
    assert row["accuracy"] is not None and row["variant"]["weight_bits"] == 16
    # The classes of another classifier are not those of the model.
    other = tmp_path / "features.py"
    other.write_text(
        "from trtconvert.evaluate.features import Features\n"
        "def see(images):\n    return Features(images.flatten(1), images.flatten(1))\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        (row,) = rows_of(script(modiff_study, recipe, *arguments, "--features", "features:see"))
    assert row["accuracy"] is None and row["inception_score"] is not None


@pytest.fixture(scope="module")
def workspace(work):
    return Workspace(
        digits_model(WEIGHTS), "cpu", torch.float32, 2, "ddim", 4, 1, AdaRound(iterations=0), work / "study"
    )


def test_calibrations_are_kept_by_everything_that_decides_them(workspace):
    variant = Variant("qdiff", 8, 6)
    path = workspace.calibration_path(variant)
    assert path == workspace.calibration_path(Variant("qdiff-modiff", 8, 6)), "one for both"
    changed = {
        "steps": 3, "solver": "heun", "batch": 5, "calibration_samples": 2, "device": "cuda", "rounding": AdaRound(iterations=9),
    }  # fmt: skip
    others = {
        dataclasses.replace(workspace, **{name: value}).calibration_path(variant) for name, value in changed.items()
    }
    assert len(others | {path}) == len(changed) + 1
    assert path == dataclasses.replace(workspace, dtype=torch.float16).calibration_path(variant)


def test_one_sample_calibrates_and_a_damaged_calibration_is_made_anew(workspace):
    variant = Variant("lcq", 8, 8)
    found = workspace.calibration(variant)
    path = workspace.calibration_path(variant)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert workspace.calibration(variant).digest == found.digest
    assert path.read_bytes() == whole


def test_samples_do_not_depend_on_what_was_drawn_before(workspace):
    """Each batch resets the caches, also the smaller last one."""
    draw = workspace.drawing(workspace.prepared(Variant("lcq-modiff", 8, 4)))
    together = draw(range(6))
    assert torch.equal(together[4:], draw(range(4, 6)))
    assert torch.equal(together[:4], draw(range(4)))


def test_all_floating_point_inputs_but_timesteps_take_the_type(workspace):
    x, timestep, label = torch.zeros(1, 1, 8, 8), torch.tensor([999.0]), torch.tensor([1])
    named = {"label": label, "text": torch.zeros(1, 2)}
    (x, timestep), named = typed_call(workspace.model, torch.float16, (x, timestep), named)
    assert x.dtype == named["text"].dtype == torch.float16
    assert timestep.dtype == torch.float32 and named["label"].dtype == torch.int64


def test_tables_say_which_samples_are_not_finite():
    whole = Row(Variant("full", 16, 16), 0, None, 1.0, 2.0, 3.0, 0.5, None)
    broken = Row(Variant("qdiff", 8, 4), 10, None, None, None, None, None, None)
    assert "NaN" not in markdown([whole]) and "| 16/16 |" in markdown([whole])
    assert "10 of qdiff 8/4" in markdown([whole, broken])


def test_a_variant_of_nan_leaves_the_other_rows(work, tmp_path, monkeypatch):
    drawing = Workspace.drawing
    broken = [True]

    def drawn(self, model):
        draw = drawing(self, model)
        return lambda seeds: draw(seeds) * (torch.nan if isinstance(model.denoiser, Modulated) in broken else 1)

    monkeypatch.setattr(Workspace, "drawing", drawn)
    arguments = [*FEW, "-n", "10", "--bits", "8/8", "--method", "lcq", "--json", "-o", tmp_path / "a.md"]
    full, lcq = rows_of(script(modiff_study, "digits-dit", *arguments, "--work", tmp_path / "one"))
    assert full["nonfinite"] == 0 and full["fid"] is not None
    assert lcq["nonfinite"] == 10 and lcq["fid"] is lcq["psnr"] is None
    broken.append(False)
    outcome = script(modiff_study, "digits-dit", *arguments, "--work", tmp_path / "two", "--dtype", "float16")
    assert outcome.exit_code == 2 and "in full precision" in outcome.output and "--dtype bfloat16" in outcome.output


def test_no_compilation_on_a_cpu(tmp_path):
    outcome = script(modiff_study, "digits-dit", *FEW, "--compile", "-n", "10", "-o", tmp_path / "a.md")
    assert outcome.exit_code == 2 and "--device cuda" in outcome.output
