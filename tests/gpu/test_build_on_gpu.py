"""The main job on a GPU: the stages that compute there, and the verification of the shipped engine."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from support import REPOSITORY

from trtconvert.bundle import read_manifest
from trtconvert.calib.calibration import Calibration
from trtconvert.cli import main
from trtconvert.stages.common import NATIVE

pytestmark = pytest.mark.gpu
pytest.importorskip("tensorrt_bindings", reason="needs TensorRT")


def build(folder, *arguments: str, **sections):
    recipe = {
        "model": {
            "source": "digits-dit",
            "weights": str(REPOSITORY / "recipes/digits-dit.safetensors"),
            "dtype": "float16",
        },
        "calibration": {"samples": 16, "steps": 10, "bins": 5},
        "plan": {"samples": 4, "steps": 10},
        "verify": {"samples": 8, "steps": 10},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe | sections))
    command = ["build", str(folder / "recipe.yaml"), "-o", str(folder / "bundle"), "--cache", str(folder / "cache")]
    return CliRunner().invoke(main, [*command, *arguments])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    outcome = build(folder, engine={"backend": "tensorrt"}, plan={"samples": 4, "steps": 10, "sensitivity": "probes"})
    assert outcome.exit_code == 0, outcome.output
    return folder


def test_the_engine_draws_the_samples_that_are_verified(built):
    manifest = read_manifest(built / "bundle")
    assert manifest.quality.measured == "tensorrt"
    assert manifest.quality.error is None
    assert manifest.quality.psnr > 33
    assert "float16" in manifest.quality.computed
    assert not list((built / "cache").glob(f"*/{NATIVE}"))


def test_the_engine_is_held_to_full_precision_in_every_bin(built):
    manifest = read_manifest(built / "bundle")
    (engine,) = manifest.components["denoiser"].engines
    assert len(engine.prediction_error) == 5
    assert all(error is not None and 0 < error < 0.03 for error in engine.prediction_error)
    assert all(error is not None and 0 < error < 0.005 for error in manifest.quality.type_error)


def test_a_gate_on_predictions_can_be_missed_and_costs_no_new_stage(built):
    strict = {"samples": 8, "steps": 10, "max_prediction_error": 1e-5}
    outcome = build(
        built, engine={"backend": "tensorrt"}, plan={"samples": 4, "steps": 10, "sensitivity": "probes"}, verify=strict
    )
    assert outcome.exit_code == 1
    assert "error of the prediction" in outcome.output and "16-bit type alone gives" in outcome.output
    assert (built / "bundle.missed/samples.png").is_file()


def test_compile_verifies_the_engine_on_recorded_calls(built):
    outcome = CliRunner().invoke(main, ["compile", str(built / "bundle"), "--cache", str(built / "other")])
    assert outcome.exit_code == 0, outcome.output
    (engine,) = read_manifest(built / "bundle").components["denoiser"].engines
    assert any(error is not None for error in engine.prediction_error)


def test_scales_of_a_gpu_are_those_of_a_cpu(built, tmp_path):
    on_gpu = Calibration.load(built / "bundle/calibration.safetensors")
    outcome = build(tmp_path, "--device", "cpu", engine={"backend": "onnxruntime"}, verify={"samples": 2, "steps": 5})
    assert outcome.exit_code == 0, outcome.output
    on_cpu = Calibration.load(tmp_path / "bundle/calibration.safetensors")
    for site, tables in on_cpu.tables.items():
        for name in ("q_scale", "k_scale", "v_scale"):
            ratio = on_gpu.tables[site][name] / tables[name]
            assert ratio.sub(1).abs().median() < 0.01, (site, name)
