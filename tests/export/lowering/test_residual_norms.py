"""Residual norms beside plugins: matches, and equal results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_models
import torch
from tiny_models import traced_blocks
from torch import Tensor, nn

from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.lowering.residual_norms import RESIDUAL_NORM, fuse_residual_norms
from trtconvert.export.nodes.attention import attention_nodes

WIDTH = 64


class Scaled(tiny_models.Blocks):
    """The first sum adds attention scaled per token, which is no linear layer."""

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = self.to_itself[0](normed, normed) * x.mean(2, keepdim=True) + x
        return self.mlps[0](self.norms[2](x)) + x


class Given(tiny_models.Blocks):
    """The first sum is also an output of the graph."""

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        normed = self.norms[0](x)
        return self.norms[1](self.to_itself[0](normed, normed) + x)


def taken(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == RESIDUAL_NORM]


def as_operators(model: ir.Model) -> ir.Model:
    """Replaces plugins by the two standard operators."""
    for node in taken(model):
        x, residual, weight, bias = node.inputs
        add = ir.node("Add", [x, residual])
        epsilon = node.attributes["epsilon"].as_float()
        norm = ir.node("LayerNormalization", [add.outputs[0], weight, bias], {"axis": -1, "epsilon": epsilon})
        for old, new in zip(node.outputs, (add.outputs[0], norm.outputs[0]), strict=True):
            new.type, new.shape = old.type, old.shape
        new = [add.outputs[0], norm.outputs[0]]
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [add, norm], node.outputs, new)
    return model


def run(model: ir.Model, batch: int) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(0)
    feeds = {
        value.name: generator.standard_normal((batch, *value.shape[1:])).astype(np.float16)
        for value in session.get_inputs()
    }
    return session.run(None, feeds | {"timestep": np.full(batch, 400, np.float32)})[0]


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("native", "count"),
    [
        # Of the six norms the first is of the input. The last sum has no norm.
        ((), 5),
        (("to_text",), 3),  # the MLP's norm is behind an attention of TensorRT's own, and in front of none
        (("to_itself",), 4),  # the norm of the second block's attention to itself likewise
        (("to_text", "to_itself"), 0),
    ],
)
def test_sums_beside_plugins_are_taken_with_their_norms(native, count):
    model = traced_blocks(tiny_models.Blocks(), dtype=torch.float16)
    sites = attention_nodes(model)
    left = [site for site in sites if site.startswith(native)]
    if left:
        lower_to_native(model, left)
    if len(left) < len(sites):
        lower_to_plugin(model)
    assert len(taken(model)) == count
    assert sum(node.op_type == "LayerNormalization" for node in model.graph) == 6 - count


def test_taken_sums_are_the_same_function():
    model = traced_blocks(tiny_models.Blocks(epsilon=0.5), dtype=torch.float16)
    expected = run(lowered_to_function(model.clone()), 3)
    assert fuse_residual_norms(model) == 5
    model = model.clone()  # unused initializers are not serialised
    assert {node.attributes["epsilon"].as_float() for node in taken(model)} == {0.5}
    assert all(list(value.shape)[1:] == [16, WIDTH] for node in taken(model) for value in node.outputs)
    np.testing.assert_array_equal(run(lowered_to_function(as_operators(model)), 3), expected)


def lowered_to_function(model: ir.Model) -> ir.Model:
    lower_to_function(model)
    return model


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("make", "width", "dtype"),
    [
        (lambda: tiny_models.Blocks(bias=False), WIDTH, torch.float16),  # the kernel adds one
        (tiny_models.Blocks, WIDTH, torch.float32),
        (lambda: tiny_models.Blocks(36), 36, torch.float16),  # no whole 16 bytes
        (lambda: tiny_models.Blocks(4104), 4104, torch.float16),  # more than a warp holds
        (Scaled, WIDTH, torch.float16),
    ],
    ids=["no bias", "FP32", "36 channels", "4104 channels", "scaled between"],
)
def test_other_sums_are_left(make: Callable[[], nn.Module], width: int, dtype: torch.dtype):
    model = traced_blocks(make(), width, dtype)
    before = [node.name for node in model.graph]
    assert fuse_residual_norms(model) == 0
    assert [node.name for node in model.graph] == before


def test_a_sum_that_is_a_result_is_left():
    model = traced_blocks(Given(), dtype=torch.float16)
    (total,) = (
        node.inputs[0] for node in model.graph if node.op_type == "LayerNormalization" and node.inputs[0].producer()
    )
    model.graph.outputs.append(total)
    assert fuse_residual_norms(model) == 0
    model.graph.outputs.pop()
    assert fuse_residual_norms(model) == 1


def test_refittable_engines_keep_them():
    model = traced_blocks(tiny_models.Blocks(), dtype=torch.float16)
    lower_to_plugin(model, refittable=True)
    assert not taken(model)
