"""Builds with block masks, from the recipe to the bundle and its messages."""

from __future__ import annotations

import json
import shutil

import pytest
import tiny_sparse
import tolerances
import torch
from kernel_tables import table_where_masks_gain
from support import refusal, reused, run, tiny_recipe

from trtconvert.attention.modes import Mode
from trtconvert.bundle import MANIFEST, read_manifest
from trtconvert.calib.calibration import Calibration, load_of_bundle, masks_of_bundle
from trtconvert.calib.frontier import read_frontier
from trtconvert.errors import UserError
from trtconvert.evaluate.torch_int8 import TorchInt8
from trtconvert.models.recorded_calls import relative_error
from trtconvert.runtime.session import OnnxRuntimeComponent

HEIGHT = 10
SEARCH = {"samples": 1, "steps": 2, "min_psnr": 30, "candidates": ["balanced"], "sparse_candidates": [0.01, 0.2]}


SMALL = {"source": "tiny_sparse:build", "options": {"height": HEIGHT}}


def sparse_recipe(folder, sparse=0.2, **sections):
    sections = {"model": SMALL, "attention": {}, "verify": {"min_psnr": 20}} | sections
    sections["attention"] = {"modes": ["balanced", "fp16"], "sparse": sparse} | sections["attention"]
    plan = sections.pop("plan", {})
    recipe = tiny_recipe(folder, **sections)
    plan |= {"kernel_cost": table_where_masks_gain(folder / "cost.json", [Mode.BALANCED]).name}
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"plan": plan}))
    return recipe


def built(folder, recipe):
    outcome = run("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache")
    assert outcome.exit_code == 0, outcome.output
    return folder / "bundle", outcome


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("searched")
    bundle, _ = built(folder, sparse_recipe(folder, "auto", attention={"modes": "auto"}, plan=SEARCH))
    return bundle


def test_the_search_chooses_masks_and_the_bundle_says_which(searched):
    manifest, frontier = read_manifest(searched), read_frontier(searched / "frontier.json")
    chosen = next(point for point in frontier.points if point.name == frontier.chosen)
    assert chosen.sparse and chosen.density < 1 and chosen.keeps_budget
    assert any(not point.sparse and point.density == 1 for point in frontier.points)
    calibration = Calibration.load(searched / manifest.calibration)
    for site in manifest.sites:
        assert site.sparse == chosen.sparse[site.name] and not site.dense
        densities = calibration.blocks[site.name].mask(site.sparse).double().mean((1, 2, 3))
        assert site.density == pytest.approx(densities.tolist())
    words = " ".join(run("inspect", searched).output.replace("│", " ").split())
    assert "2 sites compute" in words and "of their blocks, low noise to high: denoiser: " in words


def test_the_report_shows_the_blocks(searched, tmp_path):
    outcome = run("report", searched, "-o", tmp_path / "report.html")
    assert outcome.exit_code == 0, outcome.output
    page = (tmp_path / "report.html").read_text()
    assert (
        "Blocks that are computed" in page
        and "Blocks computed" in page
        and "of the blocks that attention leaves" in page
    )


def test_torch_computes_what_onnx_runtime_does(searched):
    manifest, model = read_manifest(searched), tiny_sparse.build(height=HEIGHT)
    calibration = load_of_bundle(searched, manifest)
    assert masks_of_bundle(manifest, calibration).keys() == {"denoiser", "denoiser#2"}
    inputs = model.example(1, {"batch": 2, "height": HEIGHT}) | {"timestep": torch.tensor([100.0, 900.0])}
    component = manifest.components["denoiser"]
    got = OnnxRuntimeComponent(searched / component.onnx, component)(**inputs)
    assert relative_error(got, TorchInt8(model, searched, manifest)(**inputs)) < tolerances.SAME_ARITHMETIC


def test_a_bundle_whose_calibration_lacks_its_blocks_is_refused(searched, tmp_path):
    shutil.copytree(searched, tmp_path / "bundle")
    content = json.loads((tmp_path / "bundle" / MANIFEST).read_text())
    content["components"]["denoiser"]["sites"][0]["sparse"] = [0.05, 0.0]
    (tmp_path / "bundle" / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(UserError, match="tables that cannot be used") as refused:
        load_of_bundle(tmp_path / "bundle", type(read_manifest(searched)).model_validate(content))
    assert "0.05" in refused.value.got


def test_a_stated_share_is_taken_and_kept_from_build_to_build(tmp_path):
    bundle, _ = built(tmp_path, sparse_recipe(tmp_path))
    sites = read_manifest(bundle).sites
    assert all(site.sparse == [0.2, 0.2] and site.density[0] < site.density[1] < 1 for site in sites)
    _, again = built(tmp_path, sparse_recipe(tmp_path))
    assert all(reused(again).values())


@pytest.mark.soak
def test_dense_is_another_calibration_plan_and_model(tmp_path):
    built(tmp_path, sparse_recipe(tmp_path))
    bundle, dense = built(tmp_path, sparse_recipe(tmp_path, "off"))
    assert not any(reused(dense).values())
    manifest = read_manifest(bundle)
    assert not any(site.sparse or site.dense for site in manifest.sites)
    # A file without blocks does not serve a recipe with some.
    shutil.copyfile(bundle / manifest.calibration, tmp_path / "dense.safetensors")
    recipe = sparse_recipe(tmp_path)
    content = json.loads(recipe.read_text()) | {"calibration": {"from": "dense.safetensors", "bins": 2}}
    recipe.write_text(json.dumps(content))
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(outcome, "lacks the blocks that attention needs", "remove calibration.from from the recipe")


@pytest.mark.soak
def test_a_gate_that_is_missed_names_the_masks(tmp_path):
    recipe = sparse_recipe(tmp_path, 0.5, verify={"min_psnr": 10, "min_site_sqnr": 60})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 1 and "make attention.sparse (auto: plan.sparse_candidates) smaller" in outcome.output


@pytest.mark.soak
def test_masks_that_would_gain_no_time_are_left_out_with_the_reason(tmp_path):
    bundle, _ = built(tmp_path, sparse_recipe(tmp_path, 0.002))
    sites = read_manifest(bundle).sites
    assert all(not site.sparse and "of its blocks are needed, too many to gain time" in site.dense for site in sites)
    words = " ".join(run("inspect", bundle).output.replace("│", " ").split())
    assert "block masks none: denoiser, denoiser#2: " in words
