"""`trtconvert modiff`: calibrate, sample, evaluate and bench, on the digits model in a few steps."""

from __future__ import annotations

import json

import pytest
from PIL import Image
from support import refusal, run

from trtconvert.errors import UserError
from trtconvert.modiff import Calibration
from trtconvert.modiff.study import METHODS, Variant, parse_variants

FEW = ("--steps", "3", "--batch", "10", "--calibration-samples", "4", "--rounding-iterations", "0")


def rows_of(outcome):
    """Of the result, the one line of JSON that is no event."""
    assert outcome.exit_code == 0, outcome.output
    found = [json.loads(line) for line in outcome.output.splitlines()]
    return next(line["rows"] for line in found if "rows" in line)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """What the commands of this module share, as commands of a user do."""
    return tmp_path_factory.mktemp("modiff")


def test_variants_are_all_methods_at_all_bits_and_full_precision_once():
    variants = parse_variants(list(METHODS), ["8/8", "4/8"])
    assert len(variants) == 1 + 2 * (len(METHODS) - 1) and variants.count(Variant("full")) == 1
    assert Variant("naive").settings().bins == 1 and not Variant("qdiff").settings().modulation
    for wrong in ("8-4", "8/2", "5/8", "/8"):
        with pytest.raises(UserError):
            parse_variants(["qdiff"], [wrong])


def test_a_table_of_variants_and_going_on_with_it(work, tmp_path):
    arguments = ["modiff", "evaluate", "digits-dit", *FEW, "--work", work, "-n", "10", "--bits", "8/4"]
    arguments += ["--method", "qdiff", "--method", "qdiff-modiff", "--json"]
    outcome = run(*arguments, "-o", tmp_path / "first.md")
    rows = {row["variant"]["method"]: row for row in rows_of(outcome)}
    assert rows["full"]["psnr"] is None and rows["full"]["fid_full"] is None
    # The caches make up for 4 bits: that is what modulation is for.
    assert rows["qdiff-modiff"]["psnr"] > rows["qdiff"]["psnr"] + 2
    kept = {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
    assert run(*arguments, "-o", tmp_path / "second.md").exit_code == 0
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
    refusal(run(*arguments, "--act-bits", "6"), "the calibration is for another activation_bits")


def test_times_of_a_step(work):
    outcome = run("modiff", "bench", "digits-dit", *FEW, "--batch", "2", "--work", work, "--runs", "2", "--json")
    what = [row["what"] for row in rows_of(outcome)]
    assert any("FP32" in name for name in what) and any("MoDiff" in name for name in what)
    assert any("simulated" in name for name in what)


def test_a_model_of_one_s_own_needs_judges(tmp_path):
    recipe = tmp_path / "own.yaml"
    recipe.write_text("model:\n  source: trtconvert.models.ddpm:ddpm_model\n  weights: none.safetensors\n")
    refusal(run("modiff", "evaluate", recipe), "need features and images to be judged by", "--features inception")
