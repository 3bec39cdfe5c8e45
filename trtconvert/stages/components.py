"""The stages that export text encoders and the VAE, which a recipe's section `components` lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.bundle import ComponentRecord, TensorRecord
from trtconvert.cache import Stage
from trtconvert.errors import UserError
from trtconvert.recipe import ComponentSection, Recipe
from trtconvert.stages.build import Build
from trtconvert.stages.common import EXAMPLE, NAMES, NATIVE, SIGNATURE, unquantised_reads
from trtconvert.stages.onnx_files import check_onnx, keep_unquantised, save_native
from trtconvert.stages.records import component_records

if TYPE_CHECKING:
    from trtconvert.models import DiffusionModel
    from trtconvert.progress import Bar


def component_stages(build: Build) -> dict[str, Stage]:
    """Exports the components of the recipe.

    Each stage writes a model, its signature, and a call with its outputs in FP32, for comparison with the engine.
    """
    return {name: component_stage(build, name) for name in named_components(build)}


def named_components(build: Build) -> list[str]:
    """Returns the names of the components to export; UserError if the pipeline lacks one."""
    recipe = build.recipe
    if not recipe.components:
        return []

    def name_them(folder: Path) -> None:
        (folder / NAMES).write_text(json.dumps(component_names(recipe, build.source.model())))

    reads = {"weights": build.weights, "asked": sorted(recipe.components)}
    named = build.cache.stage("components", {__name__, *build.code}, reads, name_them)
    return json.loads((named.folder / NAMES).read_text())


def component_stage(build: Build, name: str) -> Stage:
    """Exports one of the pipeline's models beside the denoiser."""
    recipe = build.recipe
    asked: dict[str, Any] = {}
    for section in ("all", name):  # the component's own section has precedence
        asked |= recipe.components.get(section, ComponentSection()).model_dump(exclude_none=True)
    limit = recipe.verify.max_component_error
    reads = {"weights": build.weights, "component": name, "asked": asked, "dtype": recipe.model.dtype}
    in_int8 = asked.get("layers") == "int8"
    if in_int8:
        reads |= unquantised_reads(recipe) | {"limit": limit, "native": build.native}
        reads["layers"] = recipe.layers.model_dump(
            mode="json", include={"kinds", "min_rows", "few_rows", "equalise", "offsets", "scales"}
        )

    def make(folder: Path, bar: Bar) -> None:
        import torch

        from trtconvert.calib.component_layers import component_layers
        from trtconvert.evaluate.component_example import ComponentExample
        from trtconvert.export import storage
        from trtconvert.export.trace import OF_COMPONENTS, trace_component

        components = build.source.model().components
        assert components is not None  # otherwise `component_names` raised
        source = components(name)
        dtype = asked.get("dtype") or ("float32" if source.high_precision else recipe.model.dtype)
        if dtype == "float16" and source.overflows:
            raise UserError(
                f"{name} is not converted to float16",
                expected="float32, as its configuration sets force_upcast: its values exceed the range of float16",
                got="float16",
                remedy=f"set components.{name}.dtype to float32 in the recipe",
            )
        onnx_file = folder / f"{name}.onnx"
        replaceable = recipe.engine.refittable
        found = component_layers(source, recipe.layers, limit, replaceable=replaceable) if in_int8 else None
        exported = trace_component(source, getattr(torch, dtype), found.converted if found else None)
        storage.save(exported, onnx_file)
        check_onnx(onnx_file)
        if found and build.native:
            save_native(onnx_file, folder / NATIVE)
        if found and recipe.engine.refittable:
            keep_unquantised(source.module, found.converted, onnx_file, OF_COMPONENTS)
        component = ComponentRecord(
            onnx=onnx_file.name,
            inputs=[
                TensorRecord(name=i.name, dtype=dtype if i.dtype == "float32" else i.dtype, shape=list(i.shape))
                for i in source.inputs
            ],
            outputs=[TensorRecord(name=o.name, dtype=dtype, shape=list(o.shape)) for o in source.outputs],
            dims=dict(source.dims),
            profiles=[dict(source.dims)],
            layers=component_records(found) if found else [],
            engines=[],
            diffusers=source.diffusers,
        )
        (folder / SIGNATURE).write_text(component.model_dump_json(indent=1))
        ComponentExample.of(source, torch.device("cuda" if build.place.on_gpu else "cpu")).save(folder / EXAMPLE)

    return build.stage(f"export {name}", reads, make)


def component_names(recipe: Recipe, model: DiffusionModel) -> list[str]:
    """Returns the names of the components to convert; UserError if the model lacks one."""
    if model.components is None:
        raise UserError(
            f"{model.name} has no components beside the denoiser",
            expected="a recipe without the section components",
            got=", ".join(recipe.components),
            remedy="remove the section, or convert a pipeline with model.source: diffusers",
        )
    known, named = model.components.names, recipe.components.keys() - {"all"}
    if unknown := sorted(named - set(known)):
        raise UserError(
            f"the pipeline has no {', '.join(unknown)}",
            expected=", ".join(known) or "no section components, as the pipeline was saved with its denoiser only",
            got=", ".join(unknown),
            remedy="correct components in the recipe, or save the pipeline with this model",
        )
    used = model.components.used if "all" in recipe.components else ()
    return [name for name in known if name in named or name in used]
