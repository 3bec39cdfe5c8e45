"""INT8 layers for engines: ordinary products whose weights remember their integers, and Q/DQ in front of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
import tiny_models
import tolerances
import torch
from layered_graphs import STATIC, Int8Model, count, int8_model, products, run
from tiny_layers import CHOSEN, Called, model_of
from torch import nn

from trtconvert.diffusion_model import DiffusionModel
from trtconvert.export import storage
from trtconvert.export.lowering.int8_weights import int8_weight_of
from trtconvert.export.lowering.layers import expand_layers, quantise_products
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.patches import multiply_patches
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.lowering.products import split_products
from trtconvert.export.nodes.layers import layer_nodes
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS
from trtconvert.models.recorded_calls import relative_error as error

ONE_BIN = (LayerMode.STATIC,)


@pytest.fixture(scope="module")
def static() -> Int8Model:
    """Layers of one timestep bin: Q/DQ equals the reference for these layers."""
    return int8_model(modes=ONE_BIN)


@pytest.fixture(scope="module")
def plain() -> Int8Model:
    """Without factors, its weights alone in INT8."""
    return int8_model(modes=[LayerMode.WEIGHT_ONLY], equalised=False)


@pytest.fixture(scope="module")
def moved() -> Int8Model:
    """With offsets."""
    return int8_model(modes=ONE_BIN, moved=True)


def in_mode(model: Int8Model, mode: LayerMode) -> torch.Tensor:
    """The reference's output of the example with all layers in a mode."""
    layers = {name: replace(x, tables=x.tables.with_modes(mode)) for name, x in model.layers.items()}
    return Int8Model(model.model, layers, model.attention).torch(**model.example())


def in_int8(model: ir.Model) -> list[ir.Node]:
    """Products with weights of INT8 layers."""
    return [node for node in products(model) if int8_weight_of(node.inputs[1]) is not None]


def quantised(model: ir.Model) -> list[ir.Node]:
    """Products of two dequantised tensors."""
    return [
        node
        for node in products(model)
        if all(x.producer() is not None and x.producer().op_type == "DequantizeLinear" for x in node.inputs[:2])
    ]


