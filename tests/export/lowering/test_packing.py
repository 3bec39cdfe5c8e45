"""Projections that the plugin reads where one product computes them: q, k and v of a site, keys and values of many."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_models
import torch
from exports import run_from_root
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.diffusion_model import InputSpec
from trtconvert.export import storage
from trtconvert.export.lowering import shared
from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.packing import pack_projections
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.lowering.shared import share_projections
from trtconvert.export.nodes.attention import attention_nodes


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


def in_files(model: ir.Model, folder) -> ir.Model:
    """Saves and loads a model with external weights."""
    ir.save(model, folder / "model.onnx", external_data="weights", size_threshold_bytes=storage.SMALL)
    return ir.load(folder / "model.onnx")


def cut(model: ir.Model) -> ir.Model:
    """Slices the heads of each site out of the shared tensor, so that the body can run."""
    for node in attention_nodes(model).values():
        if "parts" in node.attributes:
            join_parts(node)
        parts: dict[int, int | list[int]] = {}
        if node.inputs[0].shape.rank() == 5:
            assert len(set(node.inputs[:3])) == 1 and node.attributes["layout"].as_string() == "BNHD"
            parts = {0: 0, 1: 1, 2: 2}
        elif "kv_heads" in node.attributes:
            first = {1: node.attributes["k_head"].as_int(), 2: node.attributes["v_head"].as_int()}
            count = node.attributes["kv_heads"].as_int()
            parts = {index: list(range(head, head + count)) for index, head in first.items()}
        for index, part in parts.items():
            numbers = ir.node("Constant", [], {"value": ir.tensor(np.array(part))})
            taken = ir.node("Gather", [node.inputs[index], numbers.outputs[0]], {"axis": 2})
            taken.outputs[0].dtype = node.inputs[index].dtype
            node.graph.insert_before(node, [numbers, taken])
            node.replace_input_with(index, taken.outputs[0])
    return model


def join_parts(node: ir.Node) -> None:
    """Replaces the two inputs and outputs of a node by joined tokens."""
    first, second, again = node.inputs[:3]
    assert second is again and node.attributes.pop("parts").as_int() == 2 and len(node.outputs) == 2
    packed = ir.node("Concat", [first, second], {"axis": 1})
    packed.outputs[0].dtype = first.dtype
    packed.outputs[0].shape = ir.Shape([first.shape[0], None, *first.shape[2:]])
    for index in range(3):
        node.replace_input_with(index, packed.outputs[0])
    sizes = ir.node("Constant", [], {"value": ir.tensor(np.array([first.shape[1], second.shape[1]]))})
    inputs = (ir.val("whole"), sizes.outputs[0])
    split = ir.Node("", "Split", inputs, [ir.AttrInt64("axis", 1)], num_outputs=2)
    for old, new in zip(node.outputs, split.outputs, strict=True):
        new.type = old.type
        ir.convenience.replace_all_uses_with(old, new)
    node.resize_outputs(1)
    node.outputs[0].shape = None
    split.replace_input_with(0, node.outputs[0])
    node.graph.insert_before(node, packed)
    node.graph.insert_after(node, [sizes, split])


# q, k and v -----------------------------------------------------------------------------------------------------------


@pytest.mark.first_case
@pytest.mark.parametrize("kind", ["biased", "plain", "called twice", "unbound"])
def test_a_packed_projection_is_what_three_were(kind):
    model = tiny_models.traced_projections(kind)
    original = model.clone()
    assert pack_projections(model) == 1
    (node,) = attention_nodes(model).values()
    assert list(node.inputs[0].shape)[1:] == [16, 3, 2, 32]
    products = [n for n in model.graph if n.op_type == "MatMul"]
    assert len(products) == 2  # of the three in one, and of the output
    lower_to_function(cut(model))
    for batch in (1, 3):
        x = np.random.default_rng(0).standard_normal((batch, 1, 4, 4), np.float32)
        feeds = {"x": x, "timestep": np.full(batch, 400, np.float32)}
        np.testing.assert_allclose(run(model, feeds)[0], run(original, feeds)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.first_case
@pytest.mark.parametrize("kind", ["of another tensor", "grouped", "another order", "in windows"])
def test_other_projections_are_left(kind):
    model = tiny_models.traced_projections(kind)
    before = [node.name for node in model.graph]
    assert pack_projections(model) == 0
    assert [node.name for node in model.graph] == before


def test_packing_for_the_plugin_and_one_cast_for_the_three():
    model = tiny_models.traced_projections("biased")
    lower_to_plugin(model, refittable=True)
    (node,) = attention_nodes(model).values()
    assert len({id(value) for value in node.inputs[:3]}) == 3
    model = tiny_models.traced_projections("biased")
    lower_to_plugin(model)
    (node,) = attention_nodes(model).values()
    assert len({id(value) for value in node.inputs[:3]}) == 1
    assert node.inputs[0].producer().op_type == "Cast" and node.inputs[0].dtype == ir.DataType.FLOAT16


def test_other_readers_of_an_fp32_models_output_read_fp32():
    model = tiny_models.traced_projections("unbound")
    (node,) = attention_nodes(model).values()
    model.graph.outputs.append(node.outputs[0])  # heads first
    lower_to_plugin(model)
    (node,) = attention_nodes(model).values()
    assert node.outputs[0].dtype == ir.DataType.FLOAT16
    heads_first = model.graph.outputs[-1]
    assert (heads_first.producer().op_type, heads_first.dtype) == ("Transpose", ir.DataType.FLOAT)
    assert heads_first.producer().inputs[0].producer().op_type == "Cast"


# Text and image -------------------------------------------------------------------------------------------------------


def feeds_of_joint(model: ir.Model, batch: int, tokens: int = 33) -> dict[str, np.ndarray]:
    generator, sizes = np.random.default_rng(0), {"batch": batch, "tokens": tokens}
    shapes = {
        x.name: [sizes[n] if (n := getattr(d, "value", d)) in sizes else n for d in x.shape] for x in model.graph.inputs
    }
    fed = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return fed | {"timestep": np.full(batch, 400, np.float32)}


@pytest.mark.first_case
@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize("read", ["split", "slices", "by heads", "image alone"])
def test_tokens_of_text_and_image_stay_in_tensors_of_their_own(read, text_first):
    model = tiny_models.traced_joint(read, text_first)
    original = model.clone()
    assert pack_projections(model) == 1
    (node,) = attention_nodes(model).values()
    first, second, again = node.inputs[:3]
    assert second is again and node.attributes["parts"].as_int() == 2
    assert [list(x.shape)[1:] for x in (first, second)] == [[128, 3, 2, 32], [20, 3, 2, 32]]
    assert [list(out.shape)[1:] for out in node.outputs] == [[128, 2, 32], [20, 2, 32]]
    assert all(out.dtype == ir.DataType.FLOAT for out in node.outputs)
    assert not {"Concat", "Split", "Slice", "Transpose"} & {n.op_type for n in model.graph}
    onnx.checker.check_model(ir.to_proto(model))  # names of all outputs
    lower_to_function(cut(model))
    for batch in (1, 3):
        fed = feeds_of_joint(model, batch)
        np.testing.assert_allclose(run(model, fed)[0], run(original, fed)[0], rtol=1e-4, atol=1e-4)


def test_the_second_tokens_may_vary():
    model = tiny_models.traced_joint("slices", x=("batch", "tokens", 64))
    original = model.clone()
    assert pack_projections(model) == 1
    (node,) = attention_nodes(model).values()
    assert node.attributes["parts"].as_int() == 2
    assert not {"Split", "Slice"} & {n.op_type for n in model.graph if 3 in [len(x.shape) for x in n.inputs if x.shape]}
    for tokens in (20, 77):
        fed = feeds_of_joint(model, 2, tokens)
        sizes = {out.name: np.array(size) for out, size in zip(node.outputs, (128, tokens), strict=True)}
        assert {name: value for name, value in sizes.items() if name}  # both are named
        shapes = [x.shape for x in outputs_of(model, [node.inputs[0], node.inputs[1]], fed)]
        assert shapes == [(2, 128, 3, 2, 32), (2, tokens, 3, 2, 32)]
        assert run(original, fed)[0].shape == (2, 128, 64)


def outputs_of(model: ir.Model, values: list[ir.Value], fed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Computes intermediate values of a model."""
    copy = model.clone()
    made = {value.name: value for node in copy.graph for value in node.outputs}
    copy.graph.outputs[:] = [made[value.name] for value in values]
    RemoveUnusedNodesPass()(copy)
    return run(copy, fed)


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("read", "changed"),
    [
        ("slices", {"text": ("batch", 127, 64)}),
        ("slices", {"text": ("batch", "tokens", 64)}),
        *((read, {}) for read in ("whole", "elsewhere", "overlapping", "stepping", "result", "three runs")),
    ],
)
def test_other_tokens_are_joined(read, changed):
    model = tiny_models.traced_joint(read, **changed)
    assert pack_projections(model) == 1
    (node,) = attention_nodes(model).values()
    assert "parts" not in node.attributes and len(node.outputs) == 1 and len(set(node.inputs[:3])) == 1
    assert node.inputs[0].producer().op_type == "Concat"


