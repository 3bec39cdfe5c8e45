"""The bytes of tensors, whatever their strides."""

from __future__ import annotations

import pytest
import torch

from trtconvert.weights.tensor_files import raw_bytes


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(3.0).expand(1),
        torch.arange(4.0)[::2][:1],
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.zeros(0, 3),
    ],
    ids=["expanded", "one of a strided one", "transposed", "truth values", "no dimension", "empty"],
)
def test_numbers_row_by_row(x):
    there = torch.frombuffer(bytearray(raw_bytes(x)), dtype=x.dtype) if x.numel() else torch.zeros(0)
    assert torch.equal(there, x.reshape(-1))
