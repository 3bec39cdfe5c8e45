"""The precision plan: one mode per site and timestep bin.

`auto` looks for the fastest plan that keeps a budget: a least PSNR, and limits on SSIM, LPIPS or a distance of features where
they are asked for. For a limit on the modelled error (`Sensitivity`) the plan of least attention time is a multiple-choice
knapsack, which HiGHS solves to proven optimality. A bisection over the limit then samples with each candidate.

What is guaranteed:
- the chosen plan was sampled on the plan's seeds, and every figure keeps its limit there;
- it is the fastest of all plans that were sampled and keep the budget, so never slower than a uniform mode, the σ rule or INT8
  with late FP16 steps where those keep it;
- each candidate of the search is the fastest plan of all, to proven optimality, whose modelled error is within its limit;
- every plan is FP16 in timestep bins that no step of the search falls into: nothing was measured of other modes there.
What is not: that no plan outside the error model is faster, and that other seeds give the same figures. The gates of a build
check the figures on other seeds, and fail it.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from trtconvert.attention.blocks import SiteBlocks
from trtconvert.attention.modes import INT8_VALUES, Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.schedules import sigma_rule_modes
from trtconvert.attention.sites import Site
from trtconvert.calib.budget import Budget, figures, keeps_budget, limits
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.calib.frontier import Frontier, PlanPoint
from trtconvert.calib.layer_scales import layer_tables
from trtconvert.calib.sensitivity import (
    LAYERS_OF,
    MODULATED,
    Int8Layers,
    Int8Sites,
    Sensitivity,
    choice_of,
    measure_sensitivity,
)
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer
from trtconvert.models.denoiser import intercepted
from trtconvert.progress import Bar
from trtconvert.recipe import AttentionSection, LayersSection, PlanSection

Plan = dict[str, Tensor]
"""Site: [T] INT32 `Mode` per timestep bin; group of layers, whose name begins with `LAYERS_OF`: `LayerMode` or `MODULATED`. Where
sites may have block masks, the choice of a mode and a level, see `choice_of`."""

BISECTIONS = 6
"""Halvings of the modelled error's range in decades: the limit is known to 2**-6 of it."""

FRONTIER_DB = (60, 50, 40, 30)
"""PSNR that the error model promises at the frontier's points; each point is then sampled."""


def make_plan(section: AttentionSection, sites: Iterable[str], sigmas: Tensor, bins: int) -> Plan:
    """The modes that a recipe states or that follow each bin's noise level; for `auto` see `search_plan`.

    Args:
        sigmas: [timesteps] noise-to-signal ratio of each timestep, rising, or falling where timesteps do.
        bins: timestep bins.
    """
    if section.modes == "sigma-rule":
        modes = sigma_rule_modes(sigmas, bins)
    else:
        names = section.modes if isinstance(section.modes, list) else [section.modes] * bins
        modes = torch.tensor([Mode[name.upper()] for name in names], dtype=torch.int32)
    return {site: modes.clone() for site in sites}


def layer_modes(section: LayersSection, layers: Iterable[Layer], bins: int) -> Plan:
    """The modes of layers that a recipe states; `auto` is STATIC, where no search decides.

    Args:
        layers: that are converted; none where they are off.
    """
    if section.off:
        return {}
    names = section.modes if isinstance(section.modes, list) else [section.modes] * bins
    rows = [LayerMode.STATIC if name == "auto" else LayerMode[name.upper()] for name in names]
    plan = {}
    for layer in layers:
        plan[layer.name] = torch.tensor([_mode_of(layer, mode) for mode in rows], dtype=torch.int32)
    return plan


def _mode_of(layer: Layer, mode: LayerMode) -> LayerMode:
    """What a layer has where a mode is asked for: convolutions have no scales per token."""
    if layer.weight_only:
        return LayerMode.WEIGHT_ONLY
    return LayerMode.STATIC if layer.kind == "conv" and mode == LayerMode.DYNAMIC else mode


