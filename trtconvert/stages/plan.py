"""The stage that sets the mode of each site, layer and timestep bin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.cache import Stage
from trtconvert.calib.frontier import read_frontier
from trtconvert.calib.identity import kernel_cost_hash
from trtconvert.quant.decision import Plan
from trtconvert.stages.build import Build
from trtconvert.stages.common import FRONTIER, PLAN, SCALINGS
from trtconvert.stages.results import Calibrated, Planned
from trtconvert.stages.shapes import priced_rows, ranges_read

if TYPE_CHECKING:
    from trtconvert.progress import Bar


def plan_stages(build: Build, calibrated: Calibrated, searched: Stage | None) -> list[Planned]:
    """Sets the mode of each site, layer and timestep bin. The stage writes the plan, and the frontier of a search.

    Returns:
        One plan; the plan and its rivals (`Frontier.rivals`) if the search and the choice of steps share the budget.
    """
    names = [build.recipe.plan.point]
    if searched is not None and build.recipe.plan_follows_steps:
        names += [point.name for point in read_frontier(searched.folder / FRONTIER).rivals()[1:]]
    return [_plan_stage(build, calibrated, searched, name) for name in names]


def _plan_stage(build: Build, calibrated: Calibrated, searched: Stage | None, point: str | None) -> Planned:
    """Runs the plan stage.

    Args:
        point: name of a plan of the search; None: the fastest within the budget.
    """
    recipe = build.recipe
    reads: dict[str, Any] = {
        "calibration": calibrated.stage.key,
        "attention": recipe.attention.model_dump(mode="json"),
        "layers": recipe.layers.model_dump(mode="json"),
    }
    if searched is not None:
        reads |= {"search": searched.key, "point": point}
    elif recipe.attention.scaling == "auto" or recipe.sparse_shares:
        reads |= {"kernel_cost": kernel_cost_hash(recipe.plan), "shapes": ranges_read(recipe)} | build.guidance_reads()

    def make(folder: Path, bar: Bar) -> None:
        plan = _stated(build, calibrated) if searched is None else _found(searched, point, folder)
        (folder / PLAN).write_text(json.dumps(plan.record(), indent=1))

    return Planned(build.stage("plan", reads, make), calibrated)


def _found(searched: Stage, name: str | None, folder: Path) -> Plan:
    """Returns the plan of a point of the frontier (`Frontier.choose`), and writes the frontier with this point chosen."""
    frontier = read_frontier(searched.folder / FRONTIER)
    point = frontier.choose(name)
    chosen = frontier.model_copy(update={"chosen": point.name})
    (folder / FRONTIER).write_text(chosen.model_dump_json(indent=1))
    scalings = json.loads((searched.folder / SCALINGS).read_text())
    return point.plan(scalings)


def _stated(build: Build, calibrated: Calibrated) -> Plan:
    """Returns the plan that the recipe states, by modes or by the name of a rule."""
    from trtconvert.calib.block_plan import stated_blocks
    from trtconvert.calib.fixed_plans import stated_attention
    from trtconvert.calib.layer_plan import stated_layers
    from trtconvert.calib.search_space import site_scalings

    recipe, bins = build.recipe, build.recipe.calibration.bins
    source, sites = build.source.placed(), calibrated.chosen_sites
    batch = priced_rows(recipe, build.as_exported(source))
    scalings = site_scalings(recipe.attention, recipe.plan, sites, batch)
    decisions, dense = stated_attention(recipe.attention, scalings, source.sigmas, bins), {}
    for share in recipe.sparse_shares:
        found = calibrated.calibration
        calls = found.provenance.observed
        decisions, dense = stated_blocks(share, recipe.plan, sites, decisions, found.blocks, batch, calls)
    layers = stated_layers(recipe.layers, calibrated.chosen_layers, bins)
    return Plan(decisions, layers, dense)
