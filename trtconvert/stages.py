"""The stages of a build. Each makes a folder in the cache from what the stages before it left, filed under the hash of what it
reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.bundle import (
    ComponentRecord,
    Dims,
    EngineRecord,
    GuidanceRecord,
    LayerRecord,
    QualityRecord,
    ReuseRecord,
    SiteRecord,
    TensorRecord,
    covering,
)
from trtconvert.cache import Cache, Stage
from trtconvert.calib.frontier import read_frontier
from trtconvert.calib.identity import calibration_reads, kernel_cost_hash, observations_folder, search_reads
from trtconvert.engine import BackendStatus
from trtconvert.errors import UserError
from trtconvert.files import free_space, one_at_a_time, sha256
from trtconvert.library import library_path
from trtconvert.progress import Bar, Reporter
from trtconvert.recipe import ComponentSection, EngineSection, Range, Recipe, computes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trtconvert.attention.reference import AttentionTables
    from trtconvert.attention.sites import Site
    from trtconvert.calib.component_layers import ComponentLayers
    from trtconvert.linear.sites import ConvertedLayer, Layer
    from trtconvert.models import DiffusionModel
    from trtconvert.models.placement import Place
    from trtconvert.quant.forward import Int8Layers, Int8Sites
    from trtconvert.reuse.schedule import Reuse

COMPONENT = "denoiser"
CALIBRATION, SITES, LAYERS = "calibration.safetensors", "sites.json", "layers.json"
ONNX, NATIVE, SIGNATURE = "denoiser.onnx", "native.onnx", "signature.json"
NAMES, ERROR, ERRORS = "names.json", "error.json", "errors.json"
PLAN, FRONTIER, SCALINGS = "plan.json", "frontier.json", "scalings.json"
ENGINE, RECORD = "engine.plan", "engine.json"
QUALITY, SAMPLES = "quality.json", "samples.png"
FULL, VERIFY = "full.safetensors", "verify.safetensors"
REUSE, REUSE_RECORD = "reuse.safetensors", "reuse.json"


def component_stages(
    recipe: Recipe, weights: str, model: Callable[[], DiffusionModel], cache: Cache, report: Reporter
) -> dict[str, Stage]:
    """Export the pipeline's other models that the recipe names, and compare each with torch, first of all: it takes little time.

    Each stage leaves a model, its signature and its error.
    """
    if not recipe.components:
        return {}

    def name_them(folder: Path) -> None:
        (folder / NAMES).write_text(json.dumps(_component_names(recipe, model())))

    asked = sorted(recipe.components)
    names = json.loads(
        (cache.stage("components", {"weights": weights, "asked": asked}, name_them).folder / NAMES).read_text()
    )
    return {name: component_stage(recipe, weights, name, model, cache, report) for name in names}


def component_stage(
    recipe: Recipe, weights: str, name: str, model: Callable[[], DiffusionModel], cache: Cache, report: Reporter
) -> Stage:
    """Export one of the pipeline's models beside the denoiser, and hold it to float32 in torch."""
    asked: dict[str, Any] = {}
    for section in ("all", name):  # what the component says itself counts
        asked |= recipe.components.get(section, ComponentSection()).model_dump(exclude_none=True)
    limit = recipe.verify.max_component_error
    reads = {"weights": weights, "component": name, "asked": asked, "dtype": recipe.model.dtype, "limit": limit}
    in_int8 = asked.get("layers") == "int8"
    if in_int8:
        reads |= _kept_unquantised(recipe)
        reads["layers"] = recipe.layers.model_dump(
            mode="json", include={"kinds", "min_rows", "few_rows", "equalise", "offsets", "scales"}
        )

    def make(folder: Path, bar: Bar) -> None:
        import torch

        from trtconvert.calib.component_layers import component_layers
        from trtconvert.evaluate.verify import check_component
        from trtconvert.export import storage
        from trtconvert.export.trace import OF_COMPONENTS, trace_component
        from trtconvert.runtime.session import OnnxRuntimeComponent

        components = model().components
        assert components is not None  # or there were no names
        source = components(name)
        dtype = asked.get("dtype") or ("float32" if source.high_precision else recipe.model.dtype)
        if dtype == "float16" and source.overflows:
            raise UserError(
                f"{name} is not converted to float16",
                expected="float32: its configuration says force_upcast, since its values leave the range of float16",
                got="float16",
                remedy=f"set components.{name}.dtype to float32 in the recipe",
            )
        onnx_file = folder / f"{name}.onnx"
        found = component_layers(source, recipe.layers, limit) if in_int8 else None
        exported = trace_component(source, getattr(torch, dtype), found.converted if found else None)
        storage.save(exported, onnx_file)
        _check_onnx(onnx_file, dtype)
        if found:
            _save_native(onnx_file, folder / NATIVE, dtype)
            if recipe.engine.refittable:
                _save_unquantised(source.module, found.converted, onnx_file, OF_COMPONENTS)
        component = ComponentRecord(
            onnx=onnx_file.name,
            inputs=[
                TensorRecord(name=i.name, dtype=dtype if i.dtype == "float32" else i.dtype, shape=list(i.shape))
                for i in source.inputs
            ],
            outputs=[TensorRecord(name=o.name, dtype=dtype, shape=list(o.shape)) for o in source.outputs],
            dims=dict(source.dims),
            profiles=[dict(source.dims)],
            layers=_component_records(found) if found else [],
            engines=[],
            diffusers=source.diffusers,
        )
        error = check_component(source, OnnxRuntimeComponent(onnx_file, component), limit)
        (folder / SIGNATURE).write_text(component.model_dump_json(indent=1))
        (folder / ERROR).write_text(json.dumps(error))

    return _run(f"export {name}", reads, make, cache, report)


def _component_names(recipe: Recipe, model: DiffusionModel) -> list[str]:
    """
    Raises:
        UserError: the model has no other models, or not those that the recipe names.
    """
    if model.components is None:
        raise UserError(
            f"{model.name} has no components beside the denoiser",
            expected="a recipe without the section components",
            got=", ".join(recipe.components),
            remedy="remove it, or convert a pipeline with model.source: diffusers",
        )
    known, named = model.components.names, recipe.components.keys() - {"all"}
    if unknown := sorted(named - set(known)):
        raise UserError(
            f"the pipeline has no {', '.join(unknown)}",
            expected=", ".join(known) or "no section components: it was saved with its denoiser alone",
            got=", ".join(unknown),
            remedy="correct components in the recipe, or save the pipeline with it",
        )
    used = model.components.used if "all" in recipe.components else ()
    return [name for name in known if name in named or name in used]


