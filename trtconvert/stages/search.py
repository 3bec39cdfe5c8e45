"""The stage that searches plans and draws samples with each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.cache import Stage
from trtconvert.calib.frontier import named_fixed
from trtconvert.calib.identity import measured_reads, search_reads
from trtconvert.stages.build import Build
from trtconvert.stages.common import FRONTIER, SCALINGS
from trtconvert.stages.results import Calibrated
from trtconvert.stages.shapes import priced_rows, ranges_read

if TYPE_CHECKING:
    from trtconvert.bars import Steps
    from trtconvert.calib.budget import Budget
    from trtconvert.calib.frontier import Frontier
    from trtconvert.progress import Bar


def search_stage(build: Build, calibrated: Calibrated, meanwhile: Callable[[], None] = lambda: None) -> Stage | None:
    """Searches plans and draws samples with each. Writes the frontier; the plan stage chooses the plan to build.

    Measurements survive an interrupted build, and serve searches with other budgets.

    Args:
        meanwhile: starts work that may run beside the search; not called if the cache has the search.
    Returns:
        None if the recipe states the plan.
    """
    recipe = build.recipe
    if recipe.attention.modes != "auto":
        return None
    shared = {
        "calibration": calibrated.stage.key,
        "attention": recipe.attention.model_dump(mode="json"),
        "layers": recipe.layers.model_dump(mode="json"),
        "shapes": ranges_read(recipe),
    } | (build.guidance_reads() | build.kernel_reads())
    if recipe.layers.modiff == "auto":
        shared["dtype"] = recipe.model.dtype  # the type of caches
    of_plan = search_reads(recipe.plan)
    reads = shared | {"plan": of_plan | {"point": named_fixed(recipe.plan.point)}}

    def make(folder: Path, bar: Bar) -> None:
        from trtconvert.calib.budget import limits_alone
        from trtconvert.evaluate.budget import load_budget

        meanwhile()
        work = build.cache.work("searched", {__name__, *build.code}, shared | {"plan": measured_reads(of_plan)})
        budget = load_budget(recipe.plan)
        with build.crew.sharing(_searched, calibrated, work, limits_alone(budget)):
            frontier, scalings = _searched(build, bar, calibrated, work, budget)
        (folder / SCALINGS).write_text(json.dumps(scalings, indent=1))
        (folder / FRONTIER).write_text(frontier.model_dump_json(indent=1))

    return build.stage("search", reads, make)


def _searched(
    build: Build, bar: Steps, calibrated: Calibrated, work: Path, budget: Budget
) -> tuple[Frontier, dict[str, str]]:
    """Returns the frontier, and the scalings of its plans. work: folder of measurements."""
    from trtconvert.calib.kept_search import KeptSearch
    from trtconvert.calib.plan import search
    from trtconvert.calib.search_space import SearchSpace, site_scalings

    recipe, source, sites = build.recipe, build.source.placed(), calibrated.chosen_sites
    batch = priced_rows(recipe, build.as_exported(source))
    scalings = site_scalings(recipe.attention, recipe.plan, sites, batch)
    space = SearchSpace.of(source, recipe, sites, calibrated.chosen_layers, calibrated.calibration, scalings, batch)
    return search(source, recipe, space, budget, bar, KeptSearch(work, build.ranks), build.ranks), scalings
