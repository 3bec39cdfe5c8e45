"""Block masks against windows: every pair of tokens within a window lies in a computed block."""

from __future__ import annotations

import math
import time

import pytest
import tolerances
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention import Int8Attention, neighbourhood_mask, window_mask
from trtconvert.attention.masks import check_block_mask
from trtconvert.attention.reference import BLOCK, expand_blocks
from trtconvert.errors import UserError
from trtconvert.models.recorded_calls import relative_error as error


def blocks_of(pairs: Tensor, block_size: int) -> Tensor:
    """[Nq, Nk] pairs, widened to whole blocks of `block_size` tokens, as blocks of `BLOCK`."""
    for size in (block_size, BLOCK):
        missing = [-n % size for n in pairs.shape]
        padded = torch.nn.functional.pad(pairs, (0, missing[1], 0, missing[0]))
        rows, columns = (n // size for n in padded.shape)
        blocks = padded.view(rows, size, columns, size).any(3).any(1)
        wide = blocks.repeat_interleave(size, 0).repeat_interleave(size, 1)
        pairs = wide[: pairs.shape[0], : pairs.shape[1]]
    return blocks


def near(sizes: tuple[int, ...], window: tuple[int, ...]) -> Tensor:
    """[N, N], one pair of tokens at a time."""
    places = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).view(-1, len(sizes))
    apart = (places[:, None] - places[None]).abs()
    return (apart <= torch.tensor([w // 2 for w in window])).all(-1)


@pytest.mark.parametrize("block_size", [16, 64, 128, 256])
@pytest.mark.parametrize(("tokens", "window"), [(1000, 1), (1000, 100), (700, 512), (1024, 1024), (100, 30)])
def test_windows_of_a_sequence(tokens: int, window: int, block_size: int) -> None:
    expected = blocks_of(near((tokens,), (window,)), block_size)
    found = window_mask(tokens, tokens, window, block_size=block_size)
    assert torch.equal(found, expected[None, None])
    assert torch.equal(neighbourhood_mask((tokens,), window, block_size=block_size), found)


@pytest.mark.parametrize("block_size", [32, 128])
@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        ((32, 32), (5, 5)),
        ((30, 45), (1, 45)),
        ((20, 70), (9, 3)),
        ((5, 12, 20), (3, 5, 7)),
        ((4, 8, 8), (4, 1, 8)),
        ((7, 1, 40), (1, 1, 1)),
    ],
)
def test_neighbourhoods_of_images_and_videos(sizes: tuple[int, ...], window: tuple[int, ...], block_size: int) -> None:
    expected = blocks_of(near(sizes, window), block_size)
    assert torch.equal(neighbourhood_mask(sizes, window, block_size=block_size)[0, 0], expected)


@pytest.mark.parametrize("text", ["first", "last"])
def test_text_and_sinks_are_dense(text) -> None:
    sizes, tokens, of_text, sinks = (24, 30), 720, 77, 3
    pairs = torch.zeros(tokens + of_text, tokens + of_text, dtype=torch.bool)
    grid = slice(of_text, None) if text == "first" else slice(0, tokens)
    words = slice(0, of_text) if text == "first" else slice(tokens, None)
    pairs[grid, grid] = near(sizes, (5, 5))
    pairs[words], pairs[:, words] = True, True
    pairs[:, grid.start or 0 : (grid.start or 0) + sinks] = True
    found = neighbourhood_mask(sizes, 5, text_tokens=of_text, text=text, sink_tokens=sinks, block_size=64)
    assert torch.equal(found[0, 0], blocks_of(pairs, 64))
    assert not found.all()
    with_sinks = window_mask(1000, 1000, 10, sink_tokens=130)
    assert with_sinks[..., :2].all() and not with_sinks[0, 0, 7, 2]


def test_queries_lie_evenly_among_other_numbers_of_keys() -> None:
    found = window_mask(256, 1024, 128)[0, 0]
    # Queries 0 to 127 lie at keys 0 to 511 and reach 64 further: 508 + 64 is in the fifth block.
    assert found.tolist() == [[True] * 5 + [False] * 3, [False] * 3 + [True] * 5]


def test_131072_tokens_take_seconds_and_megabytes() -> None:
    started = time.process_time()
    found = window_mask(131_072, 131_072, 512)
    video = neighbourhood_mask((32, 64, 64), (5, 9, 9))
    assert time.process_time() - started < 30
    assert found.shape == video.shape == (1, 1, 1024, 1024)
    assert found.sum() <= 1024 * 5 and video.float().mean() < 0.3


def test_block_sparse_attention_is_attention_under_the_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 600, 32, generator=generator) for _ in range(3))
    for options in (
        {"window_size": 200},
        {"window_size": 200, "block_size": 256, "sink_tokens": 4},
        {"window_size": (3, 9), "grid": (20, 26), "text_tokens": 80},
    ):
        attention = Int8Attention(2, 32, precision_mode="fp16", attention_type="block_sparse", **options)
        mask = attention.blocks(q, k)
        assert not mask.all()
        expected = scaled_dot_product_attention(q, k, v, expand_blocks(mask, 600, 600))
        assert error(attention(q, k, v, 500), expected) < tolerances.SAME_FLOAT
    smaller, larger = (
        Int8Attention(2, 32, attention_type="block_sparse", window_size=8, block_size=size).blocks(q, k)
        for size in (64, 256)
    )
    assert smaller.sum() < larger.sum()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: window_mask(100, 100, 101), "window_size"),
        (lambda: window_mask(100, 100, 0), "window_size"),
        (lambda: window_mask(100, 100, 8, sink_tokens=101), "sink_tokens"),
        (lambda: window_mask(100, 100, 8, block_size=100), "blocks"),
        (lambda: neighbourhood_mask((), 3), "grid"),
        (lambda: neighbourhood_mask((4, 4, 4, 4), 3), "grid"),
        (lambda: neighbourhood_mask((8, 0), 3), "grid"),
        (lambda: neighbourhood_mask((8, 8), (3, 3, 3)), "directions"),
        (lambda: neighbourhood_mask((8, 8), (3, 9)), "width"),
        (lambda: neighbourhood_mask((8, 8), (0, 3)), "height"),
        (lambda: neighbourhood_mask((8, 8), 3, sink_tokens=65), "sink_tokens"),
        (lambda: neighbourhood_mask((8, 8), 3, text_tokens=-1), "text_tokens"),
        (lambda: neighbourhood_mask((8, 8), 3, text="middle"), "place"),  # type: ignore[arg-type]
    ],
)
def test_mismatched_inputs_are_refused(make, named: str) -> None:
    with pytest.raises(UserError, match=named) as refusal:
        make()
    assert refusal.value.remedy


def test_masks_of_the_callers_own() -> None:
    q, k, v = (torch.randn(1, 2, 300, 32, generator=torch.Generator().manual_seed(1)) for _ in range(3))
    attention = Int8Attention(2, 32, precision_mode="fp16")
    mask = torch.eye(3, dtype=torch.bool).repeat(1, 2, 1, 1)
    expected = scaled_dot_product_attention(q, k, v, expand_blocks(mask, 300, 300))
    assert error(attention(q, k, v, 5, block_mask=mask), expected) < tolerances.SAME_FLOAT
    blocks = math.ceil(300 / BLOCK)
    for bad, named in (
        (torch.ones(1, 1, blocks, blocks + 1, dtype=torch.bool), "does not fit"),
        (torch.ones(1, 3, blocks, blocks, dtype=torch.bool), "does not fit"),
        (torch.ones(1, 1, blocks, blocks), "does not fit"),
        (torch.ones(blocks, blocks, dtype=torch.bool), "does not fit"),
        (mask & torch.tensor([True, False, True])[:, None], "without a key"),
    ):
        with pytest.raises(UserError, match=named):
            attention(q, k, v, 5, block_mask=bad)
        with pytest.raises(UserError, match=named):
            check_block_mask(bad, 300, 300, 1, 2)
