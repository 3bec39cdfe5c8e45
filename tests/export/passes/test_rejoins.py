"""Concatenations of all parts of one tensor are that tensor; others stay."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from exports import export, run
from torch import nn

from trtconvert.export.passes.concats import drop_rejoins


class Rejoins(nn.Module):
    """Concatenates `parts(x)` along the second axis, as Flux does with text and image."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return torch.cat(self.parts(x.exp()), dim=1) * 2


def exported(parts, x, **dims) -> ir.Model:
    program = export(Rejoins(parts), x, **dims)
    program.optimize()
    return program.model


def concatenations(model: ir.Model) -> int:
    return sum(node.op_type == "Concat" for node in model.graph)


X = torch.randn(2, 7, 3)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "parts",
    [
        lambda x: [x[:, :2], x[:, 2:]],
        lambda x: [x[:, :1], x[:, 1:4], x[:, 4:]],
        lambda x: [x[:, :2], x[:, 2:7]],
        lambda x: x.split([2, 5], dim=1),
        lambda x: x.split(3, dim=1),
        lambda x: [x[:, :-2], x[:, -2:]],
    ],
    ids=["two", "three", "to-the-size", "split", "split-evenly", "from-the-end"],
)
def test_all_parts_are_the_whole(parts):
    model = exported(parts, X)
    assert concatenations(model) == 1
    before = run(model, X)
    assert drop_rejoins(model) == 1
    assert not {node.op_type for node in model.graph} & {"Concat", "Slice", "Split"}
    torch.testing.assert_close(run(model, X), before, rtol=0, atol=0)
    assert drop_rejoins(model) == 0


def test_a_reader_of_one_part_alone_stays_possible():
    class ReadsText(Rejoins):
        def forward(self, x):
            return super().forward(x), x.exp()[:, :2]

    program = export(ReadsText(lambda x: [x[:, :2], x[:, 2:]]), X)
    program.optimize()
    assert drop_rejoins(program.model) == 1
    torch.testing.assert_close(run(program.model, X), X.exp() * 2)
    assert any(node.op_type == "Slice" for node in program.model.graph)


def test_parts_of_a_tensor_of_any_length():
    model = exported(lambda x: [x[:, :2], x[:, 2:]], X, tokens=1)
    assert drop_rejoins(model) == 1
    x = torch.randn(2, 11, 3)
    torch.testing.assert_close(run(model, x), x.exp() * 2)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "parts",
    [
        lambda x: [x[:, 2:], x[:, :2]],
        lambda x: [x[:, :2], x[:, 3:]],
        lambda x: [x[:, :3], x[:, 2:]],
        lambda x: [x[:, 1:2], x[:, 2:]],
        lambda x: [x[:, :2], x[:, 2:6]],
        lambda x: [x[:, :3], x[:, 3:1], x[:, 1:]],
        lambda x: [x[:, :2], x.sin()[:, 2:]],
        lambda x: [x[:, ::2], x[:, 1::2]],
        lambda x: [x[:, :, :1], x[:, :, 1:2]],
        lambda x: x.split([2, 5], dim=1)[::-1],
        lambda x: x.split([1, 2], dim=2)[:1] * 2,
        lambda x: x.split([2, 2, 3], dim=1)[:2],
    ],
    ids=[
        "swapped", "gap", "overlap", "not-from-the-start", "not-to-the-end", "backwards", "another-tensor", "steps",
        "another-axis", "split-swapped", "split-of-another-axis", "split-without-its-last",
    ],
)  # fmt: skip
def test_other_concatenations_stay(parts):
    model = exported(parts, X)
    before = run(model, X)
    kept = concatenations(model)
    assert drop_rejoins(model) == 0
    assert concatenations(model) == kept
    torch.testing.assert_close(run(model, X), before, rtol=0, atol=0)
