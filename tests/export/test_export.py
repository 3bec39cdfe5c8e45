"""Export: the op's body against the reference, the traced model, and the three lowerings."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_models
import tolerances
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from trtconvert.attention import reference
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.bundle import NAMESAKE, TRANSPOSED
from trtconvert.errors import UserError
from trtconvert.evaluate.verify import relative_error as error
from trtconvert.export import storage
from trtconvert.export.lowering import (
    fold_transposes,
    lower_to_function,
    lower_to_native,
    lower_to_plugin,
)
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.attention_body import INPUTS, MASK, OP, Variant, function_body
from trtconvert.export.nodes.common import DOMAIN, OPSET
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.models.denoiser import intercepted

VARIANTS = [
    Variant(*parts)  # type: ignore[arg-type]
    for parts in itertools.product(
        ("BHND", "BNHD"), ("calibrated", "dynamic"), (True, False), ("none", "boolean", "additive")
    )
]
TABLES = ("q_scale", "k_scale", "v_scale", "k_offset", "v_offset", "modes")


def node_model(variant, feeds, dtype=TensorProto.FLOAT):
    """A model of one node and its inputs; the body is attached by the lowering under test or by the caller."""
    attributes = {
        "layout": variant.layout,
        "softmax_scale": 40**-0.5,
        "timestep_max": 1000.0,
        "scaling": variant.scaling,
        "smooth_k": int(variant.smooth_k),
    }
    node = helper.make_node(OP, list(feeds), ["out"], domain=DOMAIN, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), list(x.shape))
        for name, x in feeds.items()
    ]
    out = helper.make_tensor_value_info("out", dtype, list(feeds["q"].shape))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return ir.from_proto(
        helper.make_model(helper.make_graph([node], "g", inputs, [out]), opset_imports=opsets, ir_version=10)
    )


def run(model, feeds):
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return torch.from_numpy(onnxruntime.InferenceSession(proto.SerializeToString()).run(None, feeds)[0])


def case(variant, keys=200, dtype=torch.float32):
    """Inputs in all modes at once, and a timestep that is NaN."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, kv_heads, queries, dim = 6, 4, 2, 33, 40
    q = torch.randn(batch, heads, queries, dim, generator=generator) * 2
    k = torch.randn(batch, kv_heads, keys, dim, generator=generator) + 1
    v = torch.randn(batch, kv_heads, keys, dim, generator=generator) + 0.5
    per_mode = [tables_from_data(q, k, v, mode) for mode in Mode]
    tables = AttentionTables(*(torch.cat([getattr(t, name) for t in per_mode]) for name in TABLES))
    timestep = torch.tensor([0.0, 250.0, 450.0, 700.0, 1000.0, float("nan")])
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
    expected = reference.attention(
        q, k, v, timestep, tables, layout=variant.layout, scaling=variant.scaling, smooth_k=variant.smooth_k, mask=mask
    )
    return {name: x.numpy() for name, x in feeds.items()}, expected


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)
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
    "variant", [v for v in VARIANTS if v.scaling == "calibrated" and v.smooth_k], ids=lambda v: v.overload
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


@pytest.mark.parametrize("mask", ["none", "boolean", "additive"])
def test_the_plugin_of_an_fp32_model_gets_and_gives_fp16(mask):
    """Run with the body in the plugin's place: what goes around it is the same."""
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
    bodies = [function_body(variant) for variant in VARIANTS]
    assert {(body.domain, body.name) for body in bodies} == {(DOMAIN, OP)}
    assert len({body.overload for body in bodies}) == len(bodies)


# The traced model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site_tables(digits):
    tables = {}

    def handler(call):
        tables[call.name] = tables_from_data(call.q, call.k, call.v, Mode.BALANCED)
        return call.exact()

    with torch.no_grad():
        intercepted(digits, handler)(**digits.example(0, {"batch": 4, "height": 8, "width": 8}))
    return tables


@pytest.fixture(scope="module")
def traced(digits, site_tables):
    chosen = {name: site_tables[name] for name in ("blocks.0.attn", "blocks.3.attn")}
    return chosen, trace(digits, chosen, SiteOptions(1000.0, "calibrated", True), dims=digits.dims)


