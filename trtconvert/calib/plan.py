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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trtconvert.attention.modes import INT8_VALUES, Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.sites import Site
from trtconvert.bars import Steps
from trtconvert.calib.block_plan import attention_seconds, density
from trtconvert.calib.budget import Budget, figures, keeps_budget, limits
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.candidates import attention_units
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.calib.fixed_plans import fixed_plans
from trtconvert.calib.frontier import Frontier, PlanPoint
from trtconvert.calib.kept_search import KeptSearch
from trtconvert.calib.knapsack import fastest
from trtconvert.calib.layer_plan import SearchedLayers, layer_seconds
from trtconvert.calib.sensitivity import Sensitivity, measure_sensitivity
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.drawings import with_progress
from trtconvert.models.int8_denoiser import int8_denoiser
from trtconvert.quant.decision import Choice, Decision, Plan, Unit
from trtconvert.quant.forward import Int8Sites
from trtconvert.recipe import AttentionSection, LayersSection, PlanSection

BISECTIONS = 6
"""Halvings of the modelled error's range in decades: the limit is known to 2**-6 of it."""

FRONTIER_DB = (60, 50, 40, 30)
"""PSNR that the error model promises at the frontier's points; each point is then sampled."""


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
    bar: Steps,
    shares: Sequence[float] = (),
    cache_bytes: int = 2,
    kept: KeptSearch | None = None,
) -> Frontier:
    """Measure the sensitivity of the model and search its plan, see `measure_sensitivity` and `search_plan`.

    Layers take part where `layers.modes` is auto; else they have the modes that the recipe states, in all plans, and so
    have those that are `weight_only`.

    Args:
        sites, layers: to convert; scalings: of each site, see `site_scalings`.
        batch: for which times are taken.
        bar: shows the progress.
        shares: of attention that block masks may lose, of which the calibration has the blocks.
        cache_bytes: of a number in the caches of layers that quantise deltas, where `layers.modiff` is auto.
        kept: what was measured before; takes what is measured now.
    """
    kept = kept or KeptSearch()
    has_convs = any(layer.kind == "conv" for layer in layers)
    cost, allowed, allowed_layers = kernel_cost(section, of_layers, masks=bool(shares), convs=has_convs)
    blocks = {site.name: calibration.blocks[site.name] for site in sites if shares and site.name in calibration.blocks}
    slow = {
        layer.name
        for layer in layers
        if layer.kind == "conv"
        and cost.layer_seconds(layer, batch, LayerMode.STATIC) >= cost.layer_seconds(layer, batch, LayerMode.EXACT)
    }
    searched = SearchedLayers.of(model, layers, calibration, of_layers, allowed_layers, bins, slow)
    of_sites = attention_units({site.name: scalings[site.name] for site in sites}, allowed, blocks, shares)
    units = [*of_sites, *searched.groups]
    seconds = [
        attention_seconds(cost, AttentionShape.of(site, batch), unit, blocks.get(site.name), bins)
        for site, unit in zip(sites, of_sites, strict=True)
    ] + [layer_seconds(cost, group, unit, batch, bins, cache_bytes) for unit, group in searched.groups.items()]
    compared = fixed_plans(units, seconds, model.sigmas, torch.ones(bins))
    of_search = len(FRONTIER_DB) + BISECTIONS
    # Steps of the bar are drawings of all samples; the measurements add theirs.
    bar.total(1 + len(compared) + of_search * (2 if blocks else 1))

    def int8_sites(plan: Plan) -> Int8Sites:
        made = plan.attention
        tables = {name: AttentionTables(**calibration.tables[name], modes=of.modes) for name, of in made.items()}
        masks = {name: blocks[name].mask(of.shares) for name, of in made.items() if of.shares}
        in_int8 = Int8Sites(tables, model.timestep_max, scalings, attention.smooth_k, masks=masks)
        return in_int8.to(model.device)

    seeds = range(section.seed, section.seed + section.samples)
    exact = Plan.of({unit: unit.choices[:1] * bins for unit in of_sites})

    def measured_sensitivity() -> Sensitivity:
        return measure_sensitivity(
            model, units, int8_sites(exact), bins, layers=searched.int8, blocks=blocks, seeds=seeds,
            steps=section.steps, bar=bar, method=section.sensitivity,
        )  # fmt: skip

    sensitivity = kept.sensitivity(units, measured_sensitivity)

    @torch.no_grad()
    def drawn(denoiser: Denoiser) -> Tensor:
        return with_bar.sample(denoiser, seeds, steps=section.steps, solver="ddim")

    with_bar = with_progress(model, bar)
    full = kept.images(lambda: drawn(graphed(model, model.denoiser)))
    bar.step()

    def measure(plan: Plan) -> dict[str, float]:
        known = kept.figures(plan)
        if known is not None:
            bar.skip()
            return known
        in_int8 = searched.int8.in_plan(plan.layers)
        found = figures(budget, drawn(int8_denoiser(model, int8_sites(plan), in_int8)), full)
        kept.keep_figures(plan, found)
        bar.step()
        return found

    points = search_plan(sensitivity, seconds, model.sigmas, budget, measure, searched.stated)
    densities = [density(point.sparse, blocks, len(sites), sensitivity.steps) for point in points]
    points = [point.model_copy(update={"density": x}) for point, x in zip(points, densities, strict=True)]
    return Frontier(gpu=cost.gpu, date=cost.date, limits=limits(budget), points=points)


