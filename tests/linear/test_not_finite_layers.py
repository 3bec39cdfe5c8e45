"""NaN and ±Inf in inputs of INT8 layers reach their results, and no others."""

import math

import pytest
import torch
from int8_layers import tables_of
from tiny_layers import random

from trtconvert.linear.deltas import BROKEN, add_product, quantise_delta
from trtconvert.linear.groups import act_quant, int8_gemm
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import conv, linear

VALUES = (math.nan, math.inf, -math.inf)
MODES = (LayerMode.WEIGHT_ONLY, LayerMode.DYNAMIC, LayerMode.STATIC)


def compare(broken, whole, reached):
    assert torch.equal(~broken.isfinite(), reached.expand_as(broken))
    assert torch.equal(broken[~reached.expand_as(broken)], whole[~reached.expand_as(broken)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", VALUES)
def test_a_row_of_a_linear_layer(value, mode):
    x = random(2, 5, 32)
    tables = tables_of(x, modes=[mode])
    whole = linear(x, None, tables)
    x[1, 3, 7] = value
    reached = torch.zeros(2, 5, 1, dtype=torch.bool)
    reached[1, 3] = True
    compare(linear(x, None, tables), whole, reached)


@pytest.mark.parametrize("mode", [LayerMode.WEIGHT_ONLY, LayerMode.STATIC])
@pytest.mark.parametrize("value", VALUES)
def test_the_windows_of_a_pixel(value, mode):
    x, options = random(2, 16, 6, 7), {"stride": (1, 1), "padding": (1, 1)}
    tables = tables_of(x, (3, 3), modes=[mode])
    whole = conv(x, None, tables, **options)
    x[1, 4, 2, 3] = value
    reached = torch.zeros(2, 1, 6, 7, dtype=torch.bool)
    reached[1, :, 1:4, 2:5] = True
    compare(conv(x, None, tables, **options), whole, reached)


@pytest.mark.parametrize("value", [*VALUES, 0.0, -1.0])
def test_scales_of_no_use(value):
    x = random(2, 5, 32)
    tables = tables_of(x, modes=[LayerMode.STATIC])
    tables.x_scale[:] = value
    assert linear(x, None, tables).isnan().all()
    image = random(2, 16, 6, 7)
    tables = tables_of(image, (3, 3), modes=[LayerMode.STATIC])
    tables.x_scale[:] = value
    assert conv(image, None, tables, stride=(1, 1), padding=(1, 1)).isnan().all()


def steps_of_deltas(x_of_steps, tables, **options):
    """Runs steps. The first step resets the sample."""
    a_hat, o_hat, results = torch.zeros_like(x_of_steps[0]), None, []
    scale = tables.x_scale.expand(len(a_hat))[:, None]
    factor = tables.x_factor.view(-1, *[1] * (a_hat.dim() - 2)) if options else tables.x_factor
    for step, x in enumerate(x_of_steps):
        reset = torch.full((len(x),), step == 0)
        q, a_hat = quantise_delta(x, factor, a_hat, reset, scale)
        o_hat = add_product(q, scale, reset, tables, o_hat, torch.float32, **options)
        results.append(o_hat)
    return results, q, a_hat


@pytest.mark.parametrize("value", VALUES)
def test_deltas_of_rows_stay_broken_until_the_sample_begins_again(value):
    x = random(2, 5, 32)
    tables = tables_of(x, modes=[LayerMode.STATIC])
    given = [x, x + 0.1, x + 0.2]
    whole, _, _ = steps_of_deltas(given, tables)
    given[1] = given[1].clone()
    given[1][1, 3, 7] = value
    broken, q, a_hat = steps_of_deltas(given, tables)
    reached = torch.zeros(2, 5, 1, dtype=torch.bool)
    reached[1, 3] = True
    compare(broken[0], whole[0], torch.zeros_like(reached))
    for step in (1, 2):
        compare(broken[step], whole[step], reached)
    assert (q == BROKEN).nonzero().tolist() == a_hat.isnan().nonzero().tolist() == [[1, 3, 7]]
    reset = torch.ones(2, dtype=torch.bool)
    q, a_hat = quantise_delta(x, tables.x_factor, a_hat, reset, tables.x_scale.expand(2)[:, None])
    assert a_hat.isfinite().all() and (q != BROKEN).all()


@pytest.mark.parametrize("value", VALUES)
def test_deltas_of_pixels_reach_their_windows(value):
    x, options = random(2, 16, 6, 7), {"stride": (1, 1), "padding": (1, 1)}
    tables = tables_of(x, (3, 3), modes=[LayerMode.STATIC])
    whole, _, _ = steps_of_deltas([x], tables, **options)
    x[1, 4, 2, 3] = value
    broken, _, _ = steps_of_deltas([x], tables, **options)
    reached = torch.zeros(2, 1, 6, 7, dtype=torch.bool)
    reached[1, :, 1:4, 2:5] = True
    compare(broken[0], whole[0], reached)


@pytest.mark.parametrize("value", VALUES)
def test_groups_of_channels(value):
    """Products with group scales: NaN in one group reaches the token's row."""
    x, weight = random(5, 300), torch.randint(-127, 128, (24, 300), dtype=torch.int8)
    scale = torch.rand(24) / 100

    def product(of):
        q, step = act_quant(of)
        return int8_gemm(q, step, weight, scale, None, torch.float32)

    whole = product(x)
    x[3, 200] = value
    reached = torch.zeros(5, 1, dtype=torch.bool)
    reached[3] = True
    compare(product(x), whole, reached)