@pytest.mark.parametrize(("batch", "height", "width"), [(1, 8, 8), (3, 8, 8), (2, 4, 12)])
def test_the_traced_model_serves_any_batch_and_sequence(digits, traced, batch, height, width):
    chosen, model = traced
    inputs = digits.example(7, {"batch": batch, "height": height, "width": width})

    def handler(call):
        if call.name not in chosen:
            return call.exact()
        return reference.attention(call.q, call.k, call.v, call.timestep, chosen[call.name], softmax_scale=call.scale)

    with torch.no_grad():
        expected = intercepted(digits, handler)(**inputs)
    got = run(model, {name: x.numpy() for name, x in inputs.items()})
    assert error(got, expected) < tolerances.WHOLE_DENOISER


class Namesakes(nn.Module):
    """A denoiser with weights that are called as its inputs and its output are, each used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_models.Tiny(False)
        self.names = ("x", "timestep", "prediction")
        generator = torch.Generator().manual_seed(0)
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.randn(4, 4, generator=generator) / 2))

    def forward(self, x, timestep):
        for name in self.names:
            x = x @ self.get_parameter(name) @ self.get_parameter(name).T
        return self.inner(x, timestep)


def test_weights_that_are_called_as_an_input_have_names_to_replace_them_by():
    """The exporter would number them, `x_1`, which no refit could tell from a weight of that name."""
    model = replace(tiny_models.build(), denoiser=Namesakes().eval().requires_grad_(False))
    q = torch.ones(1, 1, 16, tiny_models.WIDTH)
    tables = {"inner": tables_from_data(q, q, q, Mode.FP16)}
    exported = trace(model, tables, SiteOptions(1000.0, "calibrated", True), dims=model.dims)
    assert [x.name for x in (*exported.graph.inputs, *exported.graph.outputs)] == ["x", "timestep", "prediction"]
    for name in model.denoiser.names:
        weight = model.denoiser.get_parameter(name)
        for found, expected in ((name + NAMESAKE, weight), (name + TRANSPOSED, weight.T)):
            assert np.array_equal(exported.graph.initializers[found].const_value.numpy(), expected.numpy())
    inputs = model.example(0, {"batch": 2})
    got = run(exported, {name: x.numpy() for name, x in inputs.items()})
    assert error(got, model.denoiser(**inputs)) < tolerances.WHOLE_DENOISER


def test_a_denoiser_may_be_in_half_precision_already(digits, traced):
    """It gives the weights of one that tracing converts, which stays in full precision itself."""
    chosen, _ = traced
    half = replace(digits, denoiser=copy.deepcopy(digits.denoiser).half())
    options = SiteOptions(1000.0, "calibrated", True)
    models = [trace(model, chosen, options, dims=digits.dims, dtype=torch.float16) for model in (half, digits)]
    assert {p.dtype for p in digits.denoiser.parameters()} == {torch.float32}
    kept, converted = (
        {name: value.const_value.numpy() for name, value in model.graph.initializers.items()} for model in models
    )
    assert {x.dtype for name, x in kept.items() if name in digits.denoiser.state_dict()} == {np.dtype(np.float16)}
    np.testing.assert_equal(kept, converted)


def test_no_second_copy_in_full_precision_is_made_on_the_way_to_half(digits, traced):
    chosen, _ = traced
    largest = max(p.numel() for p in digits.denoiser.parameters())
    copied = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.clone.default and args[0].dtype == torch.float32:
                copied.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Watch():
        trace(digits, chosen, SiteOptions(1000.0, "calibrated", True), dims=digits.dims, dtype=torch.float16)
    assert max(copied, default=0) < largest


class Scaled(nn.Module):
    """Attention to tokens of one head, times a number."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        """x [B, N, D] → [B, N, D]."""
        heads = self.scale * x[:, None]
        return scaled_dot_product_attention(heads, heads, x[:, None])[:, 0]


class Blocks(nn.Module):
    """What is common to the denoisers below: tokens of 32 channels."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(1, 32), nn.Linear(32, 1)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x, timestep):
        """x [B, 1, 4, 4], timestep [B] → [B, 1, 4, 4]."""
        tokens = self.embed(x.flatten(2).transpose(1, 2)) + timestep[:, None, None] / 1000
        return self.out(self.blocks(tokens)).transpose(1, 2).reshape(x.shape)


class NamesAlike(Blocks):
    """Sites, and a weight, whose names differ only in what stands between their parts."""

    def __init__(self):
        super().__init__()
        self.attn, self.attn_2 = Scaled(0.1), Scaled(3.0)
        self.attn_modes = nn.Parameter(torch.tensor([2.0]))

    def blocks(self, x):
        return self.attn_2(x + self.attn(x + self.attn(x))) * self.attn_modes  # attn, attn#2, attn_2