def kernel_cost(
    section: PlanSection, of_layers: LayersSection, *, masks: bool = False
) -> tuple[KernelCost, set[Mode], set[LayerMode]]:
    """The kernels' times by which a search prices its plans, and the modes that it may choose: of attention, FP16 among them,
    and of layers, none where it does not decide about them.

    Args:
        masks: whether it may choose block masks.
    Raises:
        UserError: as `KernelCost.load`.
    """
    allowed = {Mode.FP16, *(Mode[name.upper()] for name in section.candidates)}
    in_int8 = {LayerMode[name.upper()] for name in section.layer_candidates} if of_layers.modes == "auto" else set()
    allowed_layers = {LayerMode.EXACT, *in_int8} if in_int8 else set[LayerMode]()
    cost = KernelCost.load(section.kernel_cost, allowed, allowed_layers, masks=masks, caches=of_layers.modiff == "auto")
    return cost, allowed, allowed_layers


def site_scalings(
    attention: AttentionSection, section: PlanSection, sites: Iterable[Site], batch: int
) -> dict[str, str]:
    """How each site gets the scales of queries and keys, `calibrated` or `dynamic`; of `auto` what `KernelCost.scaling` says.

    Args:
        batch: for which times are taken.
    Raises:
        UserError: as `KernelCost.load`.
    """
    if attention.scaling != "auto":
        return {site.name: attention.scaling for site in sites}
    stated = attention.modes if isinstance(attention.modes, list) else [attention.modes]
    searched = {"auto": section.candidates, "sigma-rule": ["precision", "balanced", "aggressive"]}
    modes = {Mode[name.upper()] for name in searched.get(stated[0], stated)}
    cost = KernelCost.load(section.kernel_cost)
    return {site.name: cost.scaling(_shape(site, batch), modes) for site in sites}


