"""Scales of layers: factors and offsets where they pay, ranges, and tables."""

import math
from dataclasses import replace

import pytest
import tolerances
import torch
from tiny_layers import Called, layers_of, random
from torch import nn
from torch.nn import functional as F

from trtconvert.calib import layer_scales
from trtconvert.calib.layer_observer import LayerObserver, LayerRows
from trtconvert.calib.layer_scales import LEAST_DELTA, LayerScales, choose_scales, layer_tables
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS, conv, linear, quantise_weight, short_scale
from trtconvert.linear.sites import LayerCall, model_tensors
from trtconvert.models.recorded_calls import relative_error as error

MAX = 1000.0


def layer_and_model(channels=64, outputs=64, *, weight=None, kernel=()):
    """A model of one layer with random weights."""
    module = nn.Conv2d(channels, outputs, kernel, padding=1) if kernel else nn.Linear(channels, outputs)
    model = Called(lambda self, x: self.layer(x), layer=module)
    with torch.no_grad():
        module.weight.copy_(random(*module.weight.shape, seed=7) if weight is None else weight)
    (layer,) = layers_of(model, random(2, channels, 8, 8) if kernel else random(2, 8, channels))
    return layer, model


def rows_of(*batches, bins=1, kind="linear"):
    """Observations of calls, a batch each: (x, timestep)."""
    observer = LayerObserver(["layer"], MAX, bins)
    for x, timestep in batches:
        observer(LayerCall("layer", kind, x, x, None, torch.full((len(x),), timestep), lambda x=x: x))
    return observer.finish()["layer"]


def calls(make, count=16):
    """Batches of four samples of 64 tokens, as in a denoising run."""
    return [(make(random(4, 64, 64, seed=seed)), 1.0) for seed in range(count)]


def chosen(layer, model, rows, bins=1, **options):
    fields = {"statistic": "least-error", "percentile": 99.0, "equalise": True, "offsets": True} | options
    return choose_scales([layer], rows, model_tensors(model), bins, **fields)


def static_error(layer, model, scales, x):
    """Relative error of the INT8 layer on data outside of the calibration."""
    modes = {layer.name: torch.full_like(scales.x_scale, int(LayerMode.STATIC))}
    tables = layer_tables(model, [layer], {layer.input_group: scales}, modes)[layer.name]
    with torch.no_grad():
        return error(linear(x, None, tables), F.linear(x, model.layer.weight, model.layer.bias))


# Factors and offsets --------------------------------------------------------------------------------------------------


def outliers(x):
    """Two outlier channels as in transformers."""
    return x * torch.ones(64).index_fill(0, torch.tensor([3, 40]), 40.0)


def test_channels_of_outliers_are_equalised():
    layer, model = layer_and_model()
    rows, unseen = rows_of(*calls(outliers)), outliers(random(4, 64, 64, seed=99))
    scales = chosen(layer, model, rows)
    others = torch.ones(64, dtype=torch.bool).index_fill(0, torch.tensor([3, 40]), False)
    assert scales.x_factor[~others].max() < scales.x_factor[others].min() / 4
    plain = chosen(layer, model, rows, equalise=False)
    assert torch.equal(plain.x_factor, torch.ones(64))
    assert static_error(layer, model, scales, unseen) < static_error(layer, model, plain, unseen) / 2


@pytest.mark.parametrize(("size", "behind_gelu"), [(2.0, False), (6.0, True)])
def test_factors_behind_a_gelu_must_gain_more(size, behind_gelu):
    """Sizes of the outliers at which factors pay."""
    layer, model = layer_and_model()
    channels = torch.ones(64).index_fill(0, torch.tensor([3, 40]), size)
    rows = rows_of(*calls(lambda x: x * channels))

    def has_factors(behind_gelu):
        return bool((chosen(replace(layer, behind_gelu=behind_gelu), model, rows).x_factor != 1).any())

    assert has_factors(behind_gelu=False)
    assert has_factors(behind_gelu=True) == behind_gelu


def test_weights_that_are_stored_in_int8_are_taken_as_they_are():
    stored, scale = quantise_weight(random(64, 64, seed=7))
    layer, model = layer_and_model(weight=stored * scale[:, None])
    scales = chosen(layer, model, rows_of(*calls(outliers)))
    assert torch.equal(scales.x_factor, torch.ones(64))
    modes = {layer.name: torch.tensor([int(LayerMode.STATIC)])}
    tables = layer_tables(model, [layer], {layer.input_group: scales}, modes)[layer.name]
    assert torch.equal(tables.weight, stored) and torch.equal(tables.weight_scale, scale)