class ThreeAxes(Blocks):
    """Attention with a mask and without, of tensors that have no axis of heads, beside one that has."""

    def __init__(self):
        super().__init__()
        self.attn = Scaled(1.0)

    def blocks(self, x):
        x = x + scaled_dot_product_attention(x, x[:, :5], value=x[:, :5], attn_mask=x[..., :5] > 0, scale=0.3)
        return self.attn(x + scaled_dot_product_attention(x, x, x, None, 0.0, True))


class RowsAndColumns(Blocks):
    """Attention of the pixels of each row, and of each column, as of frames and of places: samples have four of either."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns = Scaled(0.3), Scaled(0.3)

    def blocks(self, x):
        x = x.unflatten(1, (4, 4))
        x = x + self.rows(x.flatten(0, 1)).unflatten(0, (-1, 4))
        x = x.transpose(1, 2)
        return (x + self.columns(x.flatten(0, 1)).unflatten(0, (-1, 4))).transpose(1, 2).flatten(1, 2)


class ToldSizes(Blocks):
    """Attention of each image four times over, as of the frames of a video, and repetitions that are told what they come to."""

    def __init__(self):
        super().__init__()
        self.attn = Scaled(0.3)

    def blocks(self, x):
        x = x + self.attn(x.repeat_interleave(4, dim=0, output_size=4 * x.shape[0])).unflatten(0, (-1, 4)).mean(1)
        twice = torch.repeat_interleave(x, repeats=2, dim=0, output_size=2 * x.shape[0])
        return x + twice.unflatten(0, (-1, 2)).sum(1)


class WritesPositions(Blocks):
    """Positions that are made on the way, behind some rows of zeros, as CogVideoX makes them for other sizes than its own."""

    def __init__(self):
        super().__init__()
        self.attn = Scaled(0.3)

    def blocks(self, x):
        positions = x.new_zeros(1, *x.shape[1:])
        positions.data[:, 3:].copy_(torch.arange(x.shape[1] - 3.0)[:, None].expand(-1, x.shape[2]) / 8)
        return self.attn(x + positions)


class CountsImages(Blocks):
    def __init__(self):
        super().__init__()
        self.attn = Scaled(1.0)

    def blocks(self, x):
        return self.attn(x) + torch.tensor([1.0] * x.shape[0])[:, None, None]


def coarser_later(tables):
    """Two timestep bins, the second with values in steps that are twenty times as large."""
    two = AttentionTables(*(torch.cat([x, x]) for x in vars(tables).values()))
    two.v_scale[1] *= 20
    return two.with_modes(torch.tensor([Mode.BALANCED, Mode.AGGRESSIVE]))


@pytest.mark.parametrize(
    "denoiser",
    [NamesAlike(), ThreeAxes(), RowsAndColumns(), ToldSizes(), WritesPositions()],
    ids=lambda x: type(x).__name__,
)
def test_each_site_has_its_own_tables_or_stays_as_it_is(denoiser):
    model = replace(tiny_models.build(), denoiser=denoiser.eval().requires_grad_(False))
    tables = {}

    def observe(call):
        if not call.obstacle:
            tables[call.name] = coarser_later(tables_from_data(call.q, call.k, call.v, Mode.BALANCED))
        return call.exact()

    def quantised(call):
        if call.name not in tables:
            return call.exact()
        return reference.attention(call.q, call.k, call.v, call.timestep, tables[call.name], softmax_scale=call.scale)

    with torch.no_grad():
        intercepted(model, observe)(**model.example(0, {"batch": 2}))
        exported = trace(model, tables, SiteOptions(1000.0, "calibrated", True), dims=model.dims)
        for batch in (1, 3):
            inputs = model.example(7, {"batch": batch})
            got = run(exported, {name: x.numpy() for name, x in inputs.items()})
            assert error(got, intercepted(model, quantised)(**inputs)) < tolerances.WHOLE_DENOISER


class LooksAtValues(CountsImages):
    def blocks(self, x):
        return self.attn(x) if float(x.sum()) > 0 else x


def test_of_a_model_that_cannot_be_traced_the_message_alone_is_printed(capfd):
    model = replace(tiny_models.build(), denoiser=LooksAtValues().eval().requires_grad_(False))
    x = torch.randn(2, 1, 16, 32)
    tables = tables_from_data(x, x, x, Mode.BALANCED)
    with pytest.raises(UserError, match=r"(?s)cannot be exported to ONNX.*got: .*data-dependent.*avoid data-dependent"):
        trace(model, {"attn": tables}, SiteOptions(1000.0, "calibrated", True), dims=model.dims)
    assert "def forward" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("most", [2, 8])
def test_a_size_that_the_exporter_would_fix_is_refused(most):
    model = replace(
        tiny_models.build(), denoiser=CountsImages().eval().requires_grad_(False), dims={"batch": (1, 1, most)}
    )
    with pytest.raises(UserError, match=r"(?s)for one size only.*expected: .*batch.*got: batch = 2.*remedy: fix"):
        tiny_models.traced(model)
    tiny_models.traced(replace(model, dims={"batch": (2, 2, 2)}))


def test_only_converted_sites_are_nodes_and_tables_are_initialisers(traced):
    chosen, model = traced
    nodes = attention_nodes(model)
    assert list(nodes) == list(chosen)
    for site, node in nodes.items():
        for value, name in zip(node.inputs[4:10], TABLES, strict=True):
            held = value.const_value.numpy()
            np.testing.assert_array_equal(held, getattr(chosen[site], name).numpy())


def test_a_site_that_the_model_does_not_have_is_refused(digits, site_tables):
    tables = {"blocks.9.attn": site_tables["blocks.0.attn"]}
    with pytest.raises(UserError, match="does not hold the attention that was calibrated") as raised:
        trace(
            digits,
            tables,
            SiteOptions(1000.0, "calibrated", True),
            dims={"batch": (2, 2, 2), "height": (8, 8, 8), "width": (8, 8, 8)},
        )
    assert "blocks.9.attn" in raised.value.expected


@pytest.mark.parametrize(
    ("name", "value"), [("q_scale", 0.0), ("v_scale", float("nan")), ("k_offset", float("inf")), ("modes", 9)]
)
def test_unusable_tables_are_refused_before_they_are_baked_in(digits, site_tables, name, value):
    good = site_tables["blocks.0.attn"]
    table = getattr(good, name).clone()
    table.view(-1)[0] = value
    with pytest.raises(UserError, match=rf"{name} of blocks\.0\.attn"):
        bad = AttentionTables(**{**vars(good), name: table})
        trace(digits, {"blocks.0.attn": bad}, SiteOptions(1000.0, "calibrated", True), dims=digits.dims)


# What is written ------------------------------------------------------------------------------------------------------


def test_some_sites_may_be_lowered_to_native_and_the_rest_to_the_plugin(traced):
    model = ir.from_proto(ir.to_proto(traced[1]))
    assert lower_to_native(model, ["blocks.3.attn"]) == 1
    assert list(attention_nodes(model)) == ["blocks.0.attn"]
    assert lower_to_plugin(model) == 1 and not model.functions


def test_a_site_that_the_graph_does_not_hold_is_refused(traced):
    model = ir.from_proto(ir.to_proto(traced[1]))
    with pytest.raises(UserError, match=r"no trtconvert::Int8Attention node for blocks\.9\.attn") as raised:
        lower_to_native(model, ["blocks.0.attn", "blocks.9.attn"])
    assert "blocks.3.attn" in raised.value.expected
    assert len(attention_nodes(model)) == 2  # nothing was rewritten


def test_large_weights_lie_beside_the_graph_and_are_shared_by_its_lowerings(digits, traced, tmp_path, monkeypatch):
    """The limit is half a gigabyte in earnest."""
    monkeypatch.setattr(storage, "INLINE_LIMIT", 100_000)
    path, native = tmp_path / "model.onnx", tmp_path / "native.onnx"
    storage.save(traced[1], path)
    lowered = ir.load(path)
    lower_to_native(lowered)
    storage.save(lowered, native)
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data", "native.onnx"}
    weights = storage.weights_file(path).stat().st_size
    assert path.stat().st_size < weights > native.stat().st_size

    onnx.checker.check_model(path, full_check=True)
    feeds = {name: x.numpy() for name, x in digits.example(7, {"batch": 2, "height": 8, "width": 8}).items()}
    (result,) = onnxruntime.InferenceSession(path).run(None, feeds)
    np.testing.assert_array_equal(result, run(traced[1], feeds).numpy())
