"""Builds that skip denoising steps: the content, images and messages of bundles."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support import reused, run, tiny_recipe

from trtconvert import models, runtime
from trtconvert.bundle import MANIFEST, read_manifest
from trtconvert.calib.frontier import Frontier, read_frontier
from trtconvert.runtime import bundles
from trtconvert.runtime.batches import AnyBatch
from trtconvert.runtime.reuse import Following, load_reuse
from trtconvert.stages.build import Build

STEPS = {"computed": 0.5, "calibrated": 8, "samples": 2}


def built(folder, **sections):
    made = tiny_recipe(folder)
    recipe = json.loads(made.read_text()) | {"steps": STEPS} | sections
    made.write_text(json.dumps(recipe))
    return run("build", made, "-o", folder / "bundle", "--cache", folder / "cache")


@pytest.fixture(scope="module")
def bundle(stepped_build):
    return stepped_build.bundle


def calls_of(bundle, **options):
    """Return the number of model runs for 8 steps, and the images."""
    with runtime.load(bundle, **options) as loaded:
        session, calls = loaded["denoiser"]._session, []

        class Counted:
            def __getattr__(self, name):
                return getattr(session, name)

            def run(self, *arguments):
                calls.append(None)
                return session.run(*arguments)

        loaded["denoiser"]._session = Counted()
        sample = models.load_sampler(loaded)
        images = sample(AnyBatch(loaded["denoiser"]), [1, 2], steps=8, solver="ddim")
    return len(calls), images


def test_half_of_the_steps_are_computed(bundle):
    record = read_manifest(bundle).components["denoiser"].reuse
    assert record is not None and record.steps == 8 and len(record.computed) == 4 and record.computed[0] == 0
    assert record.psnr_worst <= record.psnr + 1e-6 and record.psnr <= record.psnr_all + 1
    some, images = calls_of(bundle)
    every, expected = calls_of(bundle, all_steps=True)
    assert (some, every) == (4, 8)
    assert float((images - expected).abs().max()) > 0 and float((images - expected).square().mean()) < 0.02


def test_steps_are_read_again_with_a_bundle_that_was_replaced_meanwhile(bundle, tmp_path, monkeypatch):
    """Engines of one build must not skip the steps of another."""
    copied, read = tmp_path / "bundle", []
    shutil.copytree(bundle, copied)

    def replaced(folder, component):
        read.append(load_reuse(folder, component))
        if len(read) == 1:
            (folder / MANIFEST).write_text((folder / MANIFEST).read_text() + "\n")
        return read[-1]

    monkeypatch.setattr(bundles, "load_reuse", replaced)
    with runtime.load(copied) as loaded:
        assert len(read) == 2 and loaded["denoiser"].reuse is read[1]


def test_people_are_told(bundle, tmp_path):
    record = read_manifest(bundle).components["denoiser"].reuse
    told = run("inspect", bundle)
    assert "4 of 8 computed: " + ", ".join(map(str, record.computed)) in " ".join(told.output.split())
    page = run("report", bundle, "-o", tmp_path / "report.html")
    assert not page.exit_code
    text = " ".join((tmp_path / "report.html").read_text().split())
    assert "Steps computed" in text and "Of 8 denoising steps 4 are computed" in text


@pytest.mark.soak
def test_other_kernels_choose_the_steps_anew(stepped_build, tmp_path, monkeypatch):
    shutil.copytree(stepped_build.cache, tmp_path / "cache")
    monkeypatch.setattr(Build, "kernel_reads", lambda _: {"kernels": "another library"})
    result = built(tmp_path)
    assert not result.exit_code, result.output
    assert not reused(result)["steps"] and reused(result)["calibrate"]


def test_callers_of_their_own_follow_a_trajectory(bundle):
    with runtime.load(bundle) as loaded:
        denoiser = runtime.follow(loaded["denoiser"], [999 - 125 * step for step in range(8)])
        assert isinstance(denoiser, Following)
        spec = loaded.manifest.components["denoiser"].inputs
        shape = [size if isinstance(size, int) else 4 if size != "batch" else 1 for size in spec[0].shape]
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
        for step in range(8):
            denoiser(x, torch.tensor([999.0 - 125 * step]))
        assert (denoiser.calls, denoiser.computed) == (8, 4)


def test_a_budget_that_allows_nothing_is_told(tmp_path):
    recipe = {"steps": STEPS | {"computed": "auto"}, "plan": {"min_psnr": 400}}
    result = built(tmp_path, **recipe)
    assert not result.exit_code, result.output
    assert "all denoising steps are computed" in " ".join(result.output.split())
    assert read_manifest(tmp_path / "bundle").components["denoiser"].reuse is None


def test_plan_and_steps_are_chosen_together(tmp_path, monkeypatch):
    def several(frontier):
        kept = [point for point in frontier.points if point.keeps_budget and point.allowed]
        return [frontier.choose(None), *kept[1:3]]

    monkeypatch.setattr(Frontier, "rivals", several)
    result = built(
        tmp_path,
        attention={"modes": "auto"},
        plan={"samples": 2, "steps": 4, "min_psnr": 24},
        steps=STEPS | {"computed": "auto"},
        verify={"samples": 2, "steps": 8, "min_psnr": 0},
    )
    assert not result.exit_code, result.output
    manifest = read_manifest(tmp_path / "bundle")
    record = manifest.components["denoiser"].reuse
    frontier = read_frontier(tmp_path / "bundle/frontier.json")
    names = [plan.name for plan in record.tried]
    assert names and names == [point.name for point in several(frontier) if point.name in names]
    best = max(record.tried, key=lambda plan: plan.speed_of_all)
    assert best.name == frontier.chosen and best.computed == len(record.computed)
    assert best.speed_of_all == pytest.approx(best.speed * record.steps / best.computed)
    point = next(point for point in frontier.points if point.name == frontier.chosen)
    assert {site.name: site.modes for site in manifest.components["denoiser"].sites} == point.modes
    told = " ".join(run("inspect", tmp_path / "bundle").output.split())
    assert f"tried: {best.name}" in told
    page = run("report", tmp_path / "bundle", "-o", tmp_path / "report.html")
    assert not page.exit_code and "chosen together" in (tmp_path / "report.html").read_text()


def test_deltas_from_step_to_step_need_all_steps(tmp_path):
    result = built(tmp_path, layers={"modes": "static", "modiff": True})
    assert result.exit_code == 2 and "scales hold for deltas from one step to the next" in " ".join(
        result.output.split()
    )