def calibrate_stage(
    recipe: Recipe,
    weights: str,
    model: Callable[[], DiffusionModel],
    place: Place,
    cache: Cache,
    report: Reporter,
    skip_bad: bool = False,
) -> Stage:
    """Find the attention sites and layers and observe their ranges. Leaves the calibration, the sites and the layers.

    Args:
        model: that computes at `place`.
    """
    reads = calibration_reads(recipe, weights) | place.reads()

    def make(folder: Path, bar: Bar) -> None:
        from trtconvert.calib.calibrate import (
            calibrate,
            modulated_sources,
            parts_to_convert,
            refuse_without_blocks,
            taken,
        )
        from trtconvert.calib.dtype_checks import fitting
        from trtconvert.calib.plan import kernel_cost

        source = model()
        # Nobody wants to hear after the calibration what does not serve.
        _refuse_unfit_steps(recipe, source)
        profiles = _profiles(recipe, _as_exported(recipe, source))
        if recipe.layers.modiff:
            from trtconvert.export.changes import require_fixed_sizes

            require_fixed_sizes(source, covering(profiles))
        if recipe.attention.modes == "auto":
            kernel_cost(recipe.plan, recipe.layers, masks=bool(recipe.sparse_shares))
        elif recipe.sparse_shares:
            from trtconvert.calib.cost import KernelCost

            KernelCost.load(recipe.plan.kernel_cost, masks=True)
        with fitting(source, recipe.model.dtype):
            parts = parts_to_convert(source, recipe.attention, recipe.layers)
        if recipe.attention.modes == "auto" and any(layer.kind == "conv" for layer in parts.layers):
            kernel_cost(recipe.plan, recipe.layers, convs=True)
        if recipe.sparse_shares:
            refuse_without_blocks(source, parts.sites, covering(profiles), recipe.calibration.bins)
        if recipe.calibration.from_ is not None:
            made = taken(
                recipe.calibration.from_, source, weights, recipe.calibration.bins, parts.sites, parts.layers,
                modulated_sources(parts.layers, recipe.layers), recipe.sparse_shares,
            )  # fmt: skip
        else:
            # Observations outlive a build that is killed, and go when the stage is done.
            work = observations_folder(cache, reads | {"device": place.device})
            with one_at_a_time(work):
                made = calibrate(
                    source, recipe.calibration, weights, parts.sites, work, bar, skip_bad=skip_bad,
                    layers=parts.layers, of_layers=recipe.layers, shares=recipe.sparse_shares,
                )  # fmt: skip
                shutil.rmtree(work)
        made.save(folder / CALIBRATION)
        for file, found in ((SITES, (*parts.sites, *parts.left_sites)), (LAYERS, (*parts.layers, *parts.left_layers))):
            (folder / file).write_text(json.dumps([asdict(part) for part in found], indent=1))

    # A calibration that bad samples are missing from is another one than a build without --skip-bad asks for.
    return _run("calibrate", reads | {"skip_bad": skip_bad}, make, cache, report)


def plan_stage(
    recipe: Recipe, calibration: Stage, model: Callable[[], DiffusionModel], cache: Cache, report: Reporter
) -> Stage:
    """Give each site, layer and timestep bin its mode. Leaves the plan, and the frontier where it was searched."""
    attention, section = recipe.attention, recipe.plan
    sections = {"attention": attention.model_dump(mode="json"), "layers": recipe.layers.model_dump(mode="json")}
    reads: dict[str, Any] = {"calibration": calibration.key} | sections
    searched = search_stage(recipe, calibration, model, cache, report) if attention.modes == "auto" else None
    if searched is not None:
        reads |= {"search": searched.key, "point": section.point}
    elif attention.scaling == "auto" or recipe.sparse_shares:
        reads |= {"kernel_cost": kernel_cost_hash(section)} | _guidance(recipe)

    def make(folder: Path, bar: Bar) -> None:
        if searched is not None:
            frontier = read_frontier(searched.folder / FRONTIER)
            point = frontier.choose(section.point)
            chosen = frontier.model_copy(update={"chosen": point.name})
            (folder / FRONTIER).write_text(chosen.model_dump_json(indent=1))
            scalings = json.loads((searched.folder / SCALINGS).read_text())
            made = _Plan(point.modes, point.layers, scalings, point.sparse, {}, point.modulated)
        else:
            from trtconvert.calib.block_plan import stated_blocks
            from trtconvert.calib.calibration import Calibration
            from trtconvert.calib.fixed_plans import stated_attention
            from trtconvert.calib.layer_plan import stated_layers
            from trtconvert.calib.plan import site_scalings
            from trtconvert.quant.decision import Plan

            source, sites = model(), [site for site in _sites(calibration) if not site.obstacle]
            bins = recipe.calibration.bins
            form = _as_exported(recipe, source)
            batch = _opt_rows(form, form.dims)
            scalings = site_scalings(attention, section, sites, batch)
            decisions, dense = stated_attention(attention, scalings, source.sigmas, bins), {}
            for share in recipe.sparse_shares:
                found = Calibration.load(calibration.folder / CALIBRATION)
                calls = found.provenance.observed
                decisions, dense = stated_blocks(share, section, sites, decisions, found.blocks, batch, calls)
            layers = stated_layers(recipe.layers, _chosen_layers(calibration), bins)
            made = _Plan(**Plan(decisions, layers).record(), dense=dense)
        (folder / PLAN).write_text(json.dumps(asdict(made), indent=1))

    return _run("plan", reads, make, cache, report)


