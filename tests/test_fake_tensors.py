"""Shapes of a model's result without its computation."""

import pytest
import torch
from diffusers.configuration_utils import FrozenDict
from torch import nn

from trtconvert.fake_tensors import shapes_alone


class Reading(nn.Module):
    """Reads numbers from its buffers, as models with tables of axes do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 6))
        self.register_buffer("kept", torch.tensor([0, 2]))
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x):
        return (x @ self.weight)[:, self.kept.tolist()].view(int(self.count), -1)


@pytest.mark.parametrize("faked", [False, True])
def test_a_model_may_read_numbers_from_its_buffers(faked):
    model, x = Reading(), torch.rand(4, 4)
    with torch.no_grad(), shapes_alone(model if faked else None) as mode:
        found = model(mode.from_tensor(x))
    assert found.shape == model(x).shape
    assert model.weight.sum() > 0  # the weights are the model's own again


def test_compiled_functions_of_a_model_compute_shapes_too():
    """Compiled code reads memory, which fake tensors lack."""
    compiled = torch.compile(
        lambda x: torch.cat([x, x]), backend=lambda graph, _: pytest.fail("compiled on fake tensors")
    )
    with torch.no_grad(), shapes_alone() as mode:
        assert compiled(mode.from_tensor(torch.rand(4, 4))).shape == (8, 4)


class Keeping(nn.Module):
    """Keeps tables of positions for its next calls, as modules for rotations and ALiBi do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.register_buffer("table", None, persistent=False)
        self.by_length, self.all, self.config = {}, [], FrozenDict(width=8)

    def forward(self, x):
        if self.table is None or self.table.shape[0] < x.shape[0]:
            self.register_buffer("table", torch.arange(x.shape[0]) * self.weight[0], persistent=False)
            self.last = self.by_length[x.shape[0]] = self.table
            self.all.append(self.table)
        return x * self.table[: x.shape[0]]


def test_a_model_keeps_no_tensors_without_values():
    model, x = Keeping(), torch.rand(8)
    with torch.no_grad(), shapes_alone(model) as mode:
        model(mode.from_tensor(x))
        assert model.table is model.last
    assert model.table is None and not (model.by_length or model.all or hasattr(model, "last"))
    assert (model(x) - x * torch.arange(8) * model.weight[0]).abs().max() < 1e-6


class Deciding(nn.Module):
    """Reads numbers of several kinds from buffers, and computes others from them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 6))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("begun", torch.tensor([False, True]))
        self.register_buffer("counts", torch.tensor([3, 2]))

    def forward(self, x):
        y = x @ self.weight * float(self.scale)
        rows = self.counts.clone()
        rows += 1
        rows[0] = rows[0] * 2
        self.counts.view(2)[1].add_(7)
        if self.begun[1] and not self.begun[0].item():
            y = torch.cat([y] * int(rows.max()))
        return y.view(len(x), rows[1].tolist(), -1)


@pytest.mark.parametrize("faked", [False, True])
def test_small_buffers_decide_branches_and_sizes(faked):
    model, x = Deciding(), torch.rand(4, 4)
    with torch.no_grad(), shapes_alone(model if faked else None) as mode:
        found = model(mode.from_tensor(x))
    assert found.shape == (4, 3, 16)
    assert model.counts.tolist() == [3, 2]  # as before
