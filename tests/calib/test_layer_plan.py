"""One plan for attention and layers: optimal; layers are INT8 in all timestep bins or none; fixed plans for comparison."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from decided import BY_DELTAS, EXACT, STATIC, layer_unit, points_of
from support import Quiet, refusal, reused, run, tiny_recipe
from tiny_layers import CHOSEN, WITH_CONV, build

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.bundle import read_manifest
from trtconvert.calib.candidates import attention_units
from trtconvert.calib.cost import KernelCost
from trtconvert.calib.frontier import Frontier, read_frontier
from trtconvert.calib.knapsack import fastest
from trtconvert.calib.layer_plan import faster_modes, layer_seconds, stated_layers
from trtconvert.calib.layer_scales import LayerScales, layer_tables
from trtconvert.calib.sensitivity import measure_sensitivity
from trtconvert.linear import beside_plugins
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer, LayerFinder, TensorRef, select_layers
from trtconvert.models.denoiser import intercepted
from trtconvert.quant.decision import Choice, Unit
from trtconvert.quant.forward import Int8Layers, Int8Sites
from trtconvert.recipe import LayersSection

BINS = 2
SITE = attention_units({"site": "dynamic"}, Mode)
OF_LAYER = [EXACT, *map(Choice, (LayerMode.WEIGHT_ONLY, LayerMode.DYNAMIC)), STATIC, BY_DELTAS]
FORMS = [[choice.form for choice in choices] for choices in (SITE[0].choices, OF_LAYER)]
"""Units: a site and a layer with five choices each."""


# The knapsack ---------------------------------------------------------------------------------------------------------


def random_choices(seed):
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(2, BINS, len(OF_LAYER), generator=generator, dtype=torch.float64)
    cost[..., 0] = 0
    time = 1 + torch.rand(2, BINS, len(OF_LAYER), generator=generator, dtype=torch.float64)
    return cost, time


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [1e-3, 0.6, 1.2, 10.0])
def test_no_plan_within_the_limit_is_faster_among_those_whose_layers_are_int8_or_have_caches_in_all_bins_or_in_none(
    seed, limit
):
    cost, time = random_choices(seed)
    chosen = fastest(cost, time, limit, FORMS)
    assert cost.gather(-1, chosen[..., None]).sum() <= limit * (1 + 1e-6)
    whole = [OF_LAYER.index(choice) for choice in (EXACT, BY_DELTAS)]
    assert all(len(set((chosen[1] == index).tolist())) == 1 for index in whole)
    feasible = [
        sum(time[s, t, indexes[s * BINS + t]] for s in range(2) for t in range(BINS))
        for indexes in itertools.product(range(len(OF_LAYER)), repeat=2 * BINS)
        if sum(cost[s, t, indexes[s * BINS + t]] for s in range(2) for t in range(BINS)) <= limit
        and all(len({indexes[BINS + t] == index for t in range(BINS)}) == 1 for index in whole)
    ]
    assert float(time.gather(-1, chosen[..., None]).sum()) == pytest.approx(float(min(feasible)), rel=1e-6)


def test_a_layer_may_change_between_int8_modes():
    """A layer has the same weights in all timestep bins."""
    cost = torch.zeros(1, BINS, len(OF_LAYER), dtype=torch.float64)
    cost[0, 0, OF_LAYER.index(STATIC)] = 5
    cost[..., 1:3], cost[..., 4] = 0.1, math.inf
    time = torch.tensor([4.0, 3.5, 3.0, 1.0, math.inf], dtype=torch.float64).expand(1, BINS, -1)
    chosen = [OF_LAYER[index] for index in fastest(cost, time, 1.0, FORMS[1:])[0]]
    assert chosen == [Choice(LayerMode.DYNAMIC), STATIC]


def test_a_layer_that_one_bin_cannot_bear_is_int8_in_none():
    cost = torch.zeros(1, BINS, len(OF_LAYER), dtype=torch.float64)
    cost[0, 1, 1:] = math.inf
    time = torch.tensor([4.0, 3.0, 2.0, 1.0, 1.0], dtype=torch.float64).expand(1, BINS, -1)
    assert not fastest(cost, time, 1.0, FORMS[1:]).any()


# The search -----------------------------------------------------------------------------------------------------------


def searched(psnr, *, layer_error=1e-4, layer_seconds=1.0, steps=(0.5,) * BINS, named=None):
    """A search over a site and two groups of layers whose samples match the error model.

    Args:
        layer_error: of a group in INT8; layer_seconds: its time then, of 4 in 16 bits.
        steps: share of the steps in each bin. named: of a fixed plan to sample.
    """
    error = torch.full((3, BINS, len(Mode)), math.nan, dtype=torch.float64)
    error[..., 0] = 0
    error[0, :, 1:4] = torch.tensor([1e-5, 3e-5, 1e-4], dtype=torch.float64)
    error[1:, :, 1] = layer_error
    error[:, torch.tensor(steps) == 0] *= 0  # NaN stays NaN
    seconds = [torch.tensor(row) for row in ([4.0, 3, 2, 1, math.inf], *[[4.0, layer_seconds]] * 2)]
    points, _ = points_of([*SITE, layer_unit("q"), layer_unit("skip")], error, seconds, steps, psnr, named)
    return Frontier(gpu="", date="", limits={"psnr": psnr}, points=points)


def test_attention_alone_layers_alone_and_both_are_compared():
    names = ("aggressive everywhere", "fp16 everywhere, layers static", "aggressive everywhere, layers static")
    alone, layers, both = (
        next(point for point in searched(20.0, named=name).points if point.name == name) for name in names
    )
    assert alone.layers == {"q": [0, 0], "skip": [0, 0]} and alone.modes == {"site": [3, 3]}
    assert layers.layers == {"q": [3, 3], "skip": [3, 3]} and layers.modes == {"site": [0, 0]}
    assert (both.modes, both.layers) == (alone.modes, layers.layers)
    # Times in 16 bits: 12 in all, 4 of the site and 4 of each group.
    assert [round(point.speed, 6) for point in (alone, layers, both)] == [round(12 / t, 6) for t in (9, 6, 3)]


def test_the_fastest_that_keeps_the_budget_is_chosen_from_all():
    found = searched(20.0).choose(None)
    assert found.modes == {"site": [3, 3]} and found.layers == {"q": [3, 3], "skip": [3, 3]}


def test_layers_that_ruin_the_samples_stay():
    frontier = searched(30.0, layer_error=1.0)
    found = frontier.choose(None)
    assert found.modes == {"site": [3, 3]} and not any(any(row) for row in found.layers.values())
    assert not next(point for point in frontier.points if "layers static" in point.name).keeps_budget


def test_layers_that_are_no_faster_stay():
    found = searched(20.0, layer_seconds=5.0).choose(None)
    assert found.modes == {"site": [3, 3]} and not any(any(row) for row in found.layers.values())


def test_every_plan_has_layers_in_all_bins_or_in_none():
    for point in searched(33.0).points:
        assert all(all(row) or not any(row) for row in point.layers.values()), point


@pytest.mark.parametrize("unseen", range(BINS))
def test_a_bin_without_steps_does_not_keep_layers_from_being_int8(unseen):
    """Attention stays FP16 in a bin without steps; a layer has the same weights in all bins."""
    found = searched(20.0, steps=[float(index != unseen) for index in range(BINS)]).choose(None)
    assert found.modes["site"][unseen] == Mode.FP16
    assert found.layers == {"q": [3, 3], "skip": [3, 3]}


def test_where_no_plan_keeps_the_budget_full_precision_is_chosen():
    found = searched(200.0).choose(None)
    assert not any(any(row) for row in (*found.modes.values(), *found.layers.values()))


# Sensitivity and modes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def int8():
    """The tiny model's INT8 layers, and its attention."""
    model, finder, tables = build(), None, {}
    finder = LayerFinder(model.denoiser)
    inputs = model.example(0, {"batch": 2})

    def attend(call):
        tables[call.name] = tables_from_data(call.q, call.k, call.v, Mode.PRECISION)
        return call.exact()

    with torch.no_grad():
        intercepted(model, attend, finder)(**inputs)
    chosen, _ = select_layers(finder.layers(), WITH_CONV, [], 2)
    scales = {
        layer.input_group: LayerScales(
            torch.ones(layer.in_channels), torch.zeros(layer.in_channels), torch.full((BINS,), 0.05)
        )
        for layer in chosen
    }
    modes = {layer.name: torch.tensor([LayerMode.STATIC] * BINS) for layer in chosen}
    sites = {
        name: type(table)(*(x.expand(BINS, *x.shape[1:]) for x in vars(table).values()))
        for name, table in tables.items()
    }
    layers = Int8Layers(layer_tables(model.denoiser, chosen, scales, modes), model.timestep_max)
    return model, Int8Sites(sites, model.timestep_max, "calibrated", True), layers


