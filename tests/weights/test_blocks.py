"""Block-wise INT8 against its definition, block by block in float64."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from trtconvert.linear.reference import quantise_weight
from trtconvert.weights import blocks

SHAPES = [(1, 1), (5, 300), (128, 128), (129, 127), (300, 8500), (4500, 130)]


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.Generator().manual_seed(rows * columns)
    sizes = 10 ** torch.empty(rows, columns).uniform_(-3, 1, generator=drawn)
    return (torch.randn(rows, columns, generator=drawn) * sizes).to(dtype)


def each_block(x: Tensor) -> list[Tensor]:
    return [block.double() for rows in x.split(128) for block in rows.split(128, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_quantised_by_their_largest(shape, dtype):
    x = matrix(*shape, dtype)
    scale = blocks.scales(blocks.measure(x), "block")
    assert tuple(scale.shape) == (-(-shape[0] // 128), -(-shape[1] // 128))
    stored, error = blocks.quantise(x, scale)
    restored = blocks.dequantise(stored, scale, torch.float64)
    for block, whole, back, step in zip(
        each_block(x), each_block(stored), each_block(restored), scale.flatten().double(), strict=True
    ):
        assert float(step) == pytest.approx(float(block.abs().amax()) / 127, rel=1e-6)
        assert int(whole.abs().amax()) == 127
        assert float((back - block).abs().amax()) <= float(step) * 0.5001
    wanted = float((restored - x.double()).norm() / x.double().norm())
    assert error == pytest.approx(wanted, rel=1e-3)  # squares are added up in FP32
    assert blocks.relative_error(x, scale) == error


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_channels_are_those_of_layers_in_engines(shape):
    x = matrix(*shape)
    scale = blocks.scales(blocks.measure(x), "channel")
    stored, _ = blocks.quantise(x, scale)
    of_engines, its_scales = quantise_weight(x)
    assert torch.equal(scale, its_scales) and torch.equal(stored, of_engines)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics_are_those_of_each_block(shape):
    x = matrix(*shape)
    found = blocks.measure(x, histogram=True)
    for block, peak, power, count in zip(
        each_block(x), found.blocks.flatten(), found.squares.flatten(), found.outliers.flatten(), strict=True
    ):
        assert float(peak) == float(block.abs().amax())
        assert float(power) == pytest.approx(float(block.square().sum()), rel=1e-4)
        assert int(count) == int((block.abs() > 4 * block.square().mean().sqrt()).sum())
    assert torch.equal(found.rows, x.abs().amax(1))
    largest = torch.frexp(torch.tensor(found.amax)).exponent
    below = (largest - torch.frexp(x).exponent).clamp(0, 15)
    assert found.histogram == torch.bincount(below.flatten(), minlength=16).tolist()


@pytest.mark.parametrize("size", [0.0, 1e-43, 1e-40, 1e-38, 1e-26, 1e-5, 1e25, 1e38])
@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
def test_scales_follow_magnitudes_to_the_ends_of_fp32(size, granularity):
    x = torch.randn(130, 130, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * size
    x[7] = 0
    found = blocks.measure(x, histogram=True)
    scale = blocks.scales(found, granularity)
    stored, error = blocks.quantise(x, scale)
    restored = blocks.dequantise(stored, scale, torch.float32).double()
    assert found.nonfinite == 0 and sum(found.histogram) == x.numel()
    assert bool((scale > 0).all()) and bool(scale.isfinite().all())
    assert float(found.squares.sum()) == pytest.approx(float(x.double().square().sum()), rel=1e-4)
    assert error == pytest.approx(float((restored - x.double()).norm() / max(float(x.double().norm()), 1e-300)))
    # The smallest numbers of FP32 lie as far apart as fewer steps.
    assert error == 0 if size == 0 else 0 < error < (0.02 if size < 1e-40 else 0.01)


@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
def test_the_largest_number_of_fp32_is_restored(granularity):
    x = torch.full((130, 130), torch.finfo(torch.float32).min).triu(1)
    scale = blocks.scales(blocks.measure(x), granularity)
    stored, error = blocks.quantise(x, scale)
    assert error < 1e-6 and torch.allclose(blocks.dequantise(stored, scale, torch.float32), x)


@pytest.mark.parametrize("granularity", ["block", "channel", "tensor"])
def test_the_error_of_what_vanishes_is_all_of_it(granularity):
    """Scales of the wrong size make zeros: their squares vanish in FP32, and so do those of the weights."""
    x = torch.full((130, 130), 1e-26)
    scale = torch.full_like(blocks.scales(blocks.measure(x), granularity), 2.0**-20)
    assert blocks.relative_error(x, scale) == 1


def test_values_that_are_not_finite_are_counted():
    x = matrix(300, 300)
    x[0, 0], x[299, 299], x[150, 7] = torch.nan, torch.inf, -torch.inf
    assert blocks.measure(x).nonfinite == 3


def test_one_large_weight_spoils_its_block_alone():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    x[3, 5] = 1000
    scale = blocks.scales(found := blocks.measure(x), "block")
    assert int(found.outliers[0, 0]) == 1
    assert float(scale[0, 0]) > 7 and float(scale[1:].amax()) < 0.05


def test_blocks_of_two_threads_leave_the_program_s_number_of_threads():
    before, inside, begun = torch.get_num_threads(), threading.Event(), threading.Event()

    def first() -> None:
        with blocks.threads_by_tile():
            inside.set()
            begun.wait(10)

    def second() -> int:
        torch.zeros(9).sum()  # this thread takes its number of threads from the program's
        begun.set()
        with blocks.threads_by_tile():
            return blocks._threads

    try:
        torch.set_num_threads(3)
        with ThreadPoolExecutor(2) as pool:
            ended = pool.submit(first)
            assert inside.wait(10) and pool.submit(second).result() == 3
            ended.result()
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 3 and blocks._threads == 1
    finally:
        torch.set_num_threads(before)


def test_threads_find_what_one_finds():
    """Bit for bit, on tiles that do not end with the matrix."""
    x = matrix(700, 9000)

    def found() -> tuple[list[Tensor], list[int], Tensor, float]:
        measured = blocks.measure(x, histogram=True)
        stored, error = blocks.quantise(x, blocks.scales(measured, "block"))
        return [measured.blocks, measured.rows, measured.squares, measured.outliers], measured.histogram, stored, error

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = found()
        torch.set_num_threads(3)
        with blocks.threads_by_tile():
            together = found()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(alone[0], together[0], strict=True))
    assert alone[1] == together[1] and torch.equal(alone[2], together[2]) and alone[3] == together[3]
