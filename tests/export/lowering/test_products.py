"""Products of concatenations: Flux before and after, the error of more roundings, and graphs that stay."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import tolerances
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from exports import export, run
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from trtconvert.engine import tensorrt
from trtconvert.export.lowering.products import split_products
from trtconvert.export.weights import name_weights
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import EngineSection

TOKENS = 6
WIDTHS = (64, 256)
"""Channels of attention and of the MLP: one to four, as Flux has them."""
OUT = 48


class Flux(nn.Module):
    """Single blocks with latents as the only input: the timestep is one of their numbers, text and positions are constant."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = FluxTransformer2DModel(
            in_channels=4, num_layers=0, num_single_layers=2, num_attention_heads=2, attention_head_dim=16,
            axes_dims_rope=(4, 4, 8), joint_attention_dim=8, pooled_projection_dim=8,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        text, pooled = torch.ones(1, 2, 8, dtype=x.dtype), torch.ones(1, 8, dtype=x.dtype)
        positions = torch.arange(3.0 * TOKENS).reshape(TOKENS, 3)
        return self.transformer(
            x, text, pooled, x[:, 0, 0], positions[:TOKENS], torch.zeros(2, 3), return_dict=False
        )[0]  # fmt: skip


def test_flux():
    module, x = Flux().half(), torch.randn(1, TOKENS, 4, generator=torch.Generator().manual_seed(1)).half()
    program = export(module, x)
    name_weights(program.model, "transformer.")
    program.optimize()
    model = program.model
    before = run(model, x)
    assert split_products(model) == 2
    for block in range(2):
        names = [
            name for name in model.graph.initializers if name.startswith(f"single_transformer_blocks.{block}.proj_out")
        ]
        assert len(names) == 3  # the rows of attention, those of the MLP, and the bias
    assert not [node for node in model.graph if node.op_type == "Concat" and node.outputs[0].shape[-1] == 5 * 32]
    assert relative_error(run(model, x), before) < tolerances.SPLIT_PRODUCT
    assert split_products(model) == 0


# Numbers ----------------------------------------------------------------------------------------------------------------


def product(dtype: ir.DataType = ir.DataType.FLOAT16, widths: tuple[int, ...] = WIDTHS, bias: bool = True) -> ir.Model:
    """concat(parts) @ weight (+ bias), with random weights."""
    generator = np.random.default_rng(0)
    parts = [ir.val(f"part{index}", dtype, (2, TOKENS, width)) for index, width in enumerate(widths)]
    joined = ir.node("Concat", parts, {"axis": -1})
    joined.outputs[0].dtype, joined.outputs[0].shape = dtype, ir.Shape((2, TOKENS, sum(widths)))
    joined.outputs[0].name = "joined"
    weights = {}
    for name, shape in {"bias": (OUT,), "weight": (sum(widths), OUT)}.items():
        numbers = (generator.standard_normal(shape) * sum(widths) ** -0.5).astype(dtype.numpy())
        weights[name] = ir.val(name, const_value=ir.Tensor(numbers, dtype=dtype, name=name))
    nodes = [joined, ir.node("MatMul", [joined.outputs[0], weights["weight"]])]
    if bias:
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], weights["bias"]]))
    else:
        del weights["bias"]
    for node in nodes[1:]:
        node.outputs[0].dtype, node.outputs[0].shape = dtype, ir.Shape((2, TOKENS, OUT))
    nodes[-1].outputs[0].name = "out"
    graph = ir.Graph(
        parts,
        nodes[-1].outputs,
        nodes=nodes,
        initializers=list(weights.values()),
        opset_imports={"": 20},
        name="product",
    )
    return ir.Model(graph, ir_version=10)


def feeds(model: ir.Model) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    return {x.name: generator.standard_normal(x.shape.numpy()).astype(x.dtype.numpy()) for x in model.graph.inputs}


def rounded_at_every_node(model: ir.Model) -> np.ndarray:
    """Runs a model in NumPy, which sums FP16 products in FP32."""
    return ReferenceEvaluator(ir.to_proto(model)).run(None, feeds(model))[0]


