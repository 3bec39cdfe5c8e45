"""Repairs of the export: torch against ONNX Runtime, before and after each pass."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from exports import changed, export, run
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidGraph, NotImplemented
from torch import nn

from trtconvert.bundle import TRANSPOSED
from trtconvert.export.passes.booleans import choose_by_logic
from trtconvert.export.passes.concats import promote_concats
from trtconvert.export.passes.epsilons import keep_epsilons
from trtconvert.export.passes.interleaves import join_interleaves
from trtconvert.export.passes.scatters import leave_out_default_reductions
from trtconvert.export.passes.sizes import fold_sizes
from trtconvert.export.passes.squeezes import drop_idle_squeezes
from trtconvert.export.weights import name_weights, weights_apart


class Squeezes(nn.Module):
    def forward(self, x):
        return x.squeeze(1) + x[:, :1].squeeze(1)[:, None]


class Concatenates(nn.Module):
    """Embeddings in half precision beside sines in single precision, as Stable Diffusion XL has them."""

    def forward(self, x):
        angles = x.float().flatten()[:, None] * torch.arange(4)
        sines = torch.cat([angles.sin(), angles.cos()], -1).reshape(x.shape[0], -1)
        return torch.concat([x, sines], -1)  # the exporter promotes what is written as torch.cat


class Stacks(nn.Module):
    def forward(self, x):
        return torch.stack([x.float(), x], -1)


class Masks(nn.Module):
    """The operator Where on booleans, in several forms."""

    def forward(self, x):
        shown, beyond = x > 0, x[:1] > 1
        masks = [shown.masked_fill(beyond, False), shown.masked_fill(beyond, True), torch.where(beyond, x > 2, shown)]
        return torch.stack(masks).float()


class Projects(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 5)

    def forward(self, x):
        return self.inner(x)


class Interleaves(nn.Module):
    """Like rotary embeddings, also with heads first, as attention reads them. `first` is the half that is written first."""

    def __init__(self, first: int = 0):
        super().__init__()
        self.first = first

    def forward(self, x):
        out = torch.empty_like(x)
        for half in (self.first, 1 - self.first):
            out[..., half::2] = x[..., 1 - half :: 2] * (half + 2)
        return out.transpose(1, 2)


class WritesThirds(nn.Module):
    """Two of three parts; the third stays what it was."""

    def forward(self, x):
        out = x.clone()
        out[..., 0::3], out[..., 1::3] = x[..., 1::3], x[..., 0::3]
        return out


class WritesOneHalfTwice(nn.Module):
    def forward(self, x):
        out = x.clone()
        out[..., 0::2] = x[..., 1::2]
        out[..., 0::2] += 1
        return out


class WritesRows(nn.Module):
    """Even and odd rows, not columns: nothing is transposed."""

    def forward(self, x):
        out = x.clone()
        out[0::2], out[1::2] = x[1::2], x[0::2]
        return out


@pytest.mark.parametrize(
    ("module", "x", "rewrite", "count"),
    [
        (Squeezes(), torch.randn(2, 4, 3), drop_idle_squeezes, 1),
        (Concatenates(), torch.randn(2, 4).half(), promote_concats, 1),
        (Stacks(), torch.randn(2, 4).half(), promote_concats, 1),
        (Masks(), 2 * torch.randn(8, 64), choose_by_logic, 3),
    ],
)
def test_a_rewrite_makes_what_onnx_refuses_run(module, x, rewrite, count):
    model = export(module, x).model
    refusals = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, Fail, InvalidGraph, NotImplemented)
    with pytest.raises(refusals):
        run(model, x)
    assert rewrite(model) == count
    got, expected = run(model, x), module(x)
    assert got.dtype == expected.dtype and torch.allclose(got, expected, atol=1e-6)
    assert rewrite(model) == 0


@pytest.mark.parametrize("rewrite", [drop_idle_squeezes, promote_concats, choose_by_logic])
def test_a_graph_without_such_nodes_stays_as_it_is(rewrite):
    model = export(Projects(), torch.randn(2, 3)).model
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert rewrite(model) == 0
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


class Divides(nn.Module):
    """Divides by sums with an epsilon as number, on either side, or as tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("epsilon", torch.tensor(1e-10))

    def forward(self, x):
        return torch.stack([x / (x + 1e-15), x / (1e-9 + x), x / (x - 1e-12), x / (x + self.epsilon), x / (1 + x)])


def test_terms_next_to_zero_outlive_the_exporters_optimisation():
    x = torch.tensor([[0.0, 1.0, 2.0]])
    for keep in (False, True):
        program = export(Divides(), x)
        assert not keep or keep_epsilons(program.model) == 4
        program.optimize()
        got = run(program.model, x)
        assert got.isnan().any() == (not keep)
    torch.testing.assert_close(got, Divides()(x))