def test_sensitivities_of_layers_are_the_errors_that_one_group_makes(int8):
    model, sites, layers = int8
    units = [
        *attention_units({"denoiser": "calibrated"}, [Mode.FP16, Mode.PRECISION]),
        layer_unit("q", "k", "v"),
        layer_unit("skip"),
    ]
    bar = Quiet()
    found = measure_sensitivity(model, units, sites, BINS, layers=layers, seeds=range(2), steps=4, bar=bar)
    assert found.units == units and bar.done == bar.told == BINS + 1 + 3
    assert found.error[0, :, :2].isfinite().all() and found.error[0, :, 2:].isnan().all()
    assert found.error[1:, :, :2].isfinite().all() and found.error[1:, :, 2:].isnan().all()
    # A first step from the seeds: the change of the output by the group's layers in INT8.
    calls = []

    def watched(*inputs, **named):
        output = intercepted(model)(*inputs, **named)
        alone = Int8Layers({name: layers.tables[name] for name in ("q", "k", "v")}, model.timestep_max)
        calls.append(float((intercepted(model, layers=alone.handler())(*inputs, **named) - output).square().mean()))
        return output

    with torch.no_grad():
        model.sample(watched, range(2), steps=4, solver="ddim")
    assert float(found.error[1, :, 1].sum()) == pytest.approx(sum(calls) / 2, rel=1e-4)  # two steps a bin


