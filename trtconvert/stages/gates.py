"""The gates of a build: figures outside of their limits fail the build."""

from __future__ import annotations

import json
from pathlib import Path

from trtconvert.bundle import QualityRecord
from trtconvert.cache import Stage
from trtconvert.evaluate import gates
from trtconvert.recipe import Recipe
from trtconvert.stages.common import OUTPUT_ERRORS, QUALITY, Engines
from trtconvert.stages.results import Planned


def check_gates(recipe: Recipe, planned: Planned, verified: Stage, engines: Engines) -> tuple[QualityRecord, Engines]:
    """Returns the figures of a build, and its engines with their errors; GateError if a figure is outside of its limit."""
    quality, plan = QualityRecord.model_validate_json((verified.folder / QUALITY).read_text()), planned.plan
    convs = {layer["name"] for layer in planned.calibrated.layers_as_json() if layer["kind"] == "conv"}
    gates.check_gates(
        quality, plan.site_modes, recipe.verify, plan.layer_modes, plan.scalings, plan.shares.keys(), convs
    )
    if not (verified.folder / OUTPUT_ERRORS).is_file():
        return quality, engines
    errors = json.loads((verified.folder / OUTPUT_ERRORS).read_text())
    measured = []
    for record, stage in engines:
        if record.backend == "tensorrt" and errors:
            gates.check_predictions(Path(record.file).name, errors, recipe.verify, quality.type_error)
            record = record.model_copy(update={"prediction_error": errors})
        measured.append((record, stage))
    return quality, measured