def test_weights_keep_their_names_through_folding():
    """A weight that is folded into its transpose is found under its name with a mark, and computes the same."""
    module, x = Projects(), torch.randn(2, 4, 3)
    program = export(module, x)
    assert name_weights(program.model, "inner.") == {"weight", "weight" + TRANSPOSED, "bias"}
    program.optimize()
    found = {name: value.const_value.numpy() for name, value in program.model.graph.initializers.items()}
    assert (module.inner.weight.detach().numpy() == found["weight" + TRANSPOSED].T).all()
    assert (found["bias"] == module.inner.bias.detach().numpy()).all()
    assert torch.allclose(run(program.model, x), module(x), atol=1e-6)


class Twins(nn.Module):
    """Layers with equal weights, which the exporter's optimisation would merge."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(3, 3) for name in "abc"} | {name: nn.LayerNorm(3) for name in "de"})
        for layer in self.inner.values():
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for layer in self.inner.values():
            x = x + layer(x)
        return x


def test_equal_weights_stay_weights_of_their_own():
    module, x = Twins().requires_grad_(False), torch.randn(2, 4, 3)
    program = export(module, x)
    with weights_apart(program.model, name_weights(program.model, "inner.")):
        program.optimize()
    found = {name: value.const_value for name, value in program.model.graph.initializers.items()}
    for name, weight in module.inner.state_dict().items():
        turned = name + TRANSPOSED in found
        stored = found[name + TRANSPOSED if turned else name].numpy()
        assert np.array_equal(stored.T if turned else stored, weight.numpy())
    assert torch.allclose(run(program.model, x), module(x), atol=1e-6)

    # One of them changed, as by a refit, changes it alone.
    module.inner["b"].weight = nn.Parameter(torch.full((3, 3), 2.0), requires_grad=False)
    module.inner["e"].bias = nn.Parameter(torch.ones(3), requires_grad=False)
    changed_to = {"b.weight" + TRANSPOSED: module.inner["b"].weight.T, "e.bias": module.inner["e"].bias}
    for name, weight in changed_to.items():
        program.model.graph.initializers[name].const_value = ir.Tensor(weight.numpy(), name=name)
    assert torch.allclose(run(program.model, x), module(x), atol=1e-6)


def test_sizes_that_do_not_vary_become_constants():
    """Single sizes of a tensor with a dynamic first axis: from both ends, and of a part of the shape."""
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["": 20]>
        sizes (float[N, 3, 4] x, int64 which)
            => (int64 second, int64 last, int64 after, int64 varies, int64[1] listed, int64 asked, int64 read, int64[3] twice)
        {
            shape = Shape(x)
            tail = Shape <start = 1> (x)
            head = Shape <end = -1> (x)
            zero = Constant <value_int = 0> ()
            one = Constant <value_int = 1> ()
            back = Constant <value_int = -1> ()
            second = Gather (shape, one)
            last = Gather (head, back)
            after = Gather (tail, one)
            varies = Gather (shape, zero)
            some = Constant <value_ints = [1]> ()
            listed = Gather (shape, some)
            asked = Gather (tail, which)
            numbers = Constant <value_ints = [7, 8, 9]> ()
            read = Gather (numbers, one)
            two = Constant <value_int = 2> ()
            twice = Mul (shape, two)
        }
    """)

    def read() -> list[int]:
        session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
        feeds = {"x": np.zeros((2, 3, 4), np.float32), "which": np.array(1)}
        return np.concatenate([x.ravel() for x in session.run(None, feeds)]).tolist()

    assert read() == [3, 3, 4, 2, 3, 4, 8, 4, 6, 8]
    assert fold_sizes(model) == 3
    left = {node.outputs[0].name for node in model.graph if node.op_type == "Gather"}
    assert left == {"varies", "listed", "asked", "read"}
    assert read() == [3, 3, 4, 2, 3, 4, 8, 4, 6, 8]


@pytest.mark.parametrize("first", [0, 1])
def test_interleaved_halves_become_one_concatenation(first):
    module, x = Interleaves(first), torch.randn(2, 5, 3, 8)
    program = export(module, x)
    program.optimize()
    assert join_interleaves(program.model) == 1
    operators = {node.op_type: node for node in program.model.graph}
    assert "ScatterND" not in operators
    # What is left is the model's own transposition, which lowerings fold into attention.
    assert list(operators["Transpose"].attributes["perm"].as_ints()) == [0, 2, 1, 3]
    assert (run(program.model, x) == module(x)).all()
    assert join_interleaves(program.model) == 0


def test_interleaved_halves_of_any_number_of_rows():
    """Positions along the last axis are known once its size is, whatever varies beside it."""
    module = Interleaves(0)
    program = export(module, torch.randn(2, 5, 3, 8), batch=0, rows=1)
    assert fold_sizes(program.model) == 2
    program.optimize()
    assert join_interleaves(program.model) == 1
    assert {"ScatterND", "Range", "Shape"}.isdisjoint(node.op_type for node in program.model.graph)
    for batch, rows in ((2, 5), (1, 7), (4, 1)):
        x = torch.randn(batch, rows, 3, 8)
        assert (run(program.model, x) == module(x)).all()


