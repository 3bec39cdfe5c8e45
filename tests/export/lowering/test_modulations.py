"""Modulations as sums of rows: diffusers' transformers before and after, and similar graphs that stay."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import tolerances
import torch
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from exports import changed, export, run
from torch import Tensor, nn

from trtconvert.engine import tensorrt
from trtconvert.export.lowering.modulations import split_modulations
from trtconvert.export.passes.squeezes import drop_idle_squeezes
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import EngineSection

BLOCKS = 2
ROWS = 6
"""Shift, scale and gate of attention and of the MLP."""
TEXT = 8
"""Channels."""


class Denoiser(nn.Module):
    """A transformer with latents as the only input: the timestep is one of their numbers, the text is constant."""

    def __init__(self, transformer: nn.Module, **options: object) -> None:
        super().__init__()
        self.transformer, self.options = transformer, options
        self.register_buffer("text", torch.zeros(3, TEXT))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=generator)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        timestep = x.flatten(1)[:, 0]
        text = self.text.expand(x.shape[0], -1, -1)
        return self.transformer(
            hidden_states=x, timestep=timestep, encoder_hidden_states=text, return_dict=False, **self.options
        )[0]


def wan() -> tuple[Denoiser, Tensor]:
    transformer = WanTransformer3DModel(
        num_layers=BLOCKS, num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, ffn_dim=16,
        text_dim=TEXT, freq_dim=8, rope_max_seq_len=8,
    )  # fmt: skip
    return Denoiser(transformer).half(), torch.randn(2, 4, 2, 4, 4).half()


def pixart() -> tuple[Denoiser, Tensor]:
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=BLOCKS,
        cross_attention_dim=32, caption_channels=TEXT, sample_size=4, use_additional_conditions=False,
    )  # fmt: skip
    return Denoiser(transformer, added_cond_kwargs={"resolution": None, "aspect_ratio": None}), torch.randn(2, 4, 4, 4)


@pytest.mark.first_case
@pytest.mark.parametrize("make", [wan, pixart], ids=lambda make: make.__name__)
def test_modulations_shared_by_all_blocks_are_computed_in_rows(make: Callable[[], tuple[Denoiser, Tensor]]):
    torch.manual_seed(0)
    module, x = make()
    program = export(module, x)
    drop_idle_squeezes(program.model)
    program.optimize()
    model = program.model
    before, products = run(model, x), count(model, "Gemm")
    assert len(sixths(model)) == BLOCKS
    assert split_modulations(model) == 1
    assert count(model, "Gemm") == products + ROWS - 1
    assert relative_error(run(model, x).float(), before.float()) < tolerances.SAME_ARITHMETIC
    # Only tables are still split, under their names; a builder folds that.
    assert all(constant_behind(node.inputs[0]) for node in sixths(model))
    assert len(sixths(model)) == BLOCKS
    assert split_modulations(model) == 0


def test_modulations_of_each_block_are_computed_in_rows():
    """Flux: six rows of text and of image for each double block, three for each single one, two at the end."""

    class Flux(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = FluxTransformer2DModel(
                in_channels=4, num_layers=1, num_single_layers=BLOCKS, attention_head_dim=16, num_attention_heads=2,
                joint_attention_dim=TEXT, pooled_projection_dim=TEXT, axes_dims_rope=(4, 6, 6),
            )  # fmt: skip
            self.register_buffer("positions", torch.arange(24.0).view(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            text = x[:, :2].repeat(1, 1, 2)
            return self.transformer(
                x, text, text[:, 0], x[:, 0, 0].abs(), self.positions[:6], self.positions[6:], return_dict=False
            )[0]

    torch.manual_seed(0)
    module, x = Flux().eval().requires_grad_(False), torch.randn(2, 6, 4)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    program = export(module, x)
    drop_idle_squeezes(program.model)
    program.optimize()
    model = program.model
    before, products = run(model, x), count(model, "Gemm")
    of_products = [n for n in model.graph if n.op_type == "Split" and n.inputs[0].producer().op_type == "Gemm"]
    assert sorted(len(node.outputs) for node in of_products) == [2, *[3] * BLOCKS, ROWS, ROWS]
    assert split_modulations(model) == len(of_products)
    assert count(model, "Gemm") == products + sum(len(node.outputs) - 1 for node in of_products)
    assert not [n for n in model.graph if n.op_type == "Split" and n.inputs[0].producer().op_type == "Gemm"]
    assert relative_error(run(model, x), before) < tolerances.SAME_ARITHMETIC


ALONE = """
    <ir_version: 10, opset_import: ["": 20, "other": 1]>
    modulations (float[2, 5] x) => (float[2, 4] first, float[2, 4] second, float[2, 4] third)
    <
        float[12, 5] weight = {WEIGHT}, float[12] bias = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
        float[2, 12] product
    >
    {
        product = Gemm <transB = 1> (x, weight, bias)
        first, second, third = Split <axis = 1, num_outputs = 3> (product)
    }
