"""Block masks: pairs of a block of queries and a block of keys that attention computes, for sequences, images and videos.

The operator skips whole blocks of `BLOCK` queries × `BLOCK` keys. It computes the masks below at that granularity: a query may
see a few keys beyond its window, but never fewer than the window. Memory and time to make a mask are linear in the tokens, except
for the mask itself: 131,072 tokens have 1,024 × 1,024 entries.
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
    """Makes a mask: each query attends to the keys at most `window_size // 2` places away in one sequence.

    Computed by a few comparisons on the device, cheap enough for every call.

    Args:
        num_queries, num_keys: tokens; if the numbers differ, queries are spread evenly over the keys.
        window_size: keys around a query, at most `num_keys`.
        block_size: windows consist of whole blocks of this size, see `check_block_size`.
        sink_tokens: number of keys at the start that all queries see.
    Returns:
        [1, 1, ⌈Nq / BLOCK⌉, ⌈Nk / BLOCK⌉] boolean, true for blocks with a visible key.
    Raises:
        UserError: the window or the block size is not valid.
    """
    check_block_size(block_size)
    _check_tokens("window_size", window_size, 1, num_keys)
    _check_tokens("sink_tokens", sink_tokens, 0, num_keys)
    step = max(block_size, BLOCK)
    blocks_q, blocks_k = math.ceil(num_queries / step), math.ceil(num_keys / step)
    ratio = num_keys / num_queries

    def index(count: int) -> Tensor:
        return torch.arange(count, device=device, dtype=torch.float64)

    # Per block of queries: the first key in reach and the key after the last, rounded to edges of blocks.
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
    """Makes a mask: tokens of an image or a video attend to tokens near them in every direction.

    Args:
        sizes: of the grid, with tokens in raster order: (tokens,), (height, width) or (frames, height, width).
        window: width of the window in each direction: tokens see each other at a distance of at most half. One number stands
            for all directions.
        block_size: as in `window_mask`.
        text_tokens: number of prompt tokens beside the grid, which see all tokens and are seen by all.
        text: where the prompt lies in the sequence.
        sink_tokens: number of tokens at the start of the grid that all tokens see.
    Returns:
        [1, 1, B, B] boolean with B = ⌈(text_tokens + tokens of the grid) / BLOCK⌉, on the CPU.
    Raises:
        UserError: sizes, windows or tokens are not valid or do not fit each other.
    """
    windows = _checked_windows(sizes, window)
    check_block_size(block_size)
    _check_tokens("sink_tokens", sink_tokens, 0, math.prod(sizes))
    _check_tokens("text_tokens", text_tokens, 0, None)
    if text not in ("first", "last"):
        raise UserError(
            "the place of the text is unknown",
            expected="first or last",
            got=repr(text),
            remedy="use the order of prompt and image in the model's sequence",
        )

    tokens = math.prod(sizes) + text_tokens
    before = text_tokens if text == "first" else 0
    blocks = math.ceil(tokens / block_size)
    *outer, width = sizes
    *outer_windows, width_window = windows
    reach = width_window // 2
    # In each row of its neighbourhood a query sees one run of keys. `edges` holds +1 where a run starts and -1 after its end, by
    # block; the sum along the keys counts the runs that cover a block.
    edges = torch.zeros(blocks, blocks + 1, dtype=torch.int32)
    place = torch.arange(math.prod(sizes))
    *coordinates, x = torch.unravel_index(place, tuple(sizes))
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


def _checked_windows(sizes: Sequence[int], window: Sequence[int] | int) -> tuple[int, ...]:
    """Returns the window's width in each direction of a grid."""
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise UserError(
            "a neighbourhood needs a grid",
            expected="one to three positive sizes: (tokens,), (height, width) or (frames, height, width)",
            got=str(tuple(sizes)),
            remedy="count the patches of the latents: an image of 1024 × 1024 pixels is 64 × 64 tokens in Flux",
        )
    windows = (window,) * len(sizes) if isinstance(window, int) else tuple(window)
    if len(windows) != len(sizes):
        raise UserError(
            "the window and the grid have different numbers of directions",
            expected=f"{len(sizes)} numbers, or one for all",
            got=str(windows),
            remedy="give a size for each direction, in the grid's order",
        )
    for name, each, size in zip(("frames", "height", "width")[-len(sizes) :], windows, sizes, strict=True):
        _check_tokens(f"the window's {name}" if len(sizes) > 1 else "the window", each, 1, size)
    return windows


def check_block_size(block_size: int) -> None:
    """Raises a UserError if a block size is neither a divisor of `BLOCK` from 16 nor a multiple of `BLOCK`."""
    if block_size < 16 or (BLOCK % block_size and block_size % BLOCK):
        raise UserError(
            "the block size of block-sparse attention is not valid",
            expected=f"16, 32, 64 or {BLOCK} tokens, or a multiple of {BLOCK}",
            got=str(block_size),
            remedy=f"use {BLOCK}, the kernels' size; smaller sizes round windows less before blocks of {BLOCK} are formed",
        )


def broadcasts(mask: Tensor, full: tuple[int, ...]) -> bool:
    """True if the mask broadcasts to the shape of the weights, [B, H, Nq, Nk]."""
    tail = full[4 - mask.dim() :] if mask.dim() <= 4 else ()
    return len(tail) == mask.dim() and all(size in (1, whole) for size, whole in zip(mask.shape, tail, strict=True))


def block_shape(full: tuple[int, int, int, int]) -> str:
    """Describes the shape of a block mask for weights [B, H, Nq, Nk]."""
    batch, heads, queries, keys = full
    return f"[1 or {batch}, 1 or {heads}, {-(-queries // BLOCK)}, {-(-keys // BLOCK)}]"


def fits_blocks(mask: Tensor, full: tuple[int, int, int, int]) -> bool:
    """True if a block mask has the shape for weights [B, H, Nq, Nk]."""
    batch, heads, queries, keys = full
    blocks = (-(-queries // BLOCK), -(-keys // BLOCK))
    return mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads) and mask.shape[2:] == blocks


def check_mask(mask: Tensor, full: tuple[int, ...], caller: str) -> None:
    """Checks a mask.

    Args:
        full: shape of the weights, [B, H, Nq, Nk].
        caller: name for the message.
    Raises:
        UserError: the mask does not broadcast to `full`, or is neither boolean nor floating-point.
    """
    if not broadcasts(mask, full) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise UserError(
            f"{caller}: mask does not fit",
            expected=f"booleans or floating-point numbers that broadcast to {list(full)}",
            got=f"{list(mask.shape)} {mask.dtype}",
            remedy="correct mask",
        )


def check_block_mask(mask: Tensor, num_queries: int, num_keys: int, batch: int, heads: int) -> None:
    """Raises a UserError if a block mask has another shape or type, or, on the CPU, has a row of blocks without a key."""
    full = (batch, heads, num_queries, num_keys)
    if mask.dtype != torch.bool or not fits_blocks(mask, full):
        raise UserError(
            f"the block mask does not fit {num_queries} queries and {num_keys} keys",
            expected=f"a boolean tensor {block_shape(full)}, one entry for {BLOCK} × {BLOCK} tokens",
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
    """Converts a mask of blocks of `block_size` tokens to blocks of `BLOCK`: true if any of its blocks is."""
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
            remedy="use a smaller number" if high is not None and count > high else "use a larger number",
        )