def test_interleaved_halves_of_any_width_stay_scatters():
    module = Interleaves(0)
    program = export(module, torch.randn(2, 5, 3, 8), width=3)
    assert fold_sizes(program.model) == 0
    program.optimize()
    assert join_interleaves(program.model) == 0
    for width in (8, 14):
        x = torch.randn(2, 5, 3, width)
        assert (run(program.model, x) == module(x)).all()


@pytest.mark.parametrize("module", [WritesThirds(), WritesOneHalfTwice(), WritesRows()], ids=lambda m: type(m).__name__)
def test_other_writes_of_every_nth_element_stay_scatters(module):
    x = torch.randn(6, 5, 12)
    program = export(module, x)
    program.optimize()
    assert join_interleaves(program.model) == 0
    assert "ScatterND" in {node.op_type for node in program.model.graph}
    assert (run(program.model, x) == module(x)).all()


INTERLEAVING = """
    <ir_version: 10, opset_import: ["": 20, "other": 1]>
    interleaving (float[2, 3, 4] even, float[2, 3, 4] odd, float[8, 3, 2] out) => (float[2, 3, 8] y)
    {
        evens = Constant <value = int64[4, 1] {0, 2, 4, 6}> ()
        odds = Constant <value = int64[4, 1] {1, 3, 5, 7}> ()
        first_half = Transpose <perm = [2, 1, 0]> (even)
        second_half = Transpose <perm = [2, 1, 0]> (odd)
        first = ScatterND <reduction = "none"> (out, evens, first_half)
        last = ScatterND <reduction = "none"> (first, odds, second_half)
        y = Transpose <perm = [2, 1, 0]> (last)
    }
"""


def test_the_interleaving_that_others_only_look_like():
    assert join_interleaves(ir.from_onnx_text(INTERLEAVING)) == 1


@pytest.mark.parametrize(
    "changes",
    {
        "one write": {"(first, odds": "(out, odds"},
        "first adds": {'"none"> (out': '"add"> (out'},
        "last adds": {'"none"> (first': '"add"> (first'},
        "first is another's": {"first = ScatterND": "first = other.ScatterND"},
        "last is another's": {"last = ScatterND": "last = other.ScatterND"},
        "same half twice": {"(first, odds": "(first, evens"},
        "other positions": {"{1, 3, 5, 7}": "{1, 3, 7, 5}"},
        "unknown positions": {
            "odds = Constant": "unknown = Constant",
            "float[2, 3, 4] odd": "float[2, 3, 4] odd, int64[4, 1] odds",
        },
        "odd width": {"float[8, 3, 2] out": "float[9, 3, 2] out", "float[2, 3, 8] y": "float[2, 3, 9] y"},
        "any width": {"float[8, 3, 2] out": "float[N, 3, 2] out", "float[2, 3, 8] y": "float[2, 3, N] y"},
        "unknown width": {"first = ": "new = Relu (out) first = ", "(out, evens": "(new, evens"},
        "half as it is": {
            "float[2, 3, 4] odd": "float[4, 3, 2] odd",
            "Transpose <perm = [2, 1, 0]> (odd)": "Relu (odd)",
        },
        "halves by other ways": {"float[2, 3, 4] odd": "float[3, 2, 4] odd", "[2, 1, 0]> (odd": "[2, 0, 1]> (odd"},
        "rows": {
            "float[2, 3, 4] even, float[2, 3, 4] odd": "float[4, 2, 3] even, float[4, 2, 3] odd",
            "[2, 1, 0]> (even": "[0, 2, 1]> (even",
            "[2, 1, 0]> (odd": "[0, 2, 1]> (odd",
        },
        "read as it is": {"Transpose <perm = [2, 1, 0]> (last)": "Relu (last)", "float[2, 3, 8] y": "float[8, 3, 2] y"},
        "an output": {"=> (": "=> (float[8, 3, 2] last, "},
    }.items(),
    ids=lambda item: item[0],
)
def test_scatters_that_resemble_an_interleaving_stay(changes):
    model = changed(INTERLEAVING, changes[1])
    before = list(model.graph)
    assert join_interleaves(model) == 0
    assert list(model.graph) == before


class WritesAndAdds(nn.Module):
    """One write, and one addition in place, which is a scatter that reduces."""

    def forward(self, x):
        out = x.clone()
        out[:, 0::3] = x[:, 1::3]
        return out.index_put((torch.tensor([1, 1]),), x[:2], accumulate=True)


def test_only_scatters_that_reduce_say_so():
    module, x = WritesAndAdds(), torch.randn(4, 6)
    program = export(module, x)
    program.optimize()
    assert leave_out_default_reductions(program.model) == 1
    reductions = [node.attributes.get("reduction") for node in program.model.graph if node.op_type == "ScatterND"]
    assert [None if reduction is None else reduction.as_string() for reduction in reductions] == [None, "add"]
    assert torch.allclose(run(program.model, x), module(x), atol=1e-6)
