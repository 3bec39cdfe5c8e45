"""INT8 layers in torch: against float64, against unquantised layers, and invalid inputs."""

import math

import pytest
import tolerances
import torch
from int8_layers import conv_in_double, linear_in_double, tables_of
from tiny_layers import random
from torch.nn import functional as F

from trtconvert.linear.modes import INT8_PRODUCTS, LayerMode
from trtconvert.linear.reference import LEVELS, LayerTables, conv, is_quantised, linear, quantise_weight, short_scale
from trtconvert.models.recorded_calls import relative_error as error
from trtconvert.weights import blocks

INT8_MODES = [mode for mode in LayerMode if mode != LayerMode.EXACT]
OF_CONVS = [LayerMode.WEIGHT_ONLY, LayerMode.STATIC]

# The same arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", INT8_MODES)
@pytest.mark.parametrize("shape", [(1, 16), (3, 1, 16), (2, 7, 48), (2, 3, 5, 1040), (1, 2, 3, 4, 32)])
def test_a_linear_layer_is_its_definition_in_double(mode, shape):
    x = random(*shape)
    tables = tables_of(x, modes=[mode])
    expected = linear_in_double(x, tables, mode, float(tables.x_scale))
    wide = linear(x.double(), None, tables, compute_dtype=torch.float64)
    assert wide.shape == expected.shape == (*shape[:-1], 24)
    assert error(wide, expected) < tolerances.SAME_DOUBLE
    assert error(linear(x, None, tables), expected) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize("mode", OF_CONVS)
@pytest.mark.parametrize(
    ("sizes", "kernel", "stride", "padding"),
    [
        ((9,), (3,), (2,), (1,)),
        ((5, 8), (3, 3), (1, 1), (1, 1)),
        ((6, 7), (1, 1), (1, 1), (0, 0)),
        ((7, 9), (3, 5), (2, 1), (0, 2)),
        ((3, 4, 5), (1, 3, 3), (1, 2, 1), (0, 1, 1)),
        ((4, 4, 4), (3, 3, 3), (2, 2, 2), (2, 2, 2)),
    ],
)
def test_a_convolution_is_its_definition_in_double(mode, sizes, kernel, stride, padding):
    x = random(2, 16, *sizes)
    tables = tables_of(x, kernel, modes=[mode])
    expected = conv_in_double(x, tables, mode, stride, padding, float(tables.x_scale))
    wide = conv(x.double(), None, tables, stride=stride, padding=padding, compute_dtype=torch.float64)
    assert wide.shape == expected.shape
    assert error(wide, expected) < tolerances.SAME_DOUBLE
    assert error(conv(x, None, tables, stride=stride, padding=padding), expected) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize("mode", OF_CONVS)
def test_autocast_changes_nothing(mode):
    x, image = random(3, 48), random(2, 16, 7, 7)
    of_x, of_image = tables_of(x, modes=[mode]), tables_of(image, (3, 3), modes=[mode])
    with torch.autocast("cpu", torch.bfloat16):
        rows, pixels = linear(x, None, of_x), conv(image, None, of_image, stride=(1, 1), padding=(1, 1))
    assert torch.equal(rows, linear(x, None, of_x))
    assert torch.equal(pixels, conv(image, None, of_image, stride=(1, 1), padding=(1, 1)))


@pytest.mark.parametrize("folds", [1, 3])
def test_each_sample_of_a_batch_takes_the_scale_of_its_timestep(folds):
    x = random(3 * folds, 5, 32)
    tables = tables_of(x, modes=[LayerMode.STATIC] * 4)
    timestep, bins = torch.tensor([10.0, 990.0, 300.0]), (0, 3, 1)
    got = linear(x.double(), timestep, tables, compute_dtype=torch.float64).split(folds)
    for part, rows, index in zip(got, x.split(folds), bins, strict=True):
        expected = linear_in_double(rows, tables, LayerMode.STATIC, float(tables.x_scale[index]))
        assert error(part, expected) < tolerances.SAME_DOUBLE


@pytest.mark.parametrize("folds", [1, 2])
def test_each_sample_of_a_convolution_takes_the_scale_of_its_timestep(folds):
    x = random(2 * folds, 16, 6, 6)
    tables = tables_of(x, (3, 3), modes=[LayerMode.STATIC] * 2)
    options = {"stride": (1, 1), "padding": (1, 1)}
    got = conv(x.double(), torch.tensor([800.0, 1.0]), tables, **options, compute_dtype=torch.float64).split(folds)
    for part, images, index in zip(got, x.split(folds), (1, 0), strict=True):
        expected = conv_in_double(images, tables, LayerMode.STATIC, (1, 1), (1, 1), float(tables.x_scale[index]))
        assert error(part, expected) < tolerances.SAME_DOUBLE


