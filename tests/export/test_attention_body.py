"""The op's body and its lowerings against the reference."""

import itertools

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tolerances
import torch
from attention_graphs import TABLES, node_model, run
from onnx import TensorProto, helper

from trtconvert.attention import reference
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.errors import UserError
from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.layout import fold_transposes
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.attention_body import BLOCK_MASK, INPUTS, KEY_INDEX, MASK, OP, Variant, function_body
from trtconvert.export.nodes.common import DOMAIN
from trtconvert.models.recorded_calls import relative_error as error

VARIANTS = [
    Variant(*parts)  # type: ignore[arg-type]
    for parts in itertools.product(
        ("BHND", "BNHD"), ("calibrated", "dynamic"), (True, False), ("none", "boolean", "additive")
    )
]

SPARSE = [
    Variant(mask="boolean", block_mask=True),
    Variant(layout="BNHD", scaling="dynamic", key_index=True),
    Variant(layout="BNHD", mask="additive", block_mask=True, key_index=True),
    Variant(scaling="dynamic", smooth_k=False, block_mask=True, key_index=True),
]


def case(variant, keys=200, dtype=torch.float32):
    """Inputs in all modes at once, and a timestep that is NaN."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, kv_heads, queries, dim = 6, 4, 2, 150 if variant.block_mask else 33, 40
    q = torch.randn(batch, heads, queries, dim, generator=generator) * 2
    k = torch.randn(batch, kv_heads, keys, dim, generator=generator) + 1
    v = torch.randn(batch, kv_heads, keys, dim, generator=generator) + 0.5
    # A small token, in the last tile of one head.
    v[:, 1, keys * 3 // 4] = 0.5 + 0.02 * torch.randn(batch, dim, generator=generator)
    per_mode = [tables_from_data(q, k, v, mode) for mode in Mode]
    tables = AttentionTables(*(torch.cat([getattr(t, name) for t in per_mode]) for name in TABLES))
    timestep = torch.tensor([0.0, 250.0, 450.0, 700.0, 1000.0, float("nan")])
    sparse = {}
    if variant.key_index:  # in any order, and some twice
        sparse[KEY_INDEX] = torch.randint(keys, (batch, kv_heads, keys - 31), generator=generator).int()
        keys -= 31
    if variant.block_mask:
        blocks = torch.tensor([[[True, False], [False, True]], [[False, True], [True, True]]])
        sparse[BLOCK_MASK] = blocks[None, [0, 1, 1, 0]] if variant.key_index else blocks[[0, 1, 1, 0, 1, 0], None]
    mask = {
        "none": None,
        "boolean": torch.rand(batch, 1, queries, keys, generator=generator) > 0.3,
        "additive": torch.randn(1, heads, 1, keys, generator=generator),
    }[variant.mask]
    if variant.mask == "boolean":
        mask[0, 0, 3] = False
    if variant.layout == "BNHD":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    feeds = dict(zip(INPUTS, (q, k, v, timestep, *(getattr(tables, name) for name in TABLES)), strict=True))
    if mask is not None:
        feeds[MASK] = mask
    feeds |= {name: sparse[name] for name in (BLOCK_MASK, KEY_INDEX) if name in sparse}
    expected = reference.attention(
        q, k, v, timestep, tables, layout=variant.layout, scaling=variant.scaling, smooth_k=variant.smooth_k, mask=mask,
        **sparse,
    )  # fmt: skip
    return {name: x.numpy() for name, x in feeds.items()}, expected


@pytest.mark.parametrize("variant", VARIANTS + SPARSE, ids=lambda v: v.overload)
def test_the_body_computes_what_the_reference_does(variant):
    feeds, expected = case(variant)
    model = node_model(variant, feeds)
    assert lower_to_function(model) == 1
    out = run(model, feeds)
    assert out[-1].isnan().all() and expected[-1].isnan().all()
    assert error(out[:-1], expected[:-1]) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize("keys", [1, 127, 128, 129])
def test_the_body_at_the_edges_of_a_tile(keys):
    feeds, expected = case(Variant(scaling="dynamic"), keys=keys)
    model = node_model(Variant(scaling="dynamic"), feeds)
    lower_to_function(model)
    assert error(run(model, feeds)[:-1], expected[:-1]) < tolerances.SAME_ARITHMETIC


def test_half_precision_goes_in_and_comes_out():
    feeds, expected = case(Variant(), dtype=torch.float16)
    model = node_model(Variant(), feeds, TensorProto.FLOAT16)
    lower_to_function(model)
    out = run(model, feeds)
    assert out.dtype == torch.float16
    assert error(out[:-1], expected[:-1]) < tolerances.ROUNDED_TO_HALF


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if v.scaling == "calibrated" and v.smooth_k] + SPARSE, ids=lambda v: v.overload
)
def test_native_attention_is_exact_attention(variant):
    feeds, _ = case(variant)
    model = node_model(variant, feeds)
    lower_to_function(model)
    assert lower_to_native(model) == 1
    assert not model.functions and not attention_nodes(model)
    q, k, v = (torch.from_numpy(feeds[name]) for name in "qkv")
    if variant.layout == "BNHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.from_numpy(feeds[MASK]) if MASK in feeds else None
    if KEY_INDEX in feeds:
        k, v = reference.gather_keys(k, v, torch.from_numpy(feeds[KEY_INDEX]))
    if BLOCK_MASK in feeds:
        blocks = reference.expand_blocks(torch.from_numpy(feeds[BLOCK_MASK]), q.shape[2], k.shape[2])
        mask = blocks if mask is None else mask & blocks if mask.dtype == torch.bool else mask.where(blocks, -torch.inf)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    if variant.layout == "BNHD":
        exact = exact.transpose(1, 2)
    used = {name: feeds[name] for name in (i.name for i in model.graph.inputs)}
    out = run(model, used)
    assert error(out, exact) < tolerances.SAME_ARITHMETIC


def test_the_plugin_lowering_names_the_plugin_and_strips_the_body():
    feeds, _ = case(Variant())
    model = node_model(Variant(), feeds)
    lower_to_function(model)
    assert lower_to_plugin(model) == 1
    (node,) = attention_nodes(model).values()
    assert not model.functions
    assert (node.attributes["plugin_version"].as_string(), node.attributes["plugin_namespace"].as_string()) == ("1", "")
    # and back: the body returns, the plugin's attributes go
    assert lower_to_function(model) == 1
    assert "plugin_version" not in node.attributes


def test_the_plugin_gets_block_masks_and_indices_behind_the_mask():
    variant = SPARSE[2]
    feeds, expected = case(variant)
    model = node_model(variant, feeds)
    assert lower_to_plugin(model) == 1
    (node,) = attention_nodes(model).values()
    assert [value.name for value in node.inputs[len(INPUTS) + 1 :]] == [BLOCK_MASK, KEY_INDEX]
    assert [node.attributes[name].as_int() for name in (BLOCK_MASK, KEY_INDEX)] == [1, 1]
    lower_to_function(model)
    assert error(run(model, feeds)[:-1], expected[:-1]) < tolerances.HALF_INPUTS


@pytest.mark.parametrize("mask", ["none", "boolean", "additive"])
def test_the_plugin_of_an_fp32_model_gets_and_gives_fp16(mask):
    """The body runs in place of the plugin: the casts around stay."""
    feeds, expected = case(Variant(mask=mask))
    model = node_model(Variant(mask=mask), feeds)
    lower_to_plugin(model)
    (node,) = attention_nodes(model).values()
    half = [value.dtype == ir.DataType.FLOAT16 for value in node.inputs]
    assert half == [True] * 3 + [False] * 7 + [mask == "additive"] * (mask != "none")
    assert node.outputs[0].dtype == ir.DataType.FLOAT16
    lower_to_function(model)
    out = run(model, feeds)
    assert out.dtype == torch.float32
    assert error(out[:-1], expected[:-1]) < tolerances.HALF_INPUTS


@pytest.mark.parametrize("lower", [lower_to_function, lower_to_native, lower_to_plugin])
def test_a_model_without_our_node_is_refused(lower):
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])],
    )
    with pytest.raises(UserError, match="holds no trtconvert::Int8Attention node") as raised:
        lower(ir.from_proto(helper.make_model(graph)))
    assert raised.value.got == "1 other nodes"


@pytest.mark.parametrize("output_use", ["transposed", "direct", "both"])
def test_transposes_fold_into_the_layout(output_use):
    """q, k and v transposed to heads first, as models do; what the graph computes stays the same."""
    feeds, expected = case(Variant())
    names = ("q", "k", "v")
    inputs = {n: np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if n in names else x for n, x in feeds.items()}
    model = node_model(Variant(), inputs)
    graph = model.graph
    (node,) = attention_nodes(model).values()
    for index in range(3):
        transpose = ir.node("Transpose", [graph.inputs[index]], {"perm": [0, 2, 1, 3]})
        graph.insert_before(node, transpose)
        node.replace_input_with(index, transpose.outputs[0])
    out = node.outputs[0]
    out.shape = None
    outputs = [out] if output_use != "transposed" else []
    if output_use != "direct":
        back = ir.node("Transpose", [out], {"perm": [0, 2, 1, 3]})
        back.outputs[0].name, back.outputs[0].type = "tokens_first", out.type
        graph.append(back)
        outputs.append(back.outputs[0])
    graph.outputs[:] = outputs
    names_before = [value.name for value in outputs]

    assert fold_transposes(model) == 1
    assert node.attributes["layout"].as_string() == "BNHD"
    left = sum(n.op_type == "Transpose" for n in graph)
    assert left == (0 if output_use == "transposed" else 1)
    assert fold_transposes(model) == 0
    lower_to_function(model)
    results = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString()).run(None, inputs)
    for name, result in zip(names_before, results, strict=True):
        wanted = expected.transpose(1, 2) if name == "tokens_first" else expected
        assert error(torch.from_numpy(result)[:-1], wanted[:-1]) < tolerances.SAME_ARITHMETIC


def test_variants_share_the_op_and_differ_in_the_overload():
    bodies = [function_body(variant) for variant in VARIANTS + SPARSE]
    assert {(body.domain, body.name) for body in bodies} == {(DOMAIN, OP)}
    assert len({body.overload for body in bodies}) == len(bodies)