def exact(model: ir.Model) -> np.ndarray:
    x = np.concatenate(list(feeds(model).values()), axis=-1).astype(np.float64)
    weights = {name: value.const_value.numpy().astype(np.float64) for name, value in model.graph.initializers.items()}
    return x @ weights["weight"] + weights.get("bias", 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [WIDTHS, WIDTHS[::-1], (128, 64, 128)], ids=str)
def test_two_roundings_more_are_at_most_twice_the_error(widths, bias):
    model = product(widths=widths, bias=bias)
    true = exact(model)
    error = np.linalg.norm(rounded_at_every_node(model) - true)
    assert split_products(model) == 1
    got = rounded_at_every_node(model)
    assert np.linalg.norm(got - true) < 2 * error
    assert [x.name for x in model.graph.outputs] == ["out"]


def test_the_narrowest_part_gets_the_bias_and_the_widest_is_last():
    model = product(widths=(256, 64, 128))
    assert split_products(model) == 1
    order = [(node.op_type, node.inputs[0].name) for node in model.graph if node.op_type == "MatMul"]
    assert order == [("MatMul", "part1"), ("MatMul", "part2"), ("MatMul", "part0")]
    first, *_, last = (node for node in model.graph if node.op_type == "Add")
    assert first.inputs[0].producer().inputs[0].name == "part1" and first.inputs[1].name == "bias"
    assert last.inputs[1].producer().inputs[0].name == "part0"


# Weights ----------------------------------------------------------------------------------------------------------------


