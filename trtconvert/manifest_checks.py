"""Checks that the fields of a manifest fit together, before any of them is used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.documents import PIPELINE_INDEX

if TYPE_CHECKING:
    from trtconvert.bundle import ComponentRecord, DiffusersRecord, LayerRecord, Manifest, SiteRecord, TensorRecord

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
"""Types of inputs and outputs, by their names in numpy and torch."""

CACHE, O_HAT = "modiff.", ".o_hat"
"""Prefix of the names of caches, and suffix of caches of a layer's output."""

_STATIC = 3
"""`LayerMode.STATIC`."""

CACHE_DTYPES = ("float16", "float32")
"""Types of caches: BF16 has too few bits for sums over many steps."""


def contradiction(manifest: Manifest) -> str:
    """Returns the first contradiction in a manifest; empty if there is none."""
    return next(_contradictions(manifest), "")


def _contradictions(manifest: Manifest) -> Iterator[str]:
    bins = manifest.recipe.calibration.bins
    denoisers = [component for component in manifest.components.values() if component.is_denoiser]
    if len(denoisers) != 1:
        yield f"components: {len(denoisers)} denoisers in place of one"
        return
    for name, component in manifest.components.items():
        found = (*_of_signature(component), *_of_parts(component, bins), *_of_diffusers(component))
        yield from (f"components.{name}.{text}" for text in found)
    yield from _of_quality(manifest, denoisers[0], bins)
    for field, path in _named_files(manifest):
        if path not in manifest.files:
            yield f"{field}: {path}, which files does not list"


