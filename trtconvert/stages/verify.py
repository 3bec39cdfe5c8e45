"""The stage that measures what the gates need."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.bundle import QualityRecord
from trtconvert.cache import Stage
from trtconvert.calib.identity import named_file
from trtconvert.recipe import Recipe
from trtconvert.stages.build import Build
from trtconvert.stages.common import (
    ENGINE,
    ERROR,
    ERRORS,
    FULL,
    NATIVE,
    ONNX,
    QUALITY,
    SAMPLES,
    VERIFY,
    Engines,
    component_of,
)
from trtconvert.stages.converted import int8_in_torch
from trtconvert.stages.results import Planned, Steps

if TYPE_CHECKING:
    from torch import Tensor

    from trtconvert.progress import Bar


def verify_stage(
    build: Build,
    planned: Planned,
    steps: Steps,
    exported: Stage,
    reference: Stage,
    errors: Stage | None,
    engines: Engines,
) -> Stage:
    """Measure what the gates need: with the engine where this machine's GPU runs one, else with the exported model on a CPU, or
    with the kernels in torch on a GPU. Leaves the figures and the sample grid; thresholds are not read.

    Args:
        errors: of sites and layers, see `errors_stage`, where they were measured on a GPU.
    """
    if errors is None:
        return _verify_export(build, planned, steps, exported, reference)
    runs = [(record, stage) for record, stage in engines if record.backend == "tensorrt"]
    recipe, component = build.recipe, component_of(exported)
    section = recipe.verify
    reads = {
        "lpips": named_file("verify.lpips_weights", section.lpips_weights),
        "onnx": exported.key,
        "reference": reference.key,
        "errors": errors.key,
        "engines": [stage.key for _, stage in runs],
        "grid": recipe.output.grid,
    } | steps.reads()

    def make(folder: Path, bar: Bar) -> None:
        from trtconvert.calib.data import batches_of
        from trtconvert.evaluate import verify
        from trtconvert.evaluate.recorded_calls import RecordedCalls
        from trtconvert.models.int8_denoiser import int8_denoiser
        from trtconvert.runtime.batches import AnyBatch
        from trtconvert.runtime.bundles import engine_component
        from trtconvert.runtime.reuse import Reusable

        calls = RecordedCalls.load(reference.folder / VERIFY)
        bar.total(len(batches_of(section.samples, verify.BATCH)) + 1)
        prediction_error: list[float | None] = []
        if runs:
            record, built = runs[0]
            with closing(engine_component(built.folder / ENGINE, record, component)) as denoiser:
                prediction_error = calls.errors(AnyBatch(denoiser))
                denoiser.reuse = steps.reuse(component)
                int8 = verify.draw(build.source.model(), AnyBatch(denoiser), section, bar)
        else:
            source = build.source.placed()
            sites, layers = int8_in_torch(recipe, source, planned)
            in_int8 = int8_denoiser(source, sites, layers)
            reuse = steps.reuse(component)
            int8 = verify.draw(source, in_int8 if reuse is None else Reusable(in_int8, reuse), section, bar)
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
            computed=build.place.reason,
            type_error=calls.type_errors,
        )
        (folder / ERROR).write_text(json.dumps(prediction_error))

    return build.stage("verify", reads, make)


def _verify_export(build: Build, planned: Planned, steps: Steps, exported: Stage, reference: Stage) -> Stage:
    """Measure with the exported model on ONNX Runtime."""
    recipe = build.recipe
    section = recipe.verify
    reads = {
        "onnx": exported.key,
        "reference": reference.key,
        "verify": section.model_dump(mode="json", exclude=_THRESHOLDS | {"lpips_weights"}),
        "lpips": named_file("verify.lpips_weights", section.lpips_weights),
        "output": recipe.output.model_dump(mode="json"),
    } | steps.reads()

    def make(folder: Path, bar: Bar) -> None:
        import torch

        from trtconvert.calib.data import batches_of, samples_for_errors
        from trtconvert.evaluate import gates, verify
        from trtconvert.evaluate.recorded_calls import relative_error
        from trtconvert.export.float32 import in_float32
        from trtconvert.export.trace import in_type
        from trtconvert.guidance import GuidedDenoiser
        from trtconvert.models.denoiser import intercepted
        from trtconvert.runtime.batches import AnyBatch
        from trtconvert.runtime.session import OnnxRuntimeComponent

        source, component, dtype = build.source.placed(), component_of(exported), getattr(torch, recipe.model.dtype)
        denoiser = OnnxRuntimeComponent(exported.folder / ONNX, component)
        sites, layers = int8_in_torch(recipe, source, planned)
        tables = layers.tables
        batches = len(batches_of(section.samples, verify.BATCH))
        of_errors = samples_for_errors(planned.calibrated.chosen_sites, section.samples)
        bar.total(batches + len(batches_of(of_errors, verify.BATCH)) + 2)

        # The exported arithmetic against the torch reference of the same arithmetic, in the same types.
        inputs = build.as_exported(source).example(1, {name: opt for name, (_, opt, _) in component.dims.items()})
        typed = {spec.name: inputs[spec.name].to(getattr(torch, spec.dtype)) for spec in component.inputs}
        in_torch = in_type(intercepted(source, sites.handler(), layers.handler() if tables else None), dtype)
        if component.guidance is not None:
            in_torch = GuidedDenoiser(in_torch, source.timestep_input, component.guidance)
        wide = {name: x.float() if x.dtype == dtype else x for name, x in typed.items()}
        with torch.no_grad():
            # ONNX Runtime has no BF16: it computes in FP32, with weights and inputs of BF16.
            calls, wide_calls = [typed], [wide]
            if component.caches:  # of deltas there are some from the second step on
                calls, wide_calls = ([one, verify.next_step(source, one)] for one in (typed, wide))
            layers.reset_cache()
            exact = (
                verify.in_steps(in_torch.float(), wide_calls)
                if dtype == torch.bfloat16
                else verify.in_steps(in_torch, calls)
            )
            error = relative_error(verify.in_steps(denoiser, calls), exact)
            plan = planned.plan
            if dtype == torch.float16 and error > gates.error_limit(section, plan.sites.values(), plan.layers.values()):
                # What two ways round to FP16 may fall on different sides of INT8's edges: what both compute in FP32 does not.
                with in_float32(exported.folder / ONNX) as path:
                    found = verify.in_steps(OnnxRuntimeComponent(path, verify.widened(component)), wide_calls)
                layers.reset_cache()
                error = relative_error(found, verify.in_steps(in_torch.float(), wide_calls))
        bar.step()
        compared = typed
        if component.caches:
            denoiser.reset_cache()
            denoiser(**typed)
            compared = calls[-1] | denoiser.caches
        difference, limit = verify.lowering_difference(
            exported.folder / ONNX, exported.folder / NATIVE, recipe.model.dtype, compared, section.min_site_sqnr
        )
        bar.step()
        of_sites, of_layers = verify.output_sqnr(
            source, sites, layers, recipe.calibration.bins, section.seed, of_errors, bar
        )
        denoiser.reuse = steps.reuse(component)
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

    return build.stage("verify", reads, make)


_THRESHOLDS = {"min_psnr", "max_lpips", "max_prediction_error"}
"""Fields that decide nothing that is measured."""


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
        **_lpips(section.lpips_weights, int8, full),
        **measured,
    )
    (folder / QUALITY).write_text(quality.model_dump_json(indent=1))
    shown = min(recipe.output.grid, section.samples)
    save_comparison(full[:shown], int8[:shown], folder / SAMPLES)


def _lpips(weights: Path | None, int8: Tensor, full: Tensor) -> dict[str, float]:
    """`lpips` and `lpips_worst` of samples [N, C, H, W] in [0, 1]; empty without weights."""
    if weights is None:
        return {}
    from trtconvert.evaluate import metrics

    distances = metrics.lpips(metrics.load_lpips(weights), int8, full)
    return {"lpips": float(distances.mean()), "lpips_worst": float(distances.max())}