def test_weights_in_files_stay_there(tmp_path):
    """External weights stay in their file: parsers take graphs of at most 2 GiB."""
    ir.save(product(), tmp_path / "model.onnx", external_data="weights", size_threshold_bytes=0)
    model = ir.load(tmp_path / "model.onnx")
    inputs = feeds(model)

    def result() -> np.ndarray:
        proto = ir.to_proto(model)
        assert len(proto.SerializeToString()) < 2_000  # the weights are 30,000
        onnx.save(proto, tmp_path / "other.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "other.onnx", providers=["CPUExecutionProvider"])
        return session.run(None, inputs)[0]

    before = result()
    assert split_products(model) == 1
    rows = {value.const_value.offset: value for name, value in model.graph.initializers.items() if name != "bias"}
    assert [value.shape[0] for _, value in sorted(rows.items())] == list(WIDTHS)
    assert relative_error(torch.from_numpy(result()), torch.from_numpy(before)) < tolerances.SPLIT_PRODUCT


def test_a_weight_that_is_used_twice_is_split_once():
    model = product()
    (joined, *_) = model.graph
    again = ir.node("Concat", joined.inputs, {"axis": 2})
    again.outputs[0].dtype, again.outputs[0].shape = joined.outputs[0].dtype, joined.outputs[0].shape
    matmul = ir.node("MatMul", [again.outputs[0], model.graph.initializers["weight"]])
    matmul.outputs[0].dtype, matmul.outputs[0].shape = joined.outputs[0].dtype, ir.Shape((2, TOKENS, OUT))
    model.graph.extend([again, matmul])
    model.graph.outputs.append(matmul.outputs[0])
    before = [x.astype(np.float32) for x in ReferenceEvaluator(ir.to_proto(model)).run(None, feeds(model))]
    assert split_products(model) == 2
    assert len(model.graph.initializers) == 3
    after = ReferenceEvaluator(ir.to_proto(model)).run(None, feeds(model))
    for x, y in zip(after, before, strict=True):
        assert relative_error(torch.from_numpy(x).float(), torch.from_numpy(y)) < tolerances.SPLIT_PRODUCT


def test_bfloat16():
    model = product(ir.DataType.BFLOAT16)
    weight = model.graph.initializers["weight"].const_value.numpy()
    assert split_products(model) == 1
    parts = [value for name, value in model.graph.initializers.items() if name != "bias"]
    assert all(value.const_value.numpy().dtype == ml_dtypes.bfloat16 for value in parts)
    joined = np.concatenate([value.const_value.numpy() for value in sorted(parts, key=lambda x: x.shape[0])])
    assert (joined == weight).all()


# Left -------------------------------------------------------------------------------------------------------------------


def another_reader(model: ir.Model) -> None:
    read = ir.node("Relu", [model.graph[0].outputs[0]])
    read.outputs[0].dtype = ir.DataType.FLOAT16
    model.graph.append(read)
    model.graph.outputs.append(read.outputs[0])


def an_output(model: ir.Model) -> None:
    model.graph.outputs.append(model.graph[0].outputs[0])


def of_tokens(model: ir.Model) -> None:
    model.graph[0].attributes["axis"] = ir.AttrInt64("axis", 1)


def unknown_width(model: ir.Model) -> None:
    model.graph.inputs[0].shape = ir.Shape((2, TOKENS, "width"))


def one_part(model: ir.Model) -> None:
    model.graph[0].resize_inputs(1)


def weight_is_an_input(model: ir.Model) -> None:
    weight = model.graph.initializers.pop("weight")
    weight.const_value = None
    model.graph.inputs.append(weight)


def weight_of_three_axes(model: ir.Model) -> None:
    weight = model.graph.initializers["weight"]
    weight.const_value = ir.Tensor(weight.const_value.numpy()[None], name="weight")
    weight.shape = weight.const_value.shape


def not_joined(model: ir.Model) -> None:
    model.graph[0].op_type = "Sum"


def not_ours(model: ir.Model) -> None:
    model.graph[1].domain = "other"


@pytest.mark.parametrize(
    "change",
    [
        another_reader,
        an_output,
        of_tokens,
        unknown_width,
        one_part,
        weight_is_an_input,
        weight_of_three_axes,
        not_joined,
        not_ours,
    ],
    ids=lambda change: change.__name__,
)
def test_other_products_are_left(change):
    model = product()
    change(model)
    before = list(model.graph)
    assert split_products(model) == 0
    assert list(model.graph) == before


def test_engines_that_are_refitted_keep_their_products():
    for refittable in (True, False):
        model = tensorrt.lowered(product(), [], EngineSection(refittable=refittable), [{}])
        assert ("weight" in model.graph.initializers) == refittable


def test_full_precision_is_left():
    assert split_products(product(ir.DataType.FLOAT)) == 0


@pytest.mark.parametrize(
    ("op", "shape", "reads"),
    [
        ("Add", (2, TOKENS, OUT), 1),
        ("Add", (3, 2, TOKENS, 1), 1),
        ("Mul", (OUT,), 1),
        ("Add", (OUT,), 2),
    ],
    ids=["every token's", "more axes", "a product", "a product read twice"],
)
def test_addends_that_are_no_bias_are_added_to_the_whole_sum(op, shape, reads):
    model = product(bias=False)
    out = model.graph.outputs[0]
    out.name = "product"
    numbers = np.random.default_rng(2).standard_normal(shape).astype(np.float16)
    constant = ir.val("constant", const_value=ir.Tensor(numbers, name="constant"))
    model.graph.register_initializer(constant)
    for index in range(reads):
        read = ir.node(op, [out, constant])
        read.outputs[0].name, read.outputs[0].dtype = f"out{index}", ir.DataType.FLOAT16
        read.outputs[0].shape = ir.Shape(np.broadcast_shapes(shape, (2, TOKENS, OUT)))
        model.graph.append(read)
    model.graph.outputs[:] = read.outputs
    before = rounded_at_every_node(model)
    assert split_products(model) == 1
    assert "Concat" not in [node.op_type for node in model.graph]
    assert [node.outputs[0] for node in model.graph if constant in node.inputs][-1] is read.outputs[0]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    after = torch.from_numpy(rounded_at_every_node(model)).float()
    assert relative_error(after, torch.from_numpy(before).float()) < tolerances.SPLIT_PRODUCT
