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

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from trtconvert.attention.modes import INT8_VALUES, Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.schedules import sigma_rule_modes
from trtconvert.attention.sites import Site
from trtconvert.calib.block_plan import dense_choices, density, fixed_masks, seconds_of_choices, sparse_rows
from trtconvert.calib.budget import Budget, figures, keeps_budget, limits
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.candidates import LAYERS_OF, MODULATED
from trtconvert.calib.cost import AttentionShape, KernelCost, priced
from trtconvert.calib.frontier import Frontier, PlanPoint
from trtconvert.calib.knapsack import Plan, fastest_plan
from trtconvert.calib.layer_plan import SearchedLayers, layer_row
from trtconvert.calib.sensitivity import Sensitivity, choice_of, measure_sensitivity
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer
from trtconvert.models.denoiser import intercepted
from trtconvert.progress import Bar
from trtconvert.quant.forward import Int8Sites
from trtconvert.recipe import AttentionSection, LayersSection, PlanSection

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


def kernel_cost(
    section: PlanSection, of_layers: LayersSection, *, masks: bool = False, convs: bool = False
) -> tuple[KernelCost, set[Mode], set[LayerMode]]:
    """The kernels' times by which a search prices its plans, and the modes that it may choose: of attention, FP16 among them,
    and of layers, none where it does not decide about them.

    Args:
        masks: whether it may choose block masks; convs: whether convolutions are among the layers.
    Raises:
        UserError: as `KernelCost.load`.
    """
    allowed = {Mode.FP16, *(Mode[name.upper()] for name in section.candidates)}
    in_int8 = {LayerMode[name.upper()] for name in section.layer_candidates} if of_layers.modes == "auto" else set()
    allowed_layers = {LayerMode.EXACT, *in_int8} if in_int8 else set[LayerMode]()
    cost = KernelCost.load(
        section.kernel_cost,
        allowed,
        allowed_layers,
        masks=masks,
        caches=of_layers.modiff == "auto",
        of_convs=convs and bool(in_int8),
    )
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
    return {site.name: cost.scaling(AttentionShape.of(site, batch), modes) for site in sites}


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
    has_convs = any(layer.kind == "conv" for layer in layers)
    cost, allowed, allowed_layers = kernel_cost(section, of_layers, masks=bool(shares), convs=has_convs)
    shapes = [AttentionShape.of(site, batch) for site in sites]
    seconds = cost.table(shapes, [scalings[site.name] for site in sites])
    blocks = {site.name: calibration.blocks[site.name] for site in sites if shares and site.name in calibration.blocks}
    slow = {
        layer.name
        for layer in layers
        if layer.kind == "conv"
        and cost.layer_seconds(layer, batch, LayerMode.STATIC) >= cost.layer_seconds(layer, batch, LayerMode.EXACT)
    }
    searched = SearchedLayers.of(model, layers, calibration, of_layers, allowed_layers, bins, slow)
    modulated = any(MODULATED in modes for modes in searched.modes.values())
    of_search = len(FRONTIER_DB) + BISECTIONS
    bar.total(
        section.steps
        + bins
        + (1 + bool(searched.groups) + modulated) * (len(priced(seconds)) + 2)
        + of_search
        + (len(shares) + of_search if blocks else 0)
    )
    of_groups = searched.seconds(cost, batch, cache_bytes)
    if blocks:
        rows = zip(sites, shapes, seconds, strict=True)
        of_sites = [seconds_of_choices(cost, shape, x, blocks.get(s.name), shares, bins) for s, shape, x in rows]
        seconds = torch.stack([*of_sites, *(dense_choices(x, len(shares), bins) for x in of_groups)])
    else:
        seconds = torch.cat([seconds, of_groups])

    def int8_sites(plan: Plan) -> Int8Sites:
        rows = {site.name: plan[site.name] for site in sites}
        tables = {
            name: AttentionTables(**calibration.tables[name], modes=row % len(Mode)) for name, row in rows.items()
        }
        masks = {name: blocks[name].mask(row) for name, row in sparse_rows(rows, shares).items()}
        in_int8 = Int8Sites(tables, model.timestep_max, scalings, attention.smooth_k, masks=masks)
        return in_int8.to(next(model.denoiser.parameters()).device)

    seeds = range(section.seed, section.seed + section.samples)
    exact = {site.name: torch.zeros(bins, dtype=torch.int32) for site in sites}
    sensitivity = measure_sensitivity(
        model, int8_sites(exact), bins, modes=allowed, layers=searched.int8, groups=searched.names,
        layer_modes=searched.modes, blocks=blocks, shares=shares if blocks else (), seeds=seeds, steps=section.steps,
        done=bar.step, method=section.sensitivity,
    )  # fmt: skip

    @torch.no_grad()
    def drawn(denoiser: Denoiser) -> Tensor:
        return model.sample(denoiser, seeds, steps=section.steps, solver="ddim")

    full = drawn(model.denoiser)
    measured: dict[tuple[int, ...], dict[str, float]] = {}

    def measure(plan: Plan) -> dict[str, float]:
        key = tuple(int(choice) for row in plan.values() for choice in row)
        if key not in measured:
            in_int8 = searched.in_plan(plan)
            of_plan = intercepted(model, int8_sites(plan).handler(), in_int8.handler() if in_int8.tables else None)
            measured[key] = figures(budget, drawn(of_plan), full)
        bar.step()
        return measured[key]

    points = search_plan(sensitivity, seconds, model.sigmas, budget, measure, allowed)
    points = [
        point.model_copy(
            update={
                "layers": searched.rows(point.layers),
                "modulated": [name for source in point.modulated for name in searched.names[source]],
                "density": density(point.sparse, blocks, len(sites), sensitivity.steps),
            }
        )
        for point in points
    ]
    return Frontier(gpu=cost.gpu, date=cost.date, limits=limits(budget), points=points)


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
    sites = sensitivity.sites
    groups = torch.tensor([name.startswith(LAYERS_OF) for name in sites])
    seconds = seconds if seconds.dim() == 3 else seconds[:, None]
    cost = _cost_of_choices(sensitivity, groups, allowed).masked_fill(seconds.isinf(), math.inf)
    time = seconds * sensitivity.steps[:, None].clamp_min(1e-6)  # [S, T, choices]; unseen bins count a little
    of_modes = seconds[..., : len(Mode)].amax(1)  # without a mask, the same in all bins
    int8_values = torch.tensor(INT8_VALUES)

    def point(name: str, plan: Plan) -> PlanPoint:
        found = measure(plan)
        chosen = torch.stack([plan[site] for site in sites])
        of_sites = chosen[~groups] % len(Mode)
        of_groups = {s.removeprefix(LAYERS_OF): row for s, row in plan.items() if s.startswith(LAYERS_OF)}
        return PlanPoint(
            name=name,
            speed=float(time[..., Mode.FP16].sum() / time.gather(-1, chosen.long()[..., None]).sum()),
            figures=found,
            keeps_budget=keeps_budget(budget, found),
            allowed=set(of_sites.unique().tolist()) <= set(allowed),
            int8_values=float((torch.isin(of_sites, int8_values).double().mean(0) * sensitivity.steps).sum()),
            modes={s: (row % len(Mode)).tolist() for s, row in plan.items() if not s.startswith(LAYERS_OF)},
            layers={source: layer_row(row).tolist() for source, row in of_groups.items()},
            modulated=[source for source, row in of_groups.items() if (row == MODULATED).all()],
            sparse=sparse_rows(plan, sensitivity.shares),
        )

    compared = _fixed_plans(sensitivity, of_modes, groups, sigmas)
    compared |= fixed_masks(sensitivity, time, of_modes, groups, allowed)
    points = [point(name, plan) for name, plan in compared.items()]
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