def layer_of(kind="linear", name="a"):
    return Layer(
        name, kind, 32, 32, 16, name, TensorRef(name, 0, (32, 32), (32, 1)), kernel=(3, 3) if kind == "conv" else ()
    )


@pytest.mark.parametrize(
    ("modes", "linear", "conv"),
    [
        ("auto", [3, 3], [3, 3]),
        ("static", [3, 3], [3, 3]),
        ("dynamic", [2, 2], [3, 3]),  # convolutions have no scales per token
        ("weight_only", [1, 1], [1, 1]),
        (["weight_only", "dynamic"], [1, 2], [1, 3]),
    ],
)
def test_stated_modes_are_those_of_every_layer(modes, linear, conv):
    plan = stated_layers(LayersSection(modes=modes), [layer_of(), layer_of("conv", "b")], BINS)
    assert {name: made.modes for name, made in plan.items()} == {"a": linear, "b": conv}


def test_layers_of_few_rows_have_int8_weights_alone():
    few = dataclasses.replace(layer_of(name="few"), weight_only=True)
    plan = stated_layers(LayersSection(modes="static"), [layer_of(), few], BINS)
    assert {name: made.modes for name, made in plan.items()} == {"a": [3, 3], "few": [1, 1]}


def test_layers_that_are_off_have_none():
    assert stated_layers(LayersSection(modes="off"), [layer_of()], BINS) == {}


# Times ----------------------------------------------------------------------------------------------------------------


def table(
    path,
    *,
    attention=(4, 3, 2, 1),
    layers=((0, 4.0), (3, 1.0)),
    sizes=((64, 32, 32), (4096, 1024, 1024)),
    convs=((0, 4.0), (3, 1.0)),
):
    """A table of invented times: of attention and layers by mode, per unit of work, and of convolutions."""
    rows = [{"mode": m, "shape": [1, 1, 16, 16, 32], "seconds": s * 1e-5} for m, s in enumerate(attention)]
    of_layers = [
        {"mode": mode, "shape": list(shape), "seconds": s * 1e-9 * math.prod(shape) ** 0.5}
        for mode, s in layers
        for shape in sizes
    ]
    of_convs = [
        {"mode": mode, "shape": [2, side, side, 320, 320, 3], "seconds": s * 1e-9 * side}
        for mode, s in convs
        for side in (16, 64)
    ]
    made_up = {"gpu": "made up", "date": "2026-01-01", "rows": rows, "layers": of_layers, "convs": of_convs}
    path.write_text(json.dumps(made_up))
    return path


