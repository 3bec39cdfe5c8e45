"""Block masks in plans: what they cost in time, and the sites that get some."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from trtconvert.attention.blocks import SiteBlocks
from trtconvert.attention.modes import Mode
from trtconvert.attention.sites import Site
from trtconvert.calib.cost import AttentionShape, KernelCost, priced
from trtconvert.calib.knapsack import Plan
from trtconvert.calib.sensitivity import Sensitivity, choice_of
from trtconvert.linear.modes import LayerMode
from trtconvert.recipe import PlanSection


def stated_blocks(
    share: float,
    section: PlanSection,
    sites: Iterable[Site],
    modes: Mapping[str, Tensor],
    blocks: Mapping[str, SiteBlocks],
    batch: int,
    calls: Sequence[int],
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The shares of attention that each site loses per timestep bin where a recipe states one share for all.

    Args:
        share: that the recipe states; sites, modes: that are converted, and [T] their modes; batch: for which times are taken.
        calls: [T] of the denoiser that the calibration saw in each bin. Bins without any decide nothing: one of two denoisers
            never comes to the other's.
    Returns:
        The shares of the sites that get block masks, and why others of `blocks` get none: where most blocks are needed, going
        through them by a mask takes longer.
    Raises:
        UserError: as `KernelCost.load`.
    """
    cost = KernelCost.load(section.kernel_cost, masks=True)
    chosen, dense = {}, {}
    for site in sites:
        if (of_site := blocks.get(site.name)) is None:
            continue
        shape, rows = AttentionShape.of(site, batch), [Mode(int(mode)) for mode in modes[site.name]]
        densities = of_site.density([share] * len(rows))
        # Of a mode that nobody measured, as FP8 in older tables, the time of another serves: it is the ratio that decides.
        seconds = [
            min(cost.seconds(shape, mode), cost.seconds(shape, Mode.FP16)) * n
            for mode, n in zip(rows, calls, strict=True)
        ]
        masked = [s * cost.masked_ratio(shape, m, d) for s, m, d in zip(seconds, rows, densities, strict=True)]
        if sum(masked) < sum(seconds):
            chosen[site.name] = [share if density < 1 else 0.0 for density in densities]
        else:
            needed = sum(d * n for d, n in zip(densities, calls, strict=True)) / sum(calls)
            dense[site.name] = f"{needed:.0%} of its blocks are needed, too many to gain time"
    return chosen, dense


def seconds_of_choices(
    cost: KernelCost,
    shape: AttentionShape,
    seconds: Tensor,
    blocks: SiteBlocks | None,
    shares: Sequence[float],
    bins: int,
) -> Tensor:
    """[T, choices] time of a site in each choice of a mode and a level, see `Sensitivity`; infinite at levels of a site without
    blocks, and where a share leaves none out.

    Args:
        seconds: [modes] of a call without a mask.
    """
    found = dense_choices(seconds, len(shares), bins)
    if blocks is None:
        return found
    places = [blocks.shares.index(share) for share in shares]
    densities = blocks.densities()[:, places]
    for mode in Mode:
        for level in range(1, len(shares) + 2):
            for index in range(bins):
                density = float(densities[index, level - 1]) if level <= len(shares) else 1.0
                if density < 1 or level > len(shares):
                    ratio = cost.masked_ratio(shape, mode, density)
                    found[index, choice_of(mode, level)] = seconds[mode] * ratio
    return found


def dense_choices(seconds: Tensor, shares: int, bins: int) -> Tensor:
    """[modes] → [T, choices], infinite at all levels but `DENSE`."""
    levels = seconds.new_full((bins, len(Mode) * (shares + 1)), math.inf)
    return torch.cat([seconds.expand(bins, -1), levels], 1)


def sparse_rows(plan: Plan, shares: Sequence[float]) -> dict[str, list[float]]:
    """The shares of attention that the sites with block masks lose, per timestep bin."""
    of_level = [0.0, *shares, 0.0]
    levels = {site: (row // len(Mode)).tolist() for site, row in plan.items()}
    return {site: [of_level[level] for level in row] for site, row in levels.items() if any(row)}


def density(
    sparse: Mapping[str, Sequence[float]], blocks: Mapping[str, SiteBlocks], sites: int, steps: Tensor
) -> float:
    """The share of the blocks of all sites and denoising steps that a plan computes."""
    left_out = [
        float(((1 - torch.tensor(blocks[site].density(row), dtype=torch.float64)) * steps).sum())
        for site, row in sparse.items()
    ]
    return 1 - sum(left_out) / sites


def fixed_masks(
    sensitivity: Sensitivity, time: Tensor, of_modes: Tensor, groups: Tensor, allowed: Collection[Mode]
) -> dict[str, Plan]:
    """Plans without a search that leave one share out at all sites that may, in the fastest mode that is allowed everywhere."""
    modes = [mode for mode in priced(of_modes[~groups]) if mode in allowed]
    mode = min(modes, key=lambda mode: float(of_modes[~groups, mode].sum()))
    plans, last = {}, sensitivity.levels - 1
    for level, share in enumerate(sensitivity.shares, 1):
        plan = {}
        for row, site in enumerate(sensitivity.sites):
            of_site = torch.full(
                (len(sensitivity.steps),), int(LayerMode.EXACT if groups[row] else mode), dtype=torch.int32
            )
            known = time[row, :, choice_of(mode, level)].isfinite()
            if known.any() and not groups[row]:
                of_site = torch.where(known, choice_of(mode, level), choice_of(mode, last)).int()
                of_site[sensitivity.steps == 0] = choice_of(Mode.FP16, last)
            elif not groups[row]:
                of_site[sensitivity.steps == 0] = int(Mode.FP16)
            plan[site] = of_site
        plans[f"{mode.name.lower()} everywhere, {share:g} of attention left out"] = plan
    return plans
