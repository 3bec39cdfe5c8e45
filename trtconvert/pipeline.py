"""From a recipe to a bundle.

    recipe ─► models.load ─► components ─► calibrate ─► plan ─► export ─► engines ─► verify ─► bundle

Each stage is a folder in the cache, filed under the hash of what the stage reads: a second build redoes what changed and
nothing else, and loads neither the model nor torch when nothing did.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert import bundle
from trtconvert.bundle import (
    ComponentRecord,
    EngineRecord,
    Manifest,
    QualityRecord,
)
from trtconvert.cache import Cache, Stage, versions
from trtconvert.calib.identity import search_reads
from trtconvert.engine import BackendStatus, choose_backend
from trtconvert.entry_point import source_identity
from trtconvert.errors import UserError
from trtconvert.evaluate.optional import require_installed
from trtconvert.files import settled, whole_folder
from trtconvert.models.identity import identity
from trtconvert.models.saved import copy_without_models, pipeline_folder, with_dtype
from trtconvert.progress import Reporter
from trtconvert.recipe import ONNX, Recipe, changed_paths, with_paths
from trtconvert.stages import (
    CALIBRATION,
    COMPONENT,
    ENGINE,
    ERROR,
    FRONTIER,
    QUALITY,
    SAMPLES,
    calibrate_stage,
    component_of,
    component_stages,
    engine_stages,
    export_stage,
    plan_stage,
    verify_stage,
)
from trtconvert.weights.lora_files import left_over

if TYPE_CHECKING:
    from trtconvert.models import DiffusionModel

PIPELINE = "pipeline"
"""Folder of a bundle with what a pipeline needs beside its models."""


@dataclass(frozen=True)
class Outcome:
    """A finished build: its manifest, and where it is."""

    manifest: Manifest
    folder: Path


def build(recipe: Recipe, output: Path, cache: Cache, report: Reporter, *, skip_bad: bool = False) -> Outcome:
    """Run the whole conversion and leave a bundle at `output`.

    Args:
        skip_bad: leave bad calibration samples out, and list them in the calibration.
    Raises:
        UserError: the recipe asks for something that the model or this machine does not have.
        GateError: the quality gates are missed; no bundle is left.
    """
    output = settled(output)
    refuse_foreign(output)
    if cache.folder.resolve().is_relative_to(output.resolve()):
        raise UserError(
            f"the build cache {cache.folder} lies in the bundle {output}",
            expected="two folders, neither the cache in the bundle",
            got="one in the other",
            remedy="give another folder with --cache, or with -o",
        )
    recipe = recipe.model_copy(update={"model": with_dtype(recipe.model)})
    backend, reason = choose_backend(recipe.engine.backend)
    weights = identity(recipe.model, recipe.loras)
    _refuse_missing_packages(recipe)
    for file, missing in left_over([(lora.file, lora.target) for lora in recipe.loras]):
        report.notice(
            f"{file.name} has parts for {', '.join(missing)} too, which are left out; an entry of loras with that target "
            "takes them",
        )

    def take_along(new: Path) -> None:
        refuse_foreign(output)  # it may have come meanwhile
        if (output / bundle.MANIFEST).exists():
            bundle.keep_others(output, new)
            if lost := _engines(output) - _engines(new):
                names = ", ".join(sorted(Path(name).stem for name in lost))
                report.notice(
                    f"engines of the bundle before that the new one has not: {names}; run `trtconvert compile` on their "
                    "GPUs again",
                )

    @functools.cache
    def model() -> DiffusionModel:
        from trtconvert import models

        loaded = models.load(recipe.model, recipe.loras)
        for text in loaded.notices:
            report.notice(text)
        return loaded

    with whole_folder(output, "give another folder with -o", take_along) as folder, report.live():
        others = component_stages(recipe, weights, model, cache, report)
        calibration = calibrate_stage(recipe, weights, model, cache, report, skip_bad)
        plan = plan_stage(recipe, calibration, model, cache, report)
        exported = export_stage(recipe, calibration, plan, model, cache, report)
        components = {COMPONENT: exported} | others
        engines = {
            name: engine_stages(name, component_of(of), of, recipe.engine, backend, cache, report)
            for name, of in components.items()
        }
        verified = verify_stage(recipe, calibration, plan, exported, model, cache, report)
        with report.stage("bundle"):
            stages = (calibration, plan, verified)
            manifest = _assemble(folder, recipe, weights, backend, reason, stages, components, engines)
    return Outcome(manifest, output)


def _engines(folder: Path) -> set[str]:
    """The files of a bundle's engines."""
    return {
        engine.file for component in bundle.read_manifest(folder).components.values() for engine in component.engines
    }