def test_times_of_layers_are_interpolated_over_their_work(tmp_path):
    cost = KernelCost.load(table(tmp_path / "t.json"))
    small, large = layer_of(), Layer("b", "linear", 1024, 1024, 4096, "b", TensorRef("b", 0, (1024, 1024), (1024, 1)))
    assert cost.layer_seconds(large, 1, LayerMode.STATIC) == pytest.approx(1e-9 * (4096 * 1024 * 1024) ** 0.5)
    assert cost.layer_seconds(large, 1, LayerMode.EXACT) == pytest.approx(
        4 * cost.layer_seconds(large, 1, LayerMode.STATIC)
    )
    between = cost.layer_seconds(small, 64, LayerMode.STATIC)
    assert cost.layer_seconds(small, 4, LayerMode.STATIC) < between < cost.layer_seconds(large, 1, LayerMode.STATIC)
    # Between measured sizes the table's times grow with the square root of the work.
    assert between == pytest.approx(1e-9 * (64 * 16 * 32 * 32) ** 0.5, rel=1e-6)
    assert cost.layer_seconds(small, 1, LayerMode.DYNAMIC) == math.inf  # not measured


def conv_of(side=64, *, inputs=320, outputs=320, kernel=3, normed=True, padding=1):
    return Layer(
        "a", "conv", inputs, outputs, side**2, "a", TensorRef("a", 0, (outputs, inputs, kernel, kernel), (1, 1, 1, 1)),
        kernel=(kernel, kernel), stride=(1, 1), padding=(padding, padding), normed=normed,
    )  # fmt: skip


def test_times_of_convolutions_are_those_of_engines(tmp_path):
    cost = KernelCost.load(table(tmp_path / "t.json"), of_convs=True)
    exact, static, alone = (cost.layer_seconds(conv_of(), 2, LayerMode(mode)) for mode in (0, 3, 1))
    assert (exact, static) == (pytest.approx(4 * 64e-9), pytest.approx(64e-9))
    assert alone == exact  # 16 bits, with INT8 weights
    assert static < cost.layer_seconds(conv_of(), 4, LayerMode.STATIC)
    for slow in (
        conv_of(normed=False),  # no norm quantises its input
        conv_of(8, outputs=160), conv_of(inputs=64), conv_of(kernel=1, padding=0), conv_of(padding=3),
        dataclasses.replace(conv_of(), kernel=(3, 3, 3), stride=(1, 1, 1), padding=(1, 1, 1)),
    ):  # fmt: skip
        assert cost.layer_seconds(slow, 2, LayerMode.STATIC) == cost.layer_seconds(slow, 2, LayerMode.EXACT)
    without = KernelCost.load(table(tmp_path / "t.json", convs=((0, 4.0),)), of_convs=True)
    assert without.layer_seconds(conv_of(), 2, LayerMode.STATIC) == exact  # on a GPU without the kernel


def test_the_times_that_come_with_the_program_have_convolutions():
    cost = KernelCost.load(of_convs=True)
    for side, inputs, outputs in ((64, 320, 320), (32, 640, 640), (8, 1280, 1280), (128, 320, 320)):
        layer = conv_of(side, inputs=inputs, outputs=outputs)
        static, exact = (cost.layer_seconds(layer, 2, mode) for mode in (LayerMode.STATIC, LayerMode.EXACT))
        assert 1e-6 < static < exact < 1e-3


def rows_of(rows, outputs, depth, **flags):
    """A linear layer of a U-Net, with the rows of one sample."""
    weight = TensorRef("a", 0, (outputs, depth), (depth, 1))
    return Layer("a", "linear", depth, outputs, rows, "a", weight, beside_plugins=True, **flags)


