"""Rows of sums with tables: diffusers' transformers before and after, bit for bit, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir
import pytest
import tiny_models
import tolerances
import torch
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from exports import export, run
from torch import Tensor, nn

from trtconvert.evaluate.verify import relative_error
from trtconvert.export.lowering import split_rows
from trtconvert.export.modulations import add_rows
from trtconvert.export.squeezes import drop_idle_squeezes

BLOCKS = 2
TEXT = 8
"""Channels."""


class Denoiser(nn.Module):
    """A transformer that is given latents alone; the timestep is one of their numbers, the text is constant."""

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
    # In half precision: the sums are in FP32, so what ONNX Runtime rounds is the same before and after.
    return Denoiser(transformer).half(), torch.randn(2, 4, 2, 4, 4).half()


def pixart() -> tuple[Denoiser, Tensor]:
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=BLOCKS,
        cross_attention_dim=32, caption_channels=TEXT, sample_size=4, use_additional_conditions=False,
    )  # fmt: skip
    return Denoiser(transformer, added_cond_kwargs={"resolution": None, "aspect_ratio": None}), torch.randn(2, 4, 4, 4)


def ltx() -> tuple[Denoiser, Tensor]:
    transformer = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, cross_attention_dim=32,
        num_layers=BLOCKS, caption_channels=TEXT,
    )  # fmt: skip
    options = {"encoder_attention_mask": None, "num_frames": 2, "height": 2, "width": 2}
    return Denoiser(transformer, **options), torch.randn(2, 8, 4)


def constant_behind(value: ir.Value) -> str | None:
    """The name of the initializer that a value is, perhaps cast or with another axis; None for others."""
    while (node := value.producer()) is not None and node.op_type in ("Cast", "Unsqueeze"):
        value = node.inputs[0]
    return value.name if value.is_initializer() else None


@pytest.mark.parametrize("make", [wan, pixart, ltx], ids=lambda make: make.__name__)
def test_rows_of_the_embedding_are_taken_once_for_all_blocks(make: Callable[[], tuple[Denoiser, Tensor]]):
    torch.manual_seed(0)
    module, x = make()
    program = export(module, x)
    drop_idle_squeezes(program.model)
    program.optimize()
    model = program.model
    (embedding,) = {
        value
        for node in model.graph
        if node.op_type == "Add" and len(node.outputs[0].shape) > 2 and 6 in node.outputs[0].shape[1:3]
        for value in node.inputs
        if constant_behind(value) is None
    }
    taken_of_sums = len(rows(model))
    before = run(model, x)
    assert add_rows(model) == BLOCKS
    assert torch.equal(run(model, x), before)
    of_embedding = [node for node in rows(model) if node.inputs[0] is embedding]
    each = len(of_embedding)
    assert each == (6 if make is ltx else 1)  # Slice or Split
    assert len(embedding.uses()) == each
    # Those of the tables, in place of those of the sums, and those that the blocks share.
    assert len(rows(model)) == taken_of_sums + each
    assert add_rows(model) == 0


@pytest.mark.parametrize(("make", "products"), [(wan, 1), (pixart, 1), (ltx, 0)], ids=["wan", "pixart", "ltx"])
def test_products_that_are_cut_into_rows_are_computed_row_by_row(make, products):
    torch.manual_seed(0)
    module, x = make()
    program = export(module, x)
    drop_idle_squeezes(program.model)
    program.optimize()
    model = program.model
    add_rows(model)
    taken, gemms = len(rows(model)), count(model, "Gemm")
    before = run(model, x)
    assert split_rows(model) == products
    assert len(rows(model)) == taken - products
    assert count(model, "Gemm") == gemms + 5 * products
    assert relative_error(run(model, x).float(), before.float()) < 1e-3
    assert split_rows(model) == 0


def count(model: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph)


def rows(model: ir.Model) -> list[ir.Node]:
    """Nodes that take rows of something."""
    return [
        node
        for node in model.graph
        if node.op_type in ("Split", "Slice") and node.inputs[0].shape is not None and 6 in node.inputs[0].shape[1:3]
    ]


class Modulates(nn.Module):
    """With a table that is too large for the exporter to fold its cast."""

    def __init__(self, channels: int = 1400) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, channels).half())

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate, *_ = (self.table[None].float() + x).chunk(6, dim=1)
        return (x + shift) * scale * gate


def test_tables_keep_the_names_by_which_engines_are_refitted():
    module, x = Modulates(), torch.randn(2, 6, 1400)
    program = export(module, x)
    program.optimize()
    before = run(program.model, x)
    assert add_rows(program.model) == 1
    assert torch.equal(run(program.model, x), before)
    assert {constant_behind(node.inputs[0]) for node in rows(program.model)} == {"table", None}  # and the embedding


class Modulated(tiny_models.Tiny):
    def __init__(self) -> None:
        super().__init__(handwritten=False)
        self.table = nn.Parameter(torch.randn(1, 2, 4))

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        shift, scale = (self.table + timestep[:, None, None].to(x.dtype).expand(-1, 2, 4)).chunk(2, dim=1)
        return super().forward(x * scale[:, None] + shift[:, None], timestep)


def test_exported_models_add_rows():
    model = replace(tiny_models.build(), denoiser=Modulated().eval().requires_grad_(False))
    exported = tiny_models.traced(model)
    (table,) = (node for node in exported.graph if node.op_type == "Split" and node.inputs[0].is_initializer())
    assert table.inputs[0].name == "table" and len(table.outputs) == 2


SUM = """
    <ir_version: 10, opset_import: ["": 20, "other": 1]>
    modulations (float[2, 3, 4] x, float[2, 3, 4] y) => (float[2, 1, 4] first, float[2, 1, 4] second, float[2, 1, 4] third)
    <
        float[1, 3, 4] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, float[1, 1, 4] row = {0, 1, 2, 3},
        float[3, 4] flat = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, float[2, 3, 4] total
    >
    {
        total = Add (table, x)
        first, second, third = Split <axis = 1, num_outputs = 3> (total)
    }