def search_stage(
    recipe: Recipe, calibration: Stage, model: Callable[[], DiffusionModel], cache: Cache, report: Reporter
) -> Stage:
    """Try plans and sample with each. Leaves the frontier; which of them is built is the plan stage's choice."""
    reads = {
        "calibration": calibration.key,
        "attention": recipe.attention.model_dump(mode="json"),
        "layers": recipe.layers.model_dump(mode="json"),
        "plan": search_reads(recipe.plan),
        "shapes": _ranges(recipe),
    } | _guidance(recipe)
    if recipe.layers.modiff == "auto":
        reads["dtype"] = recipe.model.dtype  # that of caches

    def make(folder: Path, bar: Bar) -> None:
        from trtconvert.calib.calibration import Calibration
        from trtconvert.calib.plan import search, site_scalings
        from trtconvert.evaluate.budget import load_budget

        source, bins = model(), recipe.calibration.bins
        sites = [site for site in _sites(calibration) if not site.obstacle]
        made = Calibration.load(calibration.folder / CALIBRATION)
        form = _as_exported(recipe, source)
        batch = _opt_rows(form, _profiles(recipe, form)[0])
        scalings = site_scalings(recipe.attention, recipe.plan, sites, batch)
        (folder / SCALINGS).write_text(json.dumps(scalings, indent=1))
        budget = load_budget(recipe.plan)
        frontier = search(
            source,
            sites,
            _chosen_layers(calibration),
            made,
            recipe.attention,
            scalings,
            recipe.layers,
            recipe.plan,
            budget,
            bins,
            batch,
            bar,
            recipe.sparse_shares,
            2 if recipe.model.dtype == "float16" else 4,
        )
        (folder / FRONTIER).write_text(frontier.model_dump_json(indent=1))

    return _run("search", reads, make, cache, report)


def export_stage(
    recipe: Recipe, calibration: Stage, plan: Stage, model: Callable[[], DiffusionModel], cache: Cache, report: Reporter
) -> Stage:
    """Trace the denoiser to ONNX, and lower it to native attention beside."""
    reads = (
        {
            "calibration": calibration.key,
            "plan": plan.key,
            "dtype": recipe.model.dtype,
            "shapes": _ranges(recipe),
            "modiff": recipe.layers.modiff,
        }
        | _kept_unquantised(recipe)
        | _guidance(recipe)
    )

    def make(folder: Path, bar: Bar) -> None:
        import torch

        from trtconvert.export import storage
        from trtconvert.export.changes import caches_of
        from trtconvert.export.trace import SiteOptions, trace

        source = _as_exported(recipe, model())
        profiles = _profiles(recipe, source)
        dims = covering(profiles)
        options = SiteOptions(source.timestep_max, _plan(plan).scalings, recipe.attention.smooth_k)
        dtype = getattr(torch, recipe.model.dtype)
        layers = _converted_layers(source, recipe, calibration, plan)
        exported = trace(
            source,
            _tables(calibration, plan),
            options,
            layers=layers,
            dims=dims,
            dtype=dtype,
            masks=_masks(calibration, plan),
        )
        storage.save(exported, folder / ONNX)
        _check_onnx(folder / ONNX, recipe.model.dtype)
        _save_native(folder / ONNX, folder / NATIVE, recipe.model.dtype)
        if recipe.engine.refittable and layers:
            _save_unquantised(source.denoiser, layers, folder / ONNX)
        component = ComponentRecord(
            onnx=ONNX,
            inputs=[
                TensorRecord(name=i.name, dtype=_engine_dtype(recipe, source, i.name, i.dtype), shape=list(i.shape))
                for i in source.inputs
            ],
            outputs=[TensorRecord(name=source.output.name, dtype=recipe.model.dtype, shape=list(source.output.shape))],
            timestep_input=source.timestep_input,
            timestep_max=source.timestep_max,
            dims=dims,
            steps=dict(source.steps),
            input_ranges=_input_ranges(calibration, source.guidance),
            profiles=profiles,
            sites=_site_records(calibration, plan, bool(recipe.sparse_shares)),
            layers=_layer_records(recipe, calibration, plan, layers, _opt_rows(source, profiles[0])),
            engines=[],
            diffusers=source.diffusers,
            caches=[
                TensorRecord(name=cache.name, dtype=cache.dtype, shape=list(cache.shape))
                for cache in caches_of(source, layers, dims, dtype)
            ],
            guidance=source.guidance,
        )
        (folder / SIGNATURE).write_text(component.model_dump_json(indent=1))

    return _run("export", reads, make, cache, report)


def engine_stages(
    name: str,
    component: ComponentRecord,
    exported: Stage,
    options: EngineSection,
    backend: BackendStatus,
    cache: Cache,
    report: Reporter,
    recheck: Callable[[], None] | None = None,
) -> list[tuple[EngineRecord, Stage]]:
    """One serialized engine of a component per target of the chosen backend; none for ONNX Runtime, which builds nothing.

    Args:
        exported: a folder with the component's ONNX, and the hash of what decides it.
        recheck: called when an engine is built, where the folder may change meanwhile. What it raises keeps the engine out of the
            cache.
    """
    from trtconvert.engine import tensorrt, tensorrt_rtx

    chosen = options.model_dump(mode="json", exclude={"backend", "targets", "guidance"})  # which the ONNX has inside
    reads = {"onnx": exported.key, "engine": chosen, "library": backend.detail}
    if backend.name == "tensorrt":  # what is measured and built depends on the GPU and on the kernels in the plugin
        reads |= {"gpu": tensorrt.device_name(), "plugin": sha256(library) if (library := library_path()) else None}
    of_rtx = [target for target in options.targets if computes(target, component.outputs[0].dtype)]
    if backend.name == "tensorrt_rtx" and (left := [target for target in options.targets if target not in of_rtx]):
        report.notice(f"no engine of {name} for {', '.join(left)}, which computes in float16 alone")
    targets = {"tensorrt_rtx": of_rtx, "tensorrt": [tensorrt.device_architecture()], "onnxruntime": []}
    built = []
    for target in targets[backend.name]:

        def make(folder: Path, bar: Bar, target: str = str(target)) -> None:
            size, free = _size(exported, component), free_space(folder)
            if free < size:  # the engine is written after hours, perhaps; how large it is nobody knows before
                report.notice(
                    f"the ONNX of {name} takes {size / 2**20:.0f} MiB, and {cache.folder} has {free / 2**20:.0f} MiB "
                    f"free: the engine may not fit. If so, it is lost: free some space, or {cache.instead}",
                )
            if backend.name == "tensorrt_rtx":
                # A component without nodes of ours is what it is.
                has_native = component.is_denoiser or component.has_int8_layers
                onnx = exported.folder / (NATIVE if has_native else component.onnx)
                engine = tensorrt_rtx.build_engine(name, component, onnx, options, target, bar)
            else:
                engine = tensorrt.build_engine(name, component, exported.folder / component.onnx, options, bar)
            if recheck is not None:
                recheck()
            (folder / ENGINE).write_bytes(engine.plan)
            (folder / RECORD).write_text(engine.record.model_dump_json(indent=1))

        title = f"engine {target}" if name == COMPONENT else f"engine {name} {target}"
        stage = _run(title, reads | {"target": target}, make, cache, report)
        built.append((EngineRecord.model_validate_json((stage.folder / RECORD).read_text()), stage))
    return built