def test_linear_layers_beside_plugins_take_the_time_that_engines_save():
    """Sizes of SDXL, two samples: the price is that of the engine's rule, not that of a layer with a kernel for its rows."""
    cost = KernelCost.load()

    def saved(layer, mode=LayerMode.STATIC):
        return (cost.layer_seconds(layer, 2, LayerMode.EXACT) - cost.layer_seconds(layer, 2, mode)) * 1e6

    queries, behind_attention = rows_of(1024, 1280, 1280, normed=True), rows_of(1024, 1280, 1280)
    products = 2 * 2048 * 1280 * 1280 * beside_plugins.SAVED_PER_OPERATION
    assert saved(queries) == pytest.approx(saved(queries, mode=LayerMode.DYNAMIC)) == pytest.approx(products)
    assert saved(behind_attention) == 0  # a kernel for its rows takes longer than the product saves
    deep = rows_of(1024, 1280, 5120, gated=True)
    assert saved(deep) == pytest.approx(4 * products)  # GEGLU quantises its rows
    by_rows = saved(deep, mode=LayerMode.DYNAMIC)  # a kernel of its own gives each row a scale
    assert 0 < by_rows == saved(dataclasses.replace(deep, gated=False)) < saved(deep)
    wide = rows_of(4096, 2560, 320, normed=True, geglu=True)
    assert saved(wide) > 0 == saved(dataclasses.replace(wide, geglu=False))  # too little depth, but for GEGLU
    assert saved(rows_of(400, 1280, 1280, normed=True)) == 0  # too few rows
    assert cost.layer_seconds(
        dataclasses.replace(queries, beside_plugins=False), 2, LayerMode.STATIC
    ) > cost.layer_seconds(queries, 2, LayerMode.STATIC)


def test_layers_beside_plugins_are_searched_in_the_modes_of_their_kernels(tmp_path):
    static, dynamic = {LayerMode.STATIC}, {LayerMode.DYNAMIC}
    queries, deep = rows_of(1024, 1280, 1280, normed=True), rows_of(1024, 1280, 5120, gated=True)
    of_transformer = dataclasses.replace(queries, beside_plugins=False)
    few = rows_of(400, 1280, 1280, normed=True)
    cost, allowed = KernelCost.load(of_convs=True), (LayerMode.EXACT, LayerMode.STATIC)
    of_layers = [
        (queries, dynamic),
        (deep, static | dynamic),
        (of_transformer, static),
        (conv_of(), static),
        (few, set()),
    ]
    for layer, expected in of_layers:
        assert faster_modes(cost, layer, 2, allowed, by_default=True) == expected
    assert faster_modes(cost, queries, 2, allowed, by_default=False) == static  # as the recipe asks
    elsewhere = KernelCost.load(table(tmp_path / "t.json", convs=((0, 4.0),)))
    assert faster_modes(elsewhere, queries, 2, allowed, by_default=True) == static


def test_rows_are_quantised_apart_behind_attention_alone():
    """A product of PixArt-Sigma's size gains where TensorRT fuses the quantisation of its rows; few rows gain nothing."""
    cost = KernelCost.load()
    product = Layer("a", "linear", 1152, 1152, 4096, "a", TensorRef("a", 0, (1152, 1152), (1152, 1)))
    behind = dataclasses.replace(product, behind_attention=True)
    exact, fused, apart = (
        cost.layer_seconds(layer, 2, mode)
        for layer, mode in ((product, LayerMode.EXACT), (product, LayerMode.STATIC), (behind, LayerMode.STATIC))
    )
    assert exact / 2 <= fused < 0.8 * exact < exact < apart
    few = [dataclasses.replace(layer, rows=77) for layer in (product, behind)]
    assert cost.layer_seconds(few[0], 2, LayerMode.STATIC) == cost.layer_seconds(few[1], 2, LayerMode.STATIC)


