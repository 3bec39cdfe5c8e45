"""All variants of the bodies of `Int8Linear` and `Int8Conv` in ONNX Runtime against the reference."""

import itertools
import math

import onnx
import onnx_ir as ir
import pytest
import tolerances
import torch
from int8_layers import tables_of
from layer_graphs import LEVELS, layer_model, run, run_proto
from tiny_layers import random

from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.nodes.common import DOMAIN, OPSET
from trtconvert.export.nodes.layers import (
    CONV,
    LINEAR,
    LayerVariant,
    inputs_of,
    is_layer,
    layer_body,
    layer_nodes,
    table_of,
    variant_of_layer,
)
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import conv, linear
from trtconvert.models.recorded_calls import relative_error as error

SAMPLES = 4


def subsets(modes):
    return [set_ for size in range(1, 1 + len(modes)) for set_ in itertools.combinations(modes, size)]


LINEAR_MODES = subsets([LayerMode.WEIGHT_ONLY, LayerMode.DYNAMIC, LayerMode.STATIC])
CONV_MODES = subsets([LayerMode.WEIGHT_ONLY, LayerMode.STATIC])


def in_bins(modes):
    """Two bins per mode, and timesteps that select them."""
    timesteps = [1000 * (index + 0.5) / (2 * len(modes)) for index in range(2 * len(modes))]
    return [mode for mode in modes for _ in range(2)], [
        torch.tensor(timesteps[i : i + 2]) for i in range(0, len(timesteps), 2)
    ]


def batch_of(timesteps):
    """Each twice, and in the place of the last one NaN."""
    return torch.cat([timesteps, timesteps])[:SAMPLES].index_fill(0, torch.tensor([SAMPLES - 1]), math.nan)


def assert_same(got, expected, limit=tolerances.SAME_ARITHMETIC):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert torch.equal(got.isnan(), expected.isnan())
    assert error(got.nan_to_num(), expected.nan_to_num()) < limit


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("modes", LINEAR_MODES, ids=str)
def test_a_linear_layer_computes_what_the_reference_does_at_every_level_of_optimisation(modes, level):
    x = random(SAMPLES, 7, 32)
    table, of_modes = in_bins(modes)
    tables = tables_of(x, modes=table)
    model = layer_model(x, tables, timed=True, free=(0, 1))
    assert lower_to_function(model) == 1
    for timesteps in of_modes:  # of each mode alone, with the scales of two bins
        timestep = batch_of(timesteps)
        got = run(model, x, timestep, level)
        assert got[-1].isnan().all() and got[:-1].isfinite().all()
        assert_same(got, linear(x, timestep, tables))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("modes", CONV_MODES, ids=str)
def test_a_convolution_computes_what_the_reference_does_at_every_level_of_optimisation(modes, level):
    x, options = random(SAMPLES, 16, 5, 6), {"stride": (2, 1), "padding": (1, 0)}
    table, of_modes = in_bins(modes)
    tables = tables_of(x, (3, 3), modes=table)
    model = layer_model(x, tables, timed=True, free=(0, 2), **options)
    lower_to_function(model)
    for timesteps in of_modes:
        timestep = batch_of(timesteps)
        assert_same(run(model, x, timestep, level), conv(x, timestep, tables, **options))


def test_a_call_of_several_modes_is_computed_in_the_most_careful_one():
    x, timestep = random(2, 7, 32), torch.tensor([900.0, 500.0])
    tables = tables_of(x, modes=[LayerMode.WEIGHT_ONLY, LayerMode.DYNAMIC, LayerMode.STATIC])
    model = layer_model(x, tables, timed=True)
    lower_to_function(model)
    got = run(model, x, timestep)
    assert_same(got, linear(x, timestep, tables))
    assert error(got, linear(x, timestep, tables.with_modes(LayerMode.STATIC))) > 10 * tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize("mode", LINEAR_MODES[:3], ids=str)