def stated_blocks(
    share: float,
    section: PlanSection,
    sites: Iterable[Site],
    modes: Mapping[str, Tensor],
    blocks: Mapping[str, SiteBlocks],
    batch: int,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The shares of attention that each site loses per timestep bin where a recipe states one share for all.

    Args:
        share: that the recipe states; sites, modes: that are converted, and [T] their modes; batch: for which times are taken.
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
        shape, rows = _shape(site, batch), [Mode(int(mode)) for mode in modes[site.name]]
        densities = of_site.densities()[:, of_site.shares.index(share)].tolist()
        seconds = [cost.seconds(shape, mode) for mode in rows]
        masked = [s * cost.masked_ratio(shape, m, d) for s, m, d in zip(seconds, rows, densities, strict=True)]
        if sum(masked) < sum(seconds):
            chosen[site.name] = [share if density < 1 else 0.0 for density in densities]
        else:
            needed = sum(densities) / len(densities)
            dense[site.name] = f"{needed:.0%} of its blocks are needed, too many to gain time"
    return chosen, dense


def _shape(site: Site, batch: int) -> AttentionShape:
    return AttentionShape(batch * site.folds, site.heads, site.query_tokens, site.key_tokens, site.head_dim)


def search(
    model: DiffusionModel,
    sites: Sequence[Site],
    layers: Sequence[Layer],
    calibration: Calibration,
    attention: AttentionSection,
    scalings: Mapping[str, str],
    of_layers: LayersSection,
    section: PlanSection,
    budget: Budget,
    bins: int,
    batch: int,
    bar: Bar,
    shares: Sequence[float] = (),
    cache_bytes: int = 2,
) -> Frontier:
    """Measure the sensitivity of the model and search its plan, see `measure_sensitivity` and `search_plan`.

    Layers take part where `layers.modes` is auto; else they have the modes that the recipe states, in all plans, and so
    have those that are `weight_only`.

    Args:
        sites, layers: to convert; scalings: of each site, see `site_scalings`.
        batch: for which times are taken.
        bar: shows the progress.
        shares: of attention that block masks may lose, of which the calibration has the blocks.
        cache_bytes: of a number in the caches of layers that quantise changes, where `layers.modiff` is auto.
    """
    cost, allowed, allowed_layers = kernel_cost(section, of_layers, masks=bool(shares))
    seconds = cost.table([_shape(site, batch) for site in sites], [scalings[site.name] for site in sites])
    blocks = {site.name: calibration.blocks[site.name] for site in sites if shares and site.name in calibration.blocks}
    seeds = range(section.seed, section.seed + section.samples)
    tables = calibration.tables
    stated = layer_modes(of_layers, layers, bins)
    of_changes = {
        layer.name: scale
        for layer in layers
        if of_layers.modiff == "auto" and (scale := calibration.layers[layer.source].change_scale) is not None
    }
    in_int8 = Int8Layers(
        layer_tables(model.denoiser, layers, calibration.layers, stated),
        model.timestep_max,
        of_changes,
        model.timesteps_fall,
    )
    groups: dict[str, list[str]] = {}
    if of_layers.modes == "auto":
        for layer in layers:
            if not layer.weight_only:
                groups.setdefault(layer.source, []).append(layer.name)
    searched = {name for members in groups.values() for name in members}
    fixed = {name: modes for name, modes in stated.items() if name not in searched}
    by_name = {layer.name: layer for layer in layers}
    modes_of: dict[str, set[int]] = {
        source: {int(_mode_of(by_name[source], mode)) for mode in allowed_layers if mode != LayerMode.EXACT}
        | ({MODULATED} if members[0] in of_changes else set())
        for source, members in groups.items()
    }
    if groups:
        rows = [
            layer_seconds(cost, [by_name[name] for name in members], batch, modes_of[source], cache_bytes)
            for source, members in groups.items()
        ]
        seconds = torch.cat([seconds, torch.tensor(rows, dtype=torch.float64)])
    of_searches = len(FRONTIER_DB) + BISECTIONS
    bar.total(
        section.steps
        + bins
        + (1 + bool(groups) + bool(of_changes and groups)) * (len(_priced(seconds[: len(sites)])) + 2)
        + of_searches
        + (len(shares) + of_searches if blocks else 0)
    )
    if blocks:
        seconds = torch.stack(
            [
                seconds_of_choices(cost, _shape(site, batch), of_site, blocks.get(site.name), shares, bins)
                for site, of_site in zip(sites, seconds, strict=False)
            ]
            + [_without_levels(of_group, len(shares), bins) for of_group in seconds[len(sites) :]]
        )

    def int8_sites(plan: Plan) -> Int8Sites:
        named = {site: AttentionTables(**tables[site], modes=row % len(Mode)) for site, row in plan.items()}
        masks = {site: blocks[site].mask(row) for site, row in sparse_rows(plan, shares).items()}
        return Int8Sites(named, model.timestep_max, scalings, attention.smooth_k, masks=masks)

    def int8_layers(plan: Plan) -> Int8Layers:
        if not groups:
            return in_int8
        chosen, scales = {name: in_int8.tables[name] for name in fixed}, {}
        for source, members in groups.items():
            row = plan[LAYERS_OF + source]
            if row.any():
                chosen |= {name: in_int8.tables[name].with_modes(_layer_row(row)) for name in members}
            if (row == MODULATED).all():
                scales |= {name: of_changes[name] for name in members}
        return Int8Layers(chosen, model.timestep_max, scales, model.timesteps_fall)

    exact = {site.name: torch.zeros(bins, dtype=torch.int32) for site in sites}
    sensitivity = measure_sensitivity(
        model, int8_sites(exact), bins, modes=allowed, layers=in_int8, groups=groups, layer_modes=modes_of,
        blocks=blocks, shares=shares if blocks else (), seeds=seeds, steps=section.steps, done=bar.step,
    )  # fmt: skip
    with torch.no_grad():
        full = model.sample(model.denoiser, seeds, steps=section.steps, solver="ddim")
    measured: dict[tuple[int, ...], dict[str, float]] = {}

    def measure(plan: Plan) -> dict[str, float]:
        key = _key(plan)
        if key not in measured:
            with torch.no_grad():
                of_sites = {name: modes for name, modes in plan.items() if not name.startswith(LAYERS_OF)}
                chosen = int8_layers(plan)
                layer_handler = chosen.handler() if chosen.tables else None
                denoiser = intercepted(model, int8_sites(of_sites).handler(), layer_handler)
                images = model.sample(denoiser, seeds, steps=section.steps, solver="ddim")
            measured[key] = figures(budget, images, full)
        bar.step()
        return measured[key]

    points = search_plan(sensitivity, seconds, model.sigmas, budget, measure, allowed)
    of_fixed = {name: modes.tolist() for name, modes in fixed.items()}
    points = [
        point.model_copy(
            update={
                "layers": of_fixed | _by_layer(point.layers, groups),
                "modulated": [name for source in point.modulated for name in groups[source]],
                "density": _density(point.sparse, blocks, len(sites), sensitivity.steps),
            }
        )
        for point in points
    ]
    return Frontier(gpu=cost.gpu, date=cost.date, limits=limits(budget), points=points)


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
    found = _without_levels(seconds, len(shares), bins)
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


def _without_levels(seconds: Tensor, shares: int, bins: int) -> Tensor:
    """[modes] → [T, choices], infinite at all levels but `DENSE`."""
    levels = seconds.new_full((bins, len(Mode) * (shares + 1)), math.inf)
    return torch.cat([seconds.expand(bins, -1), levels], 1)


def sparse_rows(plan: Plan, shares: Sequence[float]) -> dict[str, list[float]]:
    """The shares of attention that the sites with block masks lose, per timestep bin."""
    of_level = [0.0, *shares, 0.0]
    levels = {site: (row // len(Mode)).tolist() for site, row in plan.items()}
    return {site: [of_level[level] for level in row] for site, row in levels.items() if any(row)}


def _density(
    sparse: Mapping[str, Sequence[float]], blocks: Mapping[str, SiteBlocks], sites: int, steps: Tensor
) -> float:
    """The share of the blocks of all sites and denoising steps that a plan computes."""
    left_out = [
        float(((1 - blocks[site].mask(row).double().mean((1, 2, 3))) * steps).sum()) for site, row in sparse.items()
    ]
    return 1 - sum(left_out) / sites


def _by_layer(of_groups: Mapping[str, list[int]], groups: Mapping[str, Collection[str]]) -> dict[str, list[int]]:
    return {name: of_groups[source] for source, members in groups.items() for name in members}


def layer_seconds(
    cost: KernelCost, layers: Sequence[Layer], batch: int, modes: Collection[int], cache_bytes: int = 2
) -> list[float]:
    """Time of layers together in 16 bits and in each `LayerMode` of some, or `MODULATED`; infinite in others, up to as many as
    attention has."""

    def seconds(layer: Layer, mode: int) -> float:
        if mode == MODULATED:
            return cost.modulated_seconds(layer, batch, cache_bytes)
        return cost.layer_seconds(layer, batch, LayerMode(mode))

    return [
        sum(seconds(layer, mode) for layer in layers) if mode in (LayerMode.EXACT, *modes) else math.inf
        for mode in range(len(Mode))
    ]


def _layer_row(row: Tensor) -> Tensor:
    """[T] `LayerMode` of a group's row, in which `MODULATED` is static."""
    return row.masked_fill(row == MODULATED, int(LayerMode.STATIC))


def search_plan(
    sensitivity: Sensitivity,
    seconds: Tensor,
    sigmas: Tensor,
    budget: Budget,
    measure: Callable[[Plan], dict[str, float]],
    allowed: Collection[Mode] = tuple(Mode),
) -> list[PlanPoint]:
    """Plans around the fastest one whose samples keep the budget.

    Args:
        seconds: [S, modes] time of each site or group of layers in each mode, in any unit; infinite where nobody knows,
            and such a mode is not chosen. [S, T, choices] where there are block masks.
        sigmas: as in `make_plan`.
        budget: what a plan must keep.
        measure: draws samples with a plan and gives every figure of the budget.
        allowed: what the search may choose, FP16 among it. Plans without a search are sampled all the same, to compare with;
            in bins that no step fell into they are FP16 too. Whoever wants a mode there states it in attention.modes.
    Returns:
        All points that were sampled, fastest first; FP16 everywhere is one of them. Where there are block masks, the search
            without any is made as well.
    """
    sites, bins = sensitivity.sites, len(sensitivity.gain)
    groups = torch.tensor([name.startswith(LAYERS_OF) for name in sites])
    unseen = sensitivity.steps == 0
    cost = sensitivity.cost().clone()
    levels = sensitivity.levels
    left_out = [choice_of(mode, level) for mode in Mode if mode not in allowed for level in range(levels)]
    cost[~groups] = cost[~groups].index_fill(-1, torch.tensor(left_out, dtype=torch.long), math.inf)
    # A layer is INT8 in all bins or in none: what no step falls into costs nothing and decides nothing.
    cost[groups] = torch.where(
        unseen[:, None] & sensitivity.error[groups].isfinite().any(1, keepdim=True), 0.0, cost[groups]
    )
    seconds = seconds if seconds.dim() == 3 else seconds[:, None]
    cost.masked_fill_(seconds.isinf(), math.inf)
    time = seconds * sensitivity.steps[:, None].clamp_min(1e-6)  # [S, T, choices]; unseen bins count a little
    of_modes = seconds[..., : len(Mode)].amax(1)  # without a mask, the same in all bins
    int8_values = torch.tensor(INT8_VALUES)

    def point(name: str, plan: Plan) -> PlanPoint:
        found = measure(plan)
        chosen = torch.stack([plan[site] for site in sites])
        of_sites = chosen[~groups] % len(Mode)
        rows = {site: (row % len(Mode)).tolist() for site, row in plan.items()}
        return PlanPoint(
            name=name,
            speed=float(time[..., Mode.FP16].sum() / time.gather(-1, chosen.long()[..., None]).sum()),
            figures=found,
            keeps_budget=keeps_budget(budget, found),
            allowed=set(of_sites.unique().tolist()) <= set(allowed),
            int8_values=float((torch.isin(of_sites, int8_values).double().mean(0) * sensitivity.steps).sum()),
            modes={site: row for site, row in rows.items() if not site.startswith(LAYERS_OF)},
            layers={
                site.removeprefix(LAYERS_OF): _layer_row(row).tolist()
                for site, row in plan.items()
                if site.startswith(LAYERS_OF)
            },
            modulated=[
                site.removeprefix(LAYERS_OF)
                for site, row in plan.items()
                if site.startswith(LAYERS_OF) and (row == MODULATED).all()
            ],
            sparse=sparse_rows(plan, sensitivity.shares),
        )

    compared = _fixed_plans(sigmas, bins, _priced(of_modes[~groups]))
    fixed = {name: modes.masked_fill(unseen, int(Mode.FP16)) for name, modes in compared.items()}
    in_int8 = [mode for mode in LayerMode if mode and groups.any() and of_modes[groups, mode].isfinite().all()]
    points = []
    compared_layers = [("", int(LayerMode.EXACT)), *((f", layers {m.name.lower()}", int(m)) for m in in_int8[-1:])]
    if groups.any() and of_modes[groups, MODULATED].isfinite().all():
        compared_layers.append((", layers static by changes", MODULATED))
    for suffix, of_layers in compared_layers:
        for name, modes in fixed.items():
            rows = {
                s: torch.full_like(modes, int(of_layers)) if s.startswith(LAYERS_OF) else modes.clone() for s in sites
            }
            points.append(point(name + suffix, rows))
    points += [point(name, rows) for name, rows in _fixed_masks(sensitivity, time, of_modes, groups, allowed).items()]
    whole = groups.nonzero().flatten().tolist()
    masked = seconds[..., len(Mode) :].isfinite().any(-1).any(-1).nonzero().flatten().tolist()

    def search_choices(count: int, suffix: str) -> Iterator[PlanPoint]:
        """Around the fastest plan among the first choices of each site and bin."""
        some, times = cost[..., :count], time[..., :count]

        def fastest(limit: float) -> Plan:
            return fastest_plan(sites, some, times, limit, whole, masked if count > len(Mode) else ())

        for db in FRONTIER_DB:
            yield point(f"model, {db} dB{suffix}", fastest(10 ** (-db / 10)))
        # The largest modelled error whose plan keeps the budget when sampled: bisection in decades between two sure ends.
        worst = some.nan_to_num(posinf=0.0).amax(-1).sum()
        low, high = -12.0, float(worst.clamp_min(1e-12).log10())
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            candidate = point(f"search, error 10^{middle:.2f}{suffix}", fastest(10**middle))
            yield candidate
            low, high = (middle, high) if candidate.keeps_budget else (low, middle)

    points += search_choices(len(Mode), "")
    if masked:
        points += search_choices(cost.shape[-1], ", block masks")

    return _distinct(sorted(points, key=lambda p: (-p.speed, -p.psnr)))


def _fixed_masks(
    sensitivity: Sensitivity, time: Tensor, of_modes: Tensor, groups: Tensor, allowed: Collection[Mode]
) -> dict[str, Plan]:
    """Plans without a search that leave one share out at all sites that may, in the fastest mode that is allowed everywhere."""
    priced = [mode for mode in _priced(of_modes[~groups]) if mode in allowed]
    mode = min(priced, key=lambda mode: float(of_modes[~groups, mode].sum()))
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


def _priced(seconds: Tensor) -> list[Mode]:
    """Modes whose time is known at every site, which a plan may have everywhere."""
    return [mode for mode in Mode if seconds[:, mode].isfinite().all()]


def _fixed_plans(sigmas: Tensor, bins: int, modes: Iterable[Mode]) -> dict[str, Tensor]:
    """Plans without a search: one of `modes` everywhere, the σ rule, and INT8 with FP16 in the last steps (commissioning
    report, table 4.4)."""
    rule = sigma_rule_modes(sigmas, bins)

    def everywhere(mode: Mode) -> Tensor:
        return torch.full((bins,), int(mode), dtype=torch.int32)

    late = torch.where(rule == int(Mode.PRECISION), everywhere(Mode.FP16), everywhere(Mode.AGGRESSIVE))
    plans = {f"{mode.name.lower()} everywhere": everywhere(mode) for mode in modes}
    return plans | {"sigma rule": rule, "aggressive, late steps fp16": late}


def fastest_plan(
    sites: list[str],
    cost: Tensor,
    time: Tensor,
    limit: float,
    whole: Sequence[int] = (),
    masked: Sequence[int] = (),
) -> Plan:
    """The plan of least total time whose total cost is at most `limit`, to proven optimality.

    Args:
        cost, time: [S, T, choices] of each choice, not negative; FP16 costs nothing. What costs infinity is not chosen, whatever
            its time, which may be infinite too.
        whole: rows of layers, which have mode 0 in all bins or in none, as an engine holds one of both weights, and likewise
            `MODULATED`, as every step has to add to the caches.
        masked: rows of sites with levels, which are `DENSE` in all bins or in none: an engine's node has a mask or none.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, kron, vstack

    count = cost.shape[0] * cost.shape[1]
    choices = cost.shape[-1]
    time = time.masked_fill(cost.isinf(), 0)
    # Scaled to about one, so that the solver's tolerances mean the same for every model.
    weights = (cost / limit).flatten().numpy()
    one_each = kron(eye_array(count), np.ones((1, choices)))
    # Choices of a row that are taken, together, in all bins or in none.
    bins, first = cost.shape[1], np.arange(choices)
    together = [(row, first[[mode]]) for row in whole for mode in (LayerMode.EXACT, MODULATED)]
    together += [(row, first[: len(Mode)]) for row in masked]
    joined = []
    for row, chosen in together:
        for index in range(1, bins):
            columns = np.concatenate([row * bins * choices + chosen, (row * bins + index) * choices + chosen])
            signs = np.repeat([1.0, -1.0], len(chosen))
            joined.append(csr_array((signs, columns, [0, len(columns)]), shape=(1, count * choices)))
    with _printing_on_stderr():
        result = milp(
            (time / time.amax()).flatten().numpy(),
            integrality=np.ones(count * choices),
            # A choice that breaks the limit alone is no choice; it would only widen the numbers' range.
            bounds=Bounds(0, np.where(weights > 1, 0, 1)),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(
                csr_array(vstack([one_each, csr_array(np.minimum(weights, 2)[None]), *joined])),
                np.concatenate([np.ones(count), [-np.inf], np.zeros(len(joined))]),  # pyright: ignore[reportArgumentType]
                np.concatenate([np.ones(count), [1.0], np.zeros(len(joined))]),  # pyright: ignore[reportArgumentType]
            ),
            options={"mip_rel_gap": 0.0},  # the default stops 0.01 % above the optimum
        )
    assert result.success, result.message  # FP16 everywhere is always feasible
    chosen = torch.from_numpy(result.x).view(*cost.shape).argmax(-1).int()
    return dict(zip(sites, chosen, strict=True))


@contextmanager
def _printing_on_stderr() -> Iterator[None]:
    """HiGHS prints some lines of its own by C's printf, and the standard output is the result's (`--json`)."""
    sys.stdout.flush()
    kept, flush = os.dup(1), ctypes.CDLL(None).fflush
    flush(None)
    try:
        os.dup2(2, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _key(plan: Plan) -> tuple[int, ...]:
    return tuple(int(mode) for modes in plan.values() for mode in modes)


def _distinct(points: list[PlanPoint]) -> list[PlanPoint]:
    """Of points with the same modes, the first: those of the fixed plans come before those of the search."""
    kept: dict[tuple, PlanPoint] = {}
    for point in points:
        rows = (*point.modes.values(), *point.layers.values())
        sparse = tuple((site, *row) for site, row in point.sparse.items())
        kept.setdefault((*(mode for row in rows for mode in row), *point.modulated, sparse), point)
    return list(kept.values())