def _named_files(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yields the fields that name files of the bundle, with the files."""
    yield "calibration", manifest.calibration
    if manifest.pipeline:
        yield "pipeline", f"{manifest.pipeline}/{PIPELINE_INDEX}"
    for name, component in manifest.components.items():
        yield f"components.{name}.onnx", component.onnx
        for index, engine in enumerate(component.engines):
            yield f"components.{name}.engines.{index}.file", engine.file
    for argument, images in manifest.recipe.model.images.items():
        paths: Sequence[Path] = images if isinstance(images, list) else [images]
        yield from ((f"recipe.model.images.{argument}", path.as_posix()) for path in paths)


def _of_signature(component: ComponentRecord) -> Iterator[str]:
    for field, tensors in (("inputs", component.inputs), ("outputs", component.outputs)):
        if not tensors:
            yield f"{field}: none"
        yield from _twins(field, (tensor.name for tensor in tensors))
        yield from (f"{field}: the type {t.dtype!r} of {t.name}" for t in tensors if t.dtype not in DTYPES)
    sized = {dim for tensor in component.inputs for dim in tensor.shape if isinstance(dim, str)}
    if unknown := sorted(sized - component.dims.keys()):
        yield f"dims: no {unknown[0]}, a dimension of an input"
    if unknown := sorted(component.steps.keys() - component.dims.keys()):
        yield f"steps: the dimension {unknown[0]}, which dims lacks"
    given = {_symbol(dim) for tensor in component.outputs for dim in tensor.shape if isinstance(dim, str)}
    if unknown := sorted(given - sized):
        yield f"outputs: the dimension {unknown[0]}, which no input has"
    yield from _of_caches(component)
    yield from _of_guidance(component)
    names = {tensor.name for tensor in component.inputs}
    if component.timestep_input and component.timestep_input not in names:
        yield f"timestep_input: {component.timestep_input}, which is not an input"
    if (component.timestep_max > 0) != bool(component.timestep_input):
        yield f"timestep_max: {component.timestep_max:g} with the timestep_input '{component.timestep_input}'"
    if component.noise_input is not None and component.noise_input.timestep_max != component.timestep_max:
        yield f"noise_input: {component.noise_input.timestep_max:g} places with the timestep_max {component.timestep_max:g}"
    for index, profile in enumerate(component.profiles):
        if profile.keys() != component.dims.keys():
            yield f"profiles.{index}: the dimensions {', '.join(profile)}, but dims has {', '.join(component.dims)}"
    for number, engine in enumerate(component.engines):
        for index, profile in enumerate(engine.profiles):
            if unknown := sorted(profile.keys() - component.dims.keys()):
                yield f"engines.{number}.profiles.{index}: the dimension {unknown[0]}, which dims lacks"


def _of_caches(component: ComponentRecord) -> Iterator[str]:
    names = [cache.name for cache in component.caches]
    if not names:
        if any(layer.modulated for layer in component.layers):
            yield "caches: none, but layers that quantise deltas"
        return
    if not component.is_denoiser:
        yield "caches: of a component without a timestep"
    yield from _twins("caches", (tensor.name for tensor in component.all_inputs))
    batch = component.inputs[0].shape[:1] if component.inputs else []
    modulated = {layer.name for layer in component.layers if layer.modulated}
    if bad := [layer.name for layer in component.layers if layer.modulated and set(layer.modes) != {_STATIC}]:
        yield f"layers: {bad[0]} quantises deltas, but is not static in all timestep bins"
    if modulated != {name.removeprefix(CACHE).removesuffix(O_HAT) for name in names if name.endswith(O_HAT)}:
        yield "caches: of other layers than those that quantise deltas"
    for cache in component.caches:
        if cache.dtype not in CACHE_DTYPES:
            yield f"caches: the type {cache.dtype!r} of {cache.name}"
        if cache.shape[:1] != batch or not all(isinstance(size, int) for size in cache.shape[1:]):
            yield f"caches: the shape {cache.shape} of {cache.name}; only the first dimension may vary, with the samples"


def _of_guidance(component: ComponentRecord) -> Iterator[str]:
    guidance = component.guidance
    if guidance is None or not component.inputs:
        return
    if not component.is_denoiser:
        yield "guidance: in a component without a timestep"
    inputs = {tensor.name: tensor for tensor in component.inputs}
    scale = inputs.get(guidance.scale)
    if scale is None or (scale.dtype, scale.shape) != ("float32", component.inputs[0].shape[:1]):
        yield f"guidance.scale: {guidance.scale}, which is not an input with a float32 number for each sample"
    if not guidance.negative:
        yield "guidance.negative: none, but guidance needs conditions"
    for name, twin in guidance.negative.items():
        if name not in inputs or twin not in inputs or name == twin or {name, twin} & {component.timestep_input}:
            yield f"guidance.negative.{name}: {twin}; both must be inputs and differ"
        elif (inputs[name].dtype, inputs[name].shape) != (inputs[twin].dtype, inputs[twin].shape):
            yield f"guidance.negative.{name}: {twin}, of another type or shape"
    parts = [component.inputs[0].name, component.timestep_input, guidance.scale]
    parts += [name for pair in guidance.negative.items() for name in pair]
    if twice := [name for name in parts if parts.count(name) > 1]:
        yield f"guidance: {twice[0]} in several roles"
    rows = {tensor.name for tensor in component.inputs if tensor.shape[:1] == component.inputs[0].shape[:1]}
    if alone := sorted(rows - set(parts)):
        yield f"guidance: {alone[0]} has a row for each sample, but no role"
    if component.caches:
        yield "guidance: with caches, which have a row for each half"


def _symbol(dim: str) -> str:
    """Returns the symbolic dimension in a linear function of it: "height" of "8*height-3"."""
    return dim.rpartition("*")[2].partition("+")[0].partition("-")[0]


def _of_parts(component: ComponentRecord, bins: int) -> Iterator[str]:
    if component.sites and not component.is_denoiser:
        yield "sites: in a component without a timestep"
    length = bins if component.is_denoiser else 1
    inputs = {tensor.name for tensor in component.inputs} - {component.timestep_input}
    for name, ranges in component.input_ranges.items():
        if name not in inputs or not component.is_denoiser:
            yield f"input_ranges: of {name}, which is not an input of a denoiser beside the timestep"
        if len(ranges) != length:
            yield f"input_ranges.{name}: {len(ranges)} for {length} timestep bins"
    fields: dict[str, Sequence[SiteRecord | LayerRecord]] = {"sites": component.sites, "layers": component.layers}
    for field, parts in fields.items():
        yield from _twins(field, (part.name for part in parts))
        for index, part in enumerate(parts):
            if part.modes and len(part.modes) != length:
                yield f"{field}.{index}.modes: {len(part.modes)} for {length} timestep bins"
            if part.modes and part.reason:
                yield f"{field}.{index}: modes, but also a reason to have none"
    for index, site in enumerate(component.sites):
        if site.scaling and not site.modes:
            yield f"sites.{index}.scaling: {site.scaling}, of a site without modes"
        if site.sparse and len(site.sparse) != len(site.modes):
            yield f"sites.{index}.sparse: {len(site.sparse)} for {len(site.modes)} modes"
        if len(site.density) != len(site.sparse):
            yield f"sites.{index}.density: {len(site.density)} for {len(site.sparse)} in sparse"
        if any(not share and density < 1 for share, density in zip(site.sparse, site.density, strict=False)):
            yield f"sites.{index}.density: less than 1 in a bin that loses no attention"
        if site.sparse and site.dense:
            yield f"sites.{index}.dense: a reason to have no block mask, but sparse has one"
    for index, layer in enumerate(component.layers):
        if bool(layer.kernel) != (layer.kind == "conv"):
            yield f"layers.{index}.kernel: {layer.kernel} for the kind {layer.kind}"
    sites = {site.name for site in component.sites}
    for number, engine in enumerate(component.engines):
        if unknown := [site.name for site in engine.native_sites if site.name not in sites]:
            yield f"engines.{number}.native_sites: {unknown[0]}, which is not a site"


def _of_diffusers(component: ComponentRecord) -> Iterator[str]:
    record = component.diffusers
    if record is None:
        return
    names = [name.lstrip("*") for name in record.parameters]
    yield from _twins("diffusers.parameters", names)
    if bad := [name for name in names if not name.isidentifier()]:
        yield f"diffusers.parameters: {bad[0]!r} is not a name"
    taken: dict[str, int] = {}
    wrong = [*_of_nodes("diffusers.arguments", record.arguments, taken)]
    yield from wrong
    of_guidance = component.guidance.added if component.guidance else frozenset[str]()
    if taken.keys() != {tensor.name for tensor in component.inputs} - of_guidance:
        yield "diffusers.arguments: other tensors than inputs has"
    for tensor in component.inputs:
        # A wrong number of rows would be allocated at each call, before the engine's sizes are checked.
        if (least := taken.get(tensor.name, 0)) and least > (most := _most_rows(component, tensor)):
            yield f"diffusers.arguments: at least {least} rows of {tensor.name}, which has at most {most}"
    given: dict[str, int] = {}
    yield from _of_nodes("diffusers.results", record.results, given)
    if unknown := sorted(given.keys() - {tensor.name for tensor in component.outputs}):
        yield f"diffusers.results: {unknown[0]}, which is not an output"
    yield from _of_attributes(record)
    if sizes := record.predictions:
        count, shape = sum(map(math.prod, sizes.values())), component.outputs[0].shape
        if len(sizes) < 2 or not component.is_denoiser or shape[1:] != [count]:
            yield f"diffusers.predictions: {count} numbers of {', '.join(sizes)}, but the output is {shape}"
    timesteps = set[str]() if wrong else {node["of"] for node in record.arguments.values() if "share" in node}
    if timesteps - {component.timestep_input}:
        yield f"diffusers.arguments: shares of {min(timesteps)}, which is not the timestep"


def _most_rows(component: ComponentRecord, tensor: TensorRecord) -> int:
    """Returns the largest second size of an input; 0 without a second dimension."""
    size = tensor.shape[1] if len(tensor.shape) > 1 else 0
    return size if isinstance(size, int) else component.dims.get(size, (0, 0, 0))[2]


def _of_nodes(place: str, nodes: Mapping[str, Any], tensors: dict[str, int], *, nested: bool = False) -> Iterator[str]:
    """Yields faults of arguments or results, see `DiffusersRecord`, and collects their tensors with the least number of rows.

    Shares of timesteps are arguments themselves, never nested.
    """
    for name, node in nodes.items():
        here = f"{place}.{name}"
        match node:
            case {"tensor": str(tensor), **rest} if rest.keys() <= {"dtype"}:
                tensors.setdefault(tensor, 0)
            case {"tensor": str(tensor), "least": int(least), **rest} if rest.keys() <= {"dtype"} and least >= 0:
                tensors[tensor] = least
            case {"share": str(share), "of": str(timestep), **rest} if not rest and not nested:
                tensors |= {share: 0, timestep: 0}
            case {"rows": str(tensor), **rest} if not rest:
                tensors.setdefault(tensor, 0)
            case {"rows": str(tensor), "least": int(least), **rest} if not rest and least >= 0:
                tensors |= {tensor: least, f"{tensor}.mask": least}
            case {"dict": dict(inner), **rest} if not rest:
                yield from _of_nodes(here, inner, tensors, nested=True)
            case {"dict": dict(inner), "numbered": True, **rest} if not rest and all(key.isdecimal() for key in inner):
                yield from _of_nodes(here, inner, tensors, nested=True)
            case {"list": list(inner), **rest} if not rest or rest == {"tuple": True}:
                items = {str(index): item for index, item in enumerate(inner)}
                yield from _of_nodes(here, items, tensors, nested=True)
            case {"value": _, **rest} | {"unused": [*_], **rest} if not rest:
                pass
            case _:
                yield f"{here}: neither a tensor, a container of tensors, nor a value"


def _of_attributes(record: DiffusersRecord) -> Iterator[str]:
    for name, node in record.attributes.items():
        if not name.isidentifier() or name.startswith("_"):
            yield f"diffusers.attributes: {name!r} is not the name of an attribute"
        match node:
            case {"value": _, **rest} | {"part": True, **rest} if not rest:
                pass
            case {"tensor": numbers, **rest} if not rest and _is_tensor(numbers):
                pass
            case {"module": dict(inner), **rest} if not rest and all(
                isinstance(x, dict) and x.keys() == {"tensor"} and _is_tensor(x["tensor"]) for x in inner.values()
            ):
                pass
            case _:
                yield f"diffusers.attributes.{name}: no number, tensor or part"


def _is_tensor(numbers: Any) -> bool:
    """Returns whether nested lists form a tensor of numbers."""
    import numpy as np  # imported here for the start-up of fully cached builds

    try:
        return np.asarray(numbers).dtype.kind in "bif"
    except ValueError:  # lists of different lengths
        return False


def _of_quality(manifest: Manifest, denoiser: ComponentRecord, bins: int) -> Iterator[str]:
    quality = manifest.quality
    parts = (("site_sqnr", quality.site_sqnr, denoiser.sites), ("layer_sqnr", quality.layer_sqnr, denoiser.layers))
    for field, rows, records in parts:
        converted = {record.name for record in records if record.modes}
        if unknown := sorted(rows.keys() - converted):
            yield f"quality.{field}: {unknown[0]}, which is not converted"
        if wrong := sorted(name for name, row in rows.items() if len(row) != bins):
            yield f"quality.{field}.{wrong[0]}: {len(rows[wrong[0]])} figures for {bins} timestep bins"
        # Bundles may have no layers, but always have sites.
        if (rows or field == "site_sqnr") and not any(db is not None for row in rows.values() for db in row):
            yield f"quality.{field}: no figure"
    if unknown := sorted(quality.component_errors.keys() - manifest.components.keys()):
        yield f"quality.component_errors: {unknown[0]}, which is not a component"
    figures: dict[str, float | None] = {
        **{name: getattr(quality, name) for name in ("psnr", "psnr_worst", "lpips", "lpips_worst", "error")},
        "lowering_difference": quality.lowering_difference,
        "lowering_limit": quality.lowering_limit,
        **{f"type_error.{index}": error for index, error in enumerate(quality.type_error)},
        **{f"component_errors.{name}": error for name, error in quality.component_errors.items()},
        **{f"{field}.{name}": db for field, rows, _ in parts for name, row in rows.items() for db in row},
    }
    if bad := [name for name, figure in figures.items() if figure is not None and not math.isfinite(figure)]:
        yield f"quality.{bad[0]}: {figures[bad[0]]}, which no gate passes"


def _twins(field: str, names: Iterable[str]) -> Iterator[str]:
    seen = set[str]()
    for name in names:
        if name in seen:
            yield f"{field}: {name} twice"
        seen.add(name)
