"""The arithmetic of modulated layers: Triton's kernels on a GPU, plain torch elsewhere.

torch.compile and exported graphs see both as operators.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from trtconvert.modiff import reference
from trtconvert.modiff.reference import Geometry, Weight


def quantise_delta(x: Tensor, a_hat: Tensor | None, rows: Tensor, widths: Sequence[int]) -> Tensor:
    """Computes `reference.quantise_delta` by the fastest implementation."""
    if torch.compiler.is_compiling():
        return _delta_operator(x, a_hat, rows, list(widths))
    return _quantise_delta(x, a_hat, rows, widths)


def add_product(
    codes: Tensor, rows: Tensor, widths: Sequence[int], weight: Weight, o_hat: Tensor | None, y: Tensor | None,
    geometry: Geometry, shifted: bool,
) -> None:  # fmt: skip
    """Computes `reference.add_product` by the fastest implementation."""
    if torch.compiler.is_compiling():
        points = [*geometry.stride, *geometry.padding, *geometry.dilation]
        _product_operator(codes, rows, list(widths), *weight, o_hat, y, points, shifted)
    else:
        _add_product(codes, rows, widths, weight, o_hat, y, geometry, shifted)


def measured(
    x: Tensor, a_hat: Tensor | None, rows: Tensor, widths: Sequence[int], together: bool, symmetric: bool
) -> Tensor:
    """Computes `reference.measured` by the fastest implementation."""
    if not torch.compiler.is_compiling() and (triton := _triton(x, widths)) is not None:
        with torch.cuda.device(x.device):
            bounds = triton.delta_bounds(x, a_hat, rows, widths)
        return reference.of_bounds(bounds, rows, together, symmetric)
    return reference.measured(x, a_hat, rows, widths, together, symmetric)


def _quantise_delta(x: Tensor, a_hat: Tensor | None, rows: Tensor, widths: Sequence[int]) -> Tensor:
    triton = _triton(x, widths)
    if triton is None:
        return reference.quantise_delta(x, a_hat, rows, widths)
    with torch.cuda.device(x.device):  # Triton launches on the current device
        return triton.quantise_delta(x, a_hat, rows, widths)


def _add_product(
    codes: Tensor, rows: Tensor, widths: Sequence[int], weight: Weight, o_hat: Tensor | None, y: Tensor | None,
    geometry: Geometry, shifted: bool,
) -> None:  # fmt: skip
    triton = _triton(codes, widths)
    if triton is None:
        reference.add_product(codes, rows, widths, weight, o_hat, y, geometry, shifted)
        return
    with torch.cuda.device(codes.device):
        triton.add_product(codes, rows, widths, weight, o_hat, y, geometry, shifted)


_MOST_PARTS = 2  # of the input, in Triton's kernels


def _triton(x: Tensor, widths: Sequence[int]) -> ModuleType | None:
    """Returns Triton's kernels if x is on a GPU, Triton is installed, and the kernels take so many parts."""
    return _kernels() if x.is_cuda and len(widths) <= _MOST_PARTS else None


@functools.cache
def _kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("trtconvert.modiff.triton_kernels")


@torch.library.custom_op("trtconvert::modiff_delta", mutates_args=("a_hat", "rows"))
def _delta_operator(x: Tensor, a_hat: Tensor | None, rows: Tensor, widths: list[int]) -> Tensor:
    return _quantise_delta(x, a_hat, rows, widths)


@_delta_operator.register_fake
def _(x: Tensor, a_hat: Tensor | None, rows: Tensor, widths: list[int]) -> Tensor:
    return torch.empty_like(x, dtype=torch.int8)


@torch.library.custom_op("trtconvert::modiff_product", mutates_args=("o_hat", "y"))
def _product_operator(
    codes: Tensor, rows: Tensor, widths: list[int], weight: Tensor, scale: Tensor, sums: Tensor, bias: Tensor | None,
    o_hat: Tensor | None, y: Tensor | None, points: list[int], shifted: bool,
) -> None:  # fmt: skip
    height, width = weight.shape[1:3]
    geometry = Geometry((height, width), *((points[i], points[i + 1]) for i in (0, 2, 4)))
    _add_product(codes, rows, widths, Weight(weight, scale, sums, bias), o_hat, y, geometry, shifted)