def test_factors_are_exact_in_half_precision_and_keep_the_size_of_channels():
    layer, model = layer_and_model()
    factor = chosen(layer, model, rows_of(*calls(outliers))).x_factor
    assert torch.equal(factor.half().float(), factor)
    assert factor.log().mean().exp() == pytest.approx(1, rel=0.02)  # rounded up by less than 2**-7


@pytest.mark.parametrize("function", [F.gelu, F.relu, lambda x: x + 3])
def test_one_sided_activations_get_an_offset(function):
    layer, model = layer_and_model()
    rows, unseen = rows_of(*calls(function)), function(random(4, 64, 64, seed=99))
    scales = chosen(layer, model, rows)
    assert (scales.x_offset > 0.5).all()
    unmoved = LayerScales(torch.ones(64), torch.zeros(64), short_scale(rows.high.amax() / LEVELS)[None])
    assert static_error(layer, model, scales, unseen) < static_error(layer, model, unmoved, unseen)
    assert not chosen(layer, model, rows, offsets=False).x_offset.any()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("count", "outputs"), [(4, 16), (4, 256), (16, 64)])
def test_activations_without_outliers_or_offset_get_neither_factors_nor_offsets(seed, count, outputs):
    """Channels that are large by chance are large in some calls only: a choice must pay in both halves of the calls."""
    layer, model = layer_and_model(outputs=outputs)
    scales = chosen(layer, model, rows_of(*[(random(2, 64, 64, seed=100 * seed + i), 1.0) for i in range(count)]))
    assert torch.equal(scales.x_factor, torch.ones(64)) and not scales.x_offset.any()


def test_scales_can_be_chosen_from_one_call():
    layer, model = layer_and_model()
    scales = chosen(layer, model, rows_of(*calls(F.gelu, 1)))
    assert not scales.flaw(64, 1)


def test_factors_are_chosen_for_all_that_read_the_tensor():
    """An input channel with large weights in one of two layers is scaled in both."""
    heads = [nn.Linear(64, 64) for _ in range(2)]
    with torch.no_grad():
        for number, head in enumerate(heads):
            head.weight.copy_(random(64, 64, seed=number))
        heads[1].weight[:, 5] *= 100
    model = Called(lambda self, x: self.a(x) + self.b(x), a=heads[0], b=heads[1])
    layers = layers_of(model, random(2, 8, 64))
    assert [layer.input_group for layer in layers] == ["a", "a"]
    rows, options = (
        rows_of(*calls(lambda x: x)),
        {"statistic": "least-error", "percentile": 99.0, "equalise": True, "offsets": True},
    )
    both = choose_scales(layers, rows, model_tensors(model), 1, **options)
    alone = choose_scales(layers[:1], rows, model_tensors(model), 1, **options)
    assert torch.equal(alone.x_factor, torch.ones(64))
    assert both.x_factor[5] == both.x_factor.max() and both.x_factor[5] > 2 * both.x_factor.median()


def test_images_have_factors_and_no_offsets():
    layer, model = layer_and_model(32, 32, kernel=(3, 3))
    large = torch.ones(32).index_fill(0, torch.tensor([3]), 40.0)[:, None, None]
    images = [(large * (random(2, 32, 8, 8, seed=seed) + 2), 1.0) for seed in range(8)]
    scales = chosen(layer, model, rows_of(*images, kind="conv"))
    assert not scales.x_offset.any() and scales.x_factor.argmin() == 3
    modes = {layer.name: torch.tensor([LayerMode.STATIC])}
    options = {"stride": (1, 1), "padding": (1, 1)}

    def error_with(used):
        tables = layer_tables(model, [layer], {layer.input_group: used}, modes)[layer.name]
        with torch.no_grad():
            return error(conv(images[0][0], None, tables, **options), model.layer(images[0][0]))

    plain = chosen(layer, model, rows_of(*images, kind="conv"), equalise=False)
    assert error_with(scales) < error_with(plain) / 2


# Ranges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("percentile", [100.0, 50.0])
def test_maxima_are_the_percentile_of_the_calls(percentile):
    layer, model = layer_and_model()
    batches = [(random(1, 8, 64, seed=seed) * (1 + seed), t) for seed in range(6) for t in (100.0, 900.0)]
    batches = [(torch.cat([x, -x]), t) for x, t in batches]  # symmetric about zero
    scales = chosen(
        layer, model, rows_of(*batches, bins=2), bins=2, statistic="maxima", percentile=percentile, equalise=False
    )
    for index, timestep in enumerate((100.0, 900.0)):
        maxima = torch.stack([x.abs().amax() for x, t in batches if t == timestep])
        expected = short_scale(torch.quantile(maxima, percentile / 100) / LEVELS)
        assert scales.x_scale[index] == expected


