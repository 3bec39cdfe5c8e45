"""Checks that all numbers of a tensor are finite."""

from __future__ import annotations

import torch
from torch import Tensor

from trtconvert.errors import UserError


def is_finite(x: Tensor) -> bool:
    """Whether there is no NaN and no infinity; true of a tensor without numbers.

    The least and the largest number show it, in one pass without memory; torch.isfinite takes six times as long on the CPU.
    """
    return bool(finite(x))


def finite(x: Tensor) -> Tensor:
    """`is_finite` as a boolean tensor on the device of the numbers, so that the caller does not wait for the device."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.isfinite(_ends(x)).all()


def largest(x: Tensor) -> float:
    """The largest magnitude; 0 of a tensor without numbers, NaN of one with NaN."""
    return float(_ends(x).abs().amax()) if x.numel() else 0.0


def _ends(x: Tensor) -> Tensor:
    """[2] the least and the largest number of a tensor, or of both parts of complex numbers."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    elif x.is_floating_point() and x.itemsize == 1:  # torch has no aminmax of FP8; BF16 holds the range of FP8
        x = x.bfloat16()
    turned = x.T if x.dim() == 2 and not x.is_contiguous() else x  # in the order of the memory
    return torch.stack(turned.aminmax())


def count_not_finite(x: Tensor) -> str:
    """Describes how many numbers of a tensor are not finite, for messages."""
    return f"{int((~x.isfinite()).sum())} of {x.numel()} are NaN or Inf"


def require_finite(problem: str, x: Tensor, remedy: str) -> None:
    """
    Args:
        problem: for the message.
    Raises:
        UserError: the tensor has NaN or Inf.
    """
    if not is_finite(x):
        raise UserError(
            problem,
            expected="finite numbers",
            got=count_not_finite(x),
            remedy=remedy,
        )
