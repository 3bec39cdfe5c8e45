"""Plans that choose the layers that quantise deltas from step to step: cost in time, gain in error."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from decided import BY_DELTAS, STATIC, layer_unit, points_of
from kernel_tables import table_without
from support import Quiet, refusal, run, tiny_recipe
from tiny_layers import WITH_CONV, build

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.bundle import read_manifest
from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.candidates import attention_units
from trtconvert.calib.cost import KernelCost
from trtconvert.calib.frontier import read_frontier
from trtconvert.calib.identity import KERNEL_COST
from trtconvert.calib.layer_plan import layer_seconds
from trtconvert.calib.layer_scales import layer_tables
from trtconvert.calib.sensitivity import measure_sensitivity
from trtconvert.errors import UserError
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer, TensorRef
from trtconvert.models.denoiser import intercepted
from trtconvert.quant.forward import Int8Layers, Int8Sites
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection

BINS = 2
LAYER = Layer("a", "linear", 1024, 4096, 4096, "a", TensorRef("a", 0, (4096, 1024), (1024, 1)))


def test_caches_cost_what_they_read_and_write():
    cost = KernelCost.load(caches=True)
    static = cost.layer_seconds(LAYER, 2, LayerMode.STATIC)
    table = json.loads(KERNEL_COST.read_text(encoding="utf-8"))
    traffic = 2 * 2 * 4096 * (1024 + 4096) * 2 / table["bandwidth"]
    assert cost.modulated_seconds(LAYER, 2, 2) == pytest.approx(static + traffic)
    assert cost.modulated_seconds(LAYER, 2, 4) == pytest.approx(static + 2 * traffic)
    exact, unit = cost.layer_seconds(LAYER, 2, LayerMode.EXACT), layer_unit("a", choices=(STATIC, BY_DELTAS))
    other = replace(LAYER, name="b", out_channels=2048)
    times = layer_seconds(cost, [LAYER, other], unit, 2, BINS)[0].tolist()
    alone = layer_seconds(cost, [other], unit, 2, BINS)[0].tolist()
    of_layer = [a - b for a, b in zip(times, alone, strict=True)]
    assert of_layer == pytest.approx([exact, static, static + traffic])


def test_a_table_without_the_bandwidth_is_refused(tmp_path):
    path = table_without(tmp_path / "old.json", "bandwidth")
    KernelCost.load(path)
    with pytest.raises(UserError, match="cannot price the caches") as refused:
        KernelCost.load(path, caches=True)
    assert "trtconvert measure" in refused.value.remedy
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bandwidth": 0}))
    with pytest.raises(UserError, match="does not hold times"):
        KernelCost.load(path)


def searched(min_psnr, modulated_seconds=1.3):
    """A search over a site and two groups of layers: static layers ruin the samples, deltas do not."""
    groups = [layer_unit(name, choices=(STATIC, BY_DELTAS)) for name in ("q", "skip")]
    units = [*attention_units({"site": "dynamic"}, {Mode.FP16, Mode.BALANCED}), *groups]
    error = torch.full((3, BINS, len(Mode)), math.nan, dtype=torch.float64)
    error[..., 0] = 0
    error[0, :, 1:4] = 1e-5
    error[1, :, 1], error[1, :, 2] = 1e-2, 1e-5
    error[2, :, 1], error[2, :, 2] = 1e-5, 1e-5
    seconds = [torch.tensor(row) for row in ([4.0, 3, 2, 1, math.inf], *[[4.0, 1, modulated_seconds]] * 2)]
    points, _ = points_of(units, error, seconds, [0.5] * BINS, min_psnr)
    return next(point for point in points if point.keeps_budget and point.allowed), points


def test_caches_hold_a_budget_that_static_layers_miss():
    chosen, points = searched(40.0)
    assert chosen.modulated == ["q"]  # not "skip": its caches would cost time without a gain
    assert chosen.layers == {name: [LayerMode.STATIC] * BINS for name in ("q", "skip")}
    assert any(p.keeps_budget and not any(map(any, p.layers.values())) for p in points)


@pytest.mark.parametrize(("psnr", "seconds"), [(10.0, 1.3), (40.0, 5.0)])
def test_they_are_not_chosen_where_they_pay_nothing(psnr, seconds):
    assert searched(psnr, seconds)[0].modulated == []


def test_errors_of_deltas_are_those_of_a_trajectory(tmp_path):
    model, section = build(), LayersSection(modes="auto", include=WITH_CONV, kinds=["linear", "conv"], modiff="auto")
    parts = parts_to_convert(model, AttentionSection(), section)
    made = calibrate(
        model, CalibrationSection(samples=2, batch=2, steps=4, bins=BINS), "x", parts.sites, tmp_path, Quiet(),
        layers=parts.layers, of_layers=section,
    )  # fmt: skip
    modes = {layer.name: torch.full((BINS,), LayerMode.STATIC, dtype=torch.int32) for layer in parts.layers}
    tables = layer_tables(model.denoiser, parts.layers, made.layers, modes)
    scales = {layer.name: made.layers[layer.input_group].change_scale for layer in parts.layers}
    assert all(scale is not None for scale in scales.values())
    layers = Int8Layers(tables, model.timestep_max, scales, model.timesteps_fall)  # pyright: ignore[reportArgumentType]
    no_modes = torch.zeros(BINS, dtype=torch.int32)
    sites = Int8Sites(
        {site: AttentionTables(**named, modes=no_modes) for site, named in made.tables.items()}, 1000.0, "dynamic", True
    )
    units = [layer_unit("mlp.0", choices=(STATIC, BY_DELTAS))]
    found = measure_sensitivity(model, units, sites, BINS, layers=layers, seeds=range(2), steps=4)
    alone = Int8Layers({"mlp.0": tables["mlp.0"]}, 1000.0, {"mlp.0": scales["mlp.0"]}, True)  # pyright: ignore
    errors = []

    def watched(*inputs, **named):
        exact = model.denoiser(*inputs, **named)
        moved = intercepted(model, layers=alone.handler())(*inputs, **named)
        errors.append(float((moved - exact).double().square().mean()))
        return exact

    with torch.no_grad():
        model.sample(watched, range(2), steps=4, solver="ddim")
    static, by_deltas = (found.error[0, :, units[0].choices.index(choice)] for choice in (STATIC, BY_DELTAS))
    assert by_deltas.tolist() == pytest.approx([sum(errors[2:]) / 2, sum(errors[:2]) / 2], rel=1e-4)
    assert (by_deltas > 0).all() and not torch.equal(by_deltas, static)


def auto_recipe(folder, attention="auto", modiff="auto", plan=None, **layers):
    recipe = tiny_recipe(
        folder,
        model={"source": "tiny_layers:build"},
        attention={"modes": attention},
        layers={"modes": "auto", "include": WITH_CONV, "modiff": modiff} | layers,
        calibration={"samples": 2, "steps": 4},
        verify={"min_psnr": 10, "min_site_sqnr": 5},
    )
    plan = {"samples": 1, "steps": 2, "min_psnr": 10, "max_prediction_error": 0.05, "candidates": ["balanced"]} | (
        plan or {}
    )
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"plan": plan}))
    return recipe


@pytest.mark.soak
def test_a_build_takes_the_layers_that_the_plan_chose(tmp_path):
    point = "fp16 everywhere, layers static by deltas"
    bundle = tmp_path / "bundle"
    outcome = run("build", auto_recipe(tmp_path, plan={"point": point}), "-o", bundle, "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    manifest, frontier = read_manifest(bundle), read_frontier(bundle / "frontier.json")
    chosen = next(each for each in frontier.points if each.name == point)
    records = manifest.components["denoiser"].layers
    assert chosen.modulated and {layer.name for layer in records if layer.modulated} == set(chosen.modulated)
    assert manifest.components["denoiser"].caches


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"attention": "precision"}, "true or patterns with stated attention.modes"),
        ({"modes": "static"}, "true or patterns with stated layers.modes"),
        ({"plan": {"layer_candidates": ["dynamic"]}}, "static among plan.layer_candidates"),
        ({"modiff": "automatic"}, "true or false"),
    ],
)
def test_contradictory_fields_are_refused_when_the_recipe_is_read(tmp_path, change, expected):
    outcome = run("build", auto_recipe(tmp_path, **change), "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(outcome, expected)


def test_old_tables_are_refused_before_the_calibration(tmp_path):
    recipe = auto_recipe(tmp_path, plan={"kernel_cost": table_without(tmp_path / "old.json", "bandwidth").name})
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    refusal(outcome, "cannot price the caches of layers.modiff: auto")
    assert not list((tmp_path / "cache").glob("observed-*"))


def test_a_frontier_with_caches_of_unknown_layers_is_refused():
    point = searched(40.0)[0]
    with pytest.raises(ValueError, match="modulated: other"):
        type(point).model_validate(point.model_dump() | {"modulated": ["other"]})
