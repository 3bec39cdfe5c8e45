"""Exports with nodes of INT8 layers: all kinds of calls and sizes, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tolerances
import torch
from layered_graphs import STATIC, Int8Model, int8_model, run
from tiny_layers import CHOSEN, Called, build, model_of, random
from torch import nn
from torch.nn import functional as F

from trtconvert.errors import UserError
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.export.nodes.layers import (
    BIAS_METADATA,
    CONV,
    INPUT_GROUP_METADATA,
    WEIGHT_METADATA,
    layer_nodes,
)
from trtconvert.interception import InterceptedDenoiser
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import layer_hooks
from trtconvert.models.recorded_calls import relative_error as error


@pytest.fixture(scope="module")
def layered() -> Int8Model:
    return int8_model(attention=True)


def test_each_layer_is_a_node_that_says_what_it_stands_for(layered):
    nodes = layer_nodes(layered.graph())
    assert tuple(nodes) == CHOSEN
    assert {name: node.metadata_props[INPUT_GROUP_METADATA] for name, node in nodes.items()} == dict(
        zip(CHOSEN, ("conv", "q", "q", "q", *CHOSEN[4:]), strict=True)
    )
    assert nodes["mlp.0"].metadata_props[WEIGHT_METADATA] == "mlp.0.weight"
    assert nodes["tied#2"].metadata_props[BIAS_METADATA] == "tied.bias"
    assert BIAS_METADATA not in nodes["skip"].metadata_props
    assert [name for name, node in nodes.items() if node.op_type == CONV] == ["conv"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_exported_model_computes_what_the_reference_does(layered, dtype):
    inputs = layered.example(dtype, batch=3)
    limit = tolerances.WHOLE_DENOISER if dtype == torch.float32 else tolerances.HALF_LAYERS
    assert error(run(layered.graph(dtype), **inputs), layered.torch(dtype, **inputs)) < limit


WAYS = {
    "functional": lambda self, x: F.linear(x, self.weight, self.vector),
    "matmul": lambda self, x: x @ self.weight.T + self.vector,
    "a view of a weight": lambda self, x: F.linear(x, self.packed.view(3, 32, 32)[1]),
    "addmm": lambda self, x: torch.addmm(self.vector, x.flatten(0, 1), self.weight).view(x.shape),
    "five axes": lambda self, x: F.linear(x.view(-1, 2, 2, 4, 32), self.weight).flatten(1, 3),
    "a transposed input": lambda self, x: F.linear(x.view(-1, 4, 4, 32).transpose(1, 2), self.weight).flatten(1, 2),
}


@pytest.mark.first_case
@pytest.mark.parametrize("how", WAYS)
def test_layers_of_every_way_to_write_one_can_be_exported(how):
    parts = {"weight": (32, 32), "vector": (32,), "packed": (96, 32)}
    parameters = {name: nn.Parameter(random(*shape, seed=1) / 6) for name, shape in parts.items()}
    model = int8_model(model_of(Called(WAYS[how], **parameters), ("batch", 16, 32)), STATIC, include=["denoiser"])
    inputs = model.example(batch=3)
    graph = model.graph()
    assert list(layer_nodes(graph)) == ["denoiser"]
    assert error(run(graph, **inputs), model.torch(**inputs)) < tolerances.SAME_ARITHMETIC


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv1d(32, 32, 3, stride=2, padding=1), ("batch", 32, 9)),
        (nn.Conv2d(32, 32, (3, 5), padding="same"), ("batch", 32, 5, 6)),
        (nn.Conv2d(32, 32, 3, padding=1, padding_mode="circular"), ("batch", 32, 5, 6)),
        (nn.Conv3d(32, 32, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1)), ("batch", 32, 2, 5, 5)),
    ],
)
def test_convolutions_of_every_kind_can_be_exported(module, shape):
    model = int8_model(model_of(Called(lambda self, x: self.conv(x), conv=module), shape), STATIC, include=["conv"])
    inputs = model.example(batch=3)
    assert error(run(model.graph(), **inputs), model.torch(**inputs)) < tolerances.SAME_ARITHMETIC


def test_sizes_that_vary_may_be_others_than_those_of_the_calibration():
    """Tokens, and pixels of a convolution."""
    denoiser = Called(
        lambda self, x: self.linear(self.conv(x).flatten(2).transpose(1, 2)),
        conv=nn.Conv2d(32, 32, 3, padding=1),
        linear=nn.Linear(32, 32),
    )
    model = model_of(denoiser, ("batch", 32, "height", "width"), ("batch", "tokens", 32))
    model = replace(model, dims={"batch": (1, 2, 4), "height": (2, 4, 8), "width": (2, 4, 8)})
    int8 = int8_model(model, STATIC, include=["conv", "linear"])
    graph = int8.graph()
    for height, width in ((4, 4), (2, 8), (7, 3)):
        inputs = {"x": random(3, 32, height, width), "timestep": torch.tensor([1.0, 999.0, 500.0])}
        assert error(run(graph, **inputs), int8.torch(**inputs)) < tolerances.SAME_ARITHMETIC


def with_multi_head_attention(need_weights: bool, attention: bool) -> Int8Model:
    part = nn.MultiheadAttention(64, 2, batch_first=True)
    denoiser = Called(lambda self, x: x + self.attn(x, x, x, need_weights=need_weights)[0], attn=part)
    return int8_model(model_of(denoiser, ("batch", 16, 64)), STATIC, include=["attn*"], attention=attention)


@pytest.mark.parametrize("need_weights", [True, False])
def test_torchs_own_multi_head_attention_is_exported_with_its_layers(need_weights):
    model = with_multi_head_attention(need_weights, attention=False)
    graph, inputs = model.graph(), model.example()
    assert list(layer_nodes(graph)) == ["attn", "attn#2"]
    assert error(run(graph, **inputs), model.torch(**inputs)) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_and_a_layer_of_one_module_have_tables_of_their_own(need_weights):
    model = with_multi_head_attention(need_weights, attention=True)
    graph = model.graph()
    assert "Softmax" not in {node.op_type for node in graph.graph}  # weights that nobody reads are not computed
    (node,) = attention_nodes(graph).values()
    modes = next(value for value in node.inputs if value.name.endswith("modes"))
    assert modes.const_value.numpy().tolist() == model.attention["attn"].modes.tolist()


def test_torchs_own_multi_head_attention_takes_any_batch():
    """It computes tokens first: the rows of a sample are not adjacent."""
    model = with_multi_head_attention(False, attention=False)
    inputs = model.example(batch=3)  # 16 is no multiple of 3
    assert error(run(model.graph(), **inputs), model.torch(**inputs)) < tolerances.SAME_ARITHMETIC


def test_a_layer_that_is_called_twice_on_one_tensor_can_be_exported():
    twice = Called(lambda self, x: self.a(x) + self.a(x).square(), a=nn.Linear(32, 32))
    model = int8_model(model_of(twice, ("batch", 16, 32)), STATIC, include=["a", "a#2"])
    assert set(layer_nodes(model.graph())) <= {"a", "a#2"}


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_layer_whose_result_is_not_used_is_named():
    unused = Called(lambda self, x: (self.b(x), self.a(x))[1], a=nn.Linear(32, 32), b=nn.Linear(32, 32))
    model = int8_model(model_of(unused, ("batch", 16, 32)), STATIC, include=["a", "b"])
    with pytest.raises(UserError, match="does not hold the layers that were calibrated") as refused:
        model.graph()
    assert (refused.value.expected, refused.value.got) == ("a, b", "a")
    assert refused.value.remedy.startswith("add b to layers.exclude")


@pytest.mark.parametrize(
    ("table", "value", "problem"),
    [
        ("weight_scale", float("nan"), "NaN or Inf in weight_scale"),
        ("bias", float("inf"), "NaN or Inf in bias"),
        ("x_scale", 0.0, "a x_scale that is not positive"),
        ("x_factor", -1.0, "a x_factor that is not positive"),
        ("modes", LayerMode.EXACT, "a mode that is not one of"),
        ("modes", 7, "a mode that is not one of"),
    ],
)
def test_tables_that_cannot_be_used_are_refused_before_anything_is_traced(layered, table, value, problem):
    layer = layered.layers["q"]
    changed = getattr(layer.tables, table).clone()
    changed[0] = value
    broken = {**layered.layers, "q": replace(layer, tables=replace(layer.tables, **{table: changed}))}
    with pytest.raises(UserError, match="the tables of the layer q cannot be used") as refused:
        Int8Model(build(), broken, layered.attention).graph()
    assert problem in refused.value.got


def test_multi_head_attention_takes_views_of_what_its_hooked_layers_give():
    """HunyuanDiT's pooler, whose rows are those of the first token of each sample, of the second, …"""
    embeddings = pytest.importorskip("diffusers.models.embeddings", reason="needs diffusers")

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.pooler = embeddings.HunyuanDiTAttentionPool(6, 32, 2, 32)

        def forward(self, x, timestep):
            return self.pooler(x)

    model, x = Denoiser(), torch.randn(2, 6, 32)
    hooked = InterceptedDenoiser(model, ("x", "timestep"), "timestep", layer_hooks(lambda call: call.exact()))
    with torch.no_grad():
        torch.testing.assert_close(hooked(x, torch.zeros(2)), model(x, torch.zeros(2)))