@pytest.mark.parametrize(
    ("timesteps", "mode"),
    [
        ((900.0, 900.0), LayerMode.STATIC),
        ((900.0, 500.0), LayerMode.DYNAMIC),
        ((900.0, 100.0), LayerMode.WEIGHT_ONLY),
        ((500.0, 100.0), LayerMode.WEIGHT_ONLY),
    ],
)
def test_a_call_has_the_most_careful_mode_of_its_samples(timesteps, mode):
    x = random(2, 5, 32)
    tables = tables_of(x, modes=[LayerMode.WEIGHT_ONLY, LayerMode.DYNAMIC, LayerMode.STATIC])
    timestep = torch.tensor(timesteps)
    uniform = linear(x, timestep, tables.with_modes(mode))
    assert torch.equal(linear(x, timestep, tables), uniform)
    others = [linear(x, timestep, tables.with_modes(m)) for m in INT8_MODES if m != mode]
    assert not any(torch.equal(uniform, other) for other in others)


def test_bins_are_those_of_attention():
    """The last bin ends at timestep_max; timesteps beyond belong to the nearest bin."""
    x = random(1, 3, 16)
    tables = tables_of(x, modes=[LayerMode.STATIC] * 2)
    of_bins = [linear(x, torch.tensor([t]), tables, timestep_max=1.0) for t in (0.25, 0.75)]
    assert not torch.equal(*of_bins)
    for timestep, index in ((-1.0, 0), (0.0, 0), (0.5, 1), (1.0, 1), (7.0, 1)):
        assert torch.equal(linear(x, torch.tensor([timestep]), tables, timestep_max=1.0), of_bins[index])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_in_and_comes_out(dtype):
    x = random(2, 5, 64).to(dtype)
    images = random(1, 16, 6, 6).to(dtype)
    for mode in INT8_MODES:
        tables = tables_of(x, modes=[mode])
        assert torch.equal(linear(x, None, tables), linear(x.float(), None, tables).to(dtype)) == (
            mode in INT8_PRODUCTS
        )  # W8A16 rounds x̂ to the type of x first
        assert error(linear(x, None, tables), linear(x.float(), None, tables)) < tolerances.ROUNDED_INPUT[dtype]
    tables = tables_of(images, (3, 3))
    out = conv(images, None, tables, stride=(1, 1), padding=(1, 1))
    assert torch.equal(out, conv(images.float(), None, tables, stride=(1, 1), padding=(1, 1)).to(dtype))


# Against layers that are not quantised --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", INT8_MODES)
@pytest.mark.parametrize("channels", [64, 1024])
def test_each_mode_is_close_to_the_exact_layer(mode, channels):
    x, weight, bias = random(2, 64, channels), random(256, channels, seed=1), random(256, seed=2)
    stored, scale = quantise_weight(weight)
    one, zero = torch.ones(channels), torch.zeros(channels)
    tables = LayerTables(stored, scale, bias, one, zero, x.abs().amax()[None] / LEVELS, torch.tensor([mode]))
    assert error(linear(x, None, tables), F.linear(x, weight, bias)) < tolerances.LAYER_ERROR[mode]


def test_weight_only_has_the_error_of_the_weights_alone():
    """Weights that are integers times a scale have no error."""
    x = random(4, 64)
    tables = tables_of(x, modes=[LayerMode.WEIGHT_ONLY], moved=False)
    expected = F.linear(x.double(), tables.dequantised().double(), tables.bias.double())
    assert error(linear(x, None, tables), expected) < tolerances.SAME_FLOAT


def test_integers_are_multiplied_exactly():
    x = torch.randint(-LEVELS, LEVELS + 1, (5, 1040), generator=torch.Generator().manual_seed(0)).float()
    x[:, 0] = LEVELS  # so that a token's scale is 1
    for mode in INT8_MODES:
        tables = tables_of(x, modes=[mode], moved=False)
        tables = LayerTables(**vars(tables) | {"x_scale": torch.ones(1), "bias": torch.zeros(24)})
        whole = x.long() @ tables.weight.long().T
        assert torch.equal(linear(x, None, tables), whole.float() * tables.weight_scale)


def test_a_token_of_zeros_gives_the_bias():
    x = random(2, 3, 32)
    x[0, 1] = 0
    for mode in INT8_MODES:
        tables = tables_of(x, modes=[mode], moved=False)
        out = linear(x, None, tables)
        assert torch.equal(out[0, 1], tables.bias) and out.isfinite().all()