def test_the_plugin_of_an_fp32_model_gets_and_gives_casts_of_both_parts():
    model = tiny_models.traced_joint("slices")
    lower_to_plugin(model)
    onnx.checker.check_model(ir.to_proto(model))
    (node,) = attention_nodes(model).values()
    assert node.inputs[1] is node.inputs[2]
    for value in node.inputs[:2]:
        assert (value.dtype, value.producer().op_type) == (ir.DataType.FLOAT16, "Cast")
    for out in node.outputs:
        ((cast, _),) = out.uses()
        assert (out.dtype, cast.op_type, cast.outputs[0].dtype) == (ir.DataType.FLOAT16, "Cast", ir.DataType.FLOAT)


# Keys and values of many sites ----------------------------------------------------------------------------------------

TEXT = 24
"""Channels."""


class Attention(nn.Module):
    """Attention of tokens [B, N, 64] to a context [B, Nk, C], with projections in several ways."""

    def __init__(
        self, context: int = TEXT, heads: int = 2, kv_heads: int = 2, dim: int = 32, bias: bool = False
    ) -> None:
        super().__init__()
        self.dim = dim
        self.q = nn.Linear(64, heads * dim, bias=bias)
        self.k, self.v = (nn.Linear(context, kv_heads * dim, bias=bias) for _ in "kv")
        self.out = nn.Linear(heads * dim, 64)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None, normed: bool = False) -> Tensor:
        q, k, v = (f(y).unflatten(2, (-1, self.dim)) for f, y in ((self.q, x), (self.k, context), (self.v, context)))
        if normed:
            k = F.rms_norm(k, (self.dim,))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] > k.shape[1])
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Crossed(nn.Module):
    """Tokens that attend to themselves and to a text, at sites of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.itself = Attention(context=64)
        self.wide, self.grouped = Attention(heads=3, kv_heads=3), Attention(heads=4, kv_heads=2)
        self.masked, self.biased = Attention(heads=1, kv_heads=1), Attention(bias=True)
        self.long_heads, self.of_squares = Attention(heads=4, kv_heads=4, dim=64), Attention()
        self.normed, self.seen = Attention(), Attention()
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        """x [B, N, 64], timestep [B], text [B, Nk, 24], mask [B, Nk] ≥ 0 where there is text → [B, N, 64]."""
        x = x + (timestep / 1000).to(x.dtype)[:, None, None]
        for _ in range(2):
            x = self.itself(x, x)
        x = self.grouped(self.wide(x, text), text)
        x = self.masked(x, text, (mask >= 0)[:, None, None])
        x = self.of_squares(self.long_heads(self.biased(x, text), text), text.square())
        x = self.normed(x, text, normed=True)
        return self.seen(x, text) + self.seen.k(text).mean()


FIRST_HEADS = {
    "wide": (0, 3, 3),
    "grouped": (6, 8, 2),
    "masked": (10, 11, 1),
    "biased": (0, 2, 2),
    "long_heads": (0, 4, 4),
    "of_squares": (0, 2, 2),
}
"""By site: the first head of its keys, the first of its values, and how many each are."""


@pytest.fixture(scope="module")
def crossed() -> ir.Model:
    model = replace(
        tiny_models.build(),
        denoiser=Crossed().eval().requires_grad_(False),
        inputs=(
            InputSpec("x", "float32", ("batch", "tokens", 64)),
            InputSpec("timestep", "float32", ("batch",)),
            InputSpec("text", "float32", ("batch", "length", TEXT)),
            InputSpec("mask", "float32", ("batch", "length")),
        ),
        output=InputSpec("prediction", "float32", ("batch", "tokens", 64)),
        dims={"batch": (1, 2, 4), "tokens": (4, 16, 32), "length": (3, 7, 20)},
    )
    return tiny_models.traced(model)


def feeds(batch: int = 2, tokens: int = 16, length: int = 7) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "x": generator.standard_normal((batch, tokens, 64), np.float32),
        "timestep": np.full(batch, 400, np.float32),
        "text": generator.standard_normal((batch, length, TEXT), np.float32),
        "mask": generator.standard_normal((batch, length), np.float32) + 1,
    }


def keys_and_values(model: ir.Model, sites: list[str], fed: dict[str, np.ndarray]) -> list[list[np.ndarray]]:
    """Computes k and v of the nodes, by site."""
    nodes = attention_nodes(model)
    wanted = [nodes[site].inputs[index] for site in sites for index in (1, 2)]
    model.graph.outputs[:] = list(dict.fromkeys(wanted))
    RemoveUnusedNodesPass()(model)
    results = dict(zip((value.name for value in model.graph.outputs), run(model, fed), strict=True))
    found = [results[value.name] for value in wanted]
    return [found[i : i + 2] for i in range(0, len(found), 2)]


@pytest.mark.parametrize("shape", [{}, {"batch": 3, "length": 11}, {"batch": 1, "tokens": 5, "length": 3}], ids=str)
def test_sites_read_their_keys_and_values_from_one_product(crossed, shape):
    model, original, fed = crossed.clone(), crossed.clone(), feeds(**shape)
    assert share_projections(model) == len(FIRST_HEADS)
    nodes = attention_nodes(model)
    heads = {
        site: tuple(node.attributes[name].as_int() for name in ("k_head", "v_head", "kv_heads"))
        for site, node in nodes.items()
        if "kv_heads" in node.attributes
    }
    assert heads == FIRST_HEADS
    assert nodes["wide"].inputs[1] is nodes["masked"].inputs[2] is not nodes["biased"].inputs[1]
    shared = keys_and_values(model, list(FIRST_HEADS), fed)
    own = keys_and_values(original, list(FIRST_HEADS), fed)
    products = {"text", "squares", "biased", "long heads"}
    assert sum(node.op_type == "MatMul" for node in model.graph) == len(products)
    for (k_head, v_head, count), (k, v), (k_own, v_own) in zip(heads.values(), shared, own, strict=True):
        np.testing.assert_allclose(k[:, :, k_head : k_head + count], k_own, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(v[:, :, v_head : v_head + count], v_own, rtol=1e-5, atol=1e-5)


def test_a_whole_model_computes_the_same_from_shared_and_packed_projections(crossed):
    """A module that is called twice packs twice."""
    model = crossed.clone()
    assert (pack_projections(model), share_projections(model)) == (2, len(FIRST_HEADS))
    lower_to_function(cut(model))
    np.testing.assert_allclose(run(model, feeds())[0], run(crossed, feeds())[0], rtol=1e-4, atol=1e-4)


def test_queries_and_other_sites_stay_as_they_are(crossed):
    model = crossed.clone()
    before = attention_nodes(crossed)
    share_projections(model)
    for site, node in attention_nodes(model).items():
        left = slice(1) if site in FIRST_HEADS else slice(None)
        assert [x.name for x in node.inputs[left]] == [x.name for x in before[site].inputs[left]]
        assert [x.name for x in node.inputs[3:]] == [x.name for x in before[site].inputs[3:]]
    again = [node.name for node in model.graph]
    assert share_projections(model) == 0 and [node.name for node in model.graph] == again


def test_weights_in_files_are_joined_in_a_file(crossed, tmp_path):
    model = in_files(crossed, tmp_path)
    apart = [x.const_value for x in model.graph.initializers.values() if isinstance(x.const_value, ir.ExternalTensor)]
    assert (pack_projections(model), share_projections(model)) == (2, len(FIRST_HEADS))
    names = {
        name for name, value in model.graph.initializers.items() if " and " in name and value.const_value.nbytes > 1024
    }
    lower_to_function(cut(model))
    with storage.for_parser(model) as content:
        stored = {x.name for x in onnx.ModelProto.FromString(content).graph.initializer if x.external_data}
        assert names < stored and len(names) == 6
        np.testing.assert_allclose(run_from_root(content, feeds()), run(crossed, feeds())[0], rtol=1e-4, atol=1e-4)
    assert [tensor.raw for tensor in apart] == [None] * len(apart)  # no file stays mapped into memory


@pytest.mark.parametrize(
    ("most", "first_heads"),
    [
        (30_720, {"wide": (0, 3), "grouped": (6, 8), "masked": (0, 1)}),
        (30_719, {"wide": (0, 3), "grouped": (0, 2), "masked": (4, 5)}),
        (1, {"wide": (0, 3), "grouped": (0, 2), "masked": (0, 1)}),
    ],
)
def test_tensors_shared_by_many_sites_are_split(crossed, monkeypatch, most, first_heads):
    """24 channels of text to 3, 2 and 1 heads of 32, for keys and for values, in float32: 18,432, 12,288 and 6,144 bytes."""
    monkeypatch.setattr(shared, "WIDEST", most)
    model, original = crossed.clone(), crossed.clone()
    assert share_projections(model) == len(FIRST_HEADS)
    nodes = attention_nodes(model)
    found = {
        site: tuple(nodes[site].attributes[name].as_int() for name in ("k_head", "v_head")) for site in first_heads
    }
    assert found == first_heads
    sites, fed = list(first_heads), feeds()
    several, own = keys_and_values(model, sites, fed), keys_and_values(original, sites, fed)
    for heads, tensors, alone in zip(found.values(), several, own, strict=True):
        for head, tensor, expected in zip(heads, tensors, alone, strict=True):
            np.testing.assert_allclose(tensor[:, :, head : head + expected.shape[2]], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("refittable", [True, False])
def test_the_plugin_of_an_fp32_model_gets_one_cast_of_what_sites_share(crossed, refittable):
    model = crossed.clone()
    lower_to_plugin(model, refittable=refittable)
    onnx.checker.check_model(ir.to_proto(model))
    sources = [attention_nodes(model)[site].inputs[1] for site in ("wide", "grouped", "masked")]
    assert len(set(sources)) == (3 if refittable else 1)
    assert {(x.dtype, x.producer().op_type) for x in sources} == {(ir.DataType.FLOAT16, "Cast")}
