"""The measured figures of the gates, and a failure of each gate."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.bars import NoBar
from trtconvert.bundle import QualityRecord
from trtconvert.calib.layer_scales import LayerScales, layer_tables
from trtconvert.errors import GateError
from trtconvert.evaluate import verify
from trtconvert.evaluate.gates import check_gates, error_limit
from trtconvert.evaluate.verify import draw, output_sqnr, psnr
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS
from trtconvert.linear.sites import LayerFinder, select_layers
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error
from trtconvert.quant.forward import Int8Layers, Int8Sites
from trtconvert.recipe import VerifySection

BINS = 2
GOOD = QualityRecord(
    samples=4, steps=2, sampler="ddim", psnr=40.0, psnr_worst=35.0, psnr_worst_seed=3,
    site_sqnr={"a": [30.0, 20.0], "b": [None, 25.0]}, error=1e-3, lowering_difference=0.01, lowering_limit=0.1,
)  # fmt: skip
MODES = {"a": [1, 3], "b": [1, 3]}
WITH_LAYERS = GOOD.model_copy(update={"layer_sqnr": {"x": [40.0, 18.0], "y": [None, 35.0]}})
LAYERS = {"x": [1, 3], "y": [1, 3], "left by the plan": [0, 0]}


@pytest.fixture(scope="module")
def sites(digits):
    tables = {}

    def handler(call):
        one_bin = tables_from_data(call.q, call.k, call.v, Mode.AGGRESSIVE)
        tables[call.name] = AttentionTables(*(x.repeat(BINS, *[1] * (x.dim() - 1)) for x in vars(one_bin).values()))
        return call.exact()

    with torch.no_grad():
        intercepted(digits, handler)(**digits.example(0, {"batch": 16, "height": 8, "width": 8}))
    return Int8Sites(tables, digits.timestep_max, "calibrated", True)


@pytest.fixture(scope="module")
def layers(digits):
    """Some layers of the model with ranges from one call."""
    finder, largest = LayerFinder(digits.denoiser), {}

    def handler(call):
        largest[call.name] = max(largest.get(call.name, 0.0), float(call.x.abs().amax()))
        return finder(call)

    with torch.no_grad():
        intercepted(digits, layers=handler)(**digits.example(0, {"batch": 16, "height": 8, "width": 8}))
    chosen, _ = select_layers(finder.layers(), ["blocks.2.*"], ["*.modulation"], 2)
    scales = {
        layer.input_group: LayerScales(
            torch.ones(layer.in_channels),
            torch.zeros(layer.in_channels),
            torch.full((BINS,), 1.5 * largest[layer.input_group] / LEVELS),
        )
        for layer in chosen
    }
    modes = {layer.name: torch.tensor([LayerMode.STATIC] * BINS) for layer in chosen}
    return Int8Layers(layer_tables(digits.denoiser, chosen, scales, modes), digits.timestep_max)


def sqnr(model, sites=None, layers=None):
    """Returns dB of sites and of layers."""
    sites = sites or Int8Sites({}, model.timestep_max, "calibrated", True)
    layers = layers or Int8Layers({}, model.timestep_max)
    return output_sqnr(model, sites, layers, BINS, seed=0, samples=16, bar=NoBar())


def test_psnr_of_a_known_error():
    images = torch.rand(3, 1, 8, 8)
    assert psnr(images + 0.1, images).tolist() == pytest.approx([20.0] * 3, abs=1e-4)
    assert relative_error(images * 1.01, images) == pytest.approx(0.01, rel=1e-4)


def test_the_quality_record_finds_the_worst_site_and_skips_unseen_bins():
    assert GOOD.worst_site() == (20.0, "a", 1)


def test_a_good_build_passes():
    check_gates(GOOD, MODES, VerifySection())


def test_fp8_has_room_for_its_coarser_steps_and_a_recipe_decides():
    rough = GOOD.model_copy(update={"error": 0.02})
    in_fp8 = MODES | {"b": [Mode.PRECISION, Mode.FP8]}
    check_gates(rough, in_fp8, VerifySection())
    check_gates(rough, MODES, VerifySection(max_error=0.02))
    for quality, modes, section in (
        (rough, in_fp8, VerifySection(max_error=0.01)),
        (GOOD.model_copy(update={"error": 0.04}), in_fp8, VerifySection()),
    ):
        with pytest.raises(GateError, match="torch reference"):
            check_gates(quality, modes, section)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"psnr": 32.9}, "PSNR of the samples"),
        ({"lpips": 0.11, "lpips_worst": 0.2}, "mean LPIPS of the samples"),
        ({"lpips": float("nan"), "lpips_worst": 0.2}, "mean LPIPS of the samples"),
        ({"psnr": math.nan}, "PSNR of the samples"),
        ({"site_sqnr": {"a": [30.0, 14.0], "b": [None, 25.0]}}, "noise of the worst site"),
        ({"site_sqnr": {"b": [None, 25.0], "a": [30.0, math.nan]}}, "noise of the worst site"),
        ({"error": 0.02}, "torch reference"),
        ({"error": math.nan}, "torch reference"),
        ({"lowering_difference": 0.2}, "native lowering"),
    ],
)
def test_each_gate_fails_and_names_the_worst_site_and_bin(change, named):
    with pytest.raises(GateError, match=named) as raised:
        check_gates(GOOD.model_copy(update=change), MODES, VerifySection())
    assert "a in timestep bin 1, mode aggressive" in raised.value.got
    assert raised.value.exit_code == 1 and "exclude a" in raised.value.remedy


def test_a_site_with_bad_scales_stands_out_where_they_are_used(digits, sites):
    spoiled = dict(sites.tables)
    table = spoiled["blocks.2.attn"]
    scale = table.k_scale.clone()
    scale[1] *= 0.01  # clips nearly every key in the upper half of the schedule
    spoiled["blocks.2.attn"] = AttentionTables(**{**vars(table), "k_scale": scale})
    good, _ = sqnr(digits, sites)
    bad, _ = sqnr(digits, Int8Sites(spoiled, sites.timestep_max, "calibrated", True))
    lost = {(s, b): good[s][b] - bad[s][b] for s in good for b in range(BINS) if abs(good[s][b] - bad[s][b]) > 1}
    assert list(lost) == [("blocks.2.attn", 1)]
    assert lost["blocks.2.attn", 1] > 10


def test_nan_at_a_site_is_not_taken_for_a_bin_without_steps(digits, sites):
    broken = replace(digits, denoiser=copy.deepcopy(digits.denoiser))
    broken.denoiser.get_parameter("blocks.1.attn.qkv.bias").data[-1] = torch.inf  # a channel of the values
    of_the_model, _ = sqnr(broken, sites)
    assert all(math.isnan(db) for db in of_the_model["blocks.1.attn"])
    table = sites.tables["blocks.2.attn"]
    spoiled = {**sites.tables, "blocks.2.attn": replace(table, v_scale=table.v_scale * 0)}
    spoiled = Int8Sites(spoiled, sites.timestep_max, "calibrated", True)
    of_the_scales, _ = sqnr(digits, spoiled)
    assert all(math.isnan(db) for db in of_the_scales["blocks.2.attn"])


# Layers ---------------------------------------------------------------------------------------------------------------


def test_the_quality_record_finds_the_worst_layer_where_there_is_one():
    assert WITH_LAYERS.worst_layer() == (18.0, "x", 1) and GOOD.worst_layer() is None


def test_a_good_build_with_layers_passes():
    check_gates(WITH_LAYERS, MODES, VerifySection(), LAYERS)


@pytest.mark.parametrize("db", [14.0, math.nan])
def test_the_gate_of_sites_counts_layers_and_names_the_worst(db):
    bad = WITH_LAYERS.model_copy(update={"layer_sqnr": {"x": [40.0, db], "y": [None, 35.0]}})
    with pytest.raises(GateError, match="noise of the worst site or layer") as raised:
        check_gates(bad, MODES, VerifySection(), LAYERS)
    assert "the worst layer is x in timestep bin 1, mode static" in raised.value.got
    assert "exclude x in layers.exclude" in raised.value.remedy and raised.value.got.startswith(f"{db:.4g}; ")


def test_the_remedy_for_a_convolution_is_none_that_leaves_it_as_it_is():
    bad = WITH_LAYERS.model_copy(update={"psnr": 20.0})
    with pytest.raises(GateError) as of_linear:
        check_gates(bad, MODES, VerifySection(), LAYERS, convs=["y"])
    assert "exclude x" in of_linear.value.remedy and "layers.modes to dynamic" in of_linear.value.remedy
    with pytest.raises(GateError) as of_conv:
        check_gates(bad, MODES, VerifySection(), LAYERS, convs=["x"])
    assert "layers.kinds: [linear]" in of_conv.value.remedy and "dynamic" not in of_conv.value.remedy


def test_layers_of_int8_products_have_room_for_roundings_that_fall_the_other_way():
    rough, section = WITH_LAYERS.model_copy(update={"error": 0.02}), VerifySection()
    check_gates(rough, MODES, section, LAYERS)
    weights_alone = {"x": [1, 1], "y": [1, 1]}
    with pytest.raises(GateError, match="torch reference"):
        check_gates(rough, MODES, section, weights_alone)
    limits = [error_limit(section, MODES.values(), [[mode]]) for mode in LayerMode]
    assert limits == [0.01, 0.01, 0.03, 0.03]
    assert error_limit(VerifySection(max_error=0.5), MODES.values(), LAYERS.values()) == 0.5


def test_the_error_of_a_layer_is_that_of_the_layer_alone(digits, layers):
    """Each site and layer sees exact inputs."""
    _, together = sqnr(digits, layers=layers)
    assert set(together) == {f"blocks.2.{name}" for name in ("attn.qkv", "attn.out", "mlp.0", "mlp.2")}
    name = "blocks.2.mlp.2"
    _, alone = sqnr(digits, layers=Int8Layers({name: layers.tables[name]}, layers.timestep_max))
    assert alone[name] == together[name]
    assert all(30 < db < 50 for row in together.values() for db in row)


def test_large_outputs_are_summed_in_parts(digits, layers, monkeypatch):
    _, whole = sqnr(digits, layers=layers)
    monkeypatch.setattr(verify, "_MOST_NUMBERS", 16 * 1000)  # a batch of 16 samples, whose outputs have more numbers
    _, in_parts = sqnr(digits, layers=layers)
    for name, row in whole.items():
        assert in_parts[name] == pytest.approx(row, abs=1e-6)


def test_a_layer_with_bad_scales_stands_out_where_they_are_used(digits, layers):
    table = layers.tables["blocks.2.mlp.0"]
    scale = table.x_scale * torch.tensor([1.0, 0.05])
    spoiled = {**layers.tables, "blocks.2.mlp.0": replace(table, x_scale=scale)}
    _, good = sqnr(digits, layers=layers)
    _, bad = sqnr(digits, layers=Int8Layers(spoiled, layers.timestep_max))
    lost = {(n, b): good[n][b] - bad[n][b] for n in good for b in range(BINS) if abs(good[n][b] - bad[n][b]) > 1}
    assert list(lost) == [("blocks.2.mlp.0", 1)] and lost["blocks.2.mlp.0", 1] > 10


def test_nan_at_a_layer_is_not_taken_for_a_bin_without_steps(digits, layers):
    table = layers.tables["blocks.2.mlp.0"]
    spoiled = {"blocks.2.mlp.0": replace(table, x_scale=table.x_scale * torch.tensor([0.0, 1.0]))}
    _, found = sqnr(digits, layers=Int8Layers(spoiled, layers.timestep_max))
    first, second = found["blocks.2.mlp.0"]
    assert math.isnan(first) and second > 30


def test_infinite_outputs_of_a_layer_are_nan(digits, layers):
    table = layers.tables["blocks.2.mlp.0"]
    spoiled = {"blocks.2.mlp.0": replace(table, bias=torch.full_like(table.bias, torch.inf))}
    _, found = sqnr(digits, layers=Int8Layers(spoiled, layers.timestep_max))
    assert all(math.isnan(db) for db in found["blocks.2.mlp.0"])


def test_samples_do_not_depend_on_the_batch_they_are_drawn_in(digits):
    few = draw(digits, digits.denoiser, VerifySection(samples=3, steps=2, seed=7), NoBar())
    many = draw(digits, digits.denoiser, VerifySection(samples=17, steps=2, seed=7), NoBar())
    torch.testing.assert_close(few, many[:3], rtol=0, atol=1e-5)
