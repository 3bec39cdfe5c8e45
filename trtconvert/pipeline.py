"""From a recipe to a bundle.

    recipe ─► components and their engines ─► calibrate ─► search ─► plan ─► steps ─► reference ─► errors
           ─► export ─► engine ─► verify ─► bundle

Each stage is a folder in the cache, filed under the hash of what the stage reads: a second build redoes what changed and
nothing else, and loads neither the model nor torch when nothing did.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert import bundle
from trtconvert.bundle import ComponentRecord, Manifest, QualityRecord
from trtconvert.cache import Cache, Stage, versions
from trtconvert.calib.identity import named_file, search_reads
from trtconvert.engine import BackendStatus, choose_backend
from trtconvert.entry_point import source_identity
from trtconvert.errors import GateError, UserError
from trtconvert.evaluate.optional import require_installed
from trtconvert.files import settled, whole_folder
from trtconvert.models.identity import identity
from trtconvert.models.placed import Place
from trtconvert.models.placement import choose_place, tell_place
from trtconvert.models.saved import copy_without_models, pipeline_folder, with_dtype
from trtconvert.progress import Reporter
from trtconvert.recipe import ONNX, Recipe, changed_paths, with_paths
from trtconvert.stages.build import Build
from trtconvert.stages.calibrate import calibrate_stage
from trtconvert.stages.common import (
    CALIBRATION,
    COMPONENT,
    ENGINE,
    EXAMPLE,
    FRONTIER,
    QUALITY,
    REUSE,
    SAMPLES,
    VERIFY,
    Engines,
    component_of,
    example_of,
)
from trtconvert.stages.component_errors import verified_component
from trtconvert.stages.components import component_stages
from trtconvert.stages.engines import EngineBuild, engine_stages
from trtconvert.stages.errors import errors_stage
from trtconvert.stages.export import export_stage
from trtconvert.stages.gates import check_gates
from trtconvert.stages.plan import plan_stages
from trtconvert.stages.reference import reference_stage
from trtconvert.stages.results import Planned, Steps
from trtconvert.stages.search import search_stage
from trtconvert.stages.steps import steps_stage
from trtconvert.stages.verify import verify_stage
from trtconvert.weights.lora_files import left_over

if TYPE_CHECKING:
    from trtconvert.calib.calibrate import Parts
    from trtconvert.diffusion_model import DiffusionModel

PIPELINE = "pipeline"
"""Folder of a bundle with what a pipeline needs beside its models."""


def _keep_evidence(verified: Stage, output: Path) -> Path:
    """Copy the samples and the figures of a build that missed a gate beside where its bundle would be."""
    folder = output.with_name(f"{output.name}.missed")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SAMPLES, QUALITY):
        shutil.copyfile(verified.folder / name, folder / name)
    return folder


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
    place = choose_place(recipe.compute, recipe.model)
    recipe = _on_place(recipe, place)
    tell_place(place, "calibration, search and verification compute", report)
    weights = identity(recipe.model, recipe.loras)
    _refuse_missing_packages(recipe)
    for file, missing in left_over([(lora.file, lora.target) for lora in recipe.loras]):
        report.notice(
            f"{file.name} has parts for {', '.join(missing)} too, which are left out; those of a text encoder are merged "
            "by an entry of loras with that target",
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

    def timed(model: DiffusionModel, parts: Parts) -> DiffusionModel:
        from trtconvert.forecast import with_forecast

        return with_forecast(recipe, place, report, model, parts)

    asked = Build(recipe, weights, place, cache, report, skip_bad, timed)
    with whole_folder(output, "give another folder with -o", take_along) as folder, report.live():
        made = _run_stages(asked, backend, output)
        with report.stage("bundle"):
            manifest = _assemble(folder, asked, made, backend, reason)
    return Outcome(manifest, output)


@dataclass(frozen=True)
class _Made:
    """What the stages of a build made.

    Attributes:
        planned, steps, reference, verified: what these stages left.
        components, engines: by name, what the stages left that exported them and built for them.
        quality: the figures, which passed the gates.
    """

    planned: Planned
    steps: Steps
    reference: Stage
    verified: Stage
    components: Mapping[str, Stage]
    engines: Mapping[str, Engines]
    quality: QualityRecord


def _run_stages(build: Build, backend: BackendStatus, output: Path) -> _Made:
    """
    Args:
        output: where the bundle would be, beside which the evidence of a missed gate is kept.
    """
    of_engines = EngineBuild(build.recipe.engine, backend, build.cache, build.report)
    components, engines, component_errors = component_stages(build), dict[str, Engines](), dict[str, float]()
    for name, of in components.items():
        built = engine_stages(of_engines, name, component_of(of), of)
        component_errors[name], engines[name] = verified_component(build, name, of, built)
    calibrated = calibrate_stage(build)
    searched = search_stage(build, calibrated)
    steps = steps_stage(build, plan_stages(build, calibrated, searched))
    planned = steps.planned
    reference = reference_stage(build)
    errors = errors_stage(build, planned) if build.place.on_gpu else None
    build.source.leave_gpu()  # which engines are built on and timed
    exported = export_stage(build, planned)
    built = engine_stages(of_engines, COMPONENT, component_of(exported), exported)
    verified = verify_stage(build, planned, steps, exported, reference, errors, built)
    try:
        quality, built = check_gates(build.recipe, planned, verified, built)
    except GateError:
        build.report.notice(f"what missed the gate is in {_keep_evidence(verified, output)}")
        raise
    quality = quality.model_copy(update={"component_errors": component_errors})
    return _Made(
        planned, steps, reference, verified, {COMPONENT: exported} | components, {COMPONENT: built} | engines, quality
    )


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


def _on_place(recipe: Recipe, place: Place) -> Recipe:
    """The recipe with what it asks for where the build computes."""
    more = recipe.verify.on_gpu
    if not place.on_gpu or more is None:
        return recipe
    drawn = {"samples": more.samples, "steps": more.steps}
    return recipe.model_copy(update={"verify": recipe.verify.model_copy(update=drawn)})


def _refuse_missing_packages(recipe: Recipe) -> None:
    """
    Raises:
        UserError: a package or a file that the figures of the plan or of the gates need is missing: nobody wants to hear after
            the calibration.
    """
    plan = recipe.plan
    if (weights := recipe.verify.lpips_weights) is not None and named_file("verify.lpips_weights", weights):
        from trtconvert.evaluate.metrics import load_lpips  # with torch, which builds that the cache answers do without

        load_lpips(weights)
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


def _assemble(folder: Path, build: Build, made: _Made, backend: BackendStatus, reason: str) -> Manifest:
    """Copy what the stages left into the bundle's folder, and write the manifest last."""
    recipe, planned = build.recipe, made.planned
    shutil.copyfile(planned.calibrated.stage.folder / CALIBRATION, folder / CALIBRATION)
    if (planned.stage.folder / FRONTIER).is_file():
        shutil.copyfile(planned.stage.folder / FRONTIER, folder / FRONTIER)
    records: dict[str, ComponentRecord] = {}
    for name, exported in made.components.items():
        record = component_of(exported)
        for file in exported.folder.glob(f"{record.onnx}*"):  # a large model's weights lie beside it
            shutil.copyfile(file, folder / file.name)
        for engine, stage in made.engines[name]:
            (folder / engine.file).parent.mkdir(exist_ok=True)
            shutil.copyfile(stage.folder / ENGINE, folder / engine.file)
        if name != COMPONENT:
            shutil.copyfile(exported.folder / EXAMPLE, folder / example_of(name))
        records[name] = record.model_copy(update={"engines": [engine for engine, _ in made.engines[name]]})
    if made.steps.stage is not None and made.steps.record is not None:
        shutil.copyfile(made.steps.stage.folder / REUSE, folder / REUSE)
        records[COMPONENT] = records[COMPONENT].model_copy(update={"reuse": made.steps.record})
    shutil.copyfile(made.verified.folder / SAMPLES, folder / SAMPLES)
    shutil.copyfile(made.reference.folder / VERIFY, folder / VERIFY)
    kept = with_paths(recipe, lambda path: Path(path.name))  # without the folders of this machine
    images = {name: copied_images(name, paths, folder) for name, paths in recipe.model.images.items()}
    weights_at = recipe.model.weights
    if len(records) > 1 and weights_at is not None and (saved := pipeline_folder(weights_at, recipe.model.config)):
        copy_without_models(saved, folder / PIPELINE)
    denoiser = records[COMPONENT].diffusers
    manifest = Manifest(
        model=_title(recipe) if denoiser is None else f"{denoiser.pipeline} ({recipe.model.source})",
        weights=build.weights,
        code=source_identity(recipe.model.source),
        versions=versions(),
        backend=backend.name,
        backend_reason=reason,
        recipe=kept.model_copy(update={"model": kept.model.model_copy(update={"images": images})}),
        calibration=CALIBRATION,
        components=records,
        pipeline=PIPELINE if (folder / PIPELINE).is_dir() else "",
        quality=made.quality,
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