def test_queries_keys_and_values_are_priced_as_one_product():
    """PixArt-Sigma's sizes: engines compute the three as one product, and quantise their input once."""
    cost, batch = KernelCost.load(), 2
    weight = TensorRef("a", 0, (1152, 1152), (1152, 1))
    alone = [Layer(name, "linear", 1152, 1152, 4096, "q", weight) for name in "qkv"]
    wide = dataclasses.replace(alone[0], name="mlp", out_channels=4608)
    choices = tuple(Choice(mode) for mode in (LayerMode.EXACT, LayerMode.STATIC))

    def seconds(layers):
        exact, static = layer_seconds(cost, layers, Unit("layer", "q", ("q",), choices), batch, bins=2)[0].tolist()
        return exact, static

    exact, static = seconds(alone)
    assert static < 0.9 * exact
    joined = dataclasses.replace(alone[0], out_channels=3 * 1152)
    assert (exact, static) == tuple(cost.layer_seconds(joined, batch, choice.mode) for choice in choices)
    assert seconds([*alone, wide]) == pytest.approx(
        [a + b for a, b in zip(seconds(alone), seconds([wide]), strict=True)]
    )
    # Keys and values that many blocks compute from the prompt stay products of their own.
    assert seconds(alone * 2) == pytest.approx([6 * x for x in seconds(alone[:1])])


def test_layers_of_few_rows_take_the_time_of_reading_their_weights(tmp_path):
    few = dataclasses.replace(layer_of(name="few"), rows=1, weight_only=True)
    for cost in (KernelCost.load(), KernelCost.load(table(tmp_path / "t.json"))):
        exact, in_int8 = (cost.layer_seconds(few, 2, mode) for mode in (LayerMode.EXACT, LayerMode.WEIGHT_ONLY))
        assert 0 < exact == 2 * in_int8
        larger = dataclasses.replace(few, out_channels=4 * few.out_channels)
        assert cost.layer_seconds(larger, 2, LayerMode.WEIGHT_ONLY) == 4 * in_int8
        assert faster_modes(cost, few, 2, (LayerMode.EXACT, LayerMode.STATIC), by_default=True) == {
            LayerMode.WEIGHT_ONLY
        }


def test_layers_beside_plugins_keep_the_table_of_a_gpu_without_our_kernels(tmp_path):
    cost = KernelCost.load(table(tmp_path / "t.json", convs=((0, 4.0),)))
    layer = rows_of(4096, 1024, 1024, normed=True)
    assert cost.layer_seconds(layer, 1, LayerMode.STATIC) == pytest.approx(1e-9 * (4096 * 1024 * 1024) ** 0.5)


# Builds ---------------------------------------------------------------------------------------------------------------


def planned(folder, *, times=None, layers=None, **plan):
    """A build of the tiny model that searches a plan for attention and layers."""
    table(folder / "times.json", **times or {})
    of_layers = {"modes": "auto", "include": WITH_CONV} | (layers or {})
    sections = {"model": {"source": "tiny_layers:build"}, "attention": {"modes": "auto"}, "layers": of_layers}
    document = json.loads(tiny_recipe(folder, calibration={"samples": 16}, **sections).read_text())
    # With this model the difference of lowerings is near the gate: below on one processor, above on another.
    document["verify"] = document["verify"] | {"min_site_sqnr": 12}
    document["plan"] = {"min_psnr": 20, "samples": 2, "steps": 4, "kernel_cost": "times.json"} | plan
    (folder / "recipe.yaml").write_text(json.dumps(document))
    return run("build", folder / "recipe.yaml", "-o", folder / "bundle", "--cache", folder / "cache")


def test_a_build_searches_one_plan_for_attention_and_layers(tmp_path):
    outcome = planned(tmp_path)
    assert outcome.exit_code == 0, outcome.output
    frontier = read_frontier(tmp_path / "bundle" / "frontier.json")
    component = read_manifest(tmp_path / "bundle").components["denoiser"]
    chosen = next(point for point in frontier.points if point.name == frontier.chosen)
    assert set(chosen.layers) == set(CHOSEN)
    assert {layer.name: layer.modes for layer in component.layers if layer.in_int8} == {
        name: row for name, row in chosen.layers.items() if any(row)
    }
    assert {site.name: site.modes for site in component.sites} == chosen.modes
    # Layers of one input group share a mode, so that the input is quantised once.
    assert all(point.layers["q"] == point.layers["k"] == point.layers["v"] for point in frontier.points)

    # Fixed plans by name: layers only, and attention only.
    outcome = planned(tmp_path, point="fp16 everywhere, layers static")
    component = read_manifest(tmp_path / "bundle").components["denoiser"]
    assert reused(outcome)["calibrate"] and not any(site.in_int8 for site in component.sites)
    assert [layer.name for layer in component.layers if layer.in_int8] == [name for name in CHOSEN if name != "conv"]
    (conv,) = (layer for layer in component.layers if layer.name == "conv")
    assert conv.reason == (
        "it is a convolution without a group norm in front that writes INT8, and layers.modes: auto leaves it in 16 bits"
    )
    outcome = planned(tmp_path, point="balanced everywhere")
    component = read_manifest(tmp_path / "bundle").components["denoiser"]
    assert reused(outcome)["calibrate"] and component.sites[0].modes == [Mode.BALANCED] * 2
    assert not component.has_int8_layers
    assert "9 in the model's type by the plan" in " ".join(outcome.output.replace("│", " ").split())


