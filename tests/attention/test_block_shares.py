"""Blocks that calibration data needs: exact search, packing, merging, and checks of stored blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trtconvert.attention.blocks import BlockObserver, BlockRows, SiteBlocks, mask_at, obstacle_to_blocks, pack, unpack
from trtconvert.attention.pruning import needed_blocks
from trtconvert.attention.reference import BLOCK
from trtconvert.attention.sites import Site, SiteCall
from trtconvert.errors import UserError

SITE = Site("a", 2, 1, 32, 32**-0.5, False, 600, 900)
SHARES = (0.05, 0.3)


def call(seed, timesteps=(10.0,), queries=600, keys=900):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        4 * torch.randn(len(timesteps), heads, n, 32, generator=generator)
        for heads, n in ((2, queries), (1, keys), (1, keys))
    )
    return SiteCall("a", q, k, v, None, 32**-0.5, torch.tensor(timesteps), "", lambda: q)


def test_the_blocks_that_are_left_lose_no_more_than_the_share():
    one = call(0, (1.0, 2.0))
    kept = needed_blocks(one.q, one.k, SHARES, one.scale)
    weights = (one.q @ one.k.repeat_interleave(2, 1).transpose(2, 3) * one.scale).softmax(-1)
    for batch in range(2):
        for head in range(2):
            for row in range(5):
                of_row = weights[batch, head, row * BLOCK : (row + 1) * BLOCK].mean(0)
                mass = torch.stack([part.sum() for part in of_row.split(BLOCK)])
                for level, share in enumerate(SHARES):
                    left_out = mass[~kept[batch, level, head, row]]
                    assert left_out.sum() <= share
                    # One more block would exceed the limit.
                    assert left_out.sum() + mass[kept[batch, level, head, row]].min() > share


def test_a_row_keeps_its_largest_block_whatever_may_be_lost():
    q = torch.zeros(1, 1, BLOCK, 32)
    assert needed_blocks(q, torch.zeros(1, 1, 4 * BLOCK, 32), [1 - 1e-9], 1.0).sum() == 1


@pytest.mark.parametrize("counts", [(1, 1), (3, 5), (4, 8)])
def test_packed_masks_come_back(counts):
    masks = torch.rand(2, 3, *counts) > 0.5
    assert torch.equal(unpack(pack(masks), *counts), masks)


def test_blocks_of_any_sample_or_batch_are_kept_in_their_bin():
    calls = [call(1, (10.0, 600.0)), call(2, (20.0, 30.0))]
    observer = BlockObserver([SITE], SHARES, 1000.0, 4)
    found = []
    for each in calls:
        observer.observe(each)
        found.append(observer.finish()["a"])
    blocks = SiteBlocks.of(BlockRows.merged(reversed(found)), SHARES, (5, 8), 4)
    assert blocks.flaw(4) == ""
    needed = [needed_blocks(each.q, each.k, SHARES, each.scale) for each in calls]
    for level, share in enumerate(SHARES):
        masks = blocks.level(share)
        assert torch.equal(masks[0], needed[0][0, level] | needed[1][0, level] | needed[1][1, level])
        assert torch.equal(masks[2], needed[0][1, level])
        assert masks[1].all() and masks[3].all()  # bins without calls
    mixed = blocks.mask([0.3, 0.0, 0.05, 0.0])
    assert torch.equal(mixed[0], blocks.level(0.3)[0]) and torch.equal(mixed[2], blocks.level(0.05)[2])
    assert torch.equal(mask_at(mixed, torch.tensor([600.0, 0.0]), 1000.0), mixed[[2, 0]])
    assert blocks.densities()[1].tolist() == [1, 1] and blocks.densities()[0, 1] == blocks.level(0.3)[0].double().mean()
    assert blocks.density([0.3, 0.0, 0.05, 0.0]) == pytest.approx(mixed.double().mean((1, 2, 3)).tolist(), rel=1e-12)
    assert torch.equal(blocks.at(0.05, torch.tensor([2, 0])), blocks.level(0.05)[[2, 0]])
    # One observer of all calls finds the same blocks.
    whole = BlockObserver([SITE], SHARES, 1000.0, 4)
    for each in calls:
        whole.observe(each)
    assert torch.equal(SiteBlocks.of(whole.finish()["a"], SHARES, (5, 8), 4).block_bits, blocks.block_bits)


def test_calls_of_another_size_are_refused():
    with pytest.raises(UserError, match="other numbers of tokens") as refused:
        BlockObserver([SITE], SHARES, 1000.0, 4).observe(call(0, keys=901))
    assert "901" in refused.value.got and "attention.sparse" in refused.value.remedy


def test_other_sites_are_not_looked_at():
    observer = BlockObserver([SITE], SHARES, 1000.0, 4)
    observer.observe(replace(call(0, keys=901), name="b"))
    assert observer.finish() == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"query_tokens": 385, "key_tokens": 385}, ""),
        ({"query_tokens": 384, "key_tokens": 384}, "384 keys, 385 are needed"),
        ({"key_tokens": 512}, "another sequence, 900 queries to 512 keys"),
        ({"masked": True}, "an attention mask of its own"),
        ({"folds": 4}, "4 batch elements"),
    ],
)
def test_sites_that_stay_dense_say_why(change, reason):
    found = obstacle_to_blocks(replace(SITE, **{"query_tokens": 900, **change}))
    assert reason in found and bool(reason) == bool(found)


def sound():
    rows = BlockRows(torch.tensor([0]), pack(torch.ones(1, 2, 2, 5, 8, dtype=torch.bool)))
    return SiteBlocks.of(rows, SHARES, (5, 8), 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_shares": torch.tensor([0.3, 0.05], dtype=torch.float64)}, "do not rise"),
        ({"block_shares": torch.tensor([0.3, float("nan")], dtype=torch.float64)}, "do not rise"),
        ({"block_shares": torch.tensor([0.0, 0.3], dtype=torch.float64)}, "do not rise"),
        ({"block_counts": torch.tensor([5, 0])}, "two positive numbers"),
        ({"block_counts": torch.tensor([5, 9])}, "where [2, 2, heads, 6]"),
        ({"block_bits": torch.zeros(2, 2, 2, 5, dtype=torch.uint8)}, "leave queries without a key"),
        ({"block_bits": torch.zeros(3, 2, 2, 5, dtype=torch.uint8)}, "where [2, 2, heads, 5]"),
    ],
)
def test_blocks_that_cannot_be_used_are_told(change, said):
    assert sound().flaw(2) == ""
    assert said in replace(sound(), **change).flaw(2)