def reference_stage(
    recipe: Recipe,
    weights: str,
    model: Callable[[], DiffusionModel],
    full_precision: Callable[[], DiffusionModel],
    place: Place,
    cache: Cache,
    report: Reporter,
) -> Stage:
    """Draw in full precision what INT8 is compared with. Leaves the images, and a denoiser call of every timestep bin.

    Args:
        model: as it was loaded; full_precision: the one that computes at `place`.
    """
    section, bins = recipe.verify, recipe.calibration.bins
    drawn = section.model_dump(mode="json", include={"samples", "steps", "sampler", "seed"})
    reads = {"weights": weights, "dtype": recipe.model.dtype, "verify": drawn, "bins": bins} | place.reads()

    def make(folder: Path, bar: Bar) -> None:
        from safetensors.torch import save_file

        from trtconvert.calib.data import batches_of
        from trtconvert.evaluate import verify
        from trtconvert.evaluate.recorded_calls import CallRecorder
        from trtconvert.models.placement import denoiser_in_float32

        source = full_precision()
        bar.total(len(batches_of(section.samples, verify.BATCH)) + 1)
        batch = source.inputs[0].shape[0]
        rows = source.dims[batch][1] if isinstance(batch, str) else batch
        recorder = CallRecorder(source, bins, rows)
        images = verify.draw(source, recorder.around(source.denoiser), section, bar)
        in_float32 = place.on_gpu and place.dtype != "float32"
        calls = recorder.calls(lambda: denoiser_in_float32(model()) if in_float32 else None)
        calls.save(folder / VERIFY)
        save_file({"images": images.contiguous()}, folder / FULL)
        bar.step()

    return _run("reference", reads, make, cache, report)


def reuse_stage(
    recipe: Recipe,
    calibration: Stage,
    plan: Stage,
    model: Callable[[], DiffusionModel],
    cache: Cache,
    report: Reporter,
) -> Stage:
    """Choose which denoising steps are computed. Leaves what was measured of trajectories, and the record of the choice; neither
    where all steps are computed.

    Args:
        model: that computes where calibration did.
    """
    section = recipe.steps
    reads: dict[str, Any] = {"calibration": calibration.key, "plan": plan.key, "steps": section.model_dump(mode="json")}
    if section.computed == "auto":
        reads["budget"] = search_reads(recipe.plan)

    def make(folder: Path, bar: Bar) -> None:
        from safetensors.torch import save_file

        from trtconvert.calib import reuse
        from trtconvert.evaluate.budget import load_budget
        from trtconvert.models.denoiser import intercepted

        source = model()
        seeds = range(section.seed, section.seed + section.samples)
        bar.total(reuse.drawings(section.calibrated, section.computed == "auto"))
        measured, full = reuse.measure_trajectories(source, seeds, section.calibrated, bar)
        sites, layers = _in_torch(recipe, source, calibration, plan)
        in_int8 = intercepted(source, sites.handler(), layers.handler() if layers.tables else None)
        share = None if isinstance(section.computed, str) else section.computed
        tried = reuse.search_reuse(
            source, in_int8, measured, full, seeds, section.calibrated, load_budget(recipe.plan), share, bar
        )
        every, chosen = tried[0], tried[-1]
        if chosen.reuse is None:
            return
        save_file(chosen.reuse.found.tensors(), folder / REUSE)
        record = ReuseRecord(
            file=REUSE,
            objective=chosen.reuse.objective,
            limit=chosen.reuse.limit,
            steps=len(chosen.schedule.computed),
            computed=[step for step, now in enumerate(chosen.schedule.computed) if now],
            samples=section.samples,
            psnr=chosen.figures["psnr"],
            psnr_worst=chosen.psnr_worst,
            psnr_all=every.figures["psnr"],
        )
        (folder / REUSE_RECORD).write_text(record.model_dump_json(indent=1))

    return _run("steps", reads, make, cache, report)


def reuse_record(reuse: Stage | None) -> ReuseRecord | None:
    """What a stage chose; None where all steps are computed."""
    if reuse is None or not (reuse.folder / REUSE_RECORD).is_file():
        return None
    return ReuseRecord.model_validate_json((reuse.folder / REUSE_RECORD).read_text())