""".replace("WEIGHT", ", ".join(str(i % 7 - 3) for i in range(60)))


def test_parts_of_a_product_are_the_same():
    model = changed(ALONE, {})
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([run(output_alone(model, index), x) for index in range(3)])
    assert split_modulations(model) == 1
    assert (count(model, "Gemm"), count(model, "Split")) == (3, 0)
    parts = torch.stack([run(output_alone(model, index), x) for index in range(3)])
    assert relative_error(parts, expected) < tolerances.SAME_ARITHMETIC


@pytest.mark.parametrize(
    "changes",
    {
        "tokens": {"float[2, ": "float[65, "},
        "an unknown shape": {"float[2, 12] product": "float product"},
        "read as a whole": {
            "third)": "third, float[2, 12] read)",
            "(product)": "(product) read = Relu (product)",
        },
        "an output": {"third)": "third, float[2, 12] product)", ",\n        float[2, 12] product\n": "\n"},
        "along samples": {
            "float[2, 4] first, float[2, 4] second, float[2, 4] third": "float[1, 12] first, float[1, 12] second",
            "first, second, third = Split <axis = 1, num_outputs = 3>": "first, second = Split <axis = 0, num_outputs = 2>",
        },
        "parts of several widths": {
            "float[2, 4] first, float[2, 4] second": "float[2, 2] first, float[2, 6] second",
            "first, second, third = Split <axis = 1, num_outputs = 3> (product)":
                "sizes = Constant <value_ints = [2, 6, 4]> () first, second, third = Split <axis = 1> (product, sizes)",
        },
        "no bias": {"(x, weight, bias)": "(x, weight)"},
        "a product that is scaled": {"<transB = 1>": "<transB = 1, alpha = 2.0>"},
        "another's split": {"= Split": "= other.Split"},
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_other_products_are_left(changes):
    model = changed(ALONE, changes[1])
    before = list(model.graph)
    assert split_modulations(model) == 0
    assert list(model.graph) == before


def count(model: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph)


def sixths(model: ir.Model) -> list[ir.Node]:
    """Nodes that split a tensor into six rows."""
    return [node for node in model.graph if node.op_type == "Split" and len(node.outputs) == ROWS]


def constant_behind(value: ir.Value) -> str | None:
    """The name of a value's initializer, behind casts and Unsqueezes."""
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Unsqueeze"):
        value = node.inputs[0]
    return value.name if value.is_initializer() else None


MODULATIONS = """
    <ir_version: 10, opset_import: ["": 20, "other": 1]>
    modulations (float[2, 5] x, float[1, 3, 4] y, float[12, 5] z) =>
        (float[2, 1, 4] first, float[2, 1, 4] second, float[2, 1, 4] third)
    <
        float[1, 3, 4] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, float[1, 1, 4] row = {0, 1, 2, 3},
        float[12, 5] weight = {WEIGHT}, float[12] bias = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
        float[5, 12] turned = {WEIGHT}, float[1, 12] wide = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
        float[2, 12] product, float[2, 3, 4] embedding, float[2, 3, 4] total
    >
    {
        shape = Constant <value_ints = [2, 3, 4]> ()
        product = Gemm <transB = 1> (x, weight, bias)
        embedding = Reshape (product, shape)
        total = Add (table, embedding)
        first, second, third = Split <axis = 1, num_outputs = 3> (total)
    }
""".replace("WEIGHT", ", ".join(str(i % 7 - 3) for i in range(60)))
SPLIT = "first, second, third = Split <axis = 1, num_outputs = 3> (total)"
PRODUCT = "product = Gemm <transB = 1> (x, weight, bias)"
RESHAPE = "embedding = Reshape (product, shape)"
OUTPUTS = ", float[2, 1, 4] second, float[2, 1, 4] third"


