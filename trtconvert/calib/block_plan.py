"""Block masks in plans: their cost in time, and the sites that get a mask."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trtconvert.attention.blocks import SiteBlocks
from trtconvert.attention.modes import Mode
from trtconvert.attention.sites import Site
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.diffusion_model import DiffusionModel, require_one_size
from trtconvert.errors import UserError
from trtconvert.quant.decision import Decision, Unit
from trtconvert.recipe import PlanSection


def require_calibrated_size(model: DiffusionModel, dims: Mapping[str, tuple[int, int, int]]) -> None:
    """Checks that an engine with block masks takes the calibration's sizes alone.

    Args:
        dims: symbolic dimension: (min, opt, max), of the engine.
    Raises:
        UserError: sizes other than the batch vary, or differ from the calibration's.
    """
    require_one_size(
        model,
        dims,
        "attention.sparse needs one size of everything but the batch: block masks are for one number of tokens",
        "set attention.sparse to off",
    )
    batch = model.inputs[0].shape[0]
    for name, (_, size, _) in dims.items():
        own = model.dims[name][1] if name in model.dims else size
        if name != batch and size != own:
            raise UserError(
                "attention.sparse needs the size that the model is calibrated at: block masks are for one number of tokens",
                expected=f"{name}: {own} in the engine section",
                got=str(size),
                remedy=f"set {name} to {own} in engine.shapes, load the model in the other size (for a pipeline: "
                "model.options), or set attention.sparse to off",
            )


def stated_blocks(
    share: float,
    section: PlanSection,
    sites: Iterable[Site],
    decisions: Mapping[str, Decision],
    blocks: Mapping[str, SiteBlocks],
    batch: int,
    calls: Sequence[int],
) -> tuple[dict[str, Decision], dict[str, str]]:
    """Returns the decisions about sites if a recipe sets one share of attention for all block masks.

    Args:
        share: the recipe's share; sites, decisions: converted sites without masks; batch: batch size of the times.
        calls: [T] calls of the denoiser in each bin of the calibration. Bins without calls are ignored: one of two denoisers
            never reaches the other's bins.
    Returns:
        All decisions, and the reasons of sites of `blocks` that get no mask: with most blocks needed, a mask costs time.
    Raises:
        UserError: as `KernelCost.load`.
    """
    cost = KernelCost.load(section.kernel_cost, masks=True)
    found, dense = dict(decisions), {}
    for site in sites:
        if (of_site := blocks.get(site.name)) is None:
            continue
        shape, choices = AttentionShape.of(site, batch), decisions[site.name].choices
        modes = [Mode(choice.mode) for choice in choices]
        densities = of_site.density([share] * len(modes))
        # A mode without times, such as FP8 in older tables, takes FP16's: only the ratio matters.
        seconds = [
            min(cost.seconds(shape, mode), cost.seconds(shape, Mode.FP16)) * n
            for mode, n in zip(modes, calls, strict=True)
        ]
        masked = [s * cost.masked_ratio(shape, m, d) for s, m, d in zip(seconds, modes, densities, strict=True)]
        if sum(masked) < sum(seconds):
            masks = (share if density < 1 else 0.0 for density in densities)
            behind = tuple(replace(choice, mask_share=mask) for choice, mask in zip(choices, masks, strict=True))
            found[site.name] = replace(found[site.name], choices=behind)
        else:
            needed = sum(d * n for d, n in zip(densities, calls, strict=True)) / sum(calls)
            dense[site.name] = f"{needed:.0%} of its blocks are needed, too many to gain time"
    return found, dense


def attention_seconds(
    cost: KernelCost, shape: AttentionShape, unit: Unit, blocks: SiteBlocks | None, bins: int
) -> Tensor:
    """[T, choices] time of a site in each of its choices; infinite for modes without times, and for shares that skip no block."""
    densities = {0.0: [1.0] * bins}
    if blocks is not None:
        densities |= dict(zip(blocks.shares, blocks.densities().T.tolist(), strict=True))
    columns = []
    for choice in unit.choices:
        mode, share = Mode(choice.mode), choice.mask_share
        ratios = [
            1.0 if share is None else math.inf if share and density == 1 else cost.masked_ratio(shape, mode, density)
            for density in densities[share or 0.0]
        ]
        columns.append([cost.seconds(shape, mode, unit.scaling) * ratio for ratio in ratios])
    return torch.tensor(columns, dtype=torch.float64).T


def density(
    sparse: Mapping[str, Sequence[float]], blocks: Mapping[str, SiteBlocks], sites: int, steps: Tensor
) -> float:
    """Returns the share of the blocks of all sites and denoising steps that a plan computes."""
    left_out = [
        float(((1 - torch.tensor(blocks[site].density(row), dtype=torch.float64)) * steps).sum())
        for site, row in sparse.items()
    ]
    return 1 - sum(left_out) / sites
