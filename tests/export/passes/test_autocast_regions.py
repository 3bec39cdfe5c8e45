"""Regions without autocast are inlined, with equal results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trtconvert.export.passes.autocast_regions import inline_regions_without_autocast
from trtconvert.export.passes.complex_pairs import complex_as_pairs


class Turning(nn.Module):
    """x [N, 8] turned as complex numbers, in a region with autocast or without."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.enabled = enabled

    def forward(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        turns = torch.polar(torch.ones_like(angles), angles)
        with torch.autocast("cpu", enabled=self.enabled):
            both = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns
            turned, moved = torch.view_as_real(both).flatten(-2), x + 1
        return turned * 2, moved - turned


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20.0).reshape(5, 4)


def test_a_region_computes_the_same_as_part_of_the_program(inputs):
    module = Turning(enabled=False)
    program = torch.export.export(module, inputs)
    with pytest.raises(NotImplementedError, match="wrap_with_autocast"):
        complex_as_pairs(torch.export.export(module, inputs))
    assert inline_regions_without_autocast(program) == 1
    assert complex_as_pairs(program) > 0
    assert not any("autocast" in str(node.target) for node in program.graph.nodes)
    for found, expected in zip(program.module()(*inputs), module(*inputs), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_region_with_autocast_stays(inputs):
    program = torch.export.export(Turning(enabled=True), inputs)
    before = str(program.graph)
    assert inline_regions_without_autocast(program) == 0 and str(program.graph) == before
