"""The precision plan: one mode per site and timestep bin.

`auto` looks for the fastest plan that keeps a PSNR budget. For a limit on the modelled error (`Sensitivity`) the plan of least
attention time is a multiple-choice knapsack, which HiGHS solves to proven optimality. A bisection over the limit then samples
with each candidate. What is guaranteed: the chosen plan was sampled on the plan's seeds and keeps the budget there, and no plan
of the same modelled error is faster. The gates check it again on other seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.attention.schedules import sigma_rule_modes
from trtconvert.attention.sites import Site
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.calib.sensitivity import Int8Sites, Sensitivity, measure_sensitivity
from trtconvert.models.base import DiffusionModel, intercepted
from trtconvert.progress import Bar
from trtconvert.recipe import AttentionSection, PlanSection

Plan = dict[str, Tensor]
"""Site: [T] INT32 `Mode` per timestep bin."""

BISECTIONS = 6
"""Halvings of the modelled error's range in decades: the limit is known to 2**-6 of it."""

FRONTIER_DB = (60, 50, 40, 30)
"""PSNR that the error model promises at the frontier's points; each point is then sampled."""

FIXED = 5
"""Plans to compare with, see `_fixed_plans`."""

POINTS = FIXED + len(FRONTIER_DB) + BISECTIONS


@dataclass(frozen=True)
class Point:
    """A plan that was sampled.

    Attributes:
        name: what it is.
        plan: its modes.
        speed: attention time of FP16 everywhere over this plan's.
        psnr: dB, measured on the plan's seeds against full precision.
    """

    name: str
    plan: Plan
    speed: float
    psnr: float


def make_plan(section: AttentionSection, sites: Iterable[str], sigmas: Tensor, bins: int) -> Plan:
    """The modes that a recipe states or that follow each bin's noise level; for `auto` see `search_plan`.

    Args:
        sigmas: [timesteps] noise-to-signal ratio of each timestep, rising.
        bins: timestep bins.
    """
    if section.modes == "sigma-rule":
        modes = sigma_rule_modes(sigmas, bins)
    else:
        names = section.modes if isinstance(section.modes, list) else [section.modes] * bins
        modes = torch.tensor([Mode[name.upper()] for name in names], dtype=torch.int32)
    return {site: modes.clone() for site in sites}


def search(
    model: DiffusionModel,
    sites: Sequence[Site],
    tables: Mapping[str, Mapping[str, Tensor]],
    attention: AttentionSection,
    section: PlanSection,
    bins: int,
    batch: int,
    bar: Bar,
) -> tuple[Plan, list[Point]]:
    """Measure the sensitivity of the model and search its plan, see `measure_sensitivity` and `search_plan`.

    Args:
        sites: to convert.
        tables: of the calibration.
        batch: for which attention times are taken.
        bar: shows the progress.
    """
    seeds = range(section.seed, section.seed + section.samples)
    bar.total(section.steps + bins + POINTS)

    def int8_sites(plan: Plan) -> Int8Sites:
        named = {site: AttentionTables(**tables[site], modes=modes) for site, modes in plan.items()}
        return Int8Sites(named, model.timestep_max, attention.scaling, attention.smooth_k)

    exact = {site.name: torch.zeros(bins, dtype=torch.int32) for site in sites}
    sensitivity = measure_sensitivity(model, int8_sites(exact), bins, seeds=seeds, steps=section.steps, done=bar.step)
    with torch.no_grad():
        full = model.sample(model.denoiser, seeds, steps=section.steps, solver="ddim")
    sampled: dict[tuple[int, ...], float] = {}

    def sample_psnr(plan: Plan) -> float:
        key = tuple(int(m) for modes in plan.values() for m in modes)
        if key not in sampled:
            with torch.no_grad():
                denoiser = intercepted(model, int8_sites(plan).handler())
                images = model.sample(denoiser, seeds, steps=section.steps, solver="ddim")
            sampled[key] = float(-10 * (images - full).double().square().mean().clamp_min(1e-12).log10())
        bar.step()
        return sampled[key]

    shapes = [AttentionShape(batch, s.heads, s.query_tokens, s.key_tokens, s.head_dim) for s in sites]
    seconds = KernelCost.shipped().table(shapes)
    return search_plan(sensitivity, seconds, model.sigmas, section.min_psnr, sample_psnr)


