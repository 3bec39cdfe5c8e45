"""Compensated rounding of weights: errors on other inputs, beside rounding to the nearest and beside GPTQ with all columns."""

import pytest
import torch
from tiny_layers import random
from torch.nn import functional as F

from trtconvert.linear.compensation import DIRECTIONS, Moments, compensated_weight, moments_of
from trtconvert.linear.reference import LEVELS, layer_weight, quantise_weight


def inputs(count, channels, seed):
    """[count, channels]: a mean, eight directions and noise, the same model for each seed."""
    mean, mixed = random(channels, seed=1) * 0.5, random(8, channels, seed=2) * 0.3
    return mean + random(count, 8, seed=seed) @ mixed + random(count, channels, seed=seed + 1) * 0.5


def change(codes, scale, factor, weight):
    """The error of a weight [N, K]."""
    return codes.float() * scale[:, None] * factor - weight


def on(x, of_weight):
    """Squared error of the outputs."""
    return float((x @ of_weight.T).square().sum())


@pytest.mark.parametrize(("channels", "outputs"), [(64, 64), (384, 96), (1000, 32)])
def test_errors_of_outputs_are_a_third_on_inputs_that_were_not_observed(channels, outputs):
    weight, factor = random(outputs, channels, seed=5) * channels**-0.5, random(channels, seed=6).abs() + 0.5
    moments = moments_of(inputs(400, channels, 10))
    assert moments is not None and len(moments.directions) == DIRECTIONS
    nearest, scale = layer_weight(weight, factor)
    codes, same = compensated_weight(weight, factor, moments)
    assert codes.dtype == torch.int8 and int(codes.abs().max()) <= LEVELS and torch.equal(scale, same)
    unseen = inputs(400, channels, 20)
    before = on(unseen, change(nearest, scale, factor, weight))
    assert on(unseen, change(codes, scale, factor, weight)) < before / (2 if channels == 64 else 3)


def test_rounding_in_blocks_is_as_good_as_gptq_column_by_column():
    channels, outputs = 200, 40
    weight, moments = random(outputs, channels, seed=5), moments_of(inputs(400, channels, 10))
    assert moments is not None
    directions = moments.directions.float()
    of_pairs = directions.T @ directions + moments.remainder.diag()
    codes, scale = compensated_weight(weight, torch.ones(channels), moments)
    order = of_pairs.diagonal().argsort(descending=True)
    upper = torch.linalg.cholesky(of_pairs[order][:, order].double().inverse(), upper=True).float()
    left, gptq = (weight / scale[:, None])[:, order], torch.empty_like(weight)
    for column in range(channels):
        gptq[:, column] = left[:, column].round().clamp(-LEVELS, LEVELS)
        off = (left[:, column] - gptq[:, column]) / upper[column, column]
        left -= off[:, None] * upper[column]
        left[:, : column + 1] = 0
    best = (gptq - (weight / scale[:, None])[:, order]).index_select(1, order.argsort())
    ours = codes.float() - weight / scale[:, None]

    def expected(of_weight):
        return float(((of_weight @ of_pairs) * of_weight).sum())

    nearest = (weight / scale[:, None]).round() - weight / scale[:, None]
    assert expected(best) < expected(nearest) / 2
    assert expected(ours) < 1.1 * expected(best)


def test_weights_that_int8_represents_keep_their_numbers():
    codes, scale = quantise_weight(random(48, 256, seed=3))
    stored = codes.float() * scale[:, None]
    moments = moments_of(inputs(400, 256, 10))
    assert moments is not None
    again, scale_again = compensated_weight(stored, torch.ones(256), moments)
    assert torch.equal(again, codes) and torch.equal(scale_again, scale)


def test_kernels_lose_less_of_the_mean():
    x = F.silu(random(8, 64, 12, 12, seed=1) + random(64, seed=2)[:, None, None])
    weight, ones = random(32, 64, 3, 3, seed=3), torch.ones(64)
    moments = moments_of(x[:4].movedim(1, -1).flatten(0, 2)[::2])
    assert moments is not None

    def errors(codes, scale):
        found = F.conv2d(x[4:], codes.float() * scale[:, None, None, None] - weight, padding=1)
        return float(found.square().mean()), float(found.mean((0, 2, 3)).square().mean())

    (whole, of_mean), (before, mean_before) = (
        errors(*compensated_weight(weight, ones, moments)),
        errors(*layer_weight(weight, ones)),
    )
    assert whole < before and of_mean < mean_before / 4


def test_moments_keep_the_second_moment_of_each_channel():
    x = inputs(600, 96, 10) * 30
    moments = moments_of(x)
    assert moments is not None
    whole = moments.directions.float().square().sum(0) + moments.remainder
    found = x.square().mean(0) / x.square().mean()
    torch.testing.assert_close(whole, found, rtol=0.15, atol=0.02)
    share = moments.remainder_share
    assert bool((share > 0).all()) and bool((share < 1).all())
    first = moments.of_first()
    torch.testing.assert_close(first.directions.float().square().sum(0) + first.remainder, whole)


@pytest.mark.parametrize("rows", [torch.ones(3, 64), torch.zeros(400, 64)])
def test_too_few_rows_and_zeros_have_no_moments(rows):
    assert moments_of(rows) is None


@pytest.mark.parametrize("distinct", [1, 5, 20])
def test_rows_that_repeat_have_finite_codes(distinct):
    """A modulation sees one vector for each timestep."""
    x = inputs(distinct, 128, 10).repeat(160 // distinct, 1)
    moments, weight = moments_of(x), random(64, 128, seed=5)
    assert moments is not None
    ones = torch.ones(128)
    nearest, compensated = layer_weight(weight, ones), compensated_weight(weight, ones, moments)
    assert on(x, change(*compensated, ones, weight)) < on(x, change(*nearest, ones, weight)) / 4
    assert float(change(*compensated, ones, weight).abs().max()) < 8 * float(nearest[1].max())


def test_directions_are_ordered():
    moments = moments_of(inputs(400, 64, 10))
    assert isinstance(moments, Moments)
    sizes = moments.directions.float().square().sum(1)
    assert float(sizes[0]) == float(sizes.max()) and bool((sizes[:4] > sizes[16:].max()).all())


def test_codes_do_not_depend_on_the_order_of_sums():
    """A sum that rounds otherwise would change all later columns of its row."""
    weight, moments = random(96, 384, seed=5), moments_of(inputs(400, 384, 10))
    assert moments is not None
    whole, _ = compensated_weight(weight, torch.ones(384), moments)
    turned = Moments(moments.directions.flip(0), moments.remainder)
    assert torch.equal(compensated_weight(weight, torch.ones(384), turned)[0], whole)
    few = [compensated_weight(row[None], torch.ones(384), moments)[0] for row in weight]
    assert torch.equal(torch.cat(few), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(96, 384), (1280, 5120), (64, 64, 3, 3)])
def test_a_gpu_gives_the_codes_of_a_cpu(shape):
    weight, factor = random(*shape, seed=5), random(shape[1], seed=6).abs() + 0.5
    moments = moments_of(inputs(400, shape[1], 10))
    assert moments is not None
    codes, scale = compensated_weight(weight, factor, moments)
    on_gpu, scale_on_gpu = compensated_weight(weight.cuda(), factor.cuda(), moments)
    assert torch.equal(on_gpu.cpu(), codes) and torch.equal(scale_on_gpu.cpu(), scale)