def _cost_of_choices(sensitivity: Sensitivity, groups: Tensor, allowed: Collection[Mode]) -> Tensor:
    """[S, T, choices] modelled error of each choice; infinite for modes that sites may not have.

    Args:
        groups: [S] which rows are layers.
    """
    cost = sensitivity.cost()
    left_out = [choice_of(mode, level) for mode in Mode if mode not in allowed for level in range(sensitivity.levels)]
    cost[~groups] = cost[~groups].index_fill(-1, torch.tensor(left_out, dtype=torch.long), math.inf)
    # A layer is INT8 in all bins or in none: what no step falls into costs nothing and decides nothing.
    unseen, known = sensitivity.steps == 0, sensitivity.error[groups].isfinite().any(1, keepdim=True)
    cost[groups] = torch.where(unseen[:, None] & known, 0.0, cost[groups])
    return cost


def _fixed_plans(sensitivity: Sensitivity, of_modes: Tensor, groups: Tensor, sigmas: Tensor) -> dict[str, Plan]:
    """Plans without a search, see `_fixed_modes`: each with all layers in 16 bits, in the last `LayerMode` that all may have, and
    by changes.

    Args:
        of_modes: [S, modes] times; groups: [S] which rows are layers.
    """
    layers = {"": int(LayerMode.EXACT)}
    if groups.any():
        in_int8 = [mode for mode in LayerMode if mode and of_modes[groups, mode].isfinite().all()]
        layers |= {f", layers {mode.name.lower()}": int(mode) for mode in in_int8[-1:]}
        layers |= {", layers static by changes": MODULATED} if of_modes[groups, MODULATED].isfinite().all() else {}
    plans = {}
    for suffix, of_layers in layers.items():
        for name, modes in _fixed_modes(sigmas, len(sensitivity.steps), priced(of_modes[~groups])).items():
            of_sites = modes.masked_fill(sensitivity.steps == 0, int(Mode.FP16))
            plans[name + suffix] = {
                site: torch.full_like(modes, of_layers) if is_group else of_sites.clone()
                for site, is_group in zip(sensitivity.sites, groups, strict=True)
            }
    return plans


def _fixed_modes(sigmas: Tensor, bins: int, modes: Iterable[Mode]) -> dict[str, Tensor]:
    """[T] modes that follow no search: one of `modes` everywhere, the σ rule, and INT8 with FP16 in the last steps (commissioning
    report, table 4.4)."""
    rule = sigma_rule_modes(sigmas, bins)

    def everywhere(mode: Mode) -> Tensor:
        return torch.full((bins,), int(mode), dtype=torch.int32)

    late = torch.where(rule == int(Mode.PRECISION), everywhere(Mode.FP16), everywhere(Mode.AGGRESSIVE))
    plans = {f"{mode.name.lower()} everywhere": everywhere(mode) for mode in modes}
    return plans | {"sigma rule": rule, "aggressive, late steps fp16": late}


def _distinct(points: list[PlanPoint]) -> list[PlanPoint]:
    """Of points with the same modes, the first: those of the fixed plans come before those of the search."""
    kept: dict[tuple, PlanPoint] = {}
    for point in points:
        rows = (*point.modes.values(), *point.layers.values())
        sparse = tuple((site, *row) for site, row in point.sparse.items())
        kept.setdefault((*(mode for row in rows for mode in row), *point.modulated, sparse), point)
    return list(kept.values())