def search_plan(
    sensitivity: Sensitivity,
    seconds: Tensor,
    sigmas: Tensor,
    budget: float,
    sample_psnr: Callable[[Plan], float],
) -> tuple[Plan, list[Point]]:
    """The fastest plan whose samples keep the budget, and the frontier around it.

    Args:
        seconds: [S, 4] attention time of each site in each mode, in any unit.
        sigmas: as in `make_plan`.
        budget: least PSNR in dB.
        sample_psnr: draws samples with a plan and compares them with full precision.
    Returns:
        The plan, and all points that were sampled, fastest first. FP16 everywhere always keeps the budget.
    """
    sites, bins = sensitivity.sites, len(sensitivity.gain)
    cost = sensitivity.cost()
    time = seconds[:, None] * sensitivity.steps[:, None].clamp_min(1e-6)  # [S, T, 4]; unseen bins count a little

    def point(name: str, plan: Plan) -> Point:
        return Point(name, plan, _speed(plan, sites, time), sample_psnr(plan))

    fixed = _fixed_plans(sigmas, bins)
    points = [point(name, {site: modes.clone() for site in sites}) for name, modes in fixed.items()]
    points += [point(f"model, {db} dB", fastest_plan(sites, cost, time, 10 ** (-db / 10))) for db in FRONTIER_DB]

    # The largest modelled error whose plan keeps the budget when sampled: bisection in decades between two sure ends.
    low, high = -12.0, float(cost.amax(-1).sum().clamp_min(1e-12).log10())
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        candidate = point(f"search, error 10^{middle:.2f}", fastest_plan(sites, cost, time, 10**middle))
        points.append(candidate)
        low, high = (middle, high) if candidate.psnr >= budget else (low, middle)

    points.sort(key=lambda p: (-p.speed, -p.psnr))
    # Equal samples have a PSNR that ends somewhere; a budget beyond it leaves FP16 everywhere.
    best = next((p for p in points if p.psnr >= budget), min(points, key=lambda p: p.speed))
    return best.plan, _distinct(points)


def _fixed_plans(sigmas: Tensor, bins: int) -> dict[str, Tensor]:
    """Plans without a search: one mode everywhere, the σ rule, and INT8 with FP16 in the last steps (commissioning report,
    table 4.4)."""
    rule = sigma_rule_modes(sigmas, bins)

    def everywhere(mode: Mode) -> Tensor:
        return torch.full((bins,), int(mode), dtype=torch.int32)

    late = torch.where(rule == int(Mode.PRECISION), everywhere(Mode.FP16), everywhere(Mode.AGGRESSIVE))
    plans = {
        f"{mode.name.lower()} everywhere": everywhere(mode) for mode in (Mode.FP16, Mode.BALANCED, Mode.AGGRESSIVE)
    }
    return plans | {"σ rule": rule, "aggressive, late steps fp16": late}


def fastest_plan(sites: list[str], cost: Tensor, time: Tensor, limit: float) -> Plan:
    """The plan of least total time whose total cost is at most `limit`, to proven optimality.

    Args:
        cost, time: [S, T, 4] of each choice, not negative; FP16 costs nothing.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, kron, vstack

    count = cost.shape[0] * cost.shape[1]
    modes = len(Mode)
    # Scaled to about one, so that the solver's tolerances mean the same for every model.
    weights = (cost / limit).flatten().numpy()
    one_mode_each = kron(eye_array(count), np.ones((1, modes)))
    result = milp(
        (time / time.amax()).flatten().numpy(),
        integrality=np.ones(count * modes),
        # A choice that breaks the limit alone is no choice; it would only widen the numbers' range.
        bounds=Bounds(0, np.where(weights > 1, 0, 1)),  # pyright: ignore[reportArgumentType]
        constraints=LinearConstraint(
            csr_array(vstack([one_mode_each, csr_array(np.minimum(weights, 2)[None])])),
            np.concatenate([np.ones(count), [-np.inf]]),  # pyright: ignore[reportArgumentType]
            np.concatenate([np.ones(count), [1.0]]),  # pyright: ignore[reportArgumentType]
        ),
    )
    assert result.success, result.message  # FP16 everywhere is always feasible
    chosen = torch.from_numpy(result.x).view(*cost.shape).argmax(-1).int()
    return dict(zip(sites, chosen, strict=True))


def _speed(plan: Plan, sites: list[str], time: Tensor) -> float:
    chosen = torch.stack([plan[site] for site in sites]).long()[..., None]
    return float(time[..., Mode.FP16].sum() / time.gather(-1, chosen).sum())


def _distinct(points: list[Point]) -> list[Point]:
    """Of points with the same modes, the first."""
    kept: dict[tuple[int, ...], Point] = {}
    for p in points:
        kept.setdefault(tuple(int(m) for modes in p.plan.values() for m in modes), p)
    return list(kept.values())
