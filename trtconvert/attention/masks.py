"""Block masks: which blocks of queries attend to which blocks of keys, for sequences, images and videos.

The operator skips blocks of `BLOCK` queries × `BLOCK` keys whole: what it computes is the mask below at that granularity, so
that a query may see a few keys beyond its window, and never one less. Memory and time to make a mask are linear in the tokens,
but for the mask itself, of which 131,072 tokens have 1,024 × 1,024 entries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from trtconvert.attention.reference import BLOCK
from trtconvert.errors import UserError


def window_mask(
    num_queries: int,
    num_keys: int,
    window_size: int,
    *,
    block_size: int = BLOCK,
    sink_tokens: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Each query attends to the keys at most `window_size // 2` places away, as places of one sequence.

    Made of a few comparisons on the device, so that it may be made anew in each call.

    Args:
        num_queries, num_keys: tokens; where keys are more or fewer, queries lie evenly among them.
        window_size: keys around a query, at most `num_keys`.
        block_size: windows are those of whole blocks of so many tokens, see `check_block_size`.
        sink_tokens: so many keys at the start are seen by all queries.
    Returns:
        [1, 1, ⌈Nq / BLOCK⌉, ⌈Nk / BLOCK⌉] boolean, true where something is seen.
    Raises:
        UserError: no such window or block size.
    """
    check_block_size(block_size)
    _check_tokens("window_size", window_size, 1, num_keys)
    _check_tokens("sink_tokens", sink_tokens, 0, num_keys)
    step = max(block_size, BLOCK)
    blocks_q, blocks_k = math.ceil(num_queries / step), math.ceil(num_keys / step)
    ratio = num_keys / num_queries

    def index(count: int) -> Tensor:
        return torch.arange(count, device=device, dtype=torch.float64)

    # The first key that the queries of a block reach, and the one behind the last, at the edges of blocks of keys.
    first_query, last_query = index(blocks_q) * step, ((index(blocks_q) + 1) * step).clamp_max(num_queries) - 1
    first = (first_query * ratio - window_size // 2).div(block_size).floor() * block_size
    behind = ((last_query * ratio + window_size // 2).div(block_size).floor() + 1) * block_size
    start = index(blocks_k) * step
    seen = (start + step > first[:, None]) & (start < behind[:, None])
    if sink_tokens:
        seen = seen | (start < sink_tokens)
    if step > BLOCK:
        seen = seen.repeat_interleave(step // BLOCK, 0).repeat_interleave(step // BLOCK, 1)
    return seen[None, None, : math.ceil(num_queries / BLOCK), : math.ceil(num_keys / BLOCK)]


def neighbourhood_mask(
    sizes: Sequence[int],
    window: Sequence[int] | int,
    *,
    block_size: int = BLOCK,
    text_tokens: int = 0,
    text: Literal["first", "last"] = "last",
    sink_tokens: int = 0,
) -> Tensor:
    """Tokens of an image or a video attend to those near them in every direction.

    Args:
        sizes: of the grid that the tokens fill in raster order: (height, width) or (frames, height, width); (tokens,) too.
        window: how far apart tokens may be that see each other, in each direction: at most half of it on either side. One number
            stands for all.
        block_size: as in `window_mask`.
        text_tokens: of a prompt beside the grid's, which see all and are seen by all; text: where they lie in the sequence.
        sink_tokens: the first so many tokens of the grid are seen by all.
    Returns:
        [1, 1, B, B] boolean with B = ⌈(text_tokens + tokens of the grid) / BLOCK⌉, on the CPU.
    Raises:
        UserError: sizes, windows or tokens that do not fit each other.
    """
    check_block_size(block_size)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise UserError(
            "a neighbourhood needs a grid",
            expected="one to three positive sizes: (tokens,), (height, width) or (frames, height, width)",
            got=str(tuple(sizes)),
            remedy="count the latents' patches: an image of 1024 × 1024 pixels is 64 × 64 tokens in Flux",
        )
    windows = (window,) * len(sizes) if isinstance(window, int) else tuple(window)
    if len(windows) != len(sizes):
        raise UserError(
            "a neighbourhood's window has other directions than its grid",
            expected=f"{len(sizes)} numbers, or one for all",
            got=str(windows),
            remedy="give a size for each direction, in the grid's order",
        )
    for name, each, size in zip(("frames", "height", "width")[-len(sizes) :], windows, sizes, strict=True):
        _check_tokens(f"the window's {name}" if len(sizes) > 1 else "the window", each, 1, size)
    _check_tokens("sink_tokens", sink_tokens, 0, math.prod(sizes))
    _check_tokens("text_tokens", text_tokens, 0, None)
    if text not in ("first", "last"):
        raise UserError(
            "text has no such place",
            expected="first or last",
            got=repr(text),
            remedy="look at how the model joins them",
        )

    tokens = math.prod(sizes) + text_tokens
    before = text_tokens if text == "first" else 0
    blocks = math.ceil(tokens / block_size)
    *outer, width = sizes
    *outer_windows, width_window = windows
    reach = width_window // 2
    # A query sees one run of keys in each row of its neighbourhood. Runs are counted up where they begin and down after
    # they end, block by block, and summed along the keys.
    edges = torch.zeros(blocks, blocks + 1, dtype=torch.int32)
    place = torch.arange(math.prod(sizes))
    x = place % width
    rows = place // width
    coordinates = []
    for size in reversed(outer):
        coordinates.append(rows % size)
        rows = rows // size
    coordinates.reverse()
    low, high = (x - reach).clamp_min(0), (x + reach).clamp_max(width - 1)
    query = (place + before) // block_size
    for shift in itertools.product(*(range(-(w // 2), w // 2 + 1) for w in outer_windows)):
        row, inside = torch.zeros_like(place), torch.ones_like(place, dtype=torch.bool)
        for at, delta, size in zip(coordinates, shift, outer, strict=True):
            inside &= (at + delta >= 0) & (at + delta < size)
            row = row * size + at + delta
        starts = ((row * width + low + before) // block_size)[inside]
        ends = ((row * width + high + before) // block_size + 1)[inside]
        one = torch.ones(len(starts), dtype=torch.int32)
        edges.index_put_((query[inside], starts), one, accumulate=True)
        edges.index_put_((query[inside], ends), -one, accumulate=True)
    seen = edges[:, :-1].cumsum(1) > 0

    def blocks_of(start: int, count: int) -> slice:
        return slice(start // block_size, math.ceil((start + count) / block_size))

    if text_tokens:
        of_text = blocks_of(0 if text == "first" else tokens - text_tokens, text_tokens)
        seen[of_text], seen[:, of_text] = True, True
    if sink_tokens:
        seen[:, blocks_of(before, sink_tokens)] = True
    return _at_kernel_blocks(seen, block_size, tokens)[None, None]


def check_block_size(block_size: int) -> None:
    """
    Raises:
        UserError: the operator's blocks of `BLOCK` tokens are neither made of such blocks nor make them up.
    """
    if block_size < 16 or (BLOCK % block_size and block_size % BLOCK):
        raise UserError(
            "block-sparse attention cannot have such blocks",
            expected=f"16, 32, 64 or {BLOCK} tokens, or a multiple of {BLOCK}",
            got=str(block_size),
            remedy=f"take {BLOCK}, the kernels' own; smaller ones round windows less before they come to {BLOCK}",
        )


def check_mask(mask: Tensor, full: tuple[int, ...], caller: str) -> None:
    """
    Args:
        full: shape of the weights, [B, H, Nq, Nk].
        caller: whom the mask was given to.
    Raises:
        UserError: not a mask for such weights.
    """
    tail = full[4 - mask.dim() :] if mask.dim() <= 4 else ()
    fits = len(tail) == mask.dim() and all(size in (1, whole) for size, whole in zip(mask.shape, tail, strict=True))
    if not fits or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise UserError(
            f"{caller}: mask does not fit",
            expected=f"booleans or floating-point numbers that broadcast to {list(full)}",
            got=f"{list(mask.shape)} {mask.dtype}",
            remedy="correct mask",
        )


def check_block_mask(mask: Tensor, num_queries: int, num_keys: int, batch: int, heads: int) -> None:
    """
    Raises:
        UserError: not a block mask for such tensors, or, where it lies on the CPU, one that leaves a row of blocks without a key.
    """
    blocks = (math.ceil(num_queries / BLOCK), math.ceil(num_keys / BLOCK))
    wanted = f"[1 or {batch}, 1 or {heads}, {blocks[0]}, {blocks[1]}]"
    fits = mask.dim() == 4 and tuple(mask.shape[2:]) == blocks
    if mask.dtype != torch.bool or not fits or mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, heads):
        raise UserError(
            f"the block mask does not fit {num_queries} queries and {num_keys} keys",
            expected=f"a boolean tensor {wanted}, one entry for {BLOCK} × {BLOCK} tokens",
            got=f"{list(mask.shape)} {mask.dtype}",
            remedy="make it with window_mask or neighbourhood_mask for these sizes",
        )
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not mask.any(-1).all():
        empty = (~mask.any(-1)).nonzero()[0].tolist()
        raise UserError(
            "the block mask leaves queries without a key",
            expected="a true entry in every row",
            got=f"none for batch element {empty[0]}, head {empty[1]}, queries from {empty[2] * BLOCK}",
            remedy="keep each block's own keys (the diagonal), or sink tokens",
        )


def _at_kernel_blocks(seen: Tensor, block_size: int, tokens: int) -> Tensor:
    """A mask of blocks of `block_size` tokens in blocks of `BLOCK`: true where any of them is."""
    wanted = math.ceil(tokens / BLOCK)
    if block_size >= BLOCK:
        repeat = block_size // BLOCK
        return seen.repeat_interleave(repeat, 0).repeat_interleave(repeat, 1)[:wanted, :wanted].clone()
    parts = BLOCK // block_size
    missing = wanted * parts - len(seen)
    padded = torch.nn.functional.pad(seen, (0, missing, 0, missing))
    return padded.view(wanted, parts, wanted, parts).any(3).any(1)


def _check_tokens(name: str, count: int, low: int, high: int | None) -> None:
    if count < low or (high is not None and count > high):
        raise UserError(
            f"{name} does not fit the sequence",
            expected=f"{low} to {high} tokens" if high is not None else f"{low} or more tokens",
            got=str(count),
            remedy="take a smaller one" if high is not None and count > high else "take a larger one",
        )