@pytest.mark.parametrize("mode", OF_CONVS)
def test_padding_is_zero_whatever_the_factors_are(mode):
    x = random(1, 16, 4, 4)
    tables = tables_of(x, (3, 3), modes=[mode])
    padded = conv(F.pad(x, (1, 1, 1, 1)), None, tables, stride=(1, 1), padding=(0, 0))
    torch.testing.assert_close(conv(x, None, tables, stride=(1, 1), padding=(1, 1)), padded)


@pytest.mark.parametrize("clipped", [1.0, 0.5])
def test_values_beyond_the_range_are_clipped(clipped):
    x = torch.linspace(-1, 1, 16).repeat(2, 1)
    tables = tables_of(x, outputs=16, moved=False)
    identity = LEVELS * torch.eye(16, dtype=torch.int8)
    tables = LayerTables(
        **vars(tables)
        | {
            "weight": identity,
            "weight_scale": torch.full((16,), 1 / LEVELS),
            "bias": torch.zeros(16),
            "x_scale": torch.tensor([clipped / LEVELS]),
        }
    )
    expected = x.clamp(-clipped, clipped)
    assert (linear(x, None, tables) - expected).abs().max() <= clipped / LEVELS / 2 + 1e-6


# What is NaN ----------------------------------------------------------------------------------------------------------


def of_both(modes, timestep, **changed):
    """Classifies each sample's output: NaN everywhere, nowhere, or partly; of a linear layer and a convolution."""
    found = []
    for x, kernel in ((random(2, 5, 32), ()), (random(2, 16, 4, 4), (3, 3))):
        tables = tables_of(x, kernel, modes=modes)
        tables = LayerTables(**vars(tables) | changed)
        compute = conv if kernel else linear
        options = {"stride": (1, 1), "padding": (1, 1)} if kernel else {}
        out = compute(x, timestep, tables, **options).isnan().flatten(1)
        found.append([bool(row.all()) if row.all() or not row.any() else "some" for row in out])
    return found


def test_a_sample_whose_timestep_is_nan_is_nan_and_its_neighbours_are_not():
    timestep = torch.tensor([math.nan, 700.0])
    for mode in OF_CONVS:
        assert of_both([mode] * 2, timestep) == [[True, False]] * 2


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_cannot_be_used_gives_nan_where_it_is_used(scale):
    scales, timestep = torch.tensor([0.1, scale]), torch.tensor([100.0, 900.0])
    assert of_both([LayerMode.STATIC] * 2, timestep, x_scale=scales) == [[False, True]] * 2
    assert of_both([LayerMode.WEIGHT_ONLY] * 2, timestep, x_scale=scales) == [[False, False]] * 2


@pytest.mark.parametrize("mode", [0, 4, -1])
def test_a_mode_that_is_none_gives_nan(mode):
    assert of_both([mode], None) == [[True, True]] * 2


def test_convolutions_have_no_dynamic_mode():
    assert of_both([LayerMode.DYNAMIC], None) == [[False, False], [True, True]]


# Weights and scales ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 16), (5, 7), (4, 16, 3, 3), (1, 1)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_weights_are_rounded_to_the_nearest_step_of_their_channel(shape, size):
    weight = random(*shape) * size
    stored, scale = quantise_weight(weight)
    assert stored.dtype == torch.int8 and stored.abs().max() <= LEVELS
    by_row = scale.view(-1, *[1] * (weight.dim() - 1))
    assert ((stored * by_row - weight).abs() <= by_row * (0.5 + 1e-5)).all()
    # The range is the largest weight of the channel, at most eight bits' rounding above it.
    assert (stored.flatten(1).abs().amax(1) >= LEVELS - 2).all()


def test_a_channel_of_zeros_stays_one():
    weight = random(4, 16)
    weight[2] = 0
    stored, scale = quantise_weight(weight)
    assert not stored[2].any() and scale[2] > 0 and stored[[0, 1, 3]].any(1).all()


def test_channels_are_quantised_by_themselves():
    weight = random(4, 16)
    stored, scale = quantise_weight(weight * torch.tensor([1.0, 2.0, 1024.0, 2.0**-8])[:, None])
    assert torch.equal(stored, quantise_weight(weight)[0])
    torch.testing.assert_close(scale, quantise_weight(weight)[1] * torch.tensor([1.0, 2.0, 1024.0, 2.0**-8]))


