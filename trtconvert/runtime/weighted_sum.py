"""Weighted sums of tensors, by one kernel of `plugins/weighted_sum` on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from trtconvert.c_structs import MOST_TERMS, WEIGHTED_SUM_VERSION, Term, WeightedSumParams
from trtconvert.library import run, serves_gpu

Terms = Sequence[tuple[Tensor, float]]
"""One to four tensors of one shape on one device, each with its factor."""

_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
_Terms = Term * MOST_TERMS


def weighted_sum(terms: Terms) -> Tensor:
    """Return the sum of tensors times factors as a new tensor of the first tensor's type, computed in FP32 at least."""
    return _by_kernel(terms) if _fits_kernel(terms) else _by_torch(terms)


def _by_torch(terms: Terms) -> Tensor:
    (first, factor), *others = terms
    total = first.to(torch.promote_types(first.dtype, torch.float32)) * factor
    for x, factor in others:
        total = total.add(x, alpha=factor)
    return total.to(first.dtype)


def _fits_kernel(terms: Terms) -> bool:
    first = terms[0][0]
    return (
        first.is_cuda
        and first.numel() > 0
        and all(x.dtype in _TYPES and x.is_contiguous() for x, _ in terms)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x, _ in terms))
        and serves_gpu(first.get_device())
    )


def _by_kernel(terms: Terms) -> Tensor:
    first = terms[0][0]
    device, total = first.get_device(), torch.empty_like(first)
    # The public torch.cuda.device and current_stream take longer than the launch.
    with torch.cuda._DeviceGuard(device):
        given = WeightedSumParams(
            ctypes.sizeof(WeightedSumParams),
            WEIGHTED_SUM_VERSION,
            first.numel(),
            len(terms),
            _TYPES[first.dtype],
            _Terms(*((x.data_ptr(), factor, _TYPES[x.dtype]) for x, factor in terms)),
            total.data_ptr(),
            torch._C._cuda_getCurrentRawStream(device),
        )
        run("trtconvert_weighted_sum_run", given)
    return total
