"""Block masks of attention sites for engines: which sites may have them, and which blocks the calibration data needs.

A block of 128 queries × 128 keys is needed in a timestep bin if any sample in any step of the bin needs it, see
`pruning.needed_blocks`. The blocks of several batches, runs or machines merge by `or`, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtconvert.attention.pruning import needed_blocks
from trtconvert.attention.reference import BLOCK, timestep_bin
from trtconvert.attention.sites import Site, SiteCall
from trtconvert.errors import UserError
from trtconvert.noted import TensorFields

MIN_KEY_BLOCKS = 4
"""Sites with fewer blocks of keys stay dense: there is too little to leave out."""

MAX_TABLE_BYTES = 4 << 30
"""Limit for the masks of all sites, one byte per block, head and timestep bin: exports hold the masks in memory, and engines on
the GPU. Videos of 32,760 tokens take a quarter of a gigabyte, videos of 118,800 tokens more than the limit."""

_ONES = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8))
"""[256] number of set bits of each byte."""


def obstacle_to_blocks(site: Site) -> str:
    """Returns why a converted site stays dense; empty if it may have a block mask."""
    blocks = math.ceil(site.key_tokens / BLOCK)
    if (reason := obstacle_at_any_size(site)) or blocks >= MIN_KEY_BLOCKS:
        return reason
    return f"it has {site.key_tokens} keys, {(MIN_KEY_BLOCKS - 1) * BLOCK + 1} are needed for {MIN_KEY_BLOCKS} blocks"


def obstacle_at_any_size(site: Site) -> str:
    """Returns why a site could have no block mask at any size; empty if only the number of tokens may be in the way."""
    if site.query_tokens != site.key_tokens:
        # A prompt longer than the calibration's prompts would need more blocks.
        return f"it attends to another sequence, {site.query_tokens} queries to {site.key_tokens} keys"
    if site.masked:
        return "it has an attention mask of its own"
    if site.folds > 1:
        return f"its samples have {site.folds} batch elements each (frames or windows)"
    return ""


def block_counts(site: Site) -> tuple[int, int]:
    """(blocks of queries, blocks of keys)."""
    return math.ceil(site.query_tokens / BLOCK), math.ceil(site.key_tokens / BLOCK)


def table_bytes(sites: Iterable[Site], bins: int) -> int:
    """Returns the size of the masks of all sites in a graph and its engines if no two timestep bins share a mask."""
    return sum(bins * site.heads * math.prod(block_counts(site)) for site in sites if not obstacle_to_blocks(site))


@dataclass(frozen=True)
class BlockRows(TensorFields):
    """Blocks that were needed at one site, packed by `pack`. On the CPU.

    Attributes:
        bin: [R] INT64 timestep bins with calls; rows of one batch have distinct bins.
        bits: [R, L, H, bytes] U8, by the shares of attention that may be lost.
    """

    bin: Tensor
    bits: Tensor

    @staticmethod
    def merged(parts: Iterable[BlockRows]) -> BlockRows:
        """Returns the blocks that any of the parts needs; bins in ascending order."""
        found: dict[int, Tensor] = {}
        for part in parts:
            for index, bits in zip(part.bin.tolist(), part.bits, strict=True):
                found[index] = found[index] | bits if index in found else bits
        seen = sorted(found)
        return BlockRows(torch.tensor(seen), torch.stack([found[index] for index in seen]))


@dataclass(frozen=True)
class SiteBlocks(TensorFields):
    """The blocks that a site needs, as stored in a calibration: T timestep bins, L levels.

    Attributes:
        block_shares: [L] FP64, rising: the share of its attention that a block of queries may lose.
        block_counts: [2] INT64, blocks of queries and of keys.
        block_bits: [T, L, H, bytes] U8, packed by `pack`. All ones in bins without calls.
    """

    block_shares: Tensor
    block_counts: Tensor
    block_bits: Tensor

    @staticmethod
    def of(rows: BlockRows, shares: Sequence[float], counts: tuple[int, int], bins: int) -> SiteBlocks:
        """Makes the stored form of the rows of all batches."""
        every = pack(torch.ones(1, len(shares), rows.bits.shape[2], *counts, dtype=torch.bool))
        bits = every.repeat(bins, 1, 1, 1)
        bits[rows.bin] = rows.bits
        return SiteBlocks(torch.tensor(shares, dtype=torch.float64), torch.tensor(counts), bits)

    @property
    def shares(self) -> list[float]:
        return self.block_shares.tolist()

    def level(self, share: float) -> Tensor:
        """[T, H, Bq, Bk] boolean, the blocks at one of `shares`."""
        return self.at(share, torch.arange(len(self.block_bits)))

    def mask(self, shares: Sequence[float]) -> Tensor:
        """[T, H, Bq, Bk] boolean: the blocks of each timestep bin at its share; share 0 gives all blocks."""
        found = torch.ones(len(shares), self.block_bits.shape[2], *self.block_counts.tolist(), dtype=torch.bool)
        for share in sorted(set(shares) - {0.0}):
            chosen = torch.tensor([each == share for each in shares])
            found[chosen] = self.level(share)[chosen]
        return found

    def at(self, share: float, bins: Tensor) -> Tensor:
        """[B, H, Bq, Bk] boolean, the blocks at one of `shares` in timestep bins [B]."""
        return unpack(self.block_bits[bins, self.shares.index(share)], *self.block_counts.tolist())

    def densities(self) -> Tensor:
        """[T, L] FP64, the share of needed blocks. Counted on packed bits: masks of long sequences have gigabytes."""
        heads, blocks = self.block_bits.shape[2], math.prod(self.block_counts.tolist())
        needed = torch.stack([_ONES[bits.int()].sum((1, 2)) for bits in self.block_bits])
        return needed.double() / (heads * blocks)

    def density(self, shares: Sequence[float]) -> list[float]:
        """Returns the share of blocks that each timestep bin computes at its share, see `mask`."""
        rows = self.densities().tolist()
        return [row[self.shares.index(share)] if share else 1.0 for row, share in zip(rows, shares, strict=True)]

    def flaw(self, bins: int) -> str:
        """Returns why the blocks cannot be used; empty if they can."""
        shares, counts, bits = self.block_shares, self.block_counts, self.block_bits
        if shares.dim() != 1 or shares.dtype != torch.float64 or not len(shares) or not _rise(shares.tolist()):
            return "with block_shares that do not rise between 0 and 1"
        if tuple(counts.shape) != (2,) or counts.dtype != torch.int64 or not (counts > 0).all():
            return "with block_counts that are not two positive numbers"
        size = -(-math.prod(counts.tolist()) // 8)
        if bits.dim() != 4 or bits.dtype != torch.uint8 or tuple(bits.shape[i] for i in (0, 1, 3)) != (
            bins, len(shares), size
        ):  # fmt: skip
            return f"with block_bits of {list(bits.shape)} {bits.dtype}, where [{bins}, {len(shares)}, heads, {size}] is needed"
        if (unused := -math.prod(counts.tolist()) % 8) and (bits[..., -1] & ((1 << unused) - 1)).any():
            return "with block_bits beyond the last block"
        if not all(self.level(share).any(-1).all() for share in self.shares):
            return "with block_bits that leave queries without a key"
        return ""


def _rise(shares: list[float]) -> bool:
    return all(low < high for low, high in zip([0.0, *shares], [*shares, 1.0], strict=True))


def pack(masks: Tensor) -> Tensor:
    """[…, Bq, Bk] boolean → […, ⌈Bq · Bk / 8⌉] U8."""
    return torch.from_numpy(np.packbits(masks.flatten(-2).cpu().numpy(), axis=-1))


def unpack(bits: Tensor, queries: int, keys: int) -> Tensor:
    """Reverses `pack`."""
    flat = np.unpackbits(bits.numpy(), axis=-1, count=queries * keys)
    return torch.from_numpy(flat.astype(bool)).unflatten(-1, (queries, keys))


class BlockObserver:
    """Notes which blocks the sites' calls need.

    Args:
        sites: sites that may have block masks, see `obstacle_to_blocks`.
        shares: shares of attention that may be lost, rising.
        timestep_max: see `DiffusionModel`; bins: number of timestep bins.
    """

    def __init__(self, sites: Sequence[Site], shares: Sequence[float], timestep_max: float, bins: int) -> None:
        self._tokens = {site.name: (site.query_tokens, site.key_tokens) for site in sites}
        self._shares, self._timestep_max, self._bins = shares, timestep_max, bins
        self._found: dict[str, BlockRows] = {}

    def observe(self, call: SiteCall) -> None:
        """Notes a call of one of the sites; UserError if it has other numbers of tokens than its site."""
        wanted = self._tokens.get(call.name)
        if wanted is None:
            return
        if (got := (call.q.shape[2], call.k.shape[2])) != wanted:
            raise UserError(
                f"{call.name} was called with other numbers of tokens than the block masks are for",
                expected=f"{wanted[0]} queries and {wanted[1]} keys, as at the sizes that the engine is tuned for",
                got=f"{got[0]} and {got[1]}",
                remedy="calibrate on data of the engine's size only, or set attention.sparse to off",
            )
        needed = pack(needed_blocks(call.q, call.k, self._shares, call.scale))
        index = timestep_bin(call.timestep, self._timestep_max, self._bins).cpu()
        before = [self._found[call.name]] if call.name in self._found else []
        self._found[call.name] = BlockRows.merged([*before, BlockRows(index, needed)])

    def finish(self) -> dict[str, BlockRows]:
        """Returns the needed blocks since the last `finish`."""
        found, self._found = self._found, {}
        return found


def mask_at(masks: Tensor, timestep: Tensor, timestep_max: float) -> Tensor:
    """Returns the block mask of each element's timestep: [T, H, Bq, Bk], [B] → [B, H, Bq, Bk]."""
    index = timestep_bin(timestep, timestep_max, len(masks))
    return masks[index.to(masks.device)].to(timestep.device)  # indexed before the move: all bins may have gigabytes
