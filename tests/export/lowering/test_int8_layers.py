"""INT8 layers as plugins: the lowered graph, in an evaluator of the plugins, equals the specification."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tiny_models
import tolerances
import torch
from layers_of_any_size import take_any_size
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.export.lowering import int8_layers
from trtconvert.export.lowering.int8_layers import (
    INT8_LINEAR,
    INT8_RESIDUAL_NORM,
    QUANTISE_ROWS,
    fuse_few_row_layers,
    fuse_int8_layers,
    fuse_mixed_layers,
)
from trtconvert.export.lowering.joined_few_rows import join_few_row_layers
from trtconvert.export.lowering.layers import expand_layers
from trtconvert.export.lowering.modulations import split_modulations
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.residual_norms import RESIDUAL_NORM, fuse_residual_norms
from trtconvert.export.nodes.common import DOMAIN
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LayerTables, linear, quantise_weight
from trtconvert.linear.sites import ConvertedLayer, LayerFinder, select_layers
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error

CHANNELS, HEADS, TOKENS, BATCH = 64, 2, 24, 2
MAX = 1000.0


class Block(nn.Module):
    """A transformer block as U-Nets have it: self-attention, attention to a text, GEGLU, each behind a residual norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(3))
        self.q, self.k, self.v, self.out = (nn.Linear(CHANNELS, CHANNELS, bias=i == 3) for i in range(4))
        self.q2, self.k2, self.v2, self.out2 = (nn.Linear(CHANNELS, CHANNELS, bias=i == 3) for i in range(4))
        self.up, self.down = nn.Linear(CHANNELS, 8 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)
        for norm in self.norms:
            nn.init.normal_(norm.weight, 1, 0.2)
            nn.init.normal_(norm.bias, 0, 0.2)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

        h = self.norms[0](x)
        x = x + self.out(attend(self.q(h), self.k(h), self.v(h)))
        h = self.norms[1](x)
        x = x + self.out2(attend(self.q2(h), self.k2(text), self.v2(text)))
        value, gate = self.up(self.norms[2](x)).chunk(2, -1)
        return x + self.down(value * F.gelu(gate))


def block() -> DiffusionModel:
    torch.manual_seed(0)
    shapes = {"x": (BATCH, TOKENS, CHANNELS), "timestep": (BATCH,), "text": (BATCH, 8, CHANNELS)}
    return DiffusionModel(
        "block", Block().eval().requires_grad_(False), tuple(InputSpec(n, "float32", s) for n, s in shapes.items()),
        InputSpec("out", "float32", shapes["x"]), "timestep", MAX, torch.linspace(0.01, 9, int(MAX)), {},
        tiny_models.build().sample,
    )  # fmt: skip


def tables(layer, modes, model) -> LayerTables:
    """Tables with offsets and factors, for activations of about N(0, 1)."""
    generator = torch.Generator().manual_seed(len(layer.input_group))  # an input group shares them
    factor = torch.rand(layer.in_channels, generator=generator) + 0.5
    offset = torch.randn(layer.in_channels, generator=generator) * 0.1
    weight = model.denoiser.get_submodule(layer.name).weight
    bias = model.denoiser.get_submodule(layer.name).bias
    stored, scale = quantise_weight(weight / factor)
    moved = ((stored.double() @ (offset * factor).double()) * scale).float()
    return LayerTables(
        stored, scale, moved + (0 if bias is None else bias), factor, offset, torch.linspace(6, 4, len(modes)) / 127,
        torch.tensor(modes, dtype=torch.int32),
    )  # fmt: skip


@pytest.fixture
def everywhere(monkeypatch):
    """Fuses layers of any size."""
    take_any_size(monkeypatch)


