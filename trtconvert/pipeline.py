"""From a recipe to a bundle.

    recipe ─► components and their engines ─► calibrate ─► search ─► plan ─► steps ─► reference ─► errors
           ─► export ─► engine ─► verify ─► bundle

`search` is skipped if the recipe states the plan, `steps` if all denoising steps are computed, `errors` on a CPU, where `verify`
measures the errors of sites and layers. On a GPU another process exports the components meanwhile, and `calibrate` comes first.

Each stage is a folder in the cache, filed under the hash of everything that the stage reads. A second build runs only the
changed stages; without changes it loads neither the model nor torch.
"""

from __future__ import annotations

import functools
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert import bundle
from trtconvert.bars import NoBar
from trtconvert.bundle import ComponentRecord, Manifest, QualityRecord
from trtconvert.cache import Cache, Stage, versions
from trtconvert.calib.distributed import Crew
from trtconvert.calib.identity import named_file, search_reads
from trtconvert.engine import BackendStatus, choose_backend
from trtconvert.engine.builder import kernels_kept
from trtconvert.engine.driver import device_architecture
from trtconvert.entry_point import look_in, source_identity
from trtconvert.errors import GateError, UserError
from trtconvert.evaluate.optional import require_installed
from trtconvert.files import copy_files, one_at_a_time, settled, whole_folder
from trtconvert.models.identity import identity
from trtconvert.models.placed import Place, collect_garbage
from trtconvert.models.placement import choose_place, tell_place
from trtconvert.models.saved import copy_without_models, pipeline_folder, with_dtype
from trtconvert.progress import Reporter
from trtconvert.recipe import ONNX, PlanSection, Recipe, changed_paths, with_paths
from trtconvert.stages.ahead import ExportAhead, pays
from trtconvert.stages.build import Build
from trtconvert.stages.calibrate import calibrate_stage
from trtconvert.stages.common import (
    CALIBRATION,
    COMPONENT,
    ENGINE,
    EXAMPLE,
    FRONTIER,
    QUALITY,
    RECORDED_CALLS,
    REUSE,
    SAMPLES,
    Engines,
    component_of,
    example_of,
)
from trtconvert.stages.component_errors import verified_component
from trtconvert.stages.components import component_stages, named_components
from trtconvert.stages.engines import EngineBuild, engine_stages
from trtconvert.stages.errors import errors_stage
from trtconvert.stages.export import export_stage, prepare_export
from trtconvert.stages.gates import check_gates
from trtconvert.stages.plan import plan_stages
from trtconvert.stages.reference import reference_stage
from trtconvert.stages.results import ComputedSteps, Planned
from trtconvert.stages.search import search_stage
from trtconvert.stages.steps import steps_stage
from trtconvert.stages.verify import verify_stage
from trtconvert.weights.lora_files import left_over

if TYPE_CHECKING:
    from trtconvert.calib.calibrate import Parts
    from trtconvert.diffusion_model import DiffusionModel

PIPELINE = "pipeline"
"""Folder in a bundle with the files of a pipeline other than its models."""


def _keep_evidence(verified: Stage, output: Path) -> Path:
    """Copies the samples and figures of a build that missed a gate into the folder `OUTPUT.missed`."""
    folder = output.with_name(f"{output.name}.missed")
    folder.mkdir(parents=True, exist_ok=True)
    for name in (SAMPLES, QUALITY):
        shutil.copyfile(verified.folder / name, folder / name)
    return folder


@dataclass(frozen=True)
class Outcome:
    """A finished build."""

    manifest: Manifest
    folder: Path


