"""Consecutive rows that a module overwrites: torch against ONNX Runtime on its export, with concatenations for scatters."""

from __future__ import annotations

import exports
import onnx_ir as ir
import pytest
import torch
from exports import run
from torch import Tensor, nn

from trtconvert.export.passes.overwrites import join_overwritten
from trtconvert.export.passes.sizes import fold_sizes


class Overwrites(nn.Module):
    """Overwrites part of an axis of a rank-4 tensor, with heads first or not."""

    def __init__(self, axis: int, start: int, stop: int):
        super().__init__()
        self.axis, self.start, self.stop = axis, start, stop

    def forward(self, x: Tensor) -> Tensor:
        out = x * 2
        part = out.narrow(self.axis, self.start, self.stop - self.start)
        part.copy_(part.square())
        return out


class Written(nn.Module):
    """Writes that are not of consecutive rows, or whose result is also read between the transposes."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        out = x * 2
        if self.kind == "every other":
            out[:, 1::2] = x[:, 0::2]
        elif self.kind == "in another order":
            out[torch.tensor([2, 1])] = x[:2]
        elif self.kind == "twice the same":
            out[torch.tensor([1, 1])] = x[:1]
        elif self.kind == "from the end":
            out[torch.tensor([-1, 0])] = x[:2]
        elif self.kind == "single elements":
            out[torch.tensor([1, 2]), torch.tensor([1, 2])] = x[:2, 0]
        elif self.kind == "added":
            out = out.index_put((torch.tensor([1, 2]),), x[:2], accumulate=True)
        return out


def export(module: nn.Module, x: Tensor, **dims: int) -> ir.Model:
    """Exports and optimises a module. Named axes are dynamic."""
    program = exports.export(module, x, **dims)
    fold_sizes(program.model)
    program.optimize()
    return program.model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.op_type in ("ScatterND", "Transpose", "Slice", "Concat")]


@pytest.mark.first_case
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize(("start", "stop", "kept"), [(2, 6, 1), (0, 4, 1), (1, 3, 2)])
def test_consecutive_rows_become_one_concatenation(axis, start, stop, kept):
    """Remaining rows are sliced once or twice; the squared part is sliced too."""
    module, x = Overwrites(axis, start, stop), torch.randn(6, 6, 6, 6)
    model = export(module, x)
    assert operators(model).count("ScatterND") == 1
    assert join_overwritten(model) == 1
    assert sorted(operators(model)) == ["Concat", *["Slice"] * (kept + 1)]
    assert (run(model, x) == module(x)).all()
    assert join_overwritten(model) == 0


def test_of_an_axis_that_does_not_vary_beside_one_that_does():
    module = Overwrites(1, 2, 5)
    model = export(module, torch.randn(6, 6, 6, 6), batch=0)
    assert join_overwritten(model) == 1
    assert sorted(operators(model)) == ["Concat", *["Slice"] * 3]
    for batch in (2, 5):
        x = torch.randn(batch, 6, 6, 6)
        assert (run(model, x) == module(x)).all()


@pytest.mark.first_case
@pytest.mark.parametrize("reader", ["Relu", "Transpose", "output"])
def test_readers_between_transposes_keep_the_transposes(reader):
    """Rows of the transposed tensor are joined."""
    module, x = Overwrites(1, 2, 5), torch.randn(6, 6, 6, 6)
    model = export(module, x)
    (scatter,) = (node for node in model.graph if node.op_type == "ScatterND")
    scatter.outputs[0].name = "between"
    if reader == "output":
        model.graph.outputs.append(scatter.outputs[0])
    else:
        model.graph.append(
            ir.node(reader, [scatter.outputs[0]], {"perm": [1, 0, 2, 3]} if reader == "Transpose" else {})
        )
        model.graph.outputs.append(model.graph[-1].outputs[0])
        out = model.graph.outputs[-1]
        out.type, out.shape = scatter.outputs[0].type, scatter.outputs[0].shape
    assert join_overwritten(model) == 1
    assert "ScatterND" not in operators(model) and operators(model).count("Transpose") >= 3
    (join,) = (node for node in model.graph if node.op_type == "Concat")
    assert join.outputs[0].name == "between"
    assert (run(model, x) == module(x)).all()


@pytest.mark.parametrize("index", [0, 2], ids=["rows", "data"])
def test_a_transpose_of_one_alone_stays(index):
    """The other is transposed further away."""
    module, x = Overwrites(1, 2, 5), torch.randn(6, 6, 6, 6)
    model = export(module, x)
    (scatter,) = (node for node in model.graph if node.op_type == "ScatterND")
    other = scatter.inputs[index]
    assert other is not None
    same = ir.node("Identity", [other])
    same.outputs[0].type, same.outputs[0].shape = other.type, other.shape
    model.graph.insert_before(scatter, same)
    scatter.replace_input_with(index, same.outputs[0])
    assert join_overwritten(model) == 1
    assert operators(model).count("Transpose") == 3
    assert (run(model, x) == module(x)).all()


@pytest.mark.first_case
@pytest.mark.parametrize("which", ["data", "rows", "result"])
def test_other_transposes_stay(which):
    """One of the three transposes is of other axes than the rest, of a size that makes it run as well."""
    module, x = Overwrites(2, 0, 3), torch.randn(6, 6, 6, 6)
    model = export(module, x)
    (scatter,) = (node for node in model.graph if node.op_type == "ScatterND")
    (user,) = (user for user, _ in scatter.outputs[0].uses())
    changed = user if which == "result" else scatter.predecessors()[which == "rows"]
    assert changed.op_type == "Transpose"
    changed.attributes["perm"] = ir.AttrInt64s("perm", [2, 3, 0, 1] if which != "rows" else [2, 0, 1, 3])
    expected = run(model, x)
    assert join_overwritten(model) == 1
    assert operators(model).count("Transpose") == 3
    assert (run(model, x) == expected).all()


@pytest.mark.first_case
@pytest.mark.parametrize(
    "kind", ["every other", "in another order", "twice the same", "from the end", "single elements", "added"]
)
def test_other_writes_stay_scatters(kind):
    module, x = Written(kind), torch.randn(6, 6, 6)
    model = export(module, x)
    assert join_overwritten(model) == 0
    assert "ScatterND" in operators(model)
    assert torch.allclose(run(model, x), module(x), atol=1e-6)