def search_plan(
    sensitivity: Sensitivity,
    seconds: Sequence[Tensor],
    sigmas: Tensor,
    budget: Budget,
    measure: Callable[[Plan], dict[str, float]],
    stated: Mapping[str, Decision] | None = None,
) -> list[PlanPoint]:
    """Plans around the fastest one whose samples keep the budget.

    Args:
        seconds: [T, choices] of each unit, time of each choice in any unit; infinite where nobody knows, and such a choice is
            not taken.
        sigmas: as in `stated_attention`.
        budget: what a plan must keep.
        measure: draws samples with a plan and gives every figure of the budget.
        stated: decisions about layers of no unit, the same in all plans.
    Returns:
        All points that were sampled, fastest first; FP16 everywhere is one of them. Plans without a search are sampled all the
            same, to compare with; in bins that no step fell into they are FP16 too. Whoever wants a mode there states it in
            attention.modes. Where there are block masks, the search without any is made as well.
    """
    units, steps = sensitivity.units, sensitivity.steps
    padded = pad_sequence([x.T for x in seconds], True, math.inf).mT.contiguous()
    cost = sensitivity.cost().masked_fill(padded.isinf(), math.inf)
    time = padded * steps[:, None].clamp_min(1e-6)  # [S, T, choices]; unseen bins count a little
    forms = [[choice.form for choice in unit.choices] for unit in units]
    int8_values = torch.tensor(INT8_VALUES)

    def point(name: str, decided: Mapping[Unit, Sequence[Choice]]) -> PlanPoint:
        plan = Plan.of(decided, stated)
        taken = torch.tensor([[unit.choices.index(choice) for choice in row] for unit, row in decided.items()])
        of_sites = torch.stack([decision.modes for decision in plan.attention.values()])
        found, record = measure(plan), plan.record()
        return PlanPoint(
            name=name,
            speed=float(time[..., 0].sum() / time.gather(-1, taken[..., None]).sum()),
            figures=found,
            keeps_budget=keeps_budget(budget, found),
            allowed=not any(unit.compared & set(row) for unit, row in decided.items()),
            int8_values=float((torch.isin(of_sites, int8_values).double().mean(0) * steps).sum()),
            modes=record["sites"],
            layers=record["layers"],
            modulated=record["modulated"],
            sparse=record["sparse"],
        )

    points = [point(name, decided) for name, decided in fixed_plans(units, seconds, sigmas, steps).items()]

    def search_choices(cost: Tensor, suffix: str) -> Iterator[PlanPoint]:
        """Around the fastest plan by what each choice costs in quality."""

        def decided(limit: float) -> dict[Unit, list[Choice]]:
            taken = fastest(cost, time, limit, forms).tolist()
            return {unit: [unit.choices[index] for index in row] for unit, row in zip(units, taken, strict=True)}

        for db in FRONTIER_DB:
            yield point(f"model, {db} dB{suffix}", decided(10 ** (-db / 10)))
        # The largest modelled error whose plan keeps the budget when sampled: bisection in decades between two sure ends.
        worst = cost.nan_to_num(posinf=0.0).amax(-1).sum()
        low, high = -12.0, float(worst.clamp_min(1e-12).log10())
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            candidate = point(f"search, error 10^{middle:.2f}{suffix}", decided(10**middle))
            yield candidate
            low, high = (middle, high) if candidate.keeps_budget else (low, middle)

    masks = [torch.tensor([choice.mask_share is not None for choice in unit.choices]) for unit in units]
    masked = pad_sequence(masks, True)[:, None]
    points += search_choices(cost.masked_fill(masked, math.inf), "")
    if masked.any():
        points += search_choices(cost, ", block masks")

    return _distinct(sorted(points, key=lambda p: (-p.speed, -p.psnr)))


def _distinct(points: list[PlanPoint]) -> list[PlanPoint]:
    """Of points with the same modes, the first: those of the fixed plans come before those of the search."""
    kept: dict[str, PlanPoint] = {}
    for point in points:
        kept.setdefault(point.model_dump_json(include={"modes", "layers", "modulated", "sparse"}), point)
    return list(kept.values())