def test_the_range_of_least_error_is_about_the_best_of_all():
    """Heavy tails are clipped; on unseen data few ranges are better."""
    layer, model = layer_and_model()

    def heavy(x):
        return x.abs().pow(3) * x.sign()

    rows = rows_of(*calls(heavy, 32))
    scales = chosen(layer, model, rows, equalise=False)
    assert scales.x_scale.item() * LEVELS < 0.9 * max(rows.high.amax(), -rows.low.amin())
    unseen = heavy(random(16, 64, 64, seed=99))
    whole = unseen.abs().amax() / LEVELS

    def error_at(scale):
        tried = LayerScales(torch.ones(64), torch.zeros(64), torch.tensor([scale]))
        return static_error(layer, model, tried, unseen)

    best = min(error_at(float(whole) * share / 40) for share in range(8, 41))
    assert error_at(scales.x_scale.item()) < tolerances.LEAST_ERROR_OF_ROWS * best < error_at(float(whole))


def test_each_bin_has_the_range_of_its_own_and_unseen_ones_of_the_nearest():
    layer, model = layer_and_model()
    batches = [(random(2, 8, 64, seed=seed) * size, t) for seed in range(4) for size, t in ((1.0, 300.0), (8.0, 700.0))]
    scale = chosen(layer, model, rows_of(*batches, bins=5), bins=5).x_scale
    assert scale[0] == scale[1] and scale[3] == scale[4]
    assert 4 < scale[3] / scale[1] < 16 and scale[2] in (scale[1], scale[3])


@pytest.mark.parametrize("statistic", ["least-error", "maxima"])
def test_tensors_and_weights_of_zeros_have_scales_all_the_same(statistic):
    for weight in (torch.zeros(64, 64), None):
        layer, model = layer_and_model(weight=weight)
        scales = chosen(layer, model, rows_of(*calls(torch.zeros_like, 2)), statistic=statistic)
        assert not scales.flaw(64, 1)
        assert torch.equal(scales.x_factor, torch.ones(64)) and not scales.x_offset.any()
        x = random(1, 4, 64)
        tables = layer_tables(
            model, [layer], {layer.input_group: scales}, {layer.name: torch.tensor([LayerMode.STATIC])}
        )
        assert linear(torch.zeros_like(x), None, tables[layer.name]).isfinite().all()


def test_a_dead_channel_does_not_upset_the_others():
    layer, model = layer_and_model()

    def dead(x):
        return outliers(x) * torch.ones(64).index_fill(0, torch.tensor([7]), 0.0)

    scales = chosen(layer, model, rows_of(*calls(dead)))
    assert not scales.flaw(64, 1) and scales.x_factor[7] <= 2.0**10
    unseen = dead(random(4, 64, 64, seed=99))
    assert static_error(layer, model, scales, unseen) < tolerances.LAYER_ERROR[LayerMode.STATIC] * 2


# Tables ---------------------------------------------------------------------------------------------------------------


def test_offsets_and_factors_are_exact_but_for_roundings_of_the_weights():
    """Without quantised activations the layer computes with its INT8 weights, whatever factors and offsets it has."""
    layer, model = layer_and_model()
    scales = LayerScales(short_scale(random(64, seed=3).exp()), 5 * random(64, seed=4), torch.ones(2))
    modes = {layer.name: torch.tensor([LayerMode.WEIGHT_ONLY] * 2)}
    tables = layer_tables(model, [layer], {layer.input_group: scales}, modes)[layer.name]
    x = random(2, 8, 64)
    weight = tables.dequantised() * scales.x_factor
    expected = F.linear(x.double(), weight.double(), model.layer.bias.detach().double())
    got = linear(x, torch.zeros(2), tables)
    assert error(got, expected) < tolerances.SAME_ARITHMETIC
    assert tables.modes.dtype == torch.int32