def stored(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """INT8 initialisers with more than one axis."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: x for name, x in tensors.items() if x.dtype == ir.DataType.INT8 and len(x.shape) > 1}


# Expanded -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", [True, False])
@pytest.mark.parametrize("of", ["plain", "moved"])
def test_layers_become_products_that_remember_their_integers(request, of, offsets):
    """With subtracted offsets, and with offsets in the bias."""
    model = request.getfixturevalue(of)
    graph, inputs = model.graph(), model.example()
    assert expand_layers(graph, offsets=offsets) == len(CHOSEN)
    assert not layer_nodes(graph) and not graph.functions
    assert len(in_int8(graph)) == len(CHOSEN)
    assert error(run(graph, **inputs), in_mode(model, LayerMode.WEIGHT_ONLY)) < tolerances.SAME_ARITHMETIC
    assert expand_layers(graph) == 0


def test_operations_on_a_tensor_run_once_for_all_readers(moved):
    graph = moved.graph()
    before = count(graph, "Sub"), count(graph, "Mul")
    expand_layers(graph, offsets=True)
    # Offsets: of q, k and v together, attended, both of the MLP, both calls of the tied one, and both halves of skip.
    assert count(graph, "Sub") - before[0] == 8
    # Factors: the same but for the tied ones, and of the convolution.
    assert count(graph, "Mul") - before[1] == 7
    q, k, v = (node for node in in_int8(graph) if node.inputs[1].name.startswith(("q:", "k:", "v:")))
    assert q.inputs[0] is k.inputs[0] is v.inputs[0]


def test_no_cost_without_offsets_and_equalisation(plain):
    graph = plain.graph()
    before, output = {op: count(graph, op) for op in ("Sub", "Mul", "Concat")}, graph.graph.outputs[0].name
    expand_layers(graph)
    assert {op: count(graph, op) for op in before} == before
    assert graph.graph.outputs[0].name == output


def test_numbers_of_weights_are_those_of_their_integers(static):
    graph = static.graph()
    expand_layers(graph)
    for node in in_int8(graph):
        weight = int8_weight_of(node.inputs[1])
        name = next(name for name in CHOSEN if weight.name.startswith(name.partition("#")[0].replace(".", "/") + ":"))
        expected = static.layers[name].tables.dequantised()
        got = torch.from_numpy(weight.numpy())
        torch.testing.assert_close(got if node.op_type == "Conv" else got.T, expected)


# Quantised ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_between_q_dq_compute_what_the_reference_does(static, dtype):
    graph, inputs = static.graph(dtype), static.example(dtype)
    expand_layers(graph)
    assert quantise_products(graph) == len(CHOSEN) == len(quantised(graph))
    limit = tolerances.WHOLE_DENOISER if dtype == torch.float32 else tolerances.HALF_LAYERS
    assert error(run(graph, **inputs), static.torch(dtype, **inputs)) < limit


def test_offsets_that_are_subtracted_are_what_the_reference_does(moved):
    graph, inputs = moved.graph(), moved.example()
    expand_layers(graph, offsets=True)
    quantise_products(graph)
    assert error(run(graph, **inputs), moved.torch(**inputs)) < tolerances.WHOLE_DENOISER


def test_without_them_a_wider_scale_covers_what_they_would_have_moved(moved):
    """TensorRT is wrong where a Q follows a subtraction."""
    graph, inputs = moved.graph(), moved.example()
    before = count(graph, "Sub")
    expand_layers(graph)
    assert quantise_products(graph) == len(CHOSEN) and count(graph, "Sub") == before
    for node in quantised(graph):
        scale = float(node.inputs[0].producer().inputs[1].const_value.numpy())
        name = node.inputs[1].producer().inputs[0].name.partition(":")[0].replace("/", ".")
        if name == "tied":  # of two inputs
            continue
        tables = moved.layers[name].tables
        reach = float((tables.x_offset.abs() * tables.x_factor).amax()) / LEVELS
        assert float(tables.x_scale) <= scale <= (float(tables.x_scale) + reach) * (1 + 1e-6)
    exact = moved.model.denoiser(**inputs).detach()
    assert error(run(graph, **inputs), exact) < 2 * error(moved.torch(**inputs), exact)


def test_each_product_has_a_q_dq_of_its_own(static):
    """TensorRT leaves a product of a DQ with two readers in 16 bits."""
    graph = static.graph()
    expand_layers(graph)
    quantise_products(graph)
    assert count(graph, "QuantizeLinear") == len(CHOSEN) and count(graph, "DequantizeLinear") == 2 * len(CHOSEN)
    for node in graph.graph:
        if node.op_type == "DequantizeLinear":
            assert len(node.outputs[0].uses()) == 1
    q, k, v = (
        node for node in quantised(graph) if node.inputs[1].producer().inputs[0].name.startswith(("q:", "k:", "v:"))
    )
    sources = {node.inputs[0].producer().inputs[0].producer().inputs[0] for node in (q, k, v)}
    assert len(sources) == 1  # of one tensor all the same, with one scale


def test_weights_are_stored_in_int8_and_the_file_is_smaller(tmp_path):
    wide = Called(lambda self, x: self.b(self.a(x)), a=nn.Linear(256, 512), b=nn.Linear(512, 256))
    model = int8_model(model_of(wide, ("batch", 16, 256)), ONE_BIN, include=["a", "b"])
    sizes = {}
    for exact in (True, False):
        graph = model.graph(torch.float16)
        expand_layers(graph, exact=exact)
        quantise_products(graph)
        storage.save(graph, tmp_path / f"{exact}.onnx")
        sizes[exact] = (tmp_path / f"{exact}.onnx").stat().st_size
        weights = stored(ir.load(tmp_path / f"{exact}.onnx"))
        assert sum(x.size for x in weights.values()) == (0 if exact else 2 * 256 * 512)
    assert sizes[True] - sizes[False] > 0.95 * 2 * 256 * 512  # a byte for each of two


def test_the_integers_are_those_of_the_tables(static):
    graph = static.graph()
    expand_layers(graph)
    quantise_products(graph)
    weights = stored(graph)
    for name in CHOSEN:
        table = static.layers[name].tables.weight.numpy()
        found = next(x for key, x in weights.items() if key.startswith(name.partition("#")[0].replace(".", "/") + ":"))
        np.testing.assert_array_equal(found.numpy(), table if table.ndim == 4 else table.T)


def test_one_scale_serves_all_bins_the_largest():
    graph = int8_model(modes=[LayerMode.STATIC] * 3).graph()
    expand_layers(graph)
    scales = {max(int8_weight_of(node.inputs[1]).activation.scales) for node in in_int8(graph)}
    quantise_products(graph)
    found = {
        float(scale.const_value.numpy())
        for name, scale in graph.graph.initializers.items()
        if name.startswith("trtconvert/scale ")
    }
    assert sorted(found) == pytest.approx(sorted(scales), rel=1e-6) and len(found) > 1


def test_layers_that_are_int8_in_some_bins_only_stay_products():
    """One scale serves all bins: Q/DQ would compute them in INT8 where the plan says 16 bits."""
    model = int8_model(modes=[LayerMode.STATIC, LayerMode.WEIGHT_ONLY])
    graph, inputs = model.graph(), model.example()
    expand_layers(graph)
    assert all(int8_weight_of(node.inputs[1]).activation.is_mixed for node in in_int8(graph))
    assert quantise_products(graph) == 0 and count(graph, "QuantizeLinear") == 0
    inputs["timestep"] = torch.full((2,), model.model.timestep_max - 1)
    assert error(run(graph, **inputs), model.torch(**inputs)) < tolerances.SAME_ARITHMETIC


def test_layers_whose_weights_alone_are_int8_stay_products(plain):
    graph, inputs = plain.graph(), plain.example()
    expand_layers(graph)
    assert quantise_products(graph) == 0 and count(graph, "QuantizeLinear") == 0
    assert error(run(graph, **inputs), plain.torch(**inputs)) < tolerances.SAME_ARITHMETIC


def test_a_layer_of_few_inputs_is_a_gemm():
    """Inputs [B, K], such as pooled embeddings, become Gemm."""
    pooled = Called(lambda self, x: self.b(x), b=nn.Linear(32, 32))
    model = int8_model(model_of(pooled, ("batch", 32)), ONE_BIN, include=["b"])
    graph, inputs = model.graph(), model.example()
    expand_layers(graph)
    assert [node.op_type for node in products(graph)] == ["Gemm"]
    assert quantise_products(graph) == 1
    assert error(run(graph, **inputs), model.torch(**inputs)) < tolerances.SAME_ARITHMETIC


# With other rewrites --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [ONE_BIN, STATIC])
def test_joined_projections_stay_int8(modes):
    model = int8_model(projected("biased"), modes, include=["q", "k", "v"], attention=True)
    graph = model.graph(torch.float16)
    expand_layers(graph)
    lower_to_plugin(graph)
    (joined,) = in_int8(graph)
    weight = int8_weight_of(joined.inputs[1])
    assert list(weight.shape) == [64, 192] and len(weight.scale) == 192
    parts = [model.layers[name].tables for name in "qkv"]
    np.testing.assert_array_equal(weight.integers(), torch.cat([part.weight for part in parts]).T.numpy())
    np.testing.assert_array_equal(weight.scale, torch.cat([part.weight_scale for part in parts]).numpy())
    assert quantise_products(graph) == 1


def test_projections_that_are_not_all_int8_are_joined_in_16_bits():
    model = int8_model(projected("biased"), ONE_BIN, include=["q", "k"], attention=True, equalised=False)
    graph = model.graph(torch.float16)
    expand_layers(graph)
    lower_to_plugin(graph)
    (joined,) = (node for node in products(graph) if node.outputs[0].shape[-1] == 192)
    expected = torch.cat([*(model.layers[name].tables.dequantised() for name in "qk"), model.model.denoiser.v.weight])
    np.testing.assert_allclose(joined.inputs[1].const_value.numpy(), expected.T.detach().half().numpy())
    assert quantise_products(graph) == 0


def projected(kind: str) -> DiffusionModel:
    return replace(tiny_models.build(), denoiser=tiny_models.Projected(kind).eval().requires_grad_(False))


def test_products_of_concatenations_are_still_split(static):
    graph, inputs = static.graph(torch.float16), static.example(torch.float16)
    expand_layers(graph)
    assert split_products(graph) == 1
    parts = [node for node in in_int8(graph) if node.inputs[1].name.startswith("skip:")]
    table = static.layers["skip"].tables.weight.numpy().T
    rows = sorted((int8_weight_of(node.inputs[1]).integers() for node in parts), key=lambda x: (x != table[:32]).any())
    np.testing.assert_array_equal(np.concatenate(rows), table)
    assert quantise_products(graph) == len(CHOSEN) + 1
    assert error(run(graph, **inputs), static.torch(torch.float16, **inputs)) < tolerances.HALF_LAYERS


def test_convolutions_of_single_pixels_that_become_products_of_tokens_stay_int8():
    """Like layers around attention in U-Nets."""

    def tokens(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)

    model = model_of(Called(tokens, proj=nn.Conv2d(32, 48, 1)), ("batch", 32, 4, 4), ("batch", 16, 48))
    made = int8_model(model, ONE_BIN, include=["proj"])
    graph, inputs = made.graph(torch.float16), made.example(torch.float16)
    expand_layers(graph)
    assert multiply_patches(graph) == 1
    (product,) = in_int8(graph)
    table = made.layers["proj"].tables.weight
    np.testing.assert_array_equal(int8_weight_of(product.inputs[1]).integers(), table.flatten(1).T.numpy())
    assert quantise_products(graph) == len(quantised(graph)) == 1
    assert error(run(graph, **inputs), made.torch(torch.float16, **inputs)) < tolerances.HALF_LAYERS


def test_attention_beside_them_is_lowered_as_it_is_without():
    model = int8_model(modes=ONE_BIN, attention=True)
    graph, inputs = model.graph(), model.example()
    assert lower_to_native(graph) == 1
    expand_layers(graph)
    quantise_products(graph)
    exact_attention = Int8Model(model.model, model.layers, {})
    assert error(run(graph, **inputs), exact_attention.torch(**inputs)) < tolerances.WHOLE_DENOISER


# Exact ----------------------------------------------------------------------------------------------------------------


def test_exact_layers_are_the_exporters_own_products_with_the_weights_that_int8_holds(static):
    graph, inputs = static.graph(), static.example()
    assert expand_layers(graph, exact=True) == len(CHOSEN)
    assert not in_int8(graph) and quantise_products(graph) == 0
    names = {name for name, value in graph.graph.initializers.items() if len(value.shape) > 1}
    state = static.model.denoiser.state_dict()
    assert {name.removesuffix(".T") for name in names} == {name for name, x in state.items() if x.dim() > 1}
    for name in ("q", "mlp.0", "conv"):
        value = next(x for key, x in graph.graph.initializers.items() if key.removesuffix(".T") == f"{name}.weight")
        got, own = torch.from_numpy(value.const_value.numpy()), state[f"{name}.weight"]
        got = got if got.dim() == 4 else got.T
        assert 0 < error(got, own) < tolerances.INT8_WEIGHTS
    exact = in_mode(static, LayerMode.WEIGHT_ONLY)
    assert error(run(graph, **inputs), exact) < tolerances.SAME_ARITHMETIC


def test_biases_are_the_models_own_again(moved):
    graph = moved.graph()
    expand_layers(graph, exact=True)
    state = moved.model.denoiser.state_dict()
    for name in ("q.bias", "mlp.2.bias", "conv.bias"):
        torch.testing.assert_close(torch.from_numpy(graph.graph.initializers[name].const_value.numpy()), state[name])


# Tied layers ----------------------------------------------------------------------------------------------------------


def weights_of_tied(graph: ir.Model) -> list[str]:
    shapes = {name: value.shape for name, value in graph.graph.initializers.items() if name.startswith("tied")}
    return [name for name, shape in shapes.items() if len(shape) == 2]


def test_tied_layers_have_one_weight_in_the_exported_graph_and_in_exact_ones(static):
    graph = static.graph()
    assert weights_of_tied(graph) == ["tied:weight"]
    expand_layers(graph, exact=True)
    assert weights_of_tied(graph) == ["tied.weight.T"]


def test_tied_layers_of_different_inputs_have_one_weight_between_q_dq(static):
    graph = static.graph()
    expand_layers(graph)
    quantise_products(graph)
    assert len([name for name in stored(graph) if name.startswith("tied")]) == 1