def test_stated_layers_are_the_same_in_all_plans(tmp_path):
    outcome = planned(tmp_path, layers={"modes": ["weight_only", "static"]})
    assert outcome.exit_code == 0, outcome.output
    frontier = read_frontier(tmp_path / "bundle" / "frontier.json")
    rows = {name: [LayerMode.WEIGHT_ONLY, LayerMode.STATIC] for name in CHOSEN}
    assert all(point.layers == rows for point in frontier.points)
    assert not any("layers" in point.name for point in frontier.points)
    component = read_manifest(tmp_path / "bundle").components["denoiser"]
    assert {layer.name: layer.modes for layer in component.layers if layer.in_int8} == rows


@pytest.mark.first_case
@pytest.mark.parametrize("few_rows", ["auto", "weight_only"])
def test_a_search_decides_about_layers_of_few_rows_unless_the_recipe_does(tmp_path, monkeypatch, few_rows):
    monkeypatch.setattr("trtconvert.linear.sites.FEWEST_WEIGHTS", 1)
    outcome = planned(tmp_path, layers={"few_rows": few_rows})
    assert outcome.exit_code == 0, outcome.output
    frontier = read_frontier(tmp_path / "bundle" / "frontier.json")
    expected = {(1, 1)} if few_rows == "weight_only" else {(0, 0), (1, 1)}
    assert {tuple(point.layers["time"]) for point in frontier.points} == expected
    assert {tuple(point.layers["skip"]) for point in frontier.points} == {(0, 0), (3, 3)}
    chosen = next(point for point in frontier.points if point.name == frontier.chosen)
    component = read_manifest(tmp_path / "bundle").components["denoiser"]
    assert {layer.name: layer.modes for layer in component.layers if layer.in_int8} == {
        name: row for name, row in chosen.layers.items() if any(row)
    }


def test_layers_that_are_off_take_no_part_in_a_search(tmp_path):
    outcome = planned(tmp_path, layers={"modes": "off", "include": ["*"]}, times={"layers": ()})
    assert outcome.exit_code == 0, outcome.output
    assert not any(point.layers for point in read_frontier(tmp_path / "bundle" / "frontier.json").points)
    assert read_manifest(tmp_path / "bundle").components["denoiser"].layers == []


def test_a_table_without_times_of_convolutions_is_refused_before_the_calibration(tmp_path):
    outcome = planned(tmp_path, times={"convs": ()})
    refusal(outcome, "times.json", "convolutions", "trtconvert measure", "layers.kinds: [linear]")
    assert not list((tmp_path / "cache").glob("[!.]*"))  # no stage was made
    assert planned(tmp_path, times={"convs": ()}, layers={"include": ["*"]}).exit_code == 0


@pytest.mark.parametrize("times", [{"layers": ()}, {"layers": ((3, 1.0),)}])
def test_a_table_without_times_of_layers_is_refused_before_the_calibration(tmp_path, times):
    outcome = planned(tmp_path, times=times)
    refusal(outcome, "times.json", "layers", "trtconvert measure")
    assert not list((tmp_path / "cache").glob("[!.]*"))  # no stage was made


def test_a_search_among_dynamic_layers_leaves_convolutions_a_mode_that_they_have(tmp_path):
    outcome = planned(tmp_path, layer_candidates=["dynamic"], times={"layers": ((0, 4.0), (2, 1.0), (3, 1.0))})
    assert outcome.exit_code == 0, outcome.output
    points = read_frontier(tmp_path / "bundle" / "frontier.json").points
    assert all(math.isfinite(point.psnr) for point in points)