def verify_stage(
    recipe: Recipe,
    calibration: Stage,
    plan: Stage,
    reuse: Stage | None,
    exported: Stage,
    reference: Stage,
    errors: Stage | None,
    engines: list[tuple[EngineRecord, Stage]],
    model: Callable[[], DiffusionModel],
    full_precision: Callable[[], DiffusionModel],
    place: Place,
    cache: Cache,
    report: Reporter,
) -> Stage:
    """Measure what the gates need: with the engine where this machine's GPU runs one, else with the exported model on a CPU, or
    with the kernels in torch on a GPU. Leaves the figures and the sample grid; thresholds are not read.

    Args:
        reuse: which steps are left out, where the recipe does not compute all.
        errors: of sites and layers, see `errors_stage`, where they were measured on a GPU.
        model, full_precision: see `reference_stage`.
    """
    if errors is None:
        return _verify_export(recipe, calibration, plan, reuse, exported, reference, full_precision, cache, report)
    runs = [(record, stage) for record, stage in engines if record.backend == "tensorrt"]
    section, component = recipe.verify, component_of(exported)
    reads = {
        "onnx": exported.key,
        "reference": reference.key,
        "errors": errors.key,
        "engines": [stage.key for _, stage in runs],
        "grid": recipe.output.grid,
    } | _steps_left_out(reuse)

    def make(folder: Path, bar: Bar) -> None:
        from trtconvert.calib.data import batches_of
        from trtconvert.evaluate import verify
        from trtconvert.evaluate.recorded_calls import RecordedCalls
        from trtconvert.models.denoiser import intercepted
        from trtconvert.runtime import engine_component
        from trtconvert.runtime.batches import AnyBatch
        from trtconvert.runtime.reuse import Reusable

        calls = RecordedCalls.load(reference.folder / VERIFY)
        bar.total(len(batches_of(section.samples, verify.BATCH)) + 1)
        prediction_error: list[float | None] = []
        if runs:
            record, built = runs[0]
            with closing(engine_component(built.folder / ENGINE, record, component)) as denoiser:
                if component.guidance is None:  # inside the engine it takes samples, and the calls are of rows
                    prediction_error = calls.errors(AnyBatch(denoiser))
                denoiser.reuse = _reuse(reuse, component)
                int8 = verify.draw(model(), AnyBatch(denoiser), section, bar)
        else:
            source = full_precision()
            sites, layers = _in_torch(recipe, source, calibration, plan)
            in_int8 = intercepted(source, sites.handler(), layers.handler() if layers.tables else None)
            scheduler = _reuse(reuse, component)
            int8 = verify.draw(source, in_int8 if scheduler is None else Reusable(in_int8, scheduler), section, bar)
        bar.step()
        of_sites, of_layers = json.loads((errors.folder / ERRORS).read_text())
        _leave_figures(
            folder,
            recipe,
            reference,
            int8,
            site_sqnr=of_sites,
            layer_sqnr=of_layers,
            measured="tensorrt" if runs else "torch",
            computed=place.reason,
            type_error=calls.type_errors,
        )
        (folder / ERROR).write_text(json.dumps(prediction_error))

    return _run("verify", reads, make, cache, report)


def errors_stage(
    recipe: Recipe,
    calibration: Stage,
    plan: Stage,
    full_precision: Callable[[], DiffusionModel],
    cache: Cache,
    report: Reporter,
) -> Stage:
    """Measure the error of each converted site and layer at its own output, on a GPU. Leaves decibels by timestep bin."""
    section = recipe.verify
    asked = {"seed": section.seed, "samples": section.samples, "bins": recipe.calibration.bins}
    reads = {"calibration": calibration.key, "plan": plan.key, "dtype": recipe.model.dtype} | asked

    def make(folder: Path, bar: Bar) -> None:
        from trtconvert.calib.data import batches_of
        from trtconvert.evaluate import verify

        source = full_precision()
        sites, layers = _in_torch(recipe, source, calibration, plan)
        bar.total(len(batches_of(min(section.samples, verify.SITE_SAMPLES), verify.BATCH)))
        found = verify.output_sqnr(source, sites, layers, recipe.calibration.bins, section.seed, section.samples, bar)
        (folder / ERRORS).write_text(json.dumps(found))

    return _run("errors", reads, make, cache, report)


def check_gates(
    recipe: Recipe, calibration: Stage, plan: Stage, verified: Stage, engines: list[tuple[EngineRecord, Stage]]
) -> tuple[QualityRecord, list[tuple[EngineRecord, Stage]]]:
    """The figures of a build, and its engines with theirs.

    Raises:
        GateError: a gate is missed.
    """
    from trtconvert.evaluate import gates

    quality, modes = QualityRecord.model_validate_json((verified.folder / QUALITY).read_text()), _plan(plan)
    layers = json.loads((calibration.folder / LAYERS).read_text())  # as they stand there: without torch
    convs = {layer["name"] for layer in layers if layer["kind"] == "conv"}
    gates.check_gates(quality, modes.sites, recipe.verify, modes.layers, modes.scalings, modes.sparse.keys(), convs)
    if not (verified.folder / ERROR).is_file():
        return quality, engines
    errors = json.loads((verified.folder / ERROR).read_text())
    measured = []
    for record, stage in engines:
        if record.backend == "tensorrt" and errors:
            gates.check_predictions(Path(record.file).name, errors, recipe.verify, quality.type_error)
            record = record.model_copy(update={"prediction_error": errors})
        measured.append((record, stage))
    return quality, measured


def _in_torch(recipe: Recipe, source: DiffusionModel, calibration: Stage, plan: Stage) -> tuple[Int8Sites, Int8Layers]:
    """INT8 sites and layers of a plan on the device of a model."""
    from trtconvert.quant.forward import Int8Layers, Int8Sites

    masks, scalings = _masks(calibration, plan), _plan(plan).scalings
    smooth_k = recipe.attention.smooth_k
    sites = Int8Sites(_tables(calibration, plan), source.timestep_max, scalings, smooth_k, masks=masks)
    converted = _converted_layers(source, recipe, calibration, plan)
    tables = {name: layer.tables for name, layer in converted.items()}
    of_changes = {name: layer.change_scale for name, layer in converted.items() if layer.change_scale is not None}
    layers = Int8Layers(tables, source.timestep_max, of_changes, source.timesteps_fall)
    device = next(source.denoiser.parameters()).device
    return sites.to(device), layers.to(device)


def _steps_left_out(reuse: Stage | None) -> dict[str, str]:
    """What a stage's key reads of them."""
    return {} if reuse is None else {"steps": reuse.key}


def _reuse(stage: Stage | None, component: ComponentRecord) -> Reuse | None:
    """Which steps the denoiser leaves out."""
    from trtconvert.runtime.reuse import load_reuse

    record = reuse_record(stage)
    if stage is None or record is None:
        return None
    return load_reuse(stage.folder, component.model_copy(update={"reuse": record}))