@pytest.mark.parametrize(
    "changes",
    {
        "as models write it": {},
        "the other order": {"(table, embedding)": "(embedding, table)"},
        "counted backwards": {"axis = 1": "axis = -2"},
        "cast": {
            RESHAPE: "seen = Reshape (product, shape) longer = Cast <to = 11> (seen) embedding = Cast <to = 1> (longer)",
            "float[2, 3, 4] embedding": "float[2, 3, 4] seen, double[2, 3, 4] longer, float[2, 3, 4] embedding",
        },
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_rows_are_the_same(changes):
    model = changed(MODULATIONS, changes[1])
    del model.graph.inputs[1:]
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([run(output_alone(model, index), x) for index in range(3)])
    assert split_modulations(model) == 1
    rows = torch.stack([run(output_alone(model, index), x) for index in range(3)])
    assert relative_error(rows, expected) < tolerances.SAME_ARITHMETIC
    assert [value.name for value in model.graph.outputs] == ["first", "second", "third"]
    assert count(model, "Reshape") == 0 and "table" in model.graph.initializers


def output_alone(model: ir.Model, index: int) -> ir.Model:
    alone = model.clone()
    alone.graph.outputs[:] = [alone.graph.outputs[index]]
    return alone


FIRST = "        (float[2, 1, 4] first"


@pytest.mark.parametrize(
    "changes",
    {
        "the sum is read": {
            FIRST: FIRST.replace("(", "(float[2, 3, 4] read, "),
            SPLIT: SPLIT + " read = Relu (total)",
        },
        "the sum is an output": {
            FIRST: FIRST.replace("(", "(float[2, 3, 4] total, "),
            ", float[2, 3, 4] total\n": "\n",
        },
        "the embedding is read": {
            FIRST: FIRST.replace("(", "(float[2, 3, 4] read, "),
            SPLIT: SPLIT + " read = Relu (embedding)",
        },
        "the embedding is an output": {
            FIRST: FIRST.replace("(", "(float[2, 3, 4] embedding, "),
            "product, float[2, 3, 4] embedding": "product",
        },
        "the product is read": {
            FIRST: FIRST.replace("(", "(float[2, 12] read, "),
            SPLIT: SPLIT + " read = Relu (product)",
        },
        "the product is an output": {
            FIRST: FIRST.replace("(", "(float[2, 12] product, "),
            "float[2, 12] product, float[2, 3, 4] embedding": "float[2, 3, 4] embedding",
        },
        "another's sum": {"= Add": "= other.Add"},
        "another's split": {"= Split": "= other.Split"},
        "another's product": {"= Gemm": "= other.Gemm"},
        "multiplied": {"= Add": "= Mul"},
        "a sum of activations": {"(table, embedding)": "(embedding, y)"},
        "a sum of constants": {"(table, embedding)": "(table, table)", "float[2, 3, 4] total": "float[1, 3, 4] total",
                               "float[2, 1, 4]": "float[1, 1, 4]"},
        "one row for all": {"(table, embedding)": "(row, embedding)"},
        "several rows": {
            SPLIT: "sizes = Constant <value_ints = [2, 1]> ()\n first, second = Split <axis = 1> (total, sizes)",
            "float[2, 1, 4] first": "float[2, 2, 4] first",
            ", float[2, 1, 4] third": "",
        },
        "along channels": {
            SPLIT: "sizes = Constant <value_ints = [2, 1, 1]> ()\n first, second, third = Split <axis = 2> (total, sizes)",
            "float[2, 1, 4] first, float[2, 1, 4] second, float[2, 1, 4] third":
                "float[2, 3, 2] first, float[2, 3, 1] second, float[2, 3, 1] third",
        },
        "an unknown number of channels": {"float[2, 12] product": "float[2, N] product"},
        "a weight that is given": {"(x, weight, bias)": "(x, z, bias)"},
        "no bias": {"(x, weight, bias)": "(x, weight)"},
        "a bias of other axes": {"(x, weight, bias)": "(x, weight, wide)"},
        "a weight that is not turned": {"Gemm <transB = 1> (x, weight, bias)": "Gemm (x, turned, bias)"},
        "a product that is scaled": {"<transB = 1>": "<transB = 1, alpha = 2.0>"},
        "a bias that is scaled": {"<transB = 1>": "<transB = 1, beta = 2.0>"},
        "no product": {PRODUCT: "product = Expand (bias, wide_shape)",
                       "shape = Constant <value_ints = [2, 3, 4]> ()":
                       "shape = Constant <value_ints = [2, 3, 4]> () wide_shape = Constant <value_ints = [2, 12]> ()"},
        "never cut": {SPLIT: "first = Relu (total)", "float[2, 1, 4] first" + OUTPUTS: "float[2, 3, 4] first"},
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_other_sums_are_left(changes):
    model = changed(MODULATIONS, changes[1])
    before = list(model.graph)
    assert split_modulations(model) == 0
    assert list(model.graph) == before


def test_engines_that_are_refitted_keep_their_product():
    for refittable in (True, False):
        model = tensorrt.lowered(changed(MODULATIONS, {}), [], EngineSection(refittable=refittable), [{}])
        assert ("weight" in model.graph.initializers) == refittable
