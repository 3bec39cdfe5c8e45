"""`attention.scaling`: its effect in a build, and the benefit of measured scales."""

from __future__ import annotations

import json

import onnx_ir as ir
import pytest
import tiny_models
import torch
from support import run, tiny_recipe

from trtconvert.attention.modes import Mode
from trtconvert.bundle import read_manifest
from trtconvert.calib.calibration import Calibration
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error
from trtconvert.quant.forward import Int8Sites


def built(folder, **attention):
    recipe = tiny_recipe(folder, attention=attention)
    outcome = run("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache")
    assert outcome.exit_code == 0, outcome.output
    manifest = read_manifest(folder / "bundle")
    nodes = attention_nodes(ir.load(folder / "bundle" / manifest.components["denoiser"].onnx))
    found = {site.scaling for site in manifest.sites if site.modes}
    assert found == {node.attributes["scaling"].as_string() for node in nodes.values()}
    return outcome, found


@pytest.mark.parametrize(
    ("attention", "scaling"),
    [({}, "dynamic"), ({"modes": "precision", "scaling": "calibrated"}, "calibrated")],
    ids=["default", "stated"],
)
def test_a_build_follows_the_recipe_and_says_what_it_did(tmp_path, attention, scaling):
    outcome, found = built(tmp_path, **attention)
    assert found == {scaling} and f"{scaling} at " in outcome.output


def test_times_of_another_gpu_change_the_plan(tmp_path):
    """Without plan.kernel_cost measured scales do not count as slower; a second build uses plan.kernel_cost."""
    assert built(tmp_path)[1] == {"dynamic"}
    rows = [
        {"mode": mode, "shape": [1, 8, 64, 64, 32], "seconds": seconds, "scaling": scaling}
        for mode in (0, 1, 2, 3)
        for scaling, seconds in (("dynamic", 2e-6), ("calibrated", 1e-6))
    ]
    (tmp_path / "cost.json").write_text(json.dumps({"gpu": "a", "date": "b", "rows": rows}))
    document = json.loads(tiny_recipe(tmp_path).read_text()) | {"plan": {"kernel_cost": "cost.json"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(document))
    outcome = run("build", tmp_path / "recipe.yaml", "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    assert {site.scaling for site in read_manifest(tmp_path / "bundle").sites if site.modes} == {"calibrated"}


def test_measured_scales_follow_inputs_unlike_those_of_the_calibration(tmp_path):
    """Inputs five times as large are clipped by calibrated scales."""
    built(tmp_path)
    model, manifest = tiny_models.build(), read_manifest(tmp_path / "bundle")
    modes = {s.name: torch.full((2,), int(Mode.PRECISION), dtype=torch.int32) for s in manifest.sites if s.modes}
    tables = Calibration.load(tmp_path / "bundle" / manifest.calibration).with_modes(modes)
    inputs = model.example(3, {name: opt for name, (_, opt, _) in model.dims.items()})
    first = model.inputs[0].name
    inputs[first] = 5 * inputs[first]
    with torch.no_grad():
        exact = model.denoiser(**inputs)
        errors = {
            scaling: relative_error(
                intercepted(model, Int8Sites(tables, model.timestep_max, scaling, True).handler())(**inputs), exact
            )
            for scaling in ("calibrated", "dynamic")
        }
    assert errors["dynamic"] < errors["calibrated"] / 2
