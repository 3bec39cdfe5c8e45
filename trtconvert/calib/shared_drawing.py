"""Drawings that several processes share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from trtconvert.bars import Steps
from trtconvert.calib.data import batches_of
from trtconvert.calib.distributed import Ranks
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.models.drawings import WatchedSampler, with_progress


def draw(
    model: DiffusionModel,
    denoiser: Denoiser,
    seeds: Sequence[int],
    bar: Steps,
    ranks: Ranks,
    *,
    batch: int,
    **options: Any,
) -> Tensor:
    """Draws samples [N, C, H, W] in [0, 1], one batch after the other.

    The processes take turns with the calls that the sampler makes of a batch, so that every call has the seeds that it has in one
    process alone, and its bits.

    Args:
        bar: receives one step per batch of all processes.
        batch: largest number of samples that the sampler gets at once.
        options: of the sampler, see `trtconvert.diffusion_model.Sampler`.
    Returns:
        The samples on rank 0, nothing on the others.
    Raises:
        RankLost: another process has ended.
    """
    batches = batches_of(len(seeds), batch)
    calls = WatchedSampler(model.sample).calls
    pieces = [piece for whole in batches for piece in (calls(whole) if ranks.size > 1 else [whole])]
    own = pieces[ranks.rank :: ranks.size]
    steps = len(batches) / max(1, len(own))  # the other processes take about as long
    model, drawn = with_progress(model, bar, steps), list[Tensor]()
    for piece in own:
        drawn.append(model.sample(denoiser, [seeds[i] for i in piece], **options))
        bar.step(steps)
    if ranks.size == 1:
        return torch.cat(drawn)
    by_rank = ranks.to_first([images.cpu() for images in drawn])
    in_turn = [images for turn in zip_longest(*by_rank) for images in turn if images is not None]
    return torch.cat(in_turn) if in_turn else torch.empty(0)
