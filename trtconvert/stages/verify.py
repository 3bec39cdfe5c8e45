"""The stage that measures the figures for the gates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.bundle import QualityRecord
from trtconvert.cache import Stage
from trtconvert.calib.identity import named_file
from trtconvert.errors import UserError
from trtconvert.recipe import Recipe
from trtconvert.stages.build import Build
from trtconvert.stages.common import (
    ENGINE,
    FULL_PRECISION,
    NATIVE,
    ONNX,
    OUTPUT_ERRORS,
    QUALITY,
    RECORDED_CALLS,
    SAMPLES,
    SITE_ERRORS,
    Engines,
    component_of,
)
from trtconvert.stages.converted import int8_in_torch
from trtconvert.stages.results import ComputedSteps, Planned

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trtconvert import bars
    from trtconvert.bundle import ComponentRecord, EngineRecord
    from trtconvert.models.recorded_calls import RecordedCalls
    from trtconvert.progress import Bar
    from trtconvert.quant.forward import Int8Layers
    from trtconvert.runtime.session import OnnxRuntimeComponent


def verify_stage(
    build: Build,
    planned: Planned,
    steps: ComputedSteps,
    exported: Stage,
    reference: Stage,
    errors: Stage | None,
    engines: Engines,
) -> Stage:
    """Measures the figures for the gates. Writes the figures and the grid of samples; does not read the thresholds.

    A GPU draws samples with the engine if there is one, otherwise with the kernels in torch. A CPU draws them with the exported
    model.

    Args:
        errors: stage of the errors of sites and layers; None on a CPU.
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
        from trtconvert.models.recorded_calls import RecordedCalls

        calls = RecordedCalls.load(reference.folder / RECORDED_CALLS)
        bar.total(len(batches_of(section.samples, verify.BATCH)) + 1)
        prediction_error: list[float | None] = []
        if runs:
            with build.crew.sharing(_drawn_by_engine, steps, component, *runs[0]):
                int8, prediction_error = _drawn_by_engine(build, bar, steps, component, *runs[0], calls)
        else:
            with build.crew.sharing(_drawn_in_torch, planned, steps, component):
                int8 = _drawn_in_torch(build, bar, planned, steps, component)
        bar.step()
        of_sites, of_layers = json.loads((errors.folder / SITE_ERRORS).read_text())
        _write_figures(
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
        (folder / OUTPUT_ERRORS).write_text(json.dumps(prediction_error))

    return build.stage("verify", reads, make)


def _drawn_by_engine(
    build: Build,
    bar: bars.Steps,
    steps: ComputedSteps,
    component: ComponentRecord,
    record: EngineRecord,
    built: Stage,
    calls: RecordedCalls | None = None,
) -> tuple[Tensor, list[float | None]]:
    """Returns samples of an engine, and the errors of its predictions for recorded calls."""
    from trtconvert.evaluate import verify
    from trtconvert.runtime.batches import AnyBatch
    from trtconvert.runtime.bundles import engine_component

    build.source.leave_gpu()
    with closing(engine_component(built.folder / ENGINE, record, component)) as denoiser:
        prediction_error = [] if calls is None else calls.errors(AnyBatch(denoiser))
        denoiser.reuse = steps.reuse(component)
        int8 = verify.draw(build.source.model(), AnyBatch(denoiser), build.recipe.verify, bar, build.ranks)
    return int8, prediction_error


def _drawn_in_torch(
    build: Build, bar: bars.Steps, planned: Planned, steps: ComputedSteps, component: ComponentRecord
) -> Tensor:
    """Returns samples of the kernels in torch."""
    from trtconvert.evaluate import verify
    from trtconvert.models.int8_denoiser import int8_denoiser
    from trtconvert.runtime.reuse import Reusable

    source, reuse = build.source.placed(), steps.reuse(component)
    in_int8 = int8_denoiser(source, *int8_in_torch(build.recipe, source, planned))
    denoiser = in_int8 if reuse is None else Reusable(in_int8, reuse)
    return verify.draw(source, denoiser, build.recipe.verify, bar, build.ranks)


def _drawn_by_export(
    build: Build, bar: bars.Steps, steps: ComputedSteps, exported: Stage, denoiser: OnnxRuntimeComponent | None = None
) -> Tensor:
    """Returns samples of the exported model on ONNX Runtime; denoiser: that model, if this process has loaded it."""
    from trtconvert.evaluate import verify
    from trtconvert.runtime.batches import AnyBatch
    from trtconvert.runtime.session import OnnxRuntimeComponent

    component = component_of(exported)
    denoiser = denoiser or OnnxRuntimeComponent(exported.folder / ONNX, component)
    denoiser.reuse = steps.reuse(component)
    return verify.draw(build.source.placed(), AnyBatch(denoiser), build.recipe.verify, bar, build.ranks)


def _verify_export(build: Build, planned: Planned, steps: ComputedSteps, exported: Stage, reference: Stage) -> Stage:
    """Measures the figures on a CPU, with the exported model on ONNX Runtime."""
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
        from trtconvert.diffusion_model import weights_in_float32
        from trtconvert.evaluate import gates, verify
        from trtconvert.export.trace import in_type
        from trtconvert.guidance import GuidedDenoiser
        from trtconvert.mixed_types import OneType
        from trtconvert.models.denoiser import intercepted
        from trtconvert.runtime.session import OnnxRuntimeComponent

        source, component, dtype = build.source.placed(), component_of(exported), getattr(torch, recipe.model.dtype)
        denoiser = OnnxRuntimeComponent(exported.folder / ONNX, component)
        sites, layers = int8_in_torch(recipe, source, planned)
        batches = len(batches_of(section.samples, verify.BATCH))
        of_errors = samples_for_errors(planned.calibrated.chosen_sites, section.samples)
        bar.total(batches + len(batches_of(of_errors, verify.BATCH)) + 2)

        inputs = build.as_exported(source).example(1, {name: opt for name, (_, opt, _) in component.dims.items()})
        calls = [{spec.name: inputs[spec.name].to(getattr(torch, spec.dtype)) for spec in component.inputs}]
        if component.caches:  # the caches hold deltas from the second step on
            calls.append(verify.next_step(source, calls[0]))
        in_int8 = layers.handler() if layers.tables else None
        wide = {f"denoiser.{name}" for name in weights_in_float32(source, dtype)}
        in_torch = in_type(intercepted(source, sites.handler(), in_int8, around=lambda _: OneType()), dtype, wide)
        if component.guidance is not None:
            in_torch = GuidedDenoiser(in_torch, source.timestep_input, component.guidance)
        plan = planned.plan
        limit = gates.error_limit(section, plan.site_modes.values(), plan.layer_modes.values())
        with torch.no_grad():
            error = _export_error(exported.folder / ONNX, denoiser, in_torch, calls, dtype, limit, layers)
            if source.diffusers is None and not component.caches:  # pipelines were observed at several sizes
                for sizes in _other_sizes(component.dims, component.inputs[0].shape[0]):
                    inputs = build.as_exported(source).example(1, sizes)
                    call = {spec.name: inputs[spec.name].to(getattr(torch, spec.dtype)) for spec in component.inputs}
                    at_sizes = partial(
                        _export_error, exported.folder / ONNX, denoiser, in_torch, [call], dtype, limit, layers
                    )
                    _require_same_at(sizes, component.dims, source.name, limit, at_sizes)
        bar.step()
        compared = calls[0]
        if component.caches:
            denoiser.reset_cache()
            denoiser(**calls[0])
            compared = calls[1] | denoiser.caches
        difference, largest_difference = verify.lowering_difference(
            exported.folder / ONNX, exported.folder / NATIVE, compared, section.min_site_sqnr
        )
        bar.step()
        of_sites, of_layers = verify.output_sqnr(
            source, sites, layers, recipe.calibration.bins, section.seed, of_errors, bar
        )
        with build.crew.sharing(_drawn_by_export, steps, exported):
            int8 = _drawn_by_export(build, bar, steps, exported, denoiser)
        _write_figures(
            folder,
            recipe,
            reference,
            int8,
            site_sqnr=of_sites,
            layer_sqnr=of_layers,
            error=error,
            lowering_difference=difference,
            lowering_limit=largest_difference,
        )

    return build.stage("verify", reads, make)


def _export_error(
    onnx: Path,
    denoiser: OnnxRuntimeComponent,
    in_torch: nn.Module,
    calls: Sequence[Mapping[str, Tensor]],
    dtype: torch.dtype,
    limit: float,
    layers: Int8Layers,
) -> float:
    """Returns the relative L2 error of an exported model against the torch reference of the same arithmetic.

    Both compute in the model's type if ONNX Runtime supports it. Two roundings to FP16 may fall on different sides of an INT8
    step: an error above the limit is measured again in FP32.

    Args:
        denoiser: the exported model on ONNX Runtime.
        in_torch: the reference in the model's type.
        layers: INT8 layers of the reference, whose caches start again with each run.
        calls: inputs of consecutive steps in the types of the signature.
        limit: largest error that passes.
    """
    import torch

    from trtconvert.evaluate import verify
    from trtconvert.export.float32 import in_float32
    from trtconvert.models.recorded_calls import relative_error
    from trtconvert.runtime.session import OnnxRuntimeComponent

    def reference(wide: bool) -> Tensor:
        layers.reset_cache()
        return verify.in_steps(in_torch.float(), wide_calls) if wide else verify.in_steps(in_torch, calls)

    wide_calls = [{name: x.float() if x.dtype == dtype else x for name, x in call.items()} for call in calls]
    # ONNX Runtime lacks BF16: it computes in FP32, with weights and inputs of BF16.
    error = relative_error(verify.in_steps(denoiser, calls), reference(wide=dtype == torch.bfloat16))
    if dtype == torch.float16 and error > limit:
        with in_float32(onnx) as path:
            found = verify.in_steps(
                OnnxRuntimeComponent(path, verify.widened(denoiser.signature.component)), wide_calls
            )
        error = relative_error(found, reference(wide=True))
    return error


def _other_sizes(dims: Mapping[str, Sequence[int]], batch: int | str) -> list[dict[str, int]]:
    """Returns sizes far from the usual ones, with the smallest batch: the smallest, mixes of them with one usual size, and the
    largest if they are up to four times as large. Empty if only the batch varies."""
    varied = {name: of_name for name, of_name in dims.items() if name != batch and of_name[0] < of_name[2]}
    least = {name: low for name, (low, _, _) in dims.items()}
    sizes = [least, *(least | {name: opt} for name, (_, opt, _) in varied.items() if len(varied) > 1)]
    if math.prod(high / opt for _, opt, high in varied.values()) <= 4:
        sizes.append(least | {name: high for name, (_, _, high) in varied.items()})
    usual = {name: opt for name, (_, opt, _) in varied.items()}
    return [others for others in sizes if others != least | usual]


def _require_same_at(
    sizes: Mapping[str, int],
    dims: Mapping[str, Sequence[int]],
    title: str,
    limit: float,
    error_at: Callable[[], float],
) -> None:
    """Raises a UserError if an exported model fails at sizes, or differs from the model by more than a limit: an export makes
    constants of sizes that a forward uses as Python numbers."""
    try:
        error = error_at()
        got = "" if error <= limit else f"a relative error of {error:.2g}"
    except UserError as failure:
        got = failure.got
    if got:
        varied = ", ".join(f"{name} {size}" for name, size in sizes.items() if len(set(dims[name])) > 1)
        raise UserError(
            f"the export of {title} does not compute the same at all sizes",
            expected=f"at {varied} a relative error of at most {limit:g} against torch, as at the usual sizes",
            got=got,
            remedy="compute positions and tables from x.shape by functions of torch, such as torch.arange, without branches on "
            "sizes; or give one size of each dimension in engine.shapes",
        )


_THRESHOLDS = {"min_psnr", "max_lpips", "max_prediction_error"}
"""Fields that do not affect measurements."""


def _write_figures(folder: Path, recipe: Recipe, reference: Stage, int8: Tensor, **measured: Any) -> None:
    """Writes the figures of a build, and its samples [N, C, H, W] in [0, 1] beside full precision's; measured: further fields of
    `QualityRecord`."""
    from safetensors.torch import load_file

    from trtconvert.evaluate import verify
    from trtconvert.evaluate.grid import save_comparison
    from trtconvert.weights.finite import require_finite

    require_finite(
        "samples in INT8 have numbers that are not finite",
        int8,
        "give model.dtype a type that holds the model's range, such as float32 or bfloat16",
    )
    section, full = recipe.verify, load_file(reference.folder / FULL_PRECISION)["images"]
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
    """Returns `lpips` and `lpips_worst` of samples [N, C, H, W] in [0, 1]; empty without weights."""
    if weights is None:
        return {}
    from trtconvert.evaluate import metrics

    distances = metrics.lpips(metrics.load_lpips(weights), int8, full)
    return {"lpips": float(distances.mean()), "lpips_worst": float(distances.max())}