def refuse_foreign(output: Path) -> None:
    """
    Raises:
        UserError: something that is not a bundle stands where the bundle should go.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    try:
        bundle.read_manifest(output)
    except UserError as error:
        got = "a folder with other files" if output.is_dir() else "a file"
        if (output / bundle.MANIFEST).exists():
            got += f", and a {bundle.MANIFEST} that is not a bundle's, or damaged"
        raise UserError(
            f"{output} exists and is not a bundle",
            expected="a new folder, an empty one, or a bundle to replace",
            got=got,
            remedy="give another folder with -o",
        ) from error


def _refuse_missing_packages(recipe: Recipe) -> None:
    """
    Raises:
        UserError: a package or a file that the plan's figures need is missing: nobody wants to hear after the calibration.
    """
    plan = recipe.plan
    if recipe.attention.modes == "auto":
        search_reads(plan)
        needed = {
            "torchmetrics": plan.min_ssim,
            "lpips": plan.lpips_weights,
            "torch_fidelity": plan.features == "inception",
        }
        for module, wanted in needed.items():
            if wanted:
                require_installed(module)


def _assemble(
    folder: Path,
    recipe: Recipe,
    weights: str,
    backend: BackendStatus,
    reason: str,
    stages: tuple[Stage, Stage, Stage],
    components: Mapping[str, Stage],
    engines: Mapping[str, list[tuple[EngineRecord, Stage]]],
) -> Manifest:
    """Copy what the stages left into the bundle's folder, and write the manifest last.

    Args:
        components, engines: by name, the stages that exported them and built for them.
    """
    calibration, plan, verified = stages
    shutil.copyfile(calibration.folder / CALIBRATION, folder / CALIBRATION)
    if (plan.folder / FRONTIER).is_file():
        shutil.copyfile(plan.folder / FRONTIER, folder / FRONTIER)
    records: dict[str, ComponentRecord] = {}
    for name, exported in components.items():
        record = component_of(exported)
        for file in exported.folder.glob(f"{record.onnx}*"):  # a large model's weights lie beside it
            shutil.copyfile(file, folder / file.name)
        for engine, stage in engines[name]:
            (folder / engine.file).parent.mkdir(exist_ok=True)
            shutil.copyfile(stage.folder / ENGINE, folder / engine.file)
        records[name] = record.model_copy(update={"engines": [engine for engine, _ in engines[name]]})
    shutil.copyfile(verified.folder / SAMPLES, folder / SAMPLES)
    kept = with_paths(recipe, lambda path: Path(path.name))  # without the folders of this machine
    images = {name: copied_images(name, paths, folder) for name, paths in recipe.model.images.items()}
    errors = {
        name: json.loads((stage.folder / ERROR).read_text()) for name, stage in components.items() if name != COMPONENT
    }
    weights_at = recipe.model.weights
    if errors and weights_at is not None and (saved := pipeline_folder(weights_at, recipe.model.config)):
        copy_without_models(saved, folder / PIPELINE)
    denoiser = records[COMPONENT].diffusers
    quality = QualityRecord.model_validate_json((verified.folder / QUALITY).read_text())
    manifest = Manifest(
        model=_title(recipe) if denoiser is None else f"{denoiser.pipeline} ({recipe.model.source})",
        weights=weights,
        code=source_identity(recipe.model.source),
        versions=versions(),
        backend=backend.name,
        backend_reason=reason,
        recipe=kept.model_copy(update={"model": kept.model.model_copy(update={"images": images})}),
        calibration=CALIBRATION,
        components=records,
        pipeline=PIPELINE if (folder / PIPELINE).is_dir() else "",
        quality=quality.model_copy(update={"component_errors": errors}),
    )
    bundle.write_manifest(folder, manifest)
    return bundle.read_manifest(folder)


def _title(recipe: Recipe) -> str:
    """What a model is called that is no pipeline's: an ONNX file by its name."""
    section = recipe.model
    return section.weights.name if section.source == ONNX and section.weights is not None else section.source


def copied_images(name: str, paths: Path | list[Path], folder: Path) -> Path | list[Path]:
    """The images of an argument in a bundle, relative to it, where they are copied to."""
    numbered = (
        {path: f"{name}-{number}" for number, path in enumerate(paths)} if isinstance(paths, list) else {paths: name}
    )

    def copied(path: Path) -> Path:
        place = Path(bundle.IMAGES, numbered[path] + path.suffix)
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / place)
        return place

    return changed_paths(paths, copied)
