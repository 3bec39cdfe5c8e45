"""Reads products of two tensors, by matmul, bmm, baddbmm or einsum, with a letter for each axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtconvert.unfused.equations import axes_of, unnamed

BADDBMM = {torch.baddbmm, Tensor.baddbmm}

PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum, *BADDBMM}
"""Functions that multiply two tensors."""


@dataclass(frozen=True)
class Product:
    """A product of two tensors.

    Attributes:
        factors: the two tensors.
        of: axes of each factor.
        result: axes of the product.
        alpha: factor of the product.
        added: a tensor that is added to the product, and its factor.
    """

    factors: tuple[Tensor, Tensor]
    of: tuple[str, str]
    result: str
    alpha: float = 1.0
    added: tuple[Tensor, float] | None = None

    @property
    def is_of_samples(self) -> bool:
        """True if both factors share an axis of samples or heads, each has an axis of its own, and one axis is summed."""
        a, b = map(set, self.of)
        both, result = a & b, set(self.result)
        return bool(both & result and a - b and b - a) and len(both - result) == 1 and a ^ b <= result


def is_number(x: Any) -> bool:
    """Returns whether a value is a number that stays the same while a model is traced."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def product_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Returns the product that a call of one of `PRODUCTS` computes; None for fewer axes than attention has, and for other
    forms."""
    if func is torch.einsum:
        operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
        return _of_einsum(args[0], operands) if args and isinstance(args[0], str) and not kwargs else None
    alpha, added = 1.0, None
    if func in BADDBMM:
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        if len(args) != 3 or kwargs.keys() - {"beta", "alpha"} or not (is_number(alpha) and is_number(beta)):
            return None
        added, args = (args[0], float(beta)) if beta else None, args[1:]
    elif kwargs:
        return None
    if len(args) != 2 or not all(isinstance(x, Tensor) and x.dim() >= 3 for x in args):
        return None
    a, b = args
    batch = unnamed(max(a.dim(), b.dim()) - 2)
    of_a, of_b = (batch[len(batch) + 2 - x.dim() :] for x in (a, b))
    return Product((a, b), (f"{of_a}ic", f"{of_b}cj"), f"{batch}ij", float(alpha), added)


def _of_einsum(equation: str, operands: Sequence[Any]) -> Product | None:
    if len(operands) != 2 or not all(isinstance(x, Tensor) for x in operands):
        return None
    axes = axes_of(equation, [x.dim() for x in operands])
    return None if axes is None else Product((operands[0], operands[1]), axes[:2], axes[2])
