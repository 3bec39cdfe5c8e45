"""The stage that measures the error of sites and layers, on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.cache import Stage
from trtconvert.stages.build import Build
from trtconvert.stages.common import SITE_ERRORS
from trtconvert.stages.converted import int8_in_torch
from trtconvert.stages.results import Planned

if TYPE_CHECKING:
    from trtconvert.progress import Bar


def errors_stage(build: Build, planned: Planned, meanwhile: Callable[[], None] = lambda: None) -> Stage:
    """Measures the error of each converted site and layer at its own output, on a GPU. Writes decibels by timestep bin.

    Args:
        meanwhile: starts work that may run beside this stage; not called if the cache has the stage.
    """
    recipe = build.recipe
    section = recipe.verify
    asked = {"seed": section.seed, "samples": section.samples, "bins": recipe.calibration.bins}
    reads = planned.reads() | {"dtype": recipe.model.dtype} | asked | build.kernel_reads()

    def make(folder: Path, bar: Bar) -> None:
        from trtconvert.calib.data import batches_of, samples_for_errors
        from trtconvert.evaluate import verify

        meanwhile()
        source = build.source.placed()
        sites, layers = int8_in_torch(recipe, source, planned)
        samples = samples_for_errors(planned.calibrated.chosen_sites, section.samples)
        bar.total(len(batches_of(samples, verify.BATCH)))
        found = verify.output_sqnr(source, sites, layers, recipe.calibration.bins, section.seed, samples, bar)
        (folder / SITE_ERRORS).write_text(json.dumps(found))

    return build.stage("errors", reads, make)