@pytest.mark.parametrize("shape", [(6, 16), (2, 5, 48), (2, 3, 5, 32), (2, 2, 3, 4, 16), (1, 1, 1040)])
def test_inputs_of_two_to_five_axes_without_a_timestep(shape, mode):
    x = random(*shape)
    tables = tables_of(x, modes=mode)
    model = layer_model(x, tables, timed=False)
    lower_to_function(model)
    assert_same(run(model, x), linear(x, None, tables))


@pytest.mark.parametrize("folds", [1, 2, 6])
@pytest.mark.parametrize("shape", [(16,), (5, 16), (3, 5, 16)])
def test_rows_of_a_sample_lie_beside_each_other(shape, folds):
    x, timestep = random(2 * folds, *shape), torch.tensor([900.0, 100.0])
    tables = tables_of(x, modes=[LayerMode.STATIC] * 2)
    model = layer_model(x, tables, timed=True)
    lower_to_function(model)
    got = run(model, x, timestep)
    assert_same(got, linear(x, timestep, tables))
    assert_same(got[folds:], linear(x[folds:], timestep[1:], tables))


@pytest.mark.parametrize("mode", CONV_MODES[:2], ids=str)
@pytest.mark.parametrize(
    ("sizes", "kernel", "stride", "padding", "folds"),
    [
        ((9,), (3,), (2,), (1,), 1),
        ((6, 7), (1, 1), (1, 1), (0, 0), 2),
        ((7, 9), (3, 5), (2, 1), (0, 2), 1),
        ((3, 4, 5), (1, 3, 3), (1, 2, 1), (0, 1, 1), 3),
    ],
)
def test_convolutions_of_one_to_three_sizes(sizes, kernel, stride, padding, folds, mode):
    x, timestep = random(2 * folds, 16, *sizes), torch.tensor([900.0, 100.0])
    tables = tables_of(x, kernel, modes=mode * 2)
    options = {"stride": stride, "padding": padding}
    model = layer_model(x, tables, timed=True, **options)
    lower_to_function(model)
    assert_same(run(model, x, timestep), conv(x, timestep, tables, **options))
    # And without a timestep.
    tables = tables_of(x, kernel, modes=mode)
    model = layer_model(x, tables, timed=False, **options)
    lower_to_function(model)
    assert_same(run(model, x), conv(x, None, tables, **options))


@pytest.mark.parametrize("modes", LINEAR_MODES, ids=str)
def test_half_precision_goes_in_and_comes_out(modes):
    x = random(2, 7, 32).half()
    tables = tables_of(x, modes=modes)
    timed = len(modes) > 1
    model = layer_model(x, tables, timed=timed)
    lower_to_function(model)
    for t in (1.0, 999.0) if timed else (None,):
        timestep = None if t is None else torch.full((2,), t)
        assert_same(run(model, x, timestep), linear(x, timestep, tables), tolerances.ROUNDED_TO_HALF)


def test_a_convolution_in_half_precision():
    x, options = random(2, 16, 5, 5).half(), {"stride": (1, 1), "padding": (1, 1)}
    for modes in CONV_MODES[:2]:
        tables = tables_of(x, (3, 3), modes=modes)
        model = layer_model(x, tables, timed=False, **options)
        lower_to_function(model)
        assert_same(run(model, x), conv(x, None, tables, **options), tolerances.ROUNDED_TO_HALF)


def test_tokens_of_zeros_and_extreme_scales_stay_finite():
    x = random(1, 4, 32)
    x[0, 1], x[0, 2] = 0, x[0, 2] * 1e6
    for mode in LINEAR_MODES[:3]:
        tables = tables_of(x, modes=mode, moved=False)
        model = layer_model(x, tables, timed=False)
        lower_to_function(model)
        got = run(model, x)
        assert torch.equal(got[0, 1], tables.bias)
        assert_same(got, linear(x, None, tables))


# What ONNX Runtime gets wrong -----------------------------------------------------------------------------------------


