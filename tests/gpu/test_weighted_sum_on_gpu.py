"""The kernel of weighted sums on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from trtconvert.runtime.weighted_sum import weighted_sum

pytestmark = pytest.mark.gpu

TYPES = [torch.float16, torch.bfloat16, torch.float32]


def kernels(call) -> list[str]:
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [event.name for event in seen.events() if event.device_type == DeviceType.CUDA]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("other", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2, 4, 64, 64), (2, 16, 21, 60, 104)], ids=str)
def test_sums_are_those_of_fp64_rounded_once(shape, other, dtype):
    found = [torch.randn(shape, device="cuda").to(t) for t in (dtype, other, dtype, other)]
    factors = (1.75, -0.75, 0.013, 3.0)
    for count in range(1, 5):
        terms = list(zip(found[:count], factors, strict=False))
        result = weighted_sum(terms)
        right = sum(x.double() * factor for x, factor in terms)
        assert result.dtype == dtype and result.shape == shape
        torch.testing.assert_close(result.double(), right, rtol=torch.finfo(dtype).eps, atol=4e-6)


def test_a_sum_is_one_kernel():
    x, y = (torch.randn(2, 4, 64, 64, device="cuda").half() for _ in range(2))
    (name,) = kernels(lambda: weighted_sum([(x, 1.5), (y, -0.5), (x, 0.1)]))
    assert "sum_kernel" in name


def test_numbers_behind_an_offset_need_no_alignment():
    x = torch.randn(1001, device="cuda").half()[1:]
    assert torch.equal(weighted_sum([(x, 1.0)]), x)


def test_not_finite_terms_reach_the_sum():
    x = torch.tensor([1.0, torch.nan, torch.inf, 1.0], device="cuda")
    y = torch.tensor([1.0, 1.0, 1.0, -torch.inf], device="cuda")
    found = weighted_sum([(x, 2.0), (y, 1.0)])
    assert found[0] == 3 and not found[1:].isfinite().any()


def test_sums_run_on_the_current_stream_and_in_a_graph():
    x, y = (torch.randn(1000, device="cuda") for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    weighted_sum([(x, 1.0), (y, 2.0)])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = weighted_sum([(x, 1.0), (y, 2.0)])
    x.fill_(3), y.fill_(4)
    graph.replay()
    assert (found == 11).all()


def test_what_the_kernel_does_not_take_is_computed_by_torch():
    x = torch.randn(6, 8, device="cuda")
    assert torch.equal(weighted_sum([(x.t(), 2.0)]), x.t() * 2)
    assert torch.equal(weighted_sum([(x.double(), 2.0)]), x.double() * 2)
    leaf = x.clone().requires_grad_()
    weighted_sum([(leaf, 2.0)]).sum().backward()
    assert leaf.grad.unique().tolist() == [2.0]
    assert weighted_sum([(x[:0], 2.0)]).shape == (0, 8)
