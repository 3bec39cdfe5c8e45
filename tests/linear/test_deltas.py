"""The arithmetic of layers of engines that quantise deltas, against that of trtconvert.modiff and against full precision."""

import math

import pytest
import torch
from int8_layers import tables_of
from tiny_layers import random

from trtconvert.linear.deltas import add_product, cache_dtype, can_be_modulated, quantise_delta, scales_of, steps_of
from trtconvert.modiff import reference as modiff
from trtconvert.modiff.reference import Geometry, Weight


def test_a_linear_layer_computes_what_modulated_layers_do():
    """Codes and â are equal bit by bit, ô up to rounding."""
    x, a_hat, o_hat = random(3, 5, 32), random(3, 5, 32, seed=1), random(3, 5, 16, seed=2)
    tables = tables_of(x, outputs=16)
    reset, scale = torch.tensor([False, True, False]), torch.tensor([[0.01], [0.03], [0.02]])
    q, a_new = quantise_delta(x, tables.x_factor, a_hat, reset, scale)
    o_new = add_product(q, scale, reset, tables, o_hat, torch.float32)

    rows = modiff.quantiser(-scale.T * 127, scale.T * 127, 8, True, False)
    rows[..., modiff.RESET] = reset.float()
    rows[..., modiff.SCALE] = rows[..., modiff.PRODUCT] = scale.T  # equal, without rounding
    theirs = a_hat.reshape(15, 32).clone()
    codes = modiff.quantise_delta((x * tables.x_factor).reshape(15, 32), theirs, rows, [32])
    assert torch.equal(q.view(15, 32), codes) and torch.equal(a_new.view(15, 32), theirs)
    known = o_hat.reshape(15, 1, 1, 16).clone()
    sums = tables.weight.int().sum(1)[None]
    weight = Weight(tables.weight.view(16, 1, 1, 32), tables.weight_scale[None], sums, tables.bias)
    modiff.add_product(codes.view(15, 1, 1, 32), rows, [32], weight, known, None, Geometry(), False)
    assert torch.allclose(o_new.view(15, 16), known.view(15, 16), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", [2, 0])
def test_caches_add_up_to_what_the_layer_gives(batch):
    """ô is the product of the weight and â after any steps."""
    inputs = [random(2, 4, 32, seed=i) for i in range(5)]
    tables = tables_of(inputs[0])
    a_hat, o_hat, reset = torch.zeros(batch, 4, 32), None, torch.ones(batch, dtype=torch.bool)
    for x in (x[:batch] for x in inputs):
        scale = torch.full((batch, 1), 0.05)
        q, a_hat = quantise_delta(x, tables.x_factor, a_hat, reset, scale)
        o_hat = add_product(q, scale, reset, tables, o_hat, torch.float32)
        reset = torch.zeros(batch, dtype=torch.bool)
    assert o_hat is not None and o_hat.shape == (batch, 4, 24)
    assert torch.allclose(o_hat, a_hat @ tables.dequantised().T + tables.bias, atol=1e-4)


@pytest.mark.parametrize("falls", [True, False])
def test_samples_begin_where_timesteps_go_back_to_more_noise(falls):
    last = torch.full((3,), -math.inf)
    found = []
    for timestep in ([900, 500, 10], [900, 400, 20], [100, math.nan, 0], [50, 300, 0]):
        t = torch.tensor(timestep, dtype=torch.float32)
        reset, last = steps_of(t if falls else 1000 - t, last, falls)
        found.append(reset.tolist())
    # NaN leads to a reset.
    assert found == [[True, True, True], [False, False, True], [False, False, False], [False, True, False]]


def test_scales_are_those_of_deltas_but_for_samples_that_begin():
    first, deltas = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    reset, timestep = torch.tensor([True, False, False, True]), torch.tensor([100.0, 100.0, 900.0, 900.0])
    found = scales_of(reset, timestep, first, deltas, 1000.0)
    assert torch.equal(found, torch.tensor([[1.0, 2.0], [0.1, 0.2], [0.3, 0.4], [3.0, 4.0]]))


def test_caches_are_fp16_in_fp16_models_alone():
    assert [cache_dtype(x) for x in (torch.float16, torch.bfloat16, torch.float32)] == [torch.float16] + [
        torch.float32
    ] * 2


def test_only_layers_that_are_static_in_all_bins_have_caches():
    assert can_be_modulated([3, 3]) and not any(map(can_be_modulated, ([], [3, 2], [1, 3], [0])))
