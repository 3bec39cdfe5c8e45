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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trtconvert.attention.modes import INT8_VALUES, Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.schedules import sigma_rule_modes
from trtconvert.attention.sites import Site
from trtconvert.calib.budget import Budget, figures, keeps_budget, limits
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.calib.frontier import Frontier, PlanPoint
from trtconvert.calib.layer_scales import layer_tables
from trtconvert.calib.sensitivity import LAYERS_OF, Int8Layers, Int8Sites, Sensitivity, measure_sensitivity
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer
from trtconvert.models.denoiser import intercepted
from trtconvert.progress import Bar
from trtconvert.recipe import AttentionSection, LayersSection, PlanSection

Plan = dict[str, Tensor]
"""Site: [T] INT32 `Mode` per timestep bin; group of layers, whose name begins with `LAYERS_OF`: `LayerMode`."""

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


def kernel_cost(section: PlanSection, of_layers: LayersSection) -> tuple[KernelCost, set[Mode], set[LayerMode]]:
    """The kernels' times by which a search prices its plans, and the modes that it may choose: of attention, FP16 among them,
    and of layers, none where it does not decide about them.

    Raises:
        UserError: as `KernelCost.load`.
    """
    allowed = {Mode.FP16, *(Mode[name.upper()] for name in section.candidates)}
    in_int8 = {LayerMode[name.upper()] for name in section.layer_candidates} if of_layers.modes == "auto" else set()
    allowed_layers = {LayerMode.EXACT, *in_int8} if in_int8 else set[LayerMode]()
    return KernelCost.load(section.kernel_cost, allowed, allowed_layers), allowed, allowed_layers


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
) -> Frontier:
    """Measure the sensitivity of the model and search its plan, see `measure_sensitivity` and `search_plan`.

    Layers take part where `layers.modes` is auto; else they have the modes that the recipe states, in all plans, and so
    have those that are `weight_only`.

    Args:
        sites, layers: to convert; scalings: of each site, see `site_scalings`.
        batch: for which times are taken.
        bar: shows the progress.
    """
    cost, allowed, allowed_layers = kernel_cost(section, of_layers)
    seconds = cost.table([_shape(site, batch) for site in sites], [scalings[site.name] for site in sites])
    seeds = range(section.seed, section.seed + section.samples)
    tables = calibration.tables
    stated = layer_modes(of_layers, layers, bins)
    in_int8 = Int8Layers(layer_tables(model.denoiser, layers, calibration.layers, stated), model.timestep_max)
    groups: dict[str, list[str]] = {}
    if of_layers.modes == "auto":
        for layer in layers:
            if not layer.weight_only:
                groups.setdefault(layer.source, []).append(layer.name)
    searched = {name for members in groups.values() for name in members}
    fixed = {name: modes for name, modes in stated.items() if name not in searched}
    by_name = {layer.name: layer for layer in layers}
    modes_of = {
        source: {_mode_of(by_name[source], mode) for mode in allowed_layers if mode != LayerMode.EXACT}
        for source in groups
    }
    if groups:
        rows = [
            layer_seconds(cost, [by_name[name] for name in members], batch, modes_of[source])
            for source, members in groups.items()
        ]
        seconds = torch.cat([seconds, torch.tensor(rows, dtype=torch.float64)])
    bar.total(
        section.steps
        + bins
        + (2 if groups else 1) * (len(_priced(seconds[: len(sites)])) + 2)
        + len(FRONTIER_DB)
        + BISECTIONS
    )

    def int8_sites(plan: Plan) -> Int8Sites:
        named = {site: AttentionTables(**tables[site], modes=modes) for site, modes in plan.items()}
        return Int8Sites(named, model.timestep_max, scalings, attention.smooth_k)

    def int8_layers(plan: Plan) -> Int8Layers:
        if not groups:
            return in_int8
        chosen = {name: in_int8.tables[name] for name in fixed}
        chosen |= {
            name: in_int8.tables[name].with_modes(plan[LAYERS_OF + source])
            for source, members in groups.items()
            for name in members
            if plan[LAYERS_OF + source].any()
        }
        return Int8Layers(chosen, model.timestep_max)

    exact = {site.name: torch.zeros(bins, dtype=torch.int32) for site in sites}
    sensitivity = measure_sensitivity(
        model, int8_sites(exact), bins, modes=allowed, layers=in_int8, groups=groups, layer_modes=modes_of, seeds=seeds,
        steps=section.steps, done=bar.step,
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
    points = [point.model_copy(update={"layers": of_fixed | _by_layer(point.layers, groups)}) for point in points]
    return Frontier(gpu=cost.gpu, date=cost.date, limits=limits(budget), points=points)


def _by_layer(of_groups: Mapping[str, list[int]], groups: Mapping[str, Collection[str]]) -> dict[str, list[int]]:
    return {name: of_groups[source] for source, members in groups.items() for name in members}


def layer_seconds(cost: KernelCost, layers: Sequence[Layer], batch: int, modes: Collection[LayerMode]) -> list[float]:
    """Time of layers together in 16 bits and in each `LayerMode` of some; infinite in others, up to as many as attention has."""
    return [
        sum(cost.layer_seconds(layer, batch, LayerMode(mode)) for layer in layers)
        if mode in (LayerMode.EXACT, *modes)
        else math.inf
        for mode in range(len(Mode))
    ]


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
            and such a mode is not chosen.
        sigmas: as in `make_plan`.
        budget: what a plan must keep.
        measure: draws samples with a plan and gives every figure of the budget.
        allowed: what the search may choose, FP16 among it. Plans without a search are sampled all the same, to compare with;
            in bins that no step fell into they are FP16 too. Whoever wants a mode there states it in attention.modes.
    Returns:
        All points that were sampled, fastest first; FP16 everywhere is one of them.
    """
    sites, bins = sensitivity.sites, len(sensitivity.gain)
    groups = torch.tensor([name.startswith(LAYERS_OF) for name in sites])
    unseen = sensitivity.steps == 0
    cost = sensitivity.cost().clone()
    cost[~groups] = cost[~groups].index_fill(
        -1, torch.tensor([m for m in Mode if m not in allowed], dtype=torch.long), math.inf
    )
    # A layer is INT8 in all bins or in none: what no step falls into costs nothing and decides nothing.
    cost[groups] = torch.where(
        unseen[:, None] & sensitivity.error[groups].isfinite().any(1, keepdim=True), 0.0, cost[groups]
    )
    cost.masked_fill_(seconds[:, None].isinf(), math.inf)
    time = seconds[:, None] * sensitivity.steps[:, None].clamp_min(1e-6)  # [S, T, modes]; unseen bins count a little
    int8_values = torch.tensor(INT8_VALUES)

    def point(name: str, plan: Plan) -> PlanPoint:
        found = measure(plan)
        chosen = torch.stack([plan[site] for site in sites])
        of_sites = chosen[~groups]
        rows = {site: modes.tolist() for site, modes in plan.items()}
        return PlanPoint(
            name=name,
            speed=float(time[..., Mode.FP16].sum() / time.gather(-1, chosen.long()[..., None]).sum()),
            figures=found,
            keeps_budget=keeps_budget(budget, found),
            allowed=set(of_sites.unique().tolist()) <= set(allowed),
            int8_values=float((torch.isin(of_sites, int8_values).double().mean(0) * sensitivity.steps).sum()),
            modes={site: row for site, row in rows.items() if not site.startswith(LAYERS_OF)},
            layers={site.removeprefix(LAYERS_OF): row for site, row in rows.items() if site.startswith(LAYERS_OF)},
        )

    compared = _fixed_plans(sigmas, bins, _priced(seconds[~groups]))
    fixed = {name: modes.masked_fill(unseen, int(Mode.FP16)) for name, modes in compared.items()}
    in_int8 = [mode for mode in LayerMode if mode and groups.any() and seconds[groups, mode].isfinite().all()]
    points = []
    for suffix, of_layers in [("", LayerMode.EXACT), *((f", layers {m.name.lower()}", m) for m in in_int8[-1:])]:
        for name, modes in fixed.items():
            rows = {
                s: torch.full_like(modes, int(of_layers)) if s.startswith(LAYERS_OF) else modes.clone() for s in sites
            }
            points.append(point(name + suffix, rows))
    whole = groups.nonzero().flatten().tolist()

    def fastest(limit: float) -> Plan:
        return fastest_plan(sites, cost, time, limit, whole)

    points += [point(f"model, {db} dB", fastest(10 ** (-db / 10))) for db in FRONTIER_DB]

    # The largest modelled error whose plan keeps the budget when sampled: bisection in decades between two sure ends.
    worst = cost.nan_to_num(posinf=0.0).amax(-1).sum()
    low, high = -12.0, float(worst.clamp_min(1e-12).log10())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        candidate = point(f"search, error 10^{middle:.2f}", fastest(10**middle))
        points.append(candidate)
        low, high = (middle, high) if candidate.keeps_budget else (low, middle)

    return _distinct(sorted(points, key=lambda p: (-p.speed, -p.psnr)))


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


def fastest_plan(sites: list[str], cost: Tensor, time: Tensor, limit: float, whole: Sequence[int] = ()) -> Plan:
    """The plan of least total time whose total cost is at most `limit`, to proven optimality.

    Args:
        cost, time: [S, T, modes] of each choice, not negative; FP16 costs nothing. What costs infinity is not chosen, whatever
            its time, which may be infinite too.
        whole: rows of layers, which have mode 0 in all bins or in none: an engine holds one of both weights.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, kron, vstack

    count = cost.shape[0] * cost.shape[1]
    modes = len(Mode)
    time = time.masked_fill(cost.isinf(), 0)
    # Scaled to about one, so that the solver's tolerances mean the same for every model.
    weights = (cost / limit).flatten().numpy()
    one_mode_each = kron(eye_array(count), np.ones((1, modes)))
    bins, of_mode_0 = cost.shape[1], []
    for row in whole:
        for index in range(1, bins):
            same = np.zeros(count * modes)
            same[row * bins * modes], same[(row * bins + index) * modes] = 1, -1
            of_mode_0.append(csr_array(same[None]))
    result = milp(
        (time / time.amax()).flatten().numpy(),
        integrality=np.ones(count * modes),
        # A choice that breaks the limit alone is no choice; it would only widen the numbers' range.
        bounds=Bounds(0, np.where(weights > 1, 0, 1)),  # pyright: ignore[reportArgumentType]
        constraints=LinearConstraint(
            csr_array(vstack([one_mode_each, csr_array(np.minimum(weights, 2)[None]), *of_mode_0])),
            np.concatenate([np.ones(count), [-np.inf], np.zeros(len(of_mode_0))]),  # pyright: ignore[reportArgumentType]
            np.concatenate([np.ones(count), [1.0], np.zeros(len(of_mode_0))]),  # pyright: ignore[reportArgumentType]
        ),
        options={"mip_rel_gap": 0.0},  # the default stops 0.01 % above the optimum
    )
    assert result.success, result.message  # FP16 everywhere is always feasible
    chosen = torch.from_numpy(result.x).view(*cost.shape).argmax(-1).int()
    return dict(zip(sites, chosen, strict=True))


def _key(plan: Plan) -> tuple[int, ...]:
    return tuple(int(mode) for modes in plan.values() for mode in modes)


def _distinct(points: list[PlanPoint]) -> list[PlanPoint]:
    """Of points with the same modes, the first: those of the fixed plans come before those of the search."""
    kept: dict[tuple[int, ...], PlanPoint] = {}
    for point in points:
        rows = (*point.modes.values(), *point.layers.values())
        kept.setdefault(tuple(mode for row in rows for mode in row), point)
    return list(kept.values())
