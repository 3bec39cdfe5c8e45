"""The stage that gives each site, layer and timestep bin its mode."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.cache import Stage
from trtconvert.calib.frontier import read_frontier
from trtconvert.calib.identity import kernel_cost_hash
from trtconvert.stages.build import Build
from trtconvert.stages.common import FRONTIER, PLAN, SCALINGS
from trtconvert.stages.results import Calibrated, Plan, Planned
from trtconvert.stages.shapes import opt_rows

if TYPE_CHECKING:
    from trtconvert.progress import Bar


def plan_stage(build: Build, calibrated: Calibrated, searched: Stage | None) -> Planned:
    """Give each site, layer and timestep bin its mode. Leaves the plan, and the frontier where it was searched."""
    recipe = build.recipe
    reads: dict[str, Any] = {
        "calibration": calibrated.stage.key,
        "attention": recipe.attention.model_dump(mode="json"),
        "layers": recipe.layers.model_dump(mode="json"),
    }
    if searched is not None:
        reads |= {"search": searched.key, "point": recipe.plan.point}
    elif recipe.attention.scaling == "auto" or recipe.sparse_shares:
        reads |= {"kernel_cost": kernel_cost_hash(recipe.plan)} | build.guidance_reads()

    def make(folder: Path, bar: Bar) -> None:
        plan = _stated(build, calibrated) if searched is None else _found(searched, recipe.plan.point, folder)
        (folder / PLAN).write_text(json.dumps(asdict(plan), indent=1))

    return Planned(build.stage("plan", reads, make), calibrated)


def _found(searched: Stage, name: str | None, folder: Path) -> Plan:
    """A point of the frontier, which is left in a folder with that point chosen.

    Args:
        name: as `Frontier.choose` takes it.
    """
    frontier = read_frontier(searched.folder / FRONTIER)
    point = frontier.choose(name)
    chosen = frontier.model_copy(update={"chosen": point.name})
    (folder / FRONTIER).write_text(chosen.model_dump_json(indent=1))
    scalings = json.loads((searched.folder / SCALINGS).read_text())
    return Plan(point.modes, point.layers, scalings, point.sparse, {}, point.modulated)


def _stated(build: Build, calibrated: Calibrated) -> Plan:
    """What the recipe says, or the rule that the recipe names."""
    from trtconvert.calib.block_plan import stated_blocks
    from trtconvert.calib.layer_plan import layer_modes
    from trtconvert.calib.plan import make_plan, site_scalings

    recipe, bins = build.recipe, build.recipe.calibration.bins
    source, sites = build.source.placed(), calibrated.chosen_sites
    form = build.as_exported(source)
    batch = opt_rows(form, form.dims)
    scalings = site_scalings(recipe.attention, recipe.plan, sites, batch)
    plan = make_plan(recipe.attention, [site.name for site in sites], source.sigmas, bins)
    layers = layer_modes(recipe.layers, calibrated.chosen_layers, bins)
    sparse, dense = {}, {}
    for share in recipe.sparse_shares:
        found = calibrated.calibration
        calls = found.provenance.observed
        sparse, dense = stated_blocks(share, recipe.plan, sites, plan, found.blocks, batch, calls)
    return Plan(
        {site: row.tolist() for site, row in plan.items()},
        {name: row.tolist() for name, row in layers.items()},
        scalings,
        sparse,
        dense,
        [],
    )