def lowered(modes, *, mixed=False):
    """A block's graph with INT8 layers as plugins and native attention; its inputs, and the expected output.

    Args:
        mixed: whether plugins lie between TensorRT's own norms, for layers that Q/DQ does not serve.
    """
    model = block()
    finder = LayerFinder(model.denoiser)
    inputs = model.example(0, {})
    attention = {}

    def observe(call):
        attention[call.name] = tables_from_data(call.q, call.k, call.v, Mode.FP16)
        return call.exact()

    intercepted(model, observe, finder)(**inputs)
    layers, _ = select_layers(finder.layers(), ["*", "q", "down"], [], 2)
    converted = {layer.name: ConvertedLayer(layer, tables(layer, modes, model)) for layer in layers}
    assert len(converted) == 10
    options = SiteOptions(MAX, "calibrated", True)
    graph = trace(model, attention, options, layers=converted, dims={}, dtype=torch.float16)
    expand_layers(graph, offsets=not mixed)
    if mixed:
        count = fuse_mixed_layers(graph)
    else:
        fuse_residual_norms(graph)
        count = fuse_int8_layers(graph, [{}])
    lower_to_native(graph)
    # Rows have dynamic scales. GEGLU's output keeps a calibrated scale if all bins are static.
    in_hand = torch.tensor(
        [LayerMode.DYNAMIC if mode == LayerMode.STATIC else mode for mode in modes], dtype=torch.int32
    )
    from_geglu = {"down"} if set(modes) == {LayerMode.STATIC} else set()
    as_computed = {
        name: layer.tables if name in from_geglu else layer.tables.with_modes(in_hand)
        for name, layer in converted.items()
    }
    expected = lambda timestep: intercepted(  # noqa: E731
        model, layers=lambda c: linear(c.x, c.timestep, as_computed[c.name], timestep_max=MAX)
    )(**inputs | {"timestep": timestep})
    return graph, count, inputs, expected


def rows(x, inputs, mode_set, timestep_max, factor, offset, timestep):
    """Returns the INT32 payload and the scales of quantised rows, see quantise.h."""
    given = list(inputs)
    x = x.astype(np.float32)
    of_factor = given.pop(0) if factor else 1.0
    x = (x - (given.pop(0) if offset else 0.0)) * of_factor
    mode = mode_set.bit_length() - 1
    if timestep:
        t, modes = given[:2]
        mode = int(modes[np.clip(np.floor(t * len(modes) / timestep_max), 0, len(modes) - 1).astype(int)].min())
    if mode == LayerMode.WEIGHT_ONLY:
        return x.astype(np.float16).view(np.int32), np.full((*x.shape[:-1], 1), -1, np.float32)
    assert mode == LayerMode.DYNAMIC
    scale = np.maximum(np.abs(x).max(-1, keepdims=True) / 127, 2.0**-100).astype(np.float32)
    payload = np.clip(np.rint(x / scale), -127, 127).astype(np.int8)
    if mode_set & 1 << LayerMode.WEIGHT_ONLY:  # the buffer is made for 16 bits
        payload = np.concatenate([payload, np.zeros_like(payload)], -1)
    return payload.view(np.int32), scale


class QuantiseRows(OpRun):
    op_domain = DOMAIN

    def _run(self, x, *inputs, mode_set, timestep_max, factor, offset, timestep, starts_early=0, **_):
        return rows(x, inputs, mode_set, timestep_max, factor, offset, timestep)


def normed(x, residual, weight, bias, epsilon):
    total = (x.astype(np.float32) + residual).astype(np.float16)
    wide = total.astype(np.float32)
    mean, variance = wide.mean(-1, keepdims=True), wide.var(-1, keepdims=True)
    return total, (wide - mean) / np.sqrt(variance + epsilon) * weight + bias


class ResidualNorm(OpRun):
    op_domain = DOMAIN

    def _run(self, x, residual, weight, bias, *, epsilon, **_):
        total, norm = normed(x, residual, weight, bias, epsilon)
        return total, norm.astype(np.float16)


class Int8ResidualNorm(OpRun):
    op_domain = DOMAIN

    def _run(
        self, x, residual, weight, bias, *inputs, epsilon, normed, mode_set, timestep_max, factor, offset, timestep, **_
    ):
        total, norm = globals()["normed"](x, residual, weight, bias, epsilon)
        quantised = rows(norm, inputs, mode_set, timestep_max, factor, offset, timestep)
        return (total, *quantised, *([norm.astype(np.float16)] if normed else []))