@pytest.mark.xfail(
    strict=False,
    reason="ONNX Runtime 1.31 takes a scale for each row for one of all rows; if not, a body may be shorter",
)
def test_scales_that_are_multiplied_with_each_other_first():
    """The straightforward body would be fused to MatMulIntegerToFloat."""
    x = random(2, 7, 32)
    tables = tables_of(x, modes=[LayerMode.DYNAMIC])
    straight = layer_body(LayerVariant(LINEAR, (LayerMode.DYNAMIC,), False))
    ordered = onnx.printer.to_text(straight)
    before = ["weighed = Mul (products, weight_scale)", "scaled = Mul (weighed, step)"]
    after = ["weighed = Mul (step, weight_scale)", "scaled = Mul (products, weighed)"]
    for old, new in zip(before, after, strict=True):
        assert old in ordered
        ordered = ordered.replace(old, new)
    model = layer_model(x, tables, timed=False)
    lower_to_function(model)
    proto = ir.to_proto(model)
    (function,) = proto.functions
    overload = function.overload
    function.CopyFrom(onnx.parser.parse_function(ordered))
    function.overload = overload
    onnx.checker.check_model(proto, full_check=True)
    expected = linear(x, None, tables)
    assert error(run_proto(proto, x, None, "ORT_DISABLE_ALL"), expected) < tolerances.SAME_ARITHMETIC
    assert error(run_proto(proto, x, None, "ORT_ENABLE_ALL"), expected) < tolerances.SAME_ARITHMETIC


# Nodes and variants ---------------------------------------------------------------------------------------------------


def test_variants_share_the_op_and_differ_in_the_overload():
    variants = [LayerVariant(LINEAR, modes, timed) for modes in LINEAR_MODES for timed in (True, False)]
    variants += [
        LayerVariant(CONV, modes, timed, sizes)
        for modes in CONV_MODES
        for timed in (True, False)
        for sizes in (1, 2, 3)
    ]
    bodies = [layer_body(variant) for variant in variants]
    assert {(body.domain, body.name) for body in bodies} == {(DOMAIN, LINEAR), (DOMAIN, CONV)}
    assert len({(body.name, body.overload) for body in bodies}) == len(bodies)
    assert {opset.version for body in bodies for opset in body.opset_import} == {OPSET}


@pytest.mark.parametrize("timed", [True, False])
def test_a_node_tells_its_variant_and_its_tables(timed):
    x = random(2, 16, 5, 5)
    modes = [LayerMode.STATIC, LayerMode.WEIGHT_ONLY, LayerMode.STATIC] if timed else [LayerMode.STATIC]
    tables = tables_of(x, (3, 3), modes=modes)
    model = layer_model(x, tables, timed=timed, stride=(1, 1), padding=(1, 1))
    ((name, node),) = layer_nodes(model).items()
    assert name == "layer" and is_layer(node)
    assert variant_of_layer(node) == LayerVariant(CONV, tuple(LayerMode(m) for m in sorted(set(modes))), timed, 2)
    named = inputs_of(node)
    assert ("timestep" in named) == timed and "x_offset" not in named
    assert all((table_of(named[key]) == getattr(tables, key).numpy()).all() for key in ("weight", "x_scale", "modes"))


def test_layers_of_one_variant_share_a_body():
    x = random(2, 7, 32)
    model = layer_model(x, tables_of(x, modes=[LayerMode.STATIC]), timed=False)
    (node,) = layer_nodes(model).values()
    graph = model.graph
    again = ir.node(LINEAR, [node.outputs[0], *node.inputs[1:]], {"timestep_max": 1000.0}, domain=DOMAIN)
    again.metadata_props.update(node.metadata_props | {"trtconvert.layer": "again"})
    graph.insert_after(node, again)
    assert lower_to_function(model) == 2 and len(model.functions) == 1
    assert list(layer_nodes(model)) == ["layer", "again"]


def test_other_nodes_of_our_domain_are_no_layers():
    """An engine's plugin may have the op's name, but has no tables."""
    assert not is_layer(None)
    assert not is_layer(ir.node(LINEAR, [], domain=DOMAIN))
    assert not is_layer(ir.node(LINEAR, [], metadata_props={"trtconvert.layer": "x"}))