"""
SPLIT = "first, second, third = Split <axis = 1, num_outputs = 3> (total)"
SLICES = """
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    three = Constant <value_ints = [3]> ()
    axis = Constant <value_ints = [-2]> ()
    first = Slice (total, zero, one, axis)
    second = Slice (total, one, two, axis)
    third = Slice (total, two, three, axis)
"""
GATHERS = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = -2> ()
    two = Constant <value_int = 2> ()
    first = Gather <axis = 1> (total, zero)
    second = Gather <axis = -2> (total, one)
    third = Gather <axis = 1> (total, two)
"""


def changed(changes: dict[str, str]) -> ir.Model:
    text = SUM
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return ir.from_onnx_text(text)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"(table, x)": "(x, table)"},
        {"axis = 1": "axis = -2"},
        {SPLIT: SLICES},
        {SPLIT: GATHERS, "[2, 1, 4]": "[2, 4]"},
        {SPLIT: "first, second, third = Split <axis = 1, num_outputs = 3> (total)\n unread, a, b = Split <axis = 1, "
                "num_outputs = 3> (total)", "float[2, 3, 4] total": "float[2, 3, 4] total, float[2, 1, 4] unread, "
                "float[2, 1, 4] a, float[2, 1, 4] b"},
    ],
    ids=["split", "other order", "counted backwards", "slices", "gathers", "taken twice"],
)  # fmt: skip
def test_each_way_to_take_rows(changes):
    model = changed(changes)
    x = torch.randn(2, 3, 4)
    for value in model.graph.inputs[1:]:
        model.graph.inputs.remove(value)
    expected = torch.stack([run(output_alone(model, index), x) for index in range(3)])
    assert add_rows(model) == 1
    assert torch.equal(torch.stack([run(output_alone(model, index), x) for index in range(3)]), expected)
    (table,) = (value for value in model.graph.initializers.values() if value.name == "table")
    assert all(user.op_type != "Add" for user, _ in table.uses())
    assert [x.name for x in model.graph.outputs] == ["first", "second", "third"]


def output_alone(model: ir.Model, index: int) -> ir.Model:
    alone = model.clone()
    alone.graph.outputs[:] = [alone.graph.outputs[index]]
    return alone


@pytest.mark.parametrize(
    "changes",
    {
        "another reader": {"=> (": "=> (float[2, 3, 4] read, ", SPLIT: SPLIT + " read = Relu (total)"},
        "an output": {"=> (": "=> (float[2, 3, 4] total, ", ", float[2, 3, 4] total\n": "\n"},
        "another's sum": {"= Add": "= other.Add"},
        "another's split": {"= Split": "= other.Split"},
        "a product": {"= Add": "= Mul"},
        "of activations": {"(table, x)": "(y, x)"},
        "one row for all": {"(table, x)": "(row, x)"},
        "one row of the embedding": {"float[2, 3, 4] x": "float[2, 1, 4] x"},
        "fewer axes": {
            "float[3, 4] flat = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}": "float[3, 3] flat = {0, 1, 2, 3, 4, 5, 6, 7, 8}",
            "(table, x)": "(flat, x)",
            "float[2, 3, 4]": "float[2, 3, 3]",
            "float[2, 1, 4]": "float[2, 1, 3]",
        },
        "of unknown shape": {"total = Add (table, x)": "new = Relu (x) total = Add (table, new)"},
        "several rows": {
            SPLIT: "sizes = Constant <value_ints = [2, 1]> ()\n first, second = Split <axis = 1> (total, sizes)",
            "float[2, 1, 4] first": "float[2, 2, 4] first",
            ", float[2, 1, 4] third": "",
        },
        "a bias": {
            "axis = 1, num_outputs = 3": "axis = 2, num_outputs = 4",
            "first, second, third =": "first, second, third, last =",
            "float[2, 1, 4]": "float[2, 3, 1]",
            "float[2, 3, 4] total": "float[2, 3, 4] total, float[2, 3, 1] last",
        },
        "along two axes": {SPLIT: SLICES.replace("(total, two, three, axis)", "(total, two, three, one)").replace(
            "third = ", "other_axis = Constant <value_ints = [0]> ()\n third = ").replace("three, one", "three, other_axis")},
        "any number of rows": {"float[2, 3, 4] total": "float[2, N, 4] total"},
        "another's row": {SPLIT: "one = Constant <value_int = 1> ()\n first = other.Gather <axis = 1> (total, one)",
                          ", float[2, 1, 4] second, float[2, 1, 4] third": ""},
        "rows in a list": {SPLIT: "one = Constant <value_ints = [1]> ()\n first = Gather <axis = 1> (total, one)",
                           ", float[2, 1, 4] second, float[2, 1, 4] third": ""},
        "not read": {SPLIT: "first = Relu (x)", ", float[2, 1, 4] second, float[2, 1, 4] third": ""},
    }.items(),
    ids=lambda item: item[0],
)  # fmt: skip
def test_other_sums_are_left(changes):
    model = changed(changes[1])
    before = list(model.graph)
    assert add_rows(model) == 0
    assert list(model.graph) == before