class Int8Linear(OpRun):
    op_domain = DOMAIN

    def _run(
        self, x, *inputs, mode_set, activation, bias, quantised=0, out_factor=0, out_offset=0, timestep=0, timestep_max=0.0,
        parts=1, **_,
    ):  # fmt: skip
        given = list(inputs)
        row_scale = None if mode_set == 1 << LayerMode.WEIGHT_ONLY else given.pop(0)
        weight, weight_scale, of_bias = given.pop(0), given.pop(0), given.pop(0) if bias else np.zeros(1)
        weight = weight.view(np.int8).astype(np.float64).reshape(-1, weight.shape[-1] * 4)
        if row_scale is None or row_scale.ravel()[0] < 0:
            sums, scale = x.view(np.float16).astype(np.float64) @ weight.T, 1.0
        else:
            integers = x.view(np.int8)[..., : weight.shape[1]]
            sums, scale = integers.astype(np.float64) @ weight.T, row_scale
        y = sums * scale * weight_scale.ravel() + of_bias.ravel()
        if activation:
            value, gate = np.split(y, 2, -1)
            y = value * F.gelu(torch.from_numpy(gate)).numpy()
        y = y.astype(np.float16)
        if not quantised:
            return tuple(np.split(y, parts, -1))
        factor, offset = given.pop(0) if out_factor else 1.0, given.pop(0) if out_offset else 0.0
        t, scales = given.pop(0) if timestep else np.zeros(1), given.pop(0)
        of_samples = scales[np.clip(np.floor(t * len(scales) / timestep_max), 0, len(scales) - 1).astype(int)]
        scale = np.broadcast_to(of_samples.reshape(-1, *[1] * (y.ndim - 1)), (*y.shape[:-1], 1)).astype(np.float32)
        payload = np.clip(np.rint((y.astype(np.float32) - offset) * factor / scale), -127, 127).astype(np.int8)
        return payload.view(np.int32), scale


PLUGINS = [QuantiseRows, ResidualNorm, Int8ResidualNorm, Int8Linear]


