"""Drawings that several processes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, islice, product, zip_longest
from operator import itemgetter
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
    """Draws the samples of one denoiser, see `draw_each`."""
    (samples,) = draw_each(model, [lambda: denoiser], seeds, bar, ranks, batch=batch, **options)
    return samples


def draw_each(
    model: DiffusionModel,
    denoisers: Sequence[Callable[[], Denoiser]],
    seeds: Sequence[int],
    bar: Steps,
    ranks: Ranks,
    *,
    batch: int,
    **options: Any,
) -> list[Tensor]:
    """Draws samples [N, C, H, W] in [0, 1] with each denoiser, one batch after the other.

    The processes take turns with the drawings that the sampler makes of a batch. Every drawing has the seeds that it has in one
    process alone, and therefore the same bits.

    Args:
        denoisers: return a denoiser. A process calls those that it draws with.
        bar: receives one step per batch and denoiser.
        batch: largest number of samples that the sampler gets at once.
        options: of the sampler, see `trtconvert.diffusion_model.Sampler`.
    Returns:
        The samples of each denoiser on rank 0; empty tensors on the others.
    Raises:
        RankLost: another process has ended.
    """
    batches = batches_of(len(seeds), batch)
    parts = WatchedSampler(model.sample).drawings
    pieces = [piece for whole in batches for piece in (parts(whole) if ranks.size > 1 else [whole])]
    own = [*product(range(len(denoisers)), pieces)][ranks.rank :: ranks.size]
    steps = len(denoisers) * len(batches) / max(1, len(own))  # the other processes take about as long
    model, drawn = with_progress(model, bar, steps), list[Tensor]()
    for number, of_denoiser in groupby(own, key=itemgetter(0)):
        denoiser = denoisers[number]()
        for _, piece in of_denoiser:
            samples = model.sample(denoiser, [seeds[i] for i in piece], **options)
            drawn.append(samples if ranks.size == 1 else samples.cpu())
            bar.step(steps)
    by_rank = ranks.to_first(drawn)
    if not by_rank:
        return [torch.empty(0)] * len(denoisers)
    in_turn = [samples for turn in zip_longest(*by_rank) for samples in turn if samples is not None]
    return [torch.cat([*islice(one, len(pieces))]) for one in [iter(in_turn)] * len(denoisers)]
