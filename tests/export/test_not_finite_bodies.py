"""NaN and ±Inf in the bodies of our nodes in ONNX Runtime reach the same results as in the specification."""

import math

import onnx
import onnxruntime
import pytest
import tolerances
import torch
from attention_graphs import TABLES, node_model
from attention_graphs import run as run_attention
from delta_layers import InOnnxRuntime, InTorch, delta_model, trajectory
from int8_layers import tables_of
from layer_graphs import LEVELS, layer_model, run
from onnx import TensorProto, helper
from tiny_layers import random

from trtconvert.attention import reference
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.nodes.attention_body import BLOCK_MASK, INPUTS, MASK, Variant
from trtconvert.export.nodes.common import DOMAIN, OPSET
from trtconvert.export.nodes.deltas import CONV, PRODUCT_INPUTS, QUANTISE, QUANTISE_INPUTS, delta_body
from trtconvert.linear.deltas import add_product, quantise_delta
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import conv, linear
from trtconvert.models.recorded_calls import relative_error as error

VALUES = (math.nan, math.inf, -math.inf)
CASES = [
    Variant(),
    Variant(layout="BNHD", scaling="dynamic"),
    Variant(mask="boolean", scaling="dynamic"),
    Variant(mask="additive"),
    Variant(block_mask=True, scaling="dynamic"),
    Variant(mask="boolean", block_mask=True),
]


def assert_same(got, expected):
    """Checks equal places of NaN, and close numbers elsewhere."""
    assert torch.equal(got.isfinite(), expected.isfinite())
    assert expected.isfinite().any() and not expected.isfinite().all()
    known = expected.isfinite()
    assert error(got[known], expected[known]) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize("variant", CASES, ids=lambda v: v.overload)
@pytest.mark.parametrize("value", VALUES)
def test_attention(value, variant):
    """A batch element per mode; in each head another tensor has NaN or Inf."""
    generator = torch.Generator().manual_seed(0)
    modes, heads, queries, keys, dim = len(Mode), 4, 150, 300, 40
    q, k, v = (torch.randn(modes, heads, n, dim, generator=generator) for n in (queries, keys, keys))
    per_mode = [tables_from_data(q, k, v, mode) for mode in Mode]
    tables = AttentionTables(*(torch.cat([getattr(t, name) for t in per_mode]) for name in TABLES))
    q[:, 0, 7, 3], k[:, 1, 290, 3], v[:, 2, 290, 3] = value, value, value
    timestep = torch.tensor([100.0, 300.0, 500.0, 700.0, 900.0])
    options = {}
    if variant.mask == "boolean":
        options[MASK] = torch.rand(1, 1, queries, keys, generator=generator) > 0.3
        options[MASK][..., 290] = False
    elif variant.mask == "additive":
        options[MASK] = torch.randn(1, heads, queries, keys, generator=generator)
        options[MASK][0, 3, 9, 11] = math.inf if value < 0 else value
    if variant.block_mask:
        options[BLOCK_MASK] = torch.tensor([[[[True, True, False], [True, False, True]]]])
    if variant.layout == "BNHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    expected = reference.attention(q, k, v, timestep, tables, layout=variant.layout, scaling=variant.scaling, **options)
    tensors = dict(zip(INPUTS, (q, k, v, timestep, *(getattr(tables, name) for name in TABLES)), strict=True))
    feeds = {name: x.numpy() for name, x in (tensors | options).items()}
    model = node_model(variant, feeds)
    lower_to_function(model)
    assert_same(run_attention(model, feeds), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [LayerMode.WEIGHT_ONLY, LayerMode.DYNAMIC, LayerMode.STATIC])
@pytest.mark.parametrize("value", VALUES)
def test_a_linear_layer(value, mode, level):
    x = random(4, 7, 32)
    tables = tables_of(x, modes=[mode])
    x[1, 3, 5] = x[2, 0, 31] = value
    model = layer_model(x, tables, timed=False)
    lower_to_function(model)
    assert_same(run(model, x, None, level), linear(x, None, tables))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", [LayerMode.WEIGHT_ONLY, LayerMode.STATIC])
@pytest.mark.parametrize("value", VALUES)
def test_a_convolution(value, mode, level):
    x, options = random(4, 16, 5, 6), {"stride": (2, 1), "padding": (1, 0)}
    tables = tables_of(x, (3, 3), modes=[mode])
    x[1, 3, 2, 1] = x[2, 0, 0, 0] = value
    model = layer_model(x, tables, timed=False, **options)
    lower_to_function(model)
    assert_same(run(model, x, None, level), conv(x, None, tables, **options))


def change_of(op, inputs, outputs, sizes=0, **attributes):
    """Runs one node of layers that quantise deltas in ONNX Runtime."""
    nodes = [helper.make_node(op, list(inputs), list(outputs), domain=DOMAIN, place=0, **attributes)]
    body = delta_body(op, sizes)
    nodes[0].overload = body.overload
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.numpy().dtype), list(x.shape))
            for name, x in inputs.items()
        ],
        [helper.make_tensor_value_info(name, kind, [None] * 4) for name, kind in outputs.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=[body])
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return [torch.from_numpy(x) for x in session.run(None, {name: x.numpy() for name, x in inputs.items()})]


@pytest.mark.parametrize("value", VALUES)
def test_deltas_of_pixels(value):
    x = random(2, 16, 5, 6)
    tables = tables_of(x, (3, 3), modes=[LayerMode.STATIC])
    a_hat, o_hat = random(2, 16, 5, 6), random(2, len(tables.bias), 5, 6)
    reset, scale = torch.tensor([True, False]), tables.x_scale.expand(2)[:, None].contiguous()
    x[0, 3, 2, 1] = x[1, 0, 0, 0] = value
    a_hat[1, 2, 4, 5] = value
    factor = tables.x_factor.view(-1, 1, 1)
    q, a_next = quantise_delta(x, factor, a_hat, reset, scale)
    expected = add_product(q, scale, reset, tables, o_hat, torch.float32, stride=(1, 1), padding=(1, 1))
    given = dict(zip(QUANTISE_INPUTS, (x, factor, a_hat, reset, scale), strict=True))
    got_q, got_a = change_of(QUANTISE, given, {"q": TensorProto.INT8, "a_new": TensorProto.FLOAT})
    assert torch.equal(got_q, q)
    assert_same(got_a, a_next)
    of_layer = (q, scale, reset, tables.weight, tables.weight_scale, tables.bias, o_hat)
    given = dict(zip(PRODUCT_INPUTS, of_layer, strict=True))
    (got,) = change_of(CONV, given, {"o_new": TensorProto.FLOAT}, 2, strides=[1, 1], pads=[1, 1, 1, 1])
    assert_same(got, expected)


def test_a_model_of_deltas_stays_broken_as_the_specification_does():
    """Breaks the second sample from the second step on."""
    made = delta_model()
    ours, theirs = InOnnxRuntime(made.graph()), InTorch(made)
    for step, inputs in enumerate(trajectory(made)):
        if step == 1:
            inputs["x"][1, 0, 0, 0] = math.nan
        got, expected = ours(**inputs), theirs(**inputs)
        assert torch.equal(got.isfinite(), expected.isfinite())
        assert got[0].isfinite().all() and got[1].isfinite().all() == (step == 0)