def run(graph, inputs, timestep):
    model = ir.to_proto(graph)
    if not any(x.domain == DOMAIN for x in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    feed = {name: x.half().numpy() for name, x in inputs.items() if name != "timestep"} | {"timestep": timestep.numpy()}
    return torch.from_numpy(ReferenceEvaluator(model, new_ops=PLUGINS).run(None, feed)[0]).float()


@pytest.mark.parametrize(
    ("modes", "timesteps"),
    [
        ([3], [500.0]),
        pytest.param([3, 3], [100.0, 900.0], marks=pytest.mark.soak),
        ([2, 3], [100.0, 900.0]),
        ([1, 3], [100.0, 900.0]),
        ([1], [1.0]),
    ],
    ids=["static", "static in two bins", "both in INT8", "16 bits late", "weights alone"],
)
def test_plugins_compute_what_the_layers_specify(everywhere, modes, timesteps):
    graph, count, inputs, expected = lowered(modes)
    operators = [node.op_type for node in graph.graph if node.domain == DOMAIN]
    if modes == [1]:  # nothing to gain in speed
        assert count == 0 and QUANTISE_ROWS not in operators
    else:
        assert (
            count == operators.count(INT8_LINEAR) == 8
        )  # q, k, v, out, q2, out2, GEGLU and what is behind it; not of the text
        assert operators.count(INT8_RESIDUAL_NORM) == 2 and RESIDUAL_NORM not in operators
        # Of the first norm, of both attentions; and of GEGLU, but where its own kernel quantises.
        assert operators.count(QUANTISE_ROWS) == (3 if set(modes) == {LayerMode.STATIC} else 4)
        own = [node for node in graph.graph if node.op_type == INT8_LINEAR and len(node.outputs) == 2]
        assert len(own) == (set(modes) == {LayerMode.STATIC})
    for t in timesteps:
        timestep = torch.full((BATCH,), t)
        assert relative_error(run(graph, inputs, timestep), expected(timestep)) < tolerances.LAYERS_OF_A_BLOCK


def test_layers_whose_modes_change_with_the_timestep_are_plugins_between_norms_of_tensorrts_own():
    """Layers of any size: the plan chose INT8, and Q/DQ cannot compute mixed modes."""
    graph, count, inputs, expected = lowered([1, 3], mixed=True)
    operators = [node.op_type for node in graph.graph if node.domain == DOMAIN]
    assert count == operators.count(INT8_LINEAR) == 10 and set(operators) == {INT8_LINEAR, QUANTISE_ROWS}
    for t in (100.0, 900.0):
        timestep = torch.full((BATCH,), t)
        assert relative_error(run(graph, inputs, timestep), expected(timestep)) < tolerances.LAYERS_OF_A_BLOCK
    assert lowered([3, 3], mixed=True)[1] == 0


def test_the_samples_of_a_step_compute_in_the_most_careful_of_their_modes(everywhere):
    graph, _, inputs, expected = lowered([1, 3])
    timestep = torch.tensor([900.0, 100.0])
    assert relative_error(run(graph, inputs, timestep), expected(timestep)) < tolerances.LAYERS_OF_A_BLOCK


@pytest.mark.soak
def test_normed_rows_that_others_read_too_stay(everywhere, monkeypatch):
    graph, *_ = lowered([3])
    assert all(node.attributes["normed"].as_int() == 0 for node in graph.graph if node.op_type == INT8_RESIDUAL_NORM)
    monkeypatch.setattr(int8_layers, "_pays", lambda layer, _: layer.geglu)
    graph, *_ = lowered([3])
    (norm,) = (node for node in graph.graph if node.op_type == INT8_RESIDUAL_NORM)
    assert norm.attributes["normed"].as_int() == 0 and len(norm.outputs) == 3


def test_weights_are_stored_four_channels_in_an_integer(everywhere):
    graph, *_ = lowered([3])
    stored = {name: x for name, x in graph.graph.initializers.items() if name.endswith("packed")}
    assert len(stored) == 8 and all(x.dtype == ir.DataType.INT32 for x in stored.values())
    assert sum(x.const_value.size * 4 for x in stored.values()) == CHANNELS * CHANNELS * (6 + 8 + 4)
    products = [node for node in graph.graph if node.op_type == "MatMul" and node.inputs[1].const_value is not None]
    assert len(products) == 2  # keys and values of the text


def test_small_layers_stay_products():
    graph, count, *_ = lowered([3])
    assert count == 0 and not any(node.op_type == INT8_LINEAR for node in graph.graph)


class Modulated(nn.Module):
    """Tokens scaled by rows of a timestep embedding, which is one product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.modulate = nn.Linear(32, CHANNELS), nn.Linear(CHANNELS, 3 * CHANNELS)
        self.q, self.out = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        embedding = F.silu(self.embed(torch.sin(timestep[:, None] * torch.arange(32) / 50).to(x.dtype)))
        shift, scale, gate = self.modulate(embedding).chunk(3, -1)
        h = self.q(x) * (1 + scale[:, None]) + shift[:, None]
        q = h.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return x + gate[:, None] * self.out(F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("samples", "taken"), [(BATCH, 3), (16, 3), (17, 0)])
def test_modulations_of_few_samples_read_int8_weights(samples, taken):
    torch.manual_seed(0)
    model = block()
    model = dataclasses.replace(model, denoiser=Modulated().eval().requires_grad_(False))
    finder, attention = LayerFinder(model.denoiser), {}

    def observe(call):
        attention[call.name] = tables_from_data(call.q, call.k, call.v, Mode.FP16)
        return call.exact()

    inputs = model.example(0, {})
    intercepted(model, observe, finder)(**inputs)
    layer = next(layer for layer in finder.layers() if layer.name == "modulate")
    assert layer.rows == 1
    converted = {"modulate": ConvertedLayer(layer, tables(layer, [LayerMode.WEIGHT_ONLY], model))}
    plain = dataclasses.replace(
        converted["modulate"].tables, x_factor=torch.ones(CHANNELS), x_offset=torch.zeros(CHANNELS)
    )
    converted["modulate"] = ConvertedLayer(layer, plain)
    graph = trace(
        model, attention, SiteOptions(MAX, "calibrated", True), layers=converted, dims={}, dtype=torch.float16
    )
    expand_layers(graph)
    lower_to_native(graph)
    split_modulations(graph)
    for value in graph.graph:  # as if the batch were dynamic
        for output in value.outputs:
            if value.op_type == "Gemm" and output.shape is not None and output.shape[-1] == CHANNELS:
                output.shape = ir.Shape(["B", CHANNELS])
    assert fuse_few_row_layers(graph, [{"B": samples}]) == taken
    assert join_few_row_layers(graph, [{"B": samples}]) == taken
    timestep = torch.tensor([100.0, 900.0])
    expected = intercepted(
        model, layers=lambda c: linear(c.x, c.timestep, plain, timestep_max=MAX) if c.name == "modulate" else c.exact()
    )(**inputs | {"timestep": timestep})
    assert relative_error(run(graph, inputs, timestep), expected) < tolerances.LAYERS_OF_A_BLOCK
    nodes = [node for node in graph.graph if node.op_type == INT8_LINEAR]
    assert all(node.attributes["mode_set"].as_int() == 1 << LayerMode.WEIGHT_ONLY for node in nodes)
    assert [len(node.outputs) for node in nodes] == [taken] * bool(taken)
    assert all(len(node.inputs) == 4 for node in nodes)


def test_layers_of_few_rows_are_joined_by_their_rows_and_sizes():
    """Nine layers of one tensor become two nodes; a layer of another size or of other rows stays, as do layers of many rows."""
    sizes = {"B": 2}
    x, other = (
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape(["B", 64])) for name in "xz"
    )

    def layer(index, rows, outputs):
        arrays = {"weight": np.full((outputs, 16), index, np.int32), "scale": np.full(outputs, 1 / index, np.float32)}
        names = {what: f"{index} {what}" for what in arrays}
        constants = [
            ir.Value(name=names[what], const_value=ir.Tensor(array, name=names[what])) for what, array in arrays.items()
        ]
        for value in constants:
            value.shape, value.type = value.const_value.shape, ir.TensorType(value.const_value.dtype)
        attributes = {"mode_set": 2, "activation": 0, "bias": 0, "residual": 0, "bfloat16": 0}
        node = ir.node(INT8_LINEAR, [rows, *constants], attributes, domain=DOMAIN)
        node.outputs[0].name, node.outputs[0].shape = f"y{index}", ir.Shape(["B", outputs])
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT16)
        return node, constants

    made = [layer(index, x, 32) for index in range(1, 10)] + [layer(10, x, 48), layer(11, other, 32)]
    nodes = [node for node, _ in made]
    constants = [value for _, values in made for value in values]
    graph = ir.Graph([x, other], [node.outputs[0] for node in nodes], nodes=nodes, initializers=constants)
    model = ir.Model(graph, ir_version=10)
    assert join_few_row_layers(model, [{"B": 17}]) == 0
    assert join_few_row_layers(model, [sizes]) == 8
    assert [len(node.outputs) for node in graph] == [8, 1, 1, 1]
    joined = graph[0]
    assert joined.attributes["parts"].as_int() == 8
    weight, scale = (value.const_value.numpy() for value in joined.inputs[1:])
    assert weight.shape == (256, 16) and (weight[::32, 0] == range(1, 9)).all()
    assert scale[-1] == np.float32(1 / 8)
    assert [value.producer() for value in graph.outputs[:8]] == [joined] * 8