def scales():
    """For all magnitudes of FP16."""
    return torch.logspace(-30, 15, 40_001, base=2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_half_types_hold_every_scale(dtype):
    short = short_scale(scales())
    assert torch.equal(short.to(dtype).float(), short)


def test_scales_are_rounded_up_by_less_than_their_last_bit():
    given = scales()
    short = short_scale(given)
    assert (short >= given).all() and (short.diff() >= 0).all()
    ordinary = given >= 2.0**-17
    assert (short[ordinary] <= given[ordinary] * (1 + 2.0**-7)).all()
    assert (short[~ordinary] - given[~ordinary].clamp_min(2.0**-20) <= 2.0**-24).all()
    assert torch.equal(short_scale(short), short)


@pytest.mark.parametrize("power", [-20, -17, -1, 0, 5])
def test_powers_of_two_are_what_they_are(power):
    assert short_scale(torch.tensor(2.0**power)) == 2.0**power


def test_a_layer_in_other_modes_is_the_same_layer():
    x = random(1, 3, 16)
    tables = tables_of(x, modes=[LayerMode.STATIC] * 3)
    other = tables.with_modes(torch.tensor([1, 2, 3]))
    assert other.modes.tolist() == [1, 2, 3] and tables.with_modes(LayerMode.DYNAMIC).modes.tolist() == [2] * 3
    assert all(getattr(other, name) is value for name, value in vars(tables).items() if name != "modes")


@pytest.mark.parametrize("size", [30.0, 1.0, 1e-3])
@pytest.mark.parametrize("shape", [(300, 64), (300, 4, 3, 3)], ids=["linear", "conv"])
def test_weights_that_were_quantised_come_back_number_by_number(size, shape):
    """Weights of `trtconvert quantize --granularity channel`, also with a largest code below 127."""
    weight = random(*shape) * size
    weight[5] = 0
    found = blocks.measure(blocks.as_matrix(weight))
    scale = blocks.scales(found, "channel")
    stored, _ = blocks.quantise(blocks.as_matrix(weight), scale)
    assert len(stored.abs().amax(1).unique()) > 2
    restored = blocks.dequantise(stored, scale, torch.float32).view(shape)
    again, scale_again = quantise_weight(restored)
    assert torch.equal(again, stored.view(shape)) and torch.equal(scale_again, scale)
    assert is_quantised(restored) and not is_quantised(weight) and not is_quantised(torch.zeros(shape))
    assert not is_quantised(restored + weight * 1e-3)


@pytest.mark.parametrize("size", [2e-5, 1e-6])
def test_weights_below_the_smallest_scale_of_engines_are_rounded_to_it(size):
    """Files of `trtconvert quantize` hold smaller scales than engines."""
    weight = random(300, 64) * size
    scale = blocks.scales(blocks.measure(weight), "channel")
    stored, _ = blocks.quantise(weight, scale)
    restored = blocks.dequantise(stored, scale, torch.float32)
    again, scale_again = quantise_weight(restored)
    least = 2.0**-20
    assert scale.max() < least and torch.equal(scale_again, torch.full((300,), least))
    assert (again * scale_again[:, None] - restored).abs().max() <= least / 2


def test_rows_that_begin_as_if_they_were_quantised():
    """The scale depends on all columns; the quantiser checks the first columns before the others."""
    scale, integers = 0.01171875, torch.arange(-60, 60).repeat(3, 1) * 2.0  # a scale of eight bits
    integers[:, 0] = 119  # the largest, so that the next smaller scale has 127 steps for it
    whole = integers * scale
    broken = whole.clone()
    broken[1, -1] += scale / 3
    stored, scales = quantise_weight(whole)
    assert torch.equal(scales, torch.full((3,), scale)) and torch.equal(stored.float(), integers)
    stored, scales = quantise_weight(broken)
    assert scales[0] == scales[2] == scale and torch.equal(stored[::2].float(), integers[::2])
    assert scales[1] < scale and stored[1].max() > 119


@pytest.mark.parametrize("modes", [[LayerMode.STATIC], [LayerMode.WEIGHT_ONLY, LayerMode.STATIC]], ids=len)
def test_empty_batches_give_empty_outputs(modes):
    x, image = random(2, 5, 32), random(2, 16, 6, 7)
    for timestep in (None, torch.zeros(0)):
        assert linear(x[:0], timestep, tables_of(x, modes=modes)).shape == (0, 5, 24)
        found = conv(image[:0], timestep, tables_of(image, (3, 3), modes=modes), stride=(1, 1), padding=(1, 1))
        assert found.shape == (0, 24, 6, 7)