def _verify_export(
    recipe: Recipe,
    calibration: Stage,
    plan: Stage,
    reuse: Stage | None,
    exported: Stage,
    reference: Stage,
    model: Callable[[], DiffusionModel],
    cache: Cache,
    report: Reporter,
) -> Stage:
    """Measure with the exported model on ONNX Runtime."""
    section = recipe.verify
    reads = {
        "onnx": exported.key,
        "reference": reference.key,
        "verify": section.model_dump(mode="json", exclude={"min_psnr", "max_prediction_error"}),
        "output": recipe.output.model_dump(mode="json"),
    } | _steps_left_out(reuse)

    def make(folder: Path, bar: Bar) -> None:
        import torch

        from trtconvert.calib.data import batches_of
        from trtconvert.evaluate import gates, verify
        from trtconvert.export.float32 import in_float32
        from trtconvert.export.trace import in_type
        from trtconvert.guidance import GuidedDenoiser
        from trtconvert.models.denoiser import intercepted
        from trtconvert.runtime.batches import AnyBatch
        from trtconvert.runtime.session import OnnxRuntimeComponent

        source, component, dtype = model(), component_of(exported), getattr(torch, recipe.model.dtype)
        denoiser = OnnxRuntimeComponent(exported.folder / ONNX, component)
        sites, layers = _in_torch(recipe, source, calibration, plan)
        tables = layers.tables
        batches = len(batches_of(section.samples, verify.BATCH))
        bar.total(batches + len(batches_of(verify.SITE_SAMPLES, verify.BATCH)) + 2)

        # The exported arithmetic against the torch reference of the same arithmetic, in the same types.
        inputs = _as_exported(recipe, source).example(1, {name: opt for name, (_, opt, _) in component.dims.items()})
        typed = {spec.name: inputs[spec.name].to(getattr(torch, spec.dtype)) for spec in component.inputs}
        in_torch = in_type(intercepted(source, sites.handler(), layers.handler() if tables else None), dtype)
        if component.guidance is not None:
            in_torch = GuidedDenoiser(in_torch, source.timestep_input, component.guidance)
        wide = {name: x.float() if x.dtype == dtype else x for name, x in typed.items()}
        with torch.no_grad():
            # ONNX Runtime has no BF16: it computes in FP32, with weights and inputs of BF16.
            steps, wide_steps = [typed], [wide]
            if component.caches:  # of changes there are some from the second step on
                steps, wide_steps = ([one, verify.next_step(source, one)] for one in (typed, wide))
            layers.reset_cache()
            exact = (
                verify.in_steps(in_torch.float(), wide_steps)
                if dtype == torch.bfloat16
                else verify.in_steps(in_torch, steps)
            )
            error = verify.relative_error(verify.in_steps(denoiser, steps), exact)
            modes = _plan(plan)
            if dtype == torch.float16 and error > gates.error_limit(
                section, modes.sites.values(), modes.layers.values()
            ):
                # What two ways round to FP16 may fall on different sides of INT8's edges: what both compute in FP32 does not.
                with in_float32(exported.folder / ONNX) as path:
                    found = verify.in_steps(OnnxRuntimeComponent(path, verify.widened(component)), wide_steps)
                layers.reset_cache()
                error = verify.relative_error(found, verify.in_steps(in_torch.float(), wide_steps))
        bar.step()
        compared = typed
        if component.caches:
            denoiser.reset_cache()
            denoiser(**typed)
            compared = steps[-1] | denoiser.caches
        difference, limit = verify.lowering_difference(
            exported.folder / ONNX, exported.folder / NATIVE, recipe.model.dtype, compared, section.min_site_sqnr
        )
        bar.step()
        of_sites, of_layers = verify.output_sqnr(
            source, sites, layers, recipe.calibration.bins, section.seed, section.samples, bar
        )
        denoiser.reuse = _reuse(reuse, component)
        int8 = verify.draw(source, AnyBatch(denoiser), section, bar)
        _leave_figures(
            folder,
            recipe,
            reference,
            int8,
            site_sqnr=of_sites,
            layer_sqnr=of_layers,
            error=error,
            lowering_difference=difference,
            lowering_limit=limit,
        )

    return _run("verify", reads, make, cache, report)


def _leave_figures(folder: Path, recipe: Recipe, reference: Stage, int8: Tensor, **measured: Any) -> None:
    """Write the figures of a build, and its samples beside those in full precision.

    Args:
        reference: see `reference_stage`; int8: [N, C, H, W] samples in [0, 1] of the same seeds.
        measured: further fields of `QualityRecord`.
    """
    from safetensors.torch import load_file

    from trtconvert.evaluate import verify
    from trtconvert.evaluate.grid import save_comparison

    section, full = recipe.verify, load_file(reference.folder / FULL)["images"]
    per_sample = verify.psnr(int8, full)
    quality = QualityRecord(
        samples=section.samples,
        steps=section.steps,
        sampler=section.sampler,
        psnr=float(verify.psnr(int8.flatten()[None], full.flatten()[None])),
        psnr_worst=float(per_sample.min()),
        psnr_worst_seed=section.seed + int(per_sample.argmin()),
        **measured,
    )
    (folder / QUALITY).write_text(quality.model_dump_json(indent=1))
    shown = min(recipe.output.grid, section.samples)
    save_comparison(full[:shown], int8[:shown], folder / SAMPLES)


def _check_onnx(path: Path, dtype: str) -> None:
    """Let ONNX check a model, its types and shapes too; one in BF16 as FP32: operators of its opset lack BF16 where those of
    TensorRT have it (convolutions, sines)."""
    import onnx

    from trtconvert.export.float32 import without_bfloat16

    with without_bfloat16(path, dtype) as checked:
        onnx.checker.check_model(checked, full_check=True)


def _save_native(onnx_file: Path, path: Path, dtype: str) -> None:
    """Write a model of a type for engines that host no plugin: attention in its own type, INT8 layers between Q/DQ."""
    import onnx_ir as ir

    from trtconvert.export import storage
    from trtconvert.export.lowering import expand_layers, lower_changes, lower_to_native, quantise_products
    from trtconvert.export.nodes.attention import attention_nodes

    native = ir.load(onnx_file)
    if attention_nodes(native):
        lower_to_native(native)
    expand_layers(native)
    quantise_products(native)
    lower_changes(native)
    storage.save(native, path)
    _check_onnx(path, dtype)


def _kept_unquantised(recipe: Recipe) -> dict[str, Any]:
    """What an export reads of the engine section, where it matters."""
    return {"unquantised": True} if recipe.engine.refittable else {}


