"""Triton's kernels of modulated layers against what specifies them: for a GPU's tests, and as a program for Triton's interpreter,
which a process has or has not."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtconvert.modiff import reference
from trtconvert.modiff.reference import PRODUCT, RESET, Geometry, Weight

_ALONE = Geometry()  # pixels by themselves


@dataclass(frozen=True)
class Case:
    """A layer and its input.

    Attributes:
        image: batch, height and width; rows of a linear layer are images of one pixel.
        channels, outputs: widths of the input's parts, and of the output. reset: samples that begin, of three by turns.
        by_row: a quantiser for each pixel, which linear layers have.
    """

    image: tuple[int, int, int]
    channels: tuple[int, ...]
    outputs: int
    geometry: Geometry = _ALONE
    symmetric: bool = True
    cached: bool = True
    bits: int = 4
    by_row: bool = False


#: whole tiles and ends of every kind, steps, edges, distances, two parts, zero points, no cache, and NaN in one sample.
CASES = (
    Case((3, 8, 8), (32,), 32, Geometry((3, 3), (1, 1), (1, 1))),
    Case((2, 9, 7), (48,), 40, Geometry((3, 3), (2, 2), (1, 0)), symmetric=False),
    Case((3, 6, 6), (24, 16), 33, Geometry((3, 3), (1, 1), (1, 1)), symmetric=False),
    Case((2, 7, 7), (20, 44), 16, Geometry((1, 1)), bits=8),
    Case((2, 9, 9), (16,), 16, Geometry((3, 2), (1, 1), (2, 1), (2, 1)), cached=False, symmetric=False),
    Case((70, 1, 1), (200,), 72, bits=3),
    Case((37, 1, 1), (64,), 72, symmetric=False, by_row=True),
)


def made(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor | None, Tensor, Weight, Tensor | None]:
    """x and â as rows of pixels, quantisers, the weight, and ô."""
    torch.manual_seed(7)
    batch, height, width = case.image
    channels, pixels = sum(case.channels), batch * height * width
    groups = pixels if case.by_row else batch
    before = torch.randn(pixels, channels)
    x = before + 0.1 * torch.randn(pixels, channels) + torch.linspace(-0.5, 1, channels)
    span = torch.rand(len(case.channels), groups) * 0.5 + 0.2
    rows = reference.quantiser(-span, span * 1.7, case.bits, case.symmetric, False)
    reset = torch.arange(groups) % 3 == 0 if case.cached else torch.ones(groups, dtype=torch.bool)
    whole = reference.quantiser(-8 * span, 6 * span, 8, case.symmetric, True)
    rows = torch.where(reset[None, :, None], whole, rows)
    rows[..., RESET] = reset.float()
    codes = torch.randint(-127, 128, (case.outputs, *case.geometry.kernel, channels), dtype=torch.int8)
    parts = codes.int().sum((1, 2)).split(list(case.channels), 1)
    scale = torch.rand(len(case.channels), case.outputs) * 0.01 + 0.001
    sums = torch.stack([part.sum(1) for part in parts]).int()
    bias = torch.randn(case.outputs)
    weight = Weight(codes.to(device), scale.to(device), sums.to(device), bias.to(device))
    shape = (batch, *case.geometry.output(height, width), case.outputs)
    x = x.to(device, dtype)
    if not case.cached:
        return x, None, rows.to(device), weight, None
    a_hat, o_hat = before.to(device, dtype), torch.randn(shape).to(device, dtype)
    a_hat[: len(a_hat) // groups] = torch.nan  # of a sample that is reset, which nobody reads
    o_hat[0] = torch.nan
    return x, a_hat, rows.to(device), weight, o_hat


def copied(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def compare(case: Case, dtype: torch.dtype, tiles: Any, device: str, spoilt: bool = False) -> dict[str, float]:
    """Codes, numbers of â, and quantisers that differ; relative errors of ô and of y, FP32; whether NaN is where it should be."""
    from trtconvert.modiff import triton_kernels

    x, a_hat, rows, weight, o_hat = made(case, dtype, device)
    if spoilt:
        x[-1, 3] = torch.inf
    batch, height, width = case.image
    a_wanted, o_wanted, rows_wanted = copied(a_hat), copied(o_hat), rows.clone()
    bounds = triton_kernels.delta_bounds(x, a_hat, rows, case.channels)
    measured = reference.measured(x, a_hat, rows, case.channels, False, case.symmetric)
    q = triton_kernels.quantise_delta(x, a_hat, rows, case.channels)
    wanted = reference.quantise_delta(x, a_wanted, rows_wanted, case.channels)
    good = rows_wanted[0, :, PRODUCT].isfinite()
    of_pixels = good.repeat_interleave(len(x) // len(good))
    found = {
        "codes": int((q != wanted)[of_pixels].sum()),
        "rows": int((rows.nan_to_num(-7) != rows_wanted.nan_to_num(-7)).sum()),
        "a_hat": 0
        if a_hat is None or a_wanted is None
        else int((a_hat.nan_to_num(-7) != a_wanted.nan_to_num(-7)).sum()),
        "measured": float((reference.of_bounds(bounds, rows, False, case.symmetric) - measured)[:, good].abs().max()),
        "spoilt": int((~good).sum()),
    }
    shape = (batch, *case.geometry.output(height, width), case.outputs)
    images = wanted.view(batch, height, width, -1)
    y, y_wanted = torch.empty(shape, device=device), torch.empty(shape, device=device)
    shifted = not case.symmetric
    triton_kernels.add_product(images, rows_wanted, case.channels, weight, o_hat, y, case.geometry, shifted, tiles)
    reference.add_product(images, rows_wanted, case.channels, weight, o_wanted, y_wanted, case.geometry, shifted)
    found["nan"] = int((y.isnan() != y_wanted.isnan()).sum())
    found["y"] = error(y, y_wanted)
    found["o_hat"] = 0.0 if o_hat is None or o_wanted is None else error(o_hat, o_wanted)
    return found


def error(x: Tensor, wanted: Tensor) -> float:
    finite = wanted.isfinite()
    return float((x.double() - wanted.double())[finite].norm() / wanted.double()[finite].norm())


if __name__ == "__main__":
    from trtconvert.modiff.triton_kernels import Tiles

    every = []
    for index, case in enumerate(CASES):
        tiles = (Tiles(16, 32, 32, 4, 2), Tiles(64, 16, 64, 4, 2))[index % 2]
        every.append(compare(case, torch.float32, tiles, "cpu", spoilt=index % 2 == 0))
    every.append(compare(CASES[0], torch.float16, Tiles(32, 32, 32, 4, 2), "cpu"))
    json.dump(every, sys.stdout)