def test_tied_layers_have_one_weight_and_layers_without_a_bias_zeros():
    shared = nn.Linear(64, 64, bias=False)
    model = Called(lambda self, x: self.b(self.a(x)) + self.c(x), a=shared, b=shared, c=nn.Linear(64, 64))
    layers = layers_of(model, random(2, 8, 64))
    plain = LayerScales(torch.ones(64), torch.zeros(64), torch.ones(1))
    modes = {layer.name: torch.tensor([LayerMode.STATIC]) for layer in layers}
    assert [layer.input_group for layer in layers] == ["a", "a#2", "a"]
    tables = layer_tables(model, layers, {"a": plain, "a#2": plain}, modes)
    assert tables["a"].weight is tables["a#2"].weight is not tables["c"].weight
    assert not tables["a"].bias.any() and torch.equal(tables["c"].bias, model.c.bias)


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        ({}, ""),
        ({"x_factor": torch.ones(63)}, "x_factor of [63] torch.float32, where FP32 [64] is needed"),
        ({"x_scale": torch.ones(3)}, "x_scale of [3]"),
        ({"x_offset": torch.zeros(64, dtype=torch.float64)}, "x_offset of [64] torch.float64"),
        ({"x_factor": torch.zeros(64)}, "numbers that are not positive in x_factor"),
        ({"x_scale": torch.tensor([1.0, math.inf])}, "in x_scale"),
        ({"x_offset": torch.full((64,), math.nan)}, "in x_offset"),
        ({"directions": torch.ones(4, 64).half()}, "one of directions and remainder"),
        (
            {"directions": torch.ones(4, 64), "remainder": torch.ones(64)},
            "directions of [4, 64] torch.float32, where FP16 [4, 64] is needed",
        ),
        ({"directions": torch.ones(64).half(), "remainder": torch.ones(64)}, "FP16 [32, 64] is needed"),
        ({"directions": torch.ones(33, 64).half(), "remainder": torch.ones(64)}, "FP16 [32, 64] is needed"),
        ({"directions": torch.ones(4, 64).half(), "remainder": torch.zeros(64)}, "in remainder"),
    ],
)
def test_scales_that_cannot_be_used_say_why(change, flaw):
    scales = {"x_factor": torch.ones(64), "x_offset": -torch.ones(64), "x_scale": torch.ones(2)} | change
    found = LayerScales(**scales).flaw(64, 2)
    assert flaw in found and bool(found) == bool(change)


def test_weights_are_rounded_by_the_directions_of_observed_inputs():
    layer, model = layer_and_model()
    mean = random(64, seed=9)
    scales = chosen(layer, model, rows_of(*calls(lambda x: x * 0.3 + mean)))
    assert scales.directions is not None and not scales.flaw(64, 1)
    nearest, modes = scales.rounded_to_nearest(), {layer.name: torch.tensor([LayerMode.WEIGHT_ONLY])}
    assert "directions" not in nearest.tensors() and "remainder" not in nearest.tensors()
    x = random(2, 128, 64, seed=99) * 0.3 + mean

    def found(scales):
        tables = layer_tables(model, [layer], {layer.input_group: scales}, modes)[layer.name]
        with torch.no_grad():
            return error(linear(x, None, tables), F.linear(x, model.layer.weight, model.layer.bias))

    assert found(scales) < 0.6 * found(nearest)


def test_rows_move_between_devices_whole():
    rows = rows_of(*calls(lambda x: x, 2))
    assert all(torch.equal(x, rows.tensors()[name]) for name, x in rows.to("cpu").tensors().items())
    assert len(LayerRows.cat([rows, rows]).bin) == 4


def test_deltas_have_scales_of_their_own_and_those_of_what_does_not_change_are_not_too_small():
    layer, model = layer_and_model()
    rows = rows_of(*calls(lambda x: x))
    found = chosen(layer, model, rows, deltas=rows_of(*calls(lambda x: x / 50)))
    assert found.change_scale is not None and 25 < float(found.x_scale / found.change_scale) < 100
    assert torch.equal(found.x_scale, chosen(layer, model, rows).x_scale)
    still = chosen(layer, model, rows, deltas=rows_of(*calls(torch.zeros_like)))
    assert still.change_scale is not None and float(still.change_scale) >= float(still.x_scale) * LEAST_DELTA
    assert still.flaw(64, 1) == "" and "change_scale" in replace(still, change_scale=still.change_scale / 9).flaw(64, 1)
    assert "change_scale" not in chosen(layer, model, rows).tensors()


# Evaluations together -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistic", ["least-error", "maxima"])
def test_bins_have_the_scales_that_they_have_alone(statistic):
    """With different numbers of calls, not in order."""
    layer, model = layer_and_model()
    bins = [2, 0, 2, 1, 2, 0]
    given = [(random(2, 32, 64, seed=seed) * (1 + seed), 250.0 * index) for seed, index in enumerate(bins)]
    options = {"statistic": statistic, "equalise": False, "offsets": False}
    rows = rows_of(*given, bins=4)
    together = chosen(layer, model, rows, 4, **options).x_scale
    alone = [chosen(layer, model, rows.select(rows.bin == index), 4, **options).x_scale[0] for index in range(3)]
    assert together.tolist() == [*map(float, alone), float(alone[2])]


@pytest.mark.parametrize("most", [1, 20_000])
def test_less_memory_gives_the_same_scales(monkeypatch, most):
    layer, model = layer_and_model()
    spread = torch.ones(64)
    spread[[3, 40]] = 50.0
    rows = rows_of(*((x * spread, timestep) for x, timestep in calls(lambda x: x)))
    expected = chosen(layer, model, rows)
    monkeypatch.setattr(layer_scales, "MOST_NUMBERS", most)
    found = chosen(layer, model, rows)
    assert expected.x_factor.unique().numel() > 1
    assert all(torch.equal(x, found.tensors()[name]) for name, x in expected.tensors().items())