def _save_unquantised(
    module: nn.Module, layers: Mapping[str, ConvertedLayer], onnx_file: Path, prefix: str = ""
) -> None:
    """Keep what INT8 layers are quantised from, for LoRAs and new weights of refittable engines."""
    from trtconvert.weights.unquantised import save_unquantised

    save_unquantised(module, [layer.layer for layer in layers.values()], onnx_file, prefix)


# What stages leave ----------------------------------------------------------------------------------------------------


def _run(name: str, reads: dict[str, Any], make: Callable[[Path, Bar], None], cache: Cache, report: Reporter) -> Stage:
    with report.stage(name) as bar:
        stage = cache.stage(name.replace(" ", "-"), reads, lambda folder: make(folder, bar))
        bar.reused = stage.reused
    return stage


def _size(exported: Stage, component: ComponentRecord) -> int:
    """Bytes of a component's ONNX, and of its weights where they lie beside it."""
    return sum(file.stat().st_size for file in exported.folder.glob(f"{component.onnx}*"))


def _sites(calibration: Stage) -> list[Site]:
    from trtconvert.attention.sites import Site

    return [Site(**site) for site in json.loads((calibration.folder / SITES).read_text())]


def _layers(calibration: Stage) -> list[Layer]:
    from trtconvert.linear.sites import layer_from_json

    return [layer_from_json(layer) for layer in json.loads((calibration.folder / LAYERS).read_text())]


def _chosen_layers(calibration: Stage) -> list[Layer]:
    return [layer for layer in _layers(calibration) if not layer.obstacle]


@dataclass(frozen=True)
class _Plan:
    """What the plan stage writes, by the names of sites and layers.

    Attributes:
        sites, layers: modes by timestep bin; of a layer that the plan leaves as it is they are 0, `LayerMode.EXACT`.
        scalings: how each converted site gets the scales of queries and keys.
        sparse: the share of its attention that each site with a block mask may lose, by timestep bin.
        dense: why other sites that might have one have none.
        modulated: layers that quantise changes, where the search chose them.
    """

    sites: dict[str, list[int]]
    layers: dict[str, list[int]]
    scalings: dict[str, str]
    sparse: dict[str, list[float]]
    dense: dict[str, str]
    modulated: list[str]


def _plan(plan: Stage) -> _Plan:
    return _Plan(**json.loads((plan.folder / PLAN).read_text()))


def _guidance(recipe: Recipe) -> dict[str, str]:
    """What a stage's key reads of guidance, where the denoiser applies it."""
    return {"guidance": recipe.engine.guidance} if recipe.engine.guidance == "fused" else {}


def _as_exported(recipe: Recipe, model: DiffusionModel) -> DiffusionModel:
    """The model with the inputs and dimensions that it is exported with.

    Raises:
        UserError: see `fused_form`.
    """
    from trtconvert.models.guidance import fused_form

    return fused_form(model) if recipe.engine.guidance == "fused" else model


def _input_ranges(calibration: Stage, guidance: GuidanceRecord | None) -> dict[str, list[float]]:
    """Largest magnitudes of the denoiser's inputs, by timestep bin; the calibration saw both halves of guidance together."""
    from trtconvert.calib.calibration import Calibration

    ranges = {name: x.tolist() for name, x in Calibration.load(calibration.folder / CALIBRATION).inputs.items()}
    twins = guidance.negative if guidance is not None else {}
    return ranges | {twin: ranges[name] for name, twin in twins.items() if name in ranges}


def _opt_rows(model: DiffusionModel, dims: Mapping[str, tuple[int, int, int]]) -> int:
    """Rows of a call at the opt sizes: samples, twice where guidance is inside."""
    from trtconvert.runtime.signature import shape_of

    opt = {name: size for name, (_, size, _) in dims.items()}
    return shape_of(model.inputs[0].shape, opt)[0] * (1 if model.guidance is None else 2)


def _tables(calibration: Stage, plan: Stage) -> dict[str, AttentionTables]:
    import torch

    from trtconvert.calib.calibration import Calibration

    modes = {site: torch.tensor(row, dtype=torch.int32) for site, row in _plan(plan).sites.items()}
    return Calibration.load(calibration.folder / CALIBRATION).with_modes(modes)


def _masks(calibration: Stage, plan: Stage) -> dict[str, Tensor]:
    """The block masks [T, H, Bq, Bk] of the sites that the plan gives some."""
    from trtconvert.calib.calibration import Calibration

    if not (rows := _plan(plan).sparse):
        return {}
    blocks = Calibration.load(calibration.folder / CALIBRATION).blocks
    return {site: blocks[site].mask(row) for site, row in rows.items()}


def _converted_layers(
    model: DiffusionModel, recipe: Recipe, calibration: Stage, plan: Stage
) -> dict[str, ConvertedLayer]:
    """The layers that the plan converts, with their tables.

    Raises:
        UserError: none of them quantises changes, where the recipe asks for it.
    """
    import torch

    from trtconvert.calib.calibration import Calibration
    from trtconvert.calib.layer_scales import is_modulated, layer_tables
    from trtconvert.linear.changes import can_be_modulated
    from trtconvert.linear.sites import ConvertedLayer, with_sources_among

    planned = _plan(plan)
    rows = {name: row for name, row in planned.layers.items() if any(row)}
    modes = {name: torch.tensor(row, dtype=torch.int32) for name, row in rows.items()}
    layers = [layer for layer in _layers(calibration) if layer.name in modes]
    scales = Calibration.load(calibration.folder / CALIBRATION).layers
    of_sources = {layer.name: scales[layer.source] for layer in layers}
    tables = layer_tables(model.denoiser, layers, scales, modes)
    modulated = {
        layer.name
        for layer in layers
        if is_modulated(layer, recipe.layers)
        and can_be_modulated(tables[layer.name].modes.tolist())
        and (recipe.layers.modiff != "auto" or layer.name in planned.modulated)
    }
    if recipe.layers.modiff not in (False, "auto") and not modulated:
        raise UserError(
            "no layer quantises changes, as layers.modiff asks",
            expected="a plan with layers that are static in all timestep bins",
            got=f"{len(layers)} INT8 layers, none of them so",
            remedy="set layers.modes to static, raise the budget of the plan section, or set layers.modiff to false",
        )
    return {
        layer.name: ConvertedLayer(
            layer, tables[layer.name], of_sources[layer.name].change_scale if layer.name in modulated else None
        )
        for layer in with_sources_among(layers)
    }


