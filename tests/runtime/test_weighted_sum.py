"""Weighted sums of predictions: by torch here, by one kernel in tests/gpu/test_weighted_sum_on_gpu.py."""

from __future__ import annotations

import pytest
import torch

from trtconvert.runtime.weighted_sum import weighted_sum


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("other", [torch.float16, torch.float32], ids=str)
def test_sums_are_rounded_once(dtype, other):
    x, y, z = torch.randn(3, 2, 5, 7, dtype=torch.float64)
    x, y, z = x.to(dtype), y.to(other), z.to(dtype)
    found = weighted_sum([(x, 1.75), (y, -0.75), (z, 2.0**-9)])
    right = x.double() * 1.75 - y.double() * 0.75 + z.double() * 2.0**-9
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_a_sum_of_one_term_is_a_copy():
    x = torch.randn(3, 4).half()
    found = weighted_sum([(x, 1.0)])
    assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()


def test_not_finite_terms_reach_the_sum():
    x, y = torch.tensor([1.0, torch.nan, torch.inf, 1.0]), torch.tensor([1.0, 1.0, 1.0, -torch.inf])
    assert weighted_sum([(x, 2.0), (y, 1.0)]).tolist()[0] == 3.0
    assert weighted_sum([(x, 2.0), (y, 1.0)])[1:].isfinite().sum() == 0


def test_gradients_reach_the_terms():
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    weighted_sum([(x, 1.5), (y, -0.5)]).sum().backward()
    assert x.grad.unique().tolist() == [1.5] and y.grad.unique().tolist() == [-0.5]
