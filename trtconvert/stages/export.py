"""The stage that traces the denoiser to ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.bundle import ComponentRecord, TensorRecord, covering
from trtconvert.cache import Stage
from trtconvert.stages.build import Build
from trtconvert.stages.common import NATIVE, ONNX, SIGNATURE, unquantised_reads
from trtconvert.stages.converted import converted_layers
from trtconvert.stages.onnx_files import check_onnx, keep_unquantised, save_native
from trtconvert.stages.records import layer_records, site_records
from trtconvert.stages.results import Planned
from trtconvert.stages.shapes import engine_dtype, opt_rows, profiles_of, ranges_read

if TYPE_CHECKING:
    from trtconvert.progress import Bar


def prepare_export(build: Build) -> None:
    """Imports and loads what the export needs, before there is a plan."""
    from trtconvert.export import trace  # noqa: F401

    build.source.model()


def export_stage(build: Build, planned: Planned) -> Stage:
    """Traces the denoiser to ONNX, and writes its native form without plugins."""
    recipe = build.recipe
    asked = {"dtype": recipe.model.dtype, "shapes": ranges_read(recipe), "modiff": recipe.layers.modiff}
    asked["native"] = build.native
    reads = planned.reads() | asked | unquantised_reads(recipe) | build.guidance_reads()

    def make(folder: Path, bar: Bar) -> None:
        import torch

        from trtconvert.export import storage
        from trtconvert.export.delta_caches import caches_of
        from trtconvert.export.trace import SiteOptions, trace

        source = build.as_exported(build.source.model())
        profiles = profiles_of(recipe, source)
        dims = covering(profiles)
        options = SiteOptions(source.timestep_max, planned.plan.scalings, recipe.attention.smooth_k)
        dtype = getattr(torch, recipe.model.dtype)
        # The weights are quantised on the GPU: a CPU takes minutes for a large model.
        layers = converted_layers(recipe, source, planned, torch.device("cuda") if build.place.on_gpu else None)
        exported = trace(
            source, planned.tables(), options, layers=layers, dims=dims, dtype=dtype, masks=planned.masks()
        )
        storage.save(exported, folder / ONNX)
        check_onnx(folder / ONNX)
        if build.native:
            save_native(folder / ONNX, folder / NATIVE)
        if recipe.engine.refittable and layers:
            keep_unquantised(source.denoiser, layers, folder / ONNX)
        component = ComponentRecord(
            onnx=ONNX,
            inputs=[
                TensorRecord(name=i.name, dtype=engine_dtype(recipe, source, i.name, i.dtype), shape=list(i.shape))
                for i in source.inputs
            ],
            outputs=[TensorRecord(name=source.output.name, dtype=recipe.model.dtype, shape=list(source.output.shape))],
            timestep_input=source.timestep_input,
            timestep_max=source.timestep_max,
            noise_input=source.noise_input,
            dims=dims,
            steps=dict(source.steps),
            input_ranges=planned.calibrated.input_ranges(source.guidance),
            profiles=profiles,
            sites=site_records(planned, bool(recipe.sparse_shares)),
            layers=layer_records(recipe, planned, layers, opt_rows(source, profiles[0])),
            engines=[],
            diffusers=source.diffusers,
            caches=[
                TensorRecord(name=cache.name, dtype=cache.dtype, shape=list(cache.shape))
                for cache in caches_of(source, layers, dims, dtype)
            ],
            guidance=source.guidance,
        )
        (folder / SIGNATURE).write_text(component.model_dump_json(indent=1))

    return build.stage("export", reads, make)