def _layer_records(
    recipe: Recipe, calibration: Stage, plan: Stage, converted: Mapping[str, ConvertedLayer], batch: int
) -> list[LayerRecord]:
    """
    Args:
        batch: for which times were taken.
    """
    from trtconvert.linear import convs

    modes = _plan(plan).layers
    modulated = {name for name, layer in converted.items() if layer.change_scale is not None}
    searched = recipe.attention.modes == "auto" and recipe.layers.modes == "auto"

    def record(layer: Layer) -> LayerRecord:
        if any(row := modes.get(layer.name, [])):
            return _layer_record(layer, row, layer.name in modulated)
        if searched and layer.kind == "conv" and not layer.obstacle and (slow := convs.left(layer, batch)):
            reason = f"it is a convolution {slow}, and layers.modes: auto leaves it in 16 bits"
            layer = replace(layer, obstacle=reason)
        return _layer_record(layer, [])

    return [record(layer) for layer in _layers(calibration)]


def _component_records(found: ComponentLayers) -> list[LayerRecord]:
    converted = [_layer_record(layer.layer, layer.tables.modes.tolist()) for layer in found.converted.values()]
    return converted + [_layer_record(layer, []) for layer in found.left]


def _layer_record(layer: Layer, modes: list[int], modulated: bool = False) -> LayerRecord:
    return LayerRecord(
        name=layer.name,
        kind=layer.kind,
        in_channels=layer.in_channels,
        out_channels=layer.out_channels,
        kernel=list(layer.kernel),
        rows=layer.rows,
        weight=layer.weight.name,
        modes=modes,
        reason=layer.obstacle,
        modulated=modulated,
    )


def _site_records(calibration: Stage, plan: Stage, sparse: bool) -> list[SiteRecord]:
    """
    Args:
        sparse: whether the recipe asks for block masks.
    """
    from trtconvert.attention.blocks import obstacle_to_blocks
    from trtconvert.calib.calibration import Calibration

    planned = _plan(plan)
    modes, shares = planned.sites, planned.sparse
    blocks = Calibration.load(calibration.folder / CALIBRATION).blocks if shares else {}
    densities = {site: blocks[site].density(row) for site, row in shares.items()}

    def dense(site: Site) -> str:
        if not sparse or site.obstacle or site.name in shares:
            return ""
        return obstacle_to_blocks(site) or planned.dense.get(site.name, "the plan leaves it so")

    return [
        SiteRecord(
            name=s.name,
            heads=s.heads,
            head_dim=s.head_dim,
            modes=modes.get(s.name, []),
            scaling=planned.scalings.get(s.name, "") if s.name in modes else "",  # type: ignore[arg-type]  # the plan wrote it
            reason=s.obstacle,
            sparse=shares.get(s.name, []),
            density=densities.get(s.name, []),
            dense=dense(s),
        )
        for s in _sites(calibration)
    ]


def component_of(exported: Stage) -> ComponentRecord:
    return ComponentRecord.model_validate_json((exported.folder / SIGNATURE).read_text())


def _ranges(recipe: Recipe) -> list[dict[str, Any]]:
    """The shapes that a recipe asks for, as a stage's key reads them."""
    return [{name: wanted.model_dump() for name, wanted in ranges.items()} for ranges in recipe.engine.ranges()]


def _profiles(recipe: Recipe, model: DiffusionModel) -> list[Dims]:
    """The model's ranges, narrowed by the recipe's: one mapping per optimisation profile."""
    return [narrowed(wanted, model.dims, model.name, model.steps) for wanted in recipe.engine.ranges()]


def narrowed(
    ranges: Mapping[str, Range],
    available: Mapping[str, tuple[int, int, int]],
    name: str,
    steps: Mapping[str, int],
) -> Dims:
    """The dimensions of a model of some name, with the ranges of an engine section instead of its own.

    Args:
        steps: in which dimensions may vary, where that is not 1.
    Raises:
        UserError: a range is none of the model's, exceeds the model's own, or lies between its steps.
    """
    dims = dict(available)
    for dim, wanted in ranges.items():
        if dim not in dims:
            raise UserError(
                f"the recipe's engine section names the dimension '{dim}', which {name} does not have",
                expected=", ".join(dims),
                got=dim,
                remedy="correct engine.shapes or engine.profiles",
            )
        low, _, high = dims[dim]
        if wanted.min < low or wanted.max > high:
            raise UserError(
                f"the recipe's engine section asks for more of '{dim}' than {name} supports",
                expected=f"{low} to {high}",
                got=f"{wanted.min} to {wanted.max}",
                remedy="narrow engine.shapes or engine.profiles",
            )
        if any((size - low) % steps.get(dim, 1) for size in (wanted.min, wanted.opt, wanted.max)):
            raise UserError(
                f"the recipe's engine section asks for sizes of '{dim}' that {name} does not take",
                expected=f"{low} to {high} in steps of {steps[dim]}",
                got=f"{wanted.min}, {wanted.opt}, {wanted.max}",
                remedy="correct engine.shapes or engine.profiles",
            )
        dims[dim] = (wanted.min, wanted.opt, wanted.max)
    return dims


def _engine_dtype(recipe: Recipe, model: DiffusionModel, name: str, dtype: str) -> str:
    return recipe.model.dtype if dtype == "float32" and name not in model.always_float32 else dtype


def _refuse_unfit_steps(recipe: Recipe, model: DiffusionModel) -> None:
    """
    Raises:
        UserError: a section asks for steps that the model's sampler does not take.
    """
    from trtconvert.models.denoiser import refuse_steps

    asked = [("calibration", recipe.calibration.steps, "ddim"), ("verify", recipe.verify.steps, recipe.verify.sampler)]
    if recipe.calibration.data != "denoise":
        del asked[0]
    if recipe.attention.modes == "auto":
        asked.append(("plan", recipe.plan.steps, "ddim"))
    for section, steps, solver in asked:
        refuse_steps(model, f"{section}.steps", steps, solver)
