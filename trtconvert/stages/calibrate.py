"""The stage that finds attention sites and layers and observes their ranges."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.bundle import covering
from trtconvert.calib.identity import Kind, calibration_reads, data_kind
from trtconvert.files import one_at_a_time
from trtconvert.recipe import Recipe
from trtconvert.stages.build import Build
from trtconvert.stages.common import CALIBRATION, LAYERS, SITES, unquantised_reads
from trtconvert.stages.results import Calibrated
from trtconvert.stages.shapes import profiles_of

if TYPE_CHECKING:
    from trtconvert.bars import Steps
    from trtconvert.calib.calibrate import Parts
    from trtconvert.calib.calibration import Calibration
    from trtconvert.models import DiffusionModel
    from trtconvert.progress import Bar


def calibrate_stage(build: Build, meanwhile: Callable[[], None] = lambda: None) -> Calibrated:
    """Finds the attention sites and layers and observes their ranges. Writes the calibration, the sites and the layers.

    Args:
        meanwhile: starts work that may run beside the calibration; not called if the cache has the calibration.
    """
    recipe, weights = build.recipe, build.weights
    reads = calibration_reads(recipe, weights) | build.place.reads() | unquantised_reads(recipe)

    def make(folder: Path, bar: Bar) -> None:
        from trtconvert.calib.calibrate import (
            load_calibration,
            modulated_groups,
            observations_folder,
            parts_to_convert,
            refuse_without_blocks,
        )
        from trtconvert.calib.dtype_checks import fitting
        from trtconvert.calib.search_space import kernel_cost

        meanwhile()
        build.crew.announce(_load_ahead)
        source = build.source.placed()
        # All checks that may fail come before the calibration, which may take hours.
        _refuse_unfit_steps(recipe, source)
        profiles = profiles_of(recipe, build.as_exported(source))
        if recipe.layers.modiff:
            from trtconvert.export.delta_caches import require_fixed_sizes

            require_fixed_sizes(source, covering(profiles))
        if recipe.attention.modes == "auto":
            kernel_cost(recipe.plan, recipe.layers, masks=bool(recipe.sparse_shares))
        elif recipe.sparse_shares:
            from trtconvert.calib.cost import KernelCost

            KernelCost.load(recipe.plan.kernel_cost, masks=True)
        if source.diffusers is None:  # pipelines were observed at several sizes
            from trtconvert.models.fixed_sizes import refuse_fixed_sizes

            refuse_fixed_sizes(build.source.model(), covering(profiles))
        with fitting(source, recipe.model.dtype, build.source.model()):
            parts = parts_to_convert(source, recipe.attention, recipe.layers)
        if recipe.attention.modes == "auto" and any(layer.kind == "conv" for layer in parts.layers):
            kernel_cost(recipe.plan, recipe.layers, convs=True)
        if recipe.sparse_shares:
            refuse_without_blocks(source, parts.sites, covering(profiles), recipe.calibration.bins)
        if recipe.calibration.from_ is not None:
            made = load_calibration(
                recipe.calibration.from_, source, weights, recipe.calibration.bins, parts.sites, parts.layers,
                modulated_groups(parts.layers, recipe.layers), recipe.sparse_shares,
            )  # fmt: skip
        else:
            # Observations survive an interrupted build, and are removed at the end of the stage.
            work = observations_folder(build.cache, recipe, weights, build.place)
            with one_at_a_time(work):
                with build.crew.sharing(_calibration, parts, work):
                    made = _calibration(build, bar, parts, work)
                shutil.rmtree(work, ignore_errors=True)  # remains do not cost the calibration
        if recipe.engine.refittable:
            made = made.rounded_to_nearest()
        made.save(folder / CALIBRATION)
        for file, found in ((SITES, (*parts.sites, *parts.left_sites)), (LAYERS, (*parts.layers, *parts.left_layers))):
            (folder / file).write_text(json.dumps([asdict(part) for part in found], indent=1))

    # A calibration without the bad samples must not serve a build without --skip-bad.
    return Calibrated(build.stage("calibrate", reads | {"skip_bad": build.skip_bad}, make))


def _load_ahead(build: Build, _bar: Steps) -> None:
    """Loads the model in another process while rank 0 checks the recipe. Rank 0 meets the same errors and prints them."""
    with suppress(Exception):
        build.source.placed()


def _calibration(build: Build, bar: Steps, parts: Parts, work: Path) -> Calibration:
    from trtconvert.calib.calibrate import calibrate

    recipe, source = build.recipe, build.source.placed()
    return calibrate(
        build.timed(source, parts), recipe.calibration, build.weights, parts.sites, work, bar, build.ranks,
        skip_bad=build.skip_bad, layers=parts.layers, of_layers=recipe.layers, shares=recipe.sparse_shares,
        dtype=recipe.model.dtype,
    )  # fmt: skip


def _refuse_unfit_steps(recipe: Recipe, model: DiffusionModel) -> None:
    """Raises a UserError if the model's sampler does not take a section's number of steps, or cannot skip steps."""
    from trtconvert.models.denoiser import refuse_steps, refuse_unfollowed

    calibration = recipe.calibration
    asked = [("calibration", calibration.steps, "ddim"), ("verify", recipe.verify.steps, recipe.verify.sampler)]
    if calibration.from_ is not None or data_kind(calibration.data) not in (Kind.DENOISE, Kind.PROMPTS):
        del asked[0]
    if recipe.attention.modes == "auto":
        asked.append(("plan", recipe.plan.steps, "ddim"))
    for section, steps, solver in asked:
        refuse_steps(model, f"{section}.steps", steps, solver)
    if recipe.steps.computed != "all":
        refuse_unfollowed(model, recipe.steps.calibrated)
