"""A denoiser that is loaded in the type of its files is calibrated, searched and exported as one that is loaded in FP32."""

from __future__ import annotations

import json

import pytest
import tiny_pipelines
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from trtconvert.bundle import read_manifest
from trtconvert.calib.frontier import read_frontier
from trtconvert.cli import main

pytestmark = pytest.mark.gpu


def build(folder, pipe):
    folder.mkdir()
    pipe.save_pretrained(folder / "pipeline")
    recipe = {
        "model": {
            "source": "diffusers",
            "weights": "pipeline",
            "dtype": "bfloat16",
            "options": {"height": 128, "width": 128, "batch": [1, 1, 2], "tokens": 16},
        },
        "compute": {"device": "cuda"},
        "attention": {"modes": "auto"},
        "layers": {"modes": "auto", "min_rows": 1},
        "calibration": {"samples": 2, "batch": 1, "steps": 4, "bins": 2},
        "plan": {"samples": 2, "steps": 4, "min_psnr": 20, "sensitivity": "probes"},
        "verify": {"samples": 2, "steps": 4, "min_psnr": 0, "min_site_sqnr": -20, "max_prediction_error": None},
        "engine": {"backend": "onnxruntime"},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    command = ["build", str(folder / "recipe.yaml"), "-o", str(folder / "bundle"), "--cache", str(folder / "cache")]
    outcome = CliRunner().invoke(main, command)
    assert outcome.exit_code == 0, outcome.output
    return folder / "bundle"


def test_a_build_of_16_bit_files_is_that_of_the_same_numbers_in_float32(tmp_path):
    pipe = tiny_pipelines.with_text("flux")
    pipe.transformer.to(torch.bfloat16)
    narrow = build(tmp_path / "narrow", pipe)
    pipe.transformer.to(torch.float32)
    wide = build(tmp_path / "wide", pipe)
    ours, theirs = (load_file(bundle / "calibration.safetensors") for bundle in (narrow, wide))
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=0, atol=0, msg=name)
    assert [p.figures for p in read_frontier(narrow / "frontier.json").points] == [
        p.figures for p in read_frontier(wide / "frontier.json").points
    ]
    assert read_manifest(narrow).quality.measured == "torch"
    assert "bfloat16" in read_manifest(narrow).quality.computed