def build(
    recipe: Recipe, output: Path, cache: Cache, report: Reporter, *, skip_bad: bool = False, crew: Crew | None = None
) -> Outcome:
    """Runs the whole conversion and writes a bundle to `output`.

    Args:
        skip_bad: skip bad calibration samples, and list them in the calibration.
        crew: processes that share the samples. Rank 0 calls this function, the others call `assist`.
    Raises:
        UserError: the recipe does not fit the model or this machine.
        GateError: the model misses a quality gate; no bundle is written.
        RankLost: another process has ended.
    """
    crew = crew or Crew()
    output = settled(output)
    refuse_foreign(output)
    if cache.folder.resolve().is_relative_to(output.resolve()):
        raise UserError(
            f"the build cache {cache.folder} lies in the bundle {output}",
            expected="a cache outside the bundle",
            got="a cache inside the bundle",
            remedy="give another folder with --cache, or with -o",
        )
    recipe = recipe.model_copy(update={"model": with_dtype(recipe.model)})
    backend, reason = choose_backend(recipe.engine.backend)
    place = choose_place(recipe.compute, recipe.model)
    recipe = _for_place(recipe, place)
    tell_place(place, "calibration, search and verification compute", report)
    weights = identity(recipe.model, recipe.loras)
    _refuse_missing_packages(recipe)
    verify = recipe.verify
    if verify.lpips_weights is None and verify.max_lpips is not None and "max_lpips" in verify.model_fields_set:
        report.notice(
            "verify.max_lpips is no gate without verify.lpips_weights: add these weights, or remove max_lpips"
        )
    for file, missing in left_over([(lora.file, lora.target) for lora in recipe.loras]):
        report.notice(
            f"{file.name} has parts for {', '.join(missing)} too, which are ignored; an entry of loras with that target "
            "merges the parts of a text encoder",
        )

    def keep_users_files(new: Path) -> None:
        refuse_foreign(output)  # another process may have written there meanwhile
        if (output / bundle.MANIFEST).exists():
            bundle.keep_others(output, new)
            if lost := _engine_files(output) - _engine_files(new):
                names = ", ".join(sorted(Path(name).stem for name in lost))
                report.notice(
                    f"the new bundle lacks engines of the old one: {names}; run `trtconvert compile` on their GPUs again",
                )

    def timed(model: DiffusionModel, parts: Parts) -> DiffusionModel:
        from trtconvert.forecast import with_forecast

        return with_forecast(recipe, place, report, model, parts, crew.ranks.size)

    native = backend.name == "tensorrt_rtx" or not place.on_gpu
    inputs = Build(recipe, weights, place, cache, report, skip_bad, native, timed, crew)
    if crew.ranks.size > 1:
        _send_build(inputs)
    with whole_folder(output, "give another folder with -o", keep_users_files) as folder, report.live():
        results = _run_stages(inputs, backend, output)
        with report.stage("bundle"):
            manifest = _assemble(folder, inputs, results, backend, reason)
    return Outcome(manifest, output)


def assist(crew: Crew, report: Reporter) -> None:
    """Shares the work of a build of rank 0: calibrates, draws and measures samples. Writes no stage and no bundle.

    Raises:
        LeaderFailed: rank 0 fails, and prints the message.
        RankLost: another process has ended.
    """
    build = None
    with crew.assisting():
        for task, arguments in crew.tasks():
            if build is None:
                build = _receive_build(crew, report, *arguments)  # the first task
                continue
            task(build, NoBar(), *arguments)
            if build.place.on_gpu:
                collect_garbage()


def _send_build(build: Build) -> None:
    """Sends the build to the processes that assist.

    Raises:
        UserError: a process does not see the cache, whose files it needs.
    """
    folder, ranks = build.cache.folder.resolve(), build.ranks
    seen_by_all = folder / f"shared-{secrets.token_hex(8)}"
    with one_at_a_time(seen_by_all, build.cache.instead):
        lock = next(folder.glob(f"{seen_by_all.name}*"))
        with build.crew.sharing(
            _receive_build, build.recipe, build.weights, build.place, build.skip_bad, lock, sys.path
        ):
            seen = ranks.to_first(True)
    if not all(seen):
        raise UserError(
            "processes on several machines build with a cache that they do not share",
            expected=f"the folder {folder} on a disk of all {ranks.size} processes",
            got=f"rank {seen.index(False)} does not see the files of rank 0",
            remedy="give a folder on a shared disk with --cache, or run all processes on one machine",
        )


