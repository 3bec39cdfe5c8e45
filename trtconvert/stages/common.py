"""Shared by all stages: the names of their files, and the runner of a stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.bundle import ComponentRecord, EngineRecord
from trtconvert.cache import Cache, Stage

if TYPE_CHECKING:
    from trtconvert.progress import Bar, Reporter
    from trtconvert.recipe import Recipe

COMPONENT = "denoiser"
CALIBRATION, SITES, LAYERS = "calibration.safetensors", "sites.json", "layers.json"
ONNX, NATIVE, SIGNATURE = "denoiser.onnx", "native.onnx", "signature.json"  # SIGNATURE holds a ComponentRecord
NAMES = "names.json"
OUTPUT_ERRORS, SITE_ERRORS = "error.json", "errors.json"  # of predictions or components; of sites and layers
PLAN, FRONTIER, SCALINGS = "plan.json", "frontier.json", "scalings.json"
ENGINE, RECORD = "engine.plan", "engine.json"
QUALITY, SAMPLES = "quality.json", "samples.png"
FULL_PRECISION, RECORDED_CALLS, EXAMPLE = "full.safetensors", "verify.safetensors", "example.safetensors"
REUSE, REUSE_RECORD, CHOSEN_PLAN = "reuse.safetensors", "reuse.json", "chosen.json"

Engines = list[tuple[EngineRecord, Stage]]
"""The engines of a component, each with the stage that built it."""


def run_stage(
    name: str,
    reads: Mapping[str, Any],
    make: Callable[[Path, Bar], None],
    cache: Cache,
    report: Reporter,
    code: Collection[str] = (),
) -> Stage:
    """Returns a stage from the cache, or runs it, with progress on a bar.

    Args:
        reads: everything but code that the stage's output depends on: sections of the recipe, hashes, keys of earlier stages.
        make: writes the stage's folder. The module of `make`, with all that this module imports, is part of the key.
        code: names of further modules, see `Cache.stage`.
    """
    with report.stage(name) as bar:
        modules = {make.__module__, *code}
        stage = cache.stage(name.replace(" ", "-"), modules, reads, lambda folder: make(folder, bar))
        bar.reused = stage.reused
        bar.bytes = sum(file.stat().st_size for file in stage.folder.iterdir())
    return stage


def unquantised_reads(recipe: Recipe) -> dict[str, Any]:
    """Returns the part of a stage's key about refittable engines."""
    return {"unquantised": True} if recipe.engine.refittable else {}


def component_of(exported: Stage) -> ComponentRecord:
    return ComponentRecord.model_validate_json((exported.folder / SIGNATURE).read_text())


def example_of(name: str) -> str:
    """Returns the name of a bundle's file with the example call of a component's engine."""
    return f"{name}-{EXAMPLE}"
