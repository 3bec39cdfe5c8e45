"""The precision plan: one mode per site and timestep bin.

`auto` searches the fastest plan within a budget: a least PSNR, a limit on the error of predictions, and limits on SSIM, LPIPS or
a distance of features if the recipe sets them. For a limit on the modelled error of samples, and one on the modelled error of
predictions in each timestep bin (`Sensitivity`), the plan of least time is a multiple-choice knapsack, which HiGHS solves to
proven optimality. The search samples plans of a few limits, then bisects between the last limit that keeps the budget and the
first that exceeds it. Predictions of the first plans are compared with the model of errors, and the limit in the knapsack is
corrected once.

Guaranteed:
- the chosen plan was sampled on the plan's seeds, and every figure is within its limit there; predictions are measured in the
  timestep bins of the largest modelled errors;
- the chosen plan is never slower than a uniform mode, the σ rule or INT8 with late FP16 steps if those have only modes that the
  search may choose, and are within the budget: each fixed plan that is faster than the search's own plan is sampled;
- each candidate of the search is the fastest of all plans whose modelled error is within its limit, to proven optimality;
- every plan is FP16 in timestep bins without a step of the search, as no other mode was measured there.
Not guaranteed: that no plan outside of the error model is faster, or that other seeds give the same figures. The gates of a build
check the figures on other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trtconvert.attention.modes import INT8_VALUES, Mode
from trtconvert.bars import Steps
from trtconvert.calib import shared_drawing
from trtconvert.calib.block_plan import density
from trtconvert.calib.budget import PREDICTION_ERROR, Budget, Measure, figures, keeps_budget, limits
from trtconvert.calib.distributed import ALONE, Ranks
from trtconvert.calib.fixed_plans import fixed_plans, uniform_plan
from trtconvert.calib.frontier import (
    DECADES,
    FRONTIER_DB,
    MODELLED,
    SEARCHED,
    USUAL_BISECTIONS,
    USUAL_FIXED,
    Frontier,
    PlanPoint,
    named_fixed,
    usual_drawings,
)
from trtconvert.calib.kept_search import KeptSearch
from trtconvert.calib.knapsack import fastest
from trtconvert.calib.search_space import SearchSpace
from trtconvert.calib.sensitivity import Sensitivity, measure_sensitivity
from trtconvert.diffusion_model import Denoiser, DiffusionModel
from trtconvert.models.cuda_graphs import graphed
from trtconvert.models.drawings import WatchedSampler
from trtconvert.models.int8_denoiser import int8_denoiser
from trtconvert.models.recorded_calls import CallRecorder, RecordedCalls
from trtconvert.quant.decision import Choice, Decision, Plan, Unit
from trtconvert.recipe import Recipe

_Decided = Mapping[Unit, Sequence[Choice]]
"""The choices of each unit by timestep bin."""

_BINS_MEASURED = 3
"""Timestep bins in which the predictions of a plan are measured: those of the largest modelled errors."""

_CORRECTION = 0.1, 10.0
"""Limits of the correction of modelled squared errors of predictions by measured ones."""


def search(
    model: DiffusionModel,
    recipe: Recipe,
    space: SearchSpace,
    budget: Budget,
    bar: Steps,
    kept: KeptSearch,
    ranks: Ranks = ALONE,
) -> Frontier:
    """Measures the sensitivity of a model and searches its plan, see `measure_sensitivity` and `search_plan`.

    The search decides about layers if `layers.modes` is auto; other layers have the recipe's modes in all plans.

    Args:
        bar: counts drawings of all samples; measurements add their own steps.
        kept: measurements of earlier searches; receives new ones.
        ranks: processes that share the work; all call this function with the same arguments. Rank 0 measures the budget's
            figures, the others need the limits alone.
    """
    section, bins = recipe.plan, recipe.calibration.bins
    bar.total(usual_drawings(masks=bool(space.blocks)))
    seeds = range(section.seed, section.seed + section.samples)

    def measured_sensitivity() -> Sensitivity:
        exact = Plan.of({unit: unit.choices[:1] * bins for unit in space.sites})
        in_int8 = space.int8_sites(exact).to(model.device)
        return measure_sensitivity(
            model, space.units, in_int8, bins, layers=space.layers.int8, blocks=space.blocks, seeds=seeds,
            steps=section.steps, bar=bar, method=section.sensitivity, ranks=ranks,
        )  # fmt: skip

    sensitivity = kept.sensitivity(space.units, measured_sensitivity)

    @torch.no_grad()
    def drawn(denoisers: Sequence[Callable[[], Denoiser]]) -> list[Tensor]:
        """Returns the samples of each denoiser. Each is a step of the bar."""
        return shared_drawing.draw_each(
            model, denoisers, seeds, bar, ranks, batch=len(seeds), steps=section.steps, solver="ddim"
        )

    def drawn_in_full() -> dict[str, Tensor]:
        bar.more(1)
        recorder = CallRecorder(model, bins, None)
        images = drawn([lambda: recorder.around(graphed(model, model.denoiser))])[0]
        return {"images": images} | recorder.calls(lambda: None).tensors()

    def in_int8(plan: Plan) -> Denoiser:
        int8_sites, int8_layers = space.int8_sites(plan).to(model.device), space.layers.int8.in_plan(plan.layers)
        return int8_denoiser(model, int8_sites, int8_layers)

    kept_full, measured = dict(kept.full(drawn_in_full)), list[Plan]()
    full = kept_full.pop("images", torch.empty(0))
    calls = RecordedCalls.of_tensors({name: x.to(model.device) for name, x in kept_full.items()}, [None] * bins)
    if (limit := section.max_prediction_error) is not None:
        budget = [*budget, Measure(PREDICTION_ERROR, None, False, limit)]

    def prediction_error(plan: Plan, denoiser: Denoiser) -> dict[str, float]:
        """Measures predictions in the bins of the largest modelled errors."""
        modelled = sensitivity.prediction_error(plan)
        # Stated layers alone have no modelled error: all bins are measured.
        measured = _BINS_MEASURED if modelled.any() else bins
        if plan.exact:
            measured = 0
        errors = calls.errors(denoiser, modelled.argsort(descending=True)[:measured].tolist())
        seen = (error for error in errors if error is not None)
        return {PREDICTION_ERROR: max(seen, key=lambda x: math.inf if math.isnan(x) else x, default=0.0)}

    def measure_all(plans: Sequence[Plan]) -> None:
        """Measures plans that were not measured. Rank 0 holds the samples of as many plans as there are processes."""
        new = kept.without_figures(plans)
        for some in (new[start : start + ranks.size] for start in range(0, len(new), ranks.size)):
            denoisers = [cache(partial(in_int8, plan)) for plan in some]
            for plan, of_plan, samples in zip(some, denoisers, drawn(denoisers), strict=True):
                found = {}
                if ranks.rank == 0:
                    found = figures(budget, samples, full)
                    if limit is not None:
                        found |= prediction_error(plan, of_plan())
                kept.keep_figures(plan, ranks.broadcast(found))
        measured.extend(new)

    def measure(plan: Plan) -> dict[str, float]:
        measure_all([plan])
        if plan not in measured:
            bar.skip()  # an earlier search, or another point of this search, measured the plan
        found = kept.figures(plan)
        assert found is not None
        return found

    def measure_ahead(plans: Sequence[Plan], needed: int) -> None:
        bar.more(len(plans) - needed)
        measure_all(plans)

    together = max(1, ranks.size // WatchedSampler(model.sample).chunks(len(seeds)))
    points = search_plan(
        sensitivity, space.seconds, model.sigmas, budget, measure, space.layers.stated, named=named_fixed(section.point),
        more=bar.more, ahead=measure_ahead if together > 1 else None, together=together,
    )  # fmt: skip
    densities = [density(point.sparse, space.blocks, len(space.sites), sensitivity.steps) for point in points]
    points = [point.model_copy(update={"density": x}) for point, x in zip(points, densities, strict=True)]
    return Frontier(gpu=space.cost.gpu, date=space.cost.date, limits=limits(budget), points=points)


def search_plan(
    sensitivity: Sensitivity,
    seconds: Sequence[Tensor],
    sigmas: Tensor,
    budget: Budget,
    measure: Callable[[Plan], dict[str, float]],
    stated: Mapping[str, Decision] | None = None,
    *,
    named: str | None = None,
    more: Callable[[int], None] = lambda _: None,
    ahead: Callable[[Sequence[Plan], int], None] | None = None,
    together: int = 1,
) -> list[PlanPoint]:
    """Returns plans around the fastest plan whose samples are within the budget.

    Args:
        seconds: [T, choices] of each unit, time of each choice; infinite if unknown: such a choice is not taken.
        sigmas: as in `stated_attention`.
        budget: the limits of a plan.
        measure: samples with a plan and returns every figure of the budget.
        stated: decisions about layers outside of the units, the same in all plans.
        named: a fixed plan that is sampled even if the search may not choose its modes, or if it is slow.
        more: gets the number of calls of `measure` beyond those of `usual_drawings`.
        ahead: measures plans at once that `measure` is about to measure, and gets the number of those that will be needed.
        together: number of plans that `ahead` measures in the time of one.
    Returns:
        All sampled points, fastest first; FP16 everywhere is one of them. The search samples fixed plans of one mode for
        comparison, and fixed plans that are faster than its own plan because such a plan may keep the budget. Fixed plans are
        FP16 in bins without steps, like all others: modes for such bins must be set in attention.modes. If there are block
        masks, the search runs with and without them.
    """
    units, steps = sensitivity.units, sensitivity.steps
    padded = pad_sequence([x.T for x in seconds], True, math.inf).mT.contiguous()
    cost = sensitivity.cost().masked_fill(padded.isinf(), math.inf)
    time = padded * steps[:, None].clamp_min(1e-6)  # [S, T, choices]; bins without steps count a little
    forms = [[choice.form for choice in unit.choices] for unit in units]
    relative, most = sensitivity.relative(), limits(budget).get(PREDICTION_ERROR)
    int8_values = torch.tensor(INT8_VALUES)

    def speed(decided: _Decided) -> float:
        taken = torch.tensor([[unit.choices.index(choice) for choice in row] for unit, row in decided.items()])
        return float(time[..., 0].sum() / time.gather(-1, taken[..., None]).sum())

    def allowed(decided: _Decided) -> bool:
        return not any(unit.compared & set(row) for unit, row in decided.items())

    def point(name: str, decided: _Decided) -> PlanPoint:
        plan = Plan.of(decided, stated)
        of_sites = torch.tensor([*plan.site_modes.values()])
        found = measure(plan)
        return PlanPoint(
            name=name,
            speed=speed(decided),
            figures=found,
            keeps_budget=keeps_budget(budget, found),
            allowed=allowed(decided),
            int8_values=float((torch.isin(of_sites, int8_values).double().mean(0) * steps).sum()),
            modes=plan.site_modes,
            layers=plan.layer_modes,
            modulated=plan.modulated,
            sparse=plan.shares,
        )

    def measure_ahead(decisions: Iterable[_Decided], needed: int) -> None:
        if ahead is not None:
            ahead([Plan.of(decided, stated) for decided in decisions], needed)

    def search_choices(cost: Tensor, suffix: str) -> Iterator[PlanPoint]:
        """Yields points around the fastest plan for a cost of the choices."""
        correction = 1.0  # of modelled squared errors of predictions

        @cache
        def decided(limit: float) -> dict[Unit, list[Choice]]:
            of_bins = None if most is None else (relative, most**2 / correction)
            taken = fastest(cost, time, 10**limit, forms, of_bins).tolist()
            return {unit: [unit.choices[index] for index in row] for unit, row in zip(units, taken, strict=True)}

        # Limits are decades of the modelled error. Above `high` every choice is within the limit.
        low, high = -12.0, float(cost.nan_to_num(posinf=0.0).amax(-1).sum().clamp_min(1e-12).log10())
        measure_ahead((decided(-db / 10) for db in FRONTIER_DB), len(FRONTIER_DB))
        found = {-db / 10: point(MODELLED.format(db) + suffix, decided(-db / 10)) for db in FRONTIER_DB}
        yield from found.values()
        plans = [(Plan.of(decided(limit), stated), of_limit.figures) for limit, of_limit in found.items()]
        correction = _correction(sensitivity, plans)
        decided.cache_clear()
        low = max((limit for limit, of_limit in found.items() if of_limit.keeps_budget), default=low)
        high = min(
            (limit for limit, of_limit in found.items() if limit > low and not of_limit.keeps_budget), default=high
        )
        bisections = math.ceil(math.log2(max(high - low, DECADES) / DECADES))
        depth = (together + 1).bit_length() - 1
        more(bisections - USUAL_BISECTIONS)
        for index in range(bisections):
            if index % depth == 0 and depth > 1:
                following = min(depth, bisections - index)
                measure_ahead((decided(x) for x in _middles(low, high, following)), following)
            middle = (low + high) / 2
            candidate = point(SEARCHED.format(middle) + suffix, decided(middle))
            yield candidate
            low, high = (middle, high) if candidate.keeps_budget else (low, middle)

    masks = [torch.tensor([choice.mask_share is not None for choice in unit.choices]) for unit in units]
    masked = pad_sequence(masks, True)[:, None]
    searched = [*search_choices(cost.masked_fill(masked, math.inf), "")]
    if masked.any():
        searched += search_choices(cost, ", block masks")

    def until_one_keeps(plans: Sequence[tuple[str, _Decided]]) -> Iterator[PlanPoint]:
        """Yields points up to the first that keeps the budget."""
        for index, (name, decided) in enumerate(plans):
            if index % together == 0:
                some = plans[index : index + together]
                more(len(some))
                measure_ahead((x for _, x in some), len(some))
            found = point(name, decided)
            yield found
            if found.keeps_budget:
                break

    fixed = fixed_plans(units, seconds, sigmas, steps)
    uniform = {name for name in map(uniform_plan, Mode) if name in fixed and allowed(fixed[name])}
    wanted = [name for name in fixed if name in uniform or name == named]
    more(len(wanted) - USUAL_FIXED)
    measure_ahead((fixed[name] for name in wanted), len(wanted))
    points = [point(name, fixed[name]) for name in wanted]
    best = max((p.speed for p in (*points, *searched) if p.keeps_budget and p.allowed), default=0.0)
    speeds = {name: speed(x) for name, x in fixed.items() if name not in wanted and allowed(x)}
    faster = sorted((name for name in speeds if speeds[name] > best), key=lambda name: -speeds[name])
    points += until_one_keeps([(name, fixed[name]) for name in faster])
    return _distinct(sorted(points + searched, key=lambda p: (-p.speed, -p.psnr)))


def _correction(sensitivity: Sensitivity, plans: Sequence[tuple[Plan, Mapping[str, float]]]) -> float:
    """Returns the measured squared error of predictions in terms of the modelled one, of the plan of the largest modelled error.

    Args:
        plans: with their figures.
    """
    ratios = [(0.0, 1.0)]
    for plan, found in plans:
        modelled, measured = float(sensitivity.prediction_error(plan).max()), found.get(PREDICTION_ERROR, math.nan)
        if modelled > 0 and math.isfinite(measured):
            ratios.append((modelled, (measured / modelled) ** 2))
    low, high = _CORRECTION
    return min(max(max(ratios)[1], low), high)


def _middles(low: float, high: float, depth: int) -> list[float]:
    """Returns all points that so many bisections may reach."""
    if not depth:
        return []
    middle = (low + high) / 2
    return [middle, *_middles(low, middle, depth - 1), *_middles(middle, high, depth - 1)]


def _distinct(points: list[PlanPoint]) -> list[PlanPoint]:
    """Removes points with the modes of an earlier point: fixed plans come before those of the search."""
    kept: dict[str, PlanPoint] = {}
    for point in points:
        kept.setdefault(point.model_dump_json(include={"modes", "layers", "modulated", "sparse"}), point)
    return list(kept.values())
