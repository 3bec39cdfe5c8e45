"""Searches over units that tests make up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trtconvert.attention.schedules import compute_sigma_schedule
from trtconvert.calib.budget import Measure
from trtconvert.calib.frontier import PlanPoint
from trtconvert.calib.plan import search_plan
from trtconvert.calib.sensitivity import Sensitivity
from trtconvert.linear.modes import LayerMode
from trtconvert.quant.decision import Choice, Plan, Unit

EXACT, STATIC = map(Choice, (LayerMode.EXACT, LayerMode.STATIC))
BY_DELTAS = Choice(LayerMode.STATIC, delta=True)


def layer_unit(*members: str, choices: Sequence[Choice] = (STATIC,)) -> Unit:
    """A group of layers, by the name of the first, that may have some choices beside 16 bits."""
    return Unit("layer", members[0], members, (EXACT, *choices))


def points_of(
    units: Sequence[Unit],
    error: Tensor,
    seconds: Sequence[Tensor],
    steps: Sequence[float],
    min_psnr: float,
    named: str | None = None,
) -> tuple[list[PlanPoint], list[Plan]]:
    """What a search finds whose samples have the sum of the errors [S, T, choices] of their choices, in bins with steps, and all
    plans that it sampled.

    Args:
        seconds: of each unit, [T, choices] or the same in all bins; steps: share of the steps in each bin.
        named: of a fixed plan to sample.
    """
    seen, sampled = torch.tensor(steps, dtype=torch.float64), []

    def measure(plan: Plan) -> dict[str, float]:
        sampled.append(plan)
        made = plan.attention | plan.layers
        taken = [[unit.choices.index(choice) for choice in made[unit.members[0]].choices] for unit in units]
        errors = error.nan_to_num().gather(-1, torch.tensor(taken)[..., None])
        return {"psnr": -10 * math.log10(max(float(errors[:, seen > 0].sum()), 1e-15))}

    sensitivity = Sensitivity(units, error, torch.ones_like(seen), seen, torch.ones_like(seen))
    budget = [Measure("psnr", lambda *_: 0.0, True, min_psnr)]
    times = [of_unit.expand(len(steps), -1) for of_unit in seconds]
    sigmas = compute_sigma_schedule(1000, "linear")
    return search_plan(sensitivity, times, sigmas, budget, measure, named=named), sampled