def _receive_build(
    crew: Crew,
    report: Reporter,
    recipe: Recipe,
    weights: str,
    place: Place,
    skip_bad: bool,
    lock: Path,
    modules_in: Sequence[str],
) -> Build:
    """Returns the build of rank 0 in a process that assists, and tells rank 0 whether this process sees the cache.

    Args:
        lock: a file that rank 0 holds in the cache.
        modules_in: folders of rank 0's module search path, which has the folder of the recipe.
    """
    for folder in modules_in:
        look_in(Path(folder))
    crew.ranks.to_first(lock.exists())
    return Build(recipe, weights, place, Cache(lock.parent), report, skip_bad, crew=crew)


@dataclass(frozen=True)
class _Results:
    """Results of a build's stages.

    Attributes:
        components, engines: exported components and their engines, by name.
        quality: the figures that passed the gates.
    """

    planned: Planned
    steps: ComputedSteps
    reference: Stage
    verified: Stage
    components: Mapping[str, Stage]
    engines: Mapping[str, Engines]
    quality: QualityRecord


def _run_stages(build: Build, backend: BackendStatus, output: Path) -> _Results:
    engine_build = EngineBuild(build.recipe.engine, backend, build.cache, build.report)
    calibrated = None
    if build.recipe.components and pays(build):
        named_components(build)  # wrong names show before the calibration
        with ExportAhead(build, "components", component_stages).ended() as ahead:
            calibrated = calibrate_stage(build, ahead.start)
            ahead.wait()
        build.source.leave_gpu()  # makes room for building engines of components
    components, engines, component_errors = component_stages(build), dict[str, Engines](), dict[str, float]()
    with kernels_kept():
        for name, exported in components.items():
            built = engine_stages(engine_build, name, component_of(exported), exported)
            component_errors[name], engines[name] = verified_component(build, name, exported, built)
    calibrated = calibrated or calibrate_stage(build)
    with ExportAhead(build, "denoiser", export_stage, prepare_export).ended() as ahead:
        searched = search_stage(build, calibrated, ahead.prepare)
        steps = steps_stage(build, plan_stages(build, calibrated, searched))
        planned = steps.planned
        start = functools.partial(ahead.start, planned)
        if ahead.prepared:
            start()
        reference = reference_stage(build, start)
        errors = errors_stage(build, planned, start) if build.place.on_gpu else None
        ahead.wait()
    build.source.leave_gpu()  # makes room for building and timing engines
    exported = export_stage(build, planned)
    built = engine_stages(engine_build, COMPONENT, component_of(exported), exported)
    verified = verify_stage(build, planned, steps, exported, reference, errors, built)
    try:
        quality, built = check_gates(build.recipe, planned, verified, built)
    except GateError:
        try:
            build.report.notice(f"the samples that missed the gate are in {_keep_evidence(verified, output)}")
        except OSError as error:  # must not hide the missed gate
            build.report.notice(f"the samples that missed the gate could not be kept: {error}")
        raise
    quality = quality.model_copy(update={"component_errors": component_errors})
    return _Results(
        planned, steps, reference, verified, {COMPONENT: exported} | components, {COMPONENT: built} | engines, quality
    )


def _engine_files(folder: Path) -> set[str]:
    return {
        engine.file for component in bundle.read_manifest(folder).components.values() for engine in component.engines
    }


