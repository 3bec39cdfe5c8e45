"""Linear layers between plugins: matches, and equal results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import tiny_models
import torch
from test_residual_norms import as_operators as norms_as_operators
from tiny_models import traced_blocks
from torch import Tensor, nn

from trtconvert.engine import lowered_model, tensorrt
from trtconvert.export import storage
from trtconvert.export.lowering.function import lower_to_function
from trtconvert.export.lowering.linear_layers import LINEAR, fuse_linear_layers
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.lowering.residual_norms import RESIDUAL_NORM, fuse_residual_norms
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.library import has_linear_kernel
from trtconvert.recipe import EngineSection

PROFILES = [{"batch": 2048}]
"""Inputs of 16 tokens: with 64 channels the fewest outputs that the kernel takes."""


def blocks(module: nn.Module | None = None, width: int = 64, dtype: torch.dtype = torch.float16) -> ir.Model:
    return gated_blocks(width, dtype).clone() if module is None else traced_blocks(module, width, dtype)


@functools.cache
def gated_blocks(width: int, dtype: torch.dtype) -> ir.Model:
    return traced_blocks(tiny_models.GatedBlocks(width=width), width, dtype)


def taken(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == LINEAR]


def widths(model: ir.Model) -> list[tuple[int, bool]]:
    """Outputs of the fused layers, and whether they are GEGLU."""
    return [(node.outputs[0].shape[-1], bool(node.attributes["geglu"].as_int())) for node in taken(model)]


def as_operators(model: ir.Model) -> ir.Model:
    """Replaces plugins by standard operators."""
    for node in taken(model):
        x, weight, *bias = node.inputs
        geglu = node.attributes["geglu"].as_int()
        new = list[ir.Node]()

        def add(op_type: str, inputs: list[ir.Value], outputs: int = 1, new: list[ir.Node] = new, **attributes: object):
            new.append(ir.node(op_type, inputs, attributes, num_outputs=outputs))
            for out in new[-1].outputs:
                out.dtype = inputs[0].dtype
            return new[-1].outputs

        def number(*values: int, new: list[ir.Node] = new) -> ir.Value:
            new.append(ir.node("Constant", [], {"value": ir.tensor(np.array(values, np.int64))}))
            return new[-1].outputs[0]

        if geglu:
            weight, bias = (add("Reshape", [of, number(-1, *of.shape[2:])])[0] for of in (weight, bias[0]))
            bias = [bias]
        (y,) = add("MatMul", [x, *add("Transpose", [weight], perm=[1, 0])])
        if bias:
            (y,) = add("Add", [y, *bias])
        if geglu:
            value, gate = add("Split", [y], 2, axis=-1, num_outputs=2)
            (y,) = add("Mul", [value, *add("Gelu", [gate])])
        y.type, y.shape = node.outputs[0].type, node.outputs[0].shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], new, node.outputs, [y])
    return model


def run(model: ir.Model, batch: int) -> np.ndarray:
    lower_to_function(norms_as_operators(model))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(0)
    feeds = {
        value.name: generator.standard_normal((batch, *value.shape[1:])).astype(np.float16)
        for value in session.get_inputs()
    }
    return session.run(None, feeds | {"timestep": np.full(batch, 400, np.float32)})[0]


def test_layers_between_plugins_are_taken():
    """Of each block the queries, keys and values of attention to itself, which are one product, its output, the queries of
    attention to the text, its output, and the MLP; but not the end of the last one, which no norm follows. Nor keys and values of
    the text, which no plugin gives."""
    model = blocks()
    lower_to_plugin(model, linear_profiles=PROFILES)
    block = [(192, False), (64, False), (64, False), (64, False), (128, True), (64, False)]
    assert widths(model) == [*block, *block[:-1]]
    assert all(len(node.inputs) == 3 for node in taken(model))
    norms = [node for node in model.graph if node.op_type == RESIDUAL_NORM]
    assert len(norms) == 5 and all(node.attributes.get_int("starts_early", 0) for node in norms)
    used = {value for node in model.graph for value in node.inputs}
    assert set(model.graph.initializers.values()) <= used  # the untransposed weights are gone


@pytest.mark.first_case
@pytest.mark.parametrize("files", [False, True], ids=["in memory", "in files"])
def test_taken_layers_are_the_same_function(tmp_path: Path, files: bool):
    model = blocks()
    fuse_residual_norms(model)
    expected = run(model.clone(), 3)
    if files:
        ir.save(model, tmp_path / "model.onnx", external_data="weights", size_threshold_bytes=0)
        model = ir.load(tmp_path / "model.onnx")
    assert fuse_linear_layers(model, PROFILES) == 15
    model = model.clone()  # unused initializers are not serialised
    with storage.for_parser(model) as content:  # as for the engine's builder
        assert content
    ir.external_data.load_to_model(model)
    np.testing.assert_array_equal(run(as_operators(model), 3), expected)


@pytest.mark.soak
def test_layers_without_a_bias():
    class Without(tiny_models.Blocks):
        def __init__(self) -> None:
            super().__init__()
            for attention in (*self.to_itself, *self.to_text):
                for layer in (attention.q, attention.out):
                    layer.bias = None

    model = blocks(Without())
    fuse_residual_norms(model)
    expected = run(model.clone(), 3)
    assert fuse_linear_layers(model, PROFILES) == 12
    assert sum(len(node.inputs) == 2 for node in taken(model)) == 8
    np.testing.assert_array_equal(run(as_operators(model.clone()), 3), expected)


def test_a_weight_of_two_layers_is_turned_once():
    class Twice(tiny_models.Blocks):
        def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
            for block in range(2):
                x = self.to_text[0](self.norms[block](x), text) + x
            return self.norms[2](x)

    model = blocks(Twice())
    lower_to_plugin(model, linear_profiles=PROFILES)
    first, second = ([node.inputs[1] for node in taken(model)][part::2] for part in range(2))
    assert len(first) == 2 and first[0] is first[1] and second[0] is second[1] and first[0] is not second[0]


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("width", "dtype", "profiles", "count"),
    [
        (64, torch.float32, PROFILES, 0),
        (36, torch.float16, PROFILES, 0),  # no whole 16 bytes
        (64, torch.float16, [{"batch": 63}], 0),  # few rows
        (64, torch.float16, [{"batch": 1100}], 2),  # few outputs, but of GEGLU
        (64, torch.float16, [{"batch": 2048}, {"batch": 63}], 0),
        (64, torch.float16, [{"batch": 20_000}], 2),  # many outputs: GEGLU has other alternatives
        (64, torch.float16, [{}], 0),  # sizes that are not known
    ],
    ids=str,
)
def test_other_sizes_are_left(width: int, dtype: torch.dtype, profiles: list[dict[str, int]], count: int):
    model = blocks(width=width, dtype=dtype)
    before = [node.name for node in model.graph]
    assert fuse_linear_layers(model, profiles) == count
    assert count or [node.name for node in model.graph] == before


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("gate", "first"),
    [(partial(nn.GELU, approximate="tanh"), 1), (nn.SiLU, 1), (nn.GELU, 0)],
    ids=["tanh", "SiLU", "gate first"],
)
def test_other_gates_and_what_reads_them_are_left(gate: Callable[[], nn.Module], first: int):
    model = blocks(tiny_models.GatedBlocks(gate, first))
    lower_to_plugin(model, linear_profiles=PROFILES)
    assert not any(geglu for _, geglu in widths(model)) and len(taken(model)) == 8


@pytest.mark.soak
def test_layers_that_others_read_are_left():
    """Queries that are also an output of the graph."""
    model = blocks()
    node = next(iter(attention_nodes(model).values()))
    product = node.inputs[0].producer().inputs[0]
    model.graph.outputs.append(product)
    left = fuse_linear_layers(model.clone(), PROFILES)
    model.graph.outputs.pop()
    assert fuse_linear_layers(model, PROFILES) == left + 1


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("kernel", "options", "count"),
    [
        (True, {}, 11),
        (False, {}, 0),
        (True, {"refittable": True}, 0),
        (True, {"hardware_compatible": True}, 0),  # other GPUs have no kernel
    ],
    ids=str,
)
def test_engines_have_them_where_the_gpu_has_a_kernel(monkeypatch, kernel: bool, options: dict, count: int):
    monkeypatch.setattr(lowered_model, "has_linear_kernel", lambda: kernel)
    lowered = tensorrt.lowered(blocks(), [], EngineSection(**options), [{"batch": (1, 2048, 4096)}])
    assert len(taken(lowered)) == count


def test_a_machine_without_a_gpu_has_no_kernel():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert not has_linear_kernel()