def refuse_foreign(output: Path) -> None:
    """Checks that a bundle can be written to a path.

    Raises:
        UserError: the path holds something other than a bundle or an empty folder.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    try:
        bundle.read_manifest(output)
    except UserError as error:
        got = "a folder with other files" if output.is_dir() else "a file"
        if (output / bundle.MANIFEST).exists():
            got += f", and a {bundle.MANIFEST} that is damaged or not a bundle's"
        raise UserError(
            f"{output} exists and is not a bundle",
            expected="a new folder, an empty one, or a bundle to replace",
            got=got,
            remedy="give another folder with -o",
        ) from error


def _for_place(recipe: Recipe, place: Place) -> Recipe:
    """Returns the recipe for a device: on a GPU with `verify.on_gpu`, and on Hopper with FP8 in place of `aggressive`."""
    if not place.on_gpu:
        return recipe
    verify, plan = recipe.verify, recipe.plan
    if (more := verify.on_gpu) is not None:
        verify = verify.model_copy(update={"samples": more.samples, "steps": more.steps})
    if recipe.attention.modes == "auto" and plan.candidates is None and _fp8_is_priced(plan):
        plan = plan.model_copy(update={"candidates": ["precision", "fp8"]})
    return recipe.model_copy(update={"verify": verify, "plan": plan})


def _fp8_is_priced(plan: PlanSection) -> bool:
    """Returns whether this machine's GPU has a kernel for FP8 with known times."""
    if device_architecture() != "sm90":
        return False
    from trtconvert.attention.modes import Mode
    from trtconvert.calib.cost import KernelCost

    return KernelCost.load(plan.kernel_cost).prices(Mode.FP8)


def _refuse_missing_packages(recipe: Recipe) -> None:
    """Checks the packages and files that the plan's budget and the gates need, before the calibration takes hours."""
    plan = recipe.plan
    if (weights := recipe.verify.lpips_weights) is not None and named_file("verify.lpips_weights", weights):
        from trtconvert.evaluate.metrics import load_lpips  # imports torch, which fully cached builds do not need

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


def _assemble(folder: Path, build: Build, results: _Results, backend: BackendStatus, reason: str) -> Manifest:
    """Copies the stages' files into the bundle's folder, and writes the manifest last."""
    recipe, planned = build.recipe, results.planned
    copies = {folder / CALIBRATION: planned.calibrated.stage.folder / CALIBRATION}
    if (planned.stage.folder / FRONTIER).is_file():
        copies[folder / FRONTIER] = planned.stage.folder / FRONTIER
    records: dict[str, ComponentRecord] = {}
    for name, exported in results.components.items():
        record = component_of(exported)
        for file in exported.folder.glob(f"{record.onnx}*"):  # with the external weights of large models
            copies[folder / file.name] = file
        for engine, stage in results.engines[name]:
            (folder / engine.file).parent.mkdir(exist_ok=True)
            copies[folder / engine.file] = stage.folder / ENGINE
        if name != COMPONENT:
            copies[folder / example_of(name)] = exported.folder / EXAMPLE
        records[name] = record.model_copy(update={"engines": [engine for engine, _ in results.engines[name]]})
    if results.steps.stage is not None and results.steps.record is not None:
        copies[folder / REUSE] = results.steps.stage.folder / REUSE
        records[COMPONENT] = records[COMPONENT].model_copy(update={"reuse": results.steps.record})
    copies[folder / SAMPLES] = results.verified.folder / SAMPLES
    copies[folder / RECORDED_CALLS] = results.reference.folder / RECORDED_CALLS
    copy_files(copies)
    kept = with_paths(recipe, lambda path: Path(path.name))  # without this machine's folders
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
        quality=results.quality,
    )
    bundle.write_manifest(folder, manifest)
    return bundle.read_manifest(folder)


def _title(recipe: Recipe) -> str:
    section = recipe.model
    return section.weights.name if section.source == ONNX and section.weights is not None else section.source


def copied_images(name: str, paths: Path | list[Path], folder: Path) -> Path | list[Path]:
    """Copies the images of an argument into a bundle, and returns their paths relative to the bundle."""
    numbered = (
        {path: f"{name}-{number}" for number, path in enumerate(paths)} if isinstance(paths, list) else {paths: name}
    )

    def copied(path: Path) -> Path:
        place = Path(bundle.IMAGES, numbered[path] + path.suffix)
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / place)
        return place

    return changed_paths(paths, copied)
