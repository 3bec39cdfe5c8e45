"""Tables of builds and bundles for the terminal."""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.table import Table
from rich.text import Text

from trtconvert.attention.modes import Mode
from trtconvert.bundle import MANIFEST, UNQUANTISED, ComponentRecord, Dims, EngineRecord, Manifest, in_steps
from trtconvert.calib.frontier import read_frontier
from trtconvert.errors import UserError
from trtconvert.evaluate.little import why_little
from trtconvert.evaluate.parts import dense_groups, layer_counts, left_by_plan, left_groups, mode_name, weight_bytes
from trtconvert.linear.modes import LayerMode
from trtconvert.pipeline import Outcome
from trtconvert.progress import Reporter, say
from trtconvert.provenance import Provenance, read_provenance

ATTENTION = {
    "plugin": "INT8, our plugin",
    "native": "native, the model's precision, not INT8",
}

SHOWN_MASKS = 8
"""Number of sites whose block masks are listed, those with the fewest blocks first."""

_FRONTIER = "frontier.json"

_BYTES = {"float16": 2, "float32": 4}
"""Size of a cache's element."""

INT8_LAYERS = {
    "native": "INT8, TensorRT's kernels",
    "plugin": "INT8, our plugins where they exist",
    "exact": "16-bit products of the dequantised INT8 weights",
}


def print_build(outcome: Outcome, report: Reporter) -> None:
    """Prints the table at the end of `trtconvert build`."""
    table = _table(f"built {outcome.folder}")
    _manifest_rows(table, outcome.manifest, outcome.folder)
    for stage, seconds in report.seconds.items():
        _row(table, f"time, {stage}", "from the cache" if stage in report.reused else f"{seconds:.1f} s")
    _row(table, "time, all", f"{sum(report.seconds.values()):.1f} s")
    _row(table, "memory", _memory(report))
    written = sum(size for stage, size in report.bytes.items() if stage not in report.reused)
    bundle = sum(file.size for file in outcome.manifest.files.values())
    _row(table, "disk", f"the bundle {_size(bundle)}; new in the cache {_size(written)}")
    report.console.print(table)
    say(report.console, f"look at {outcome.folder / 'samples.png'}: the same seeds in full precision and in INT8")


def _memory(report: Reporter) -> str:
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = f"{_size(host)} of the host at most"
    if report.gpu_bytes:
        stage = max(report.gpu_bytes, key=report.gpu_bytes.__getitem__)
        text += f"; {_size(report.gpu_bytes[stage])} of the GPU at most by PyTorch, in the stage {stage}"
    return text


def _by_bin(errors: Sequence[float | None]) -> str:
    return "by timestep bin " + ", ".join("–" if error is None else f"{error:.4f}" for error in errors)


def manifest_table(manifest: Manifest, folder: Path) -> Table:
    """Makes the table of `trtconvert inspect`.

    Raises:
        UserError: the bundle's calibration file is not a calibration.
    """
    table = _table(str(folder))
    _manifest_rows(table, manifest, folder)
    _row(table, "made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    _row(table, "weights", manifest.weights[:16] + "…")
    _row(table, "files", f"{len(manifest.files)}, {_size(sum(f.size for f in manifest.files.values()))}, all as built")
    return table


def _table(title: str) -> Table:
    table = Table(title=Text(title), title_justify="left", show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _row(table: Table, label: str, value: str) -> None:
    table.add_row(Text(label), Text(value))  # Text: names and paths may hold brackets, which are not markup


def _manifest_rows(table: Table, manifest: Manifest, folder: Path) -> None:
    _row(table, "model", manifest.model)
    for lora in manifest.recipe.loras:
        _row(table, "LoRA", f"{lora.file} × {lora.scale:g} in {lora.target}")
    for name, component in manifest.components.items():
        signature = ", ".join(f"{t.name} {t.dtype} [{', '.join(map(str, t.shape))}]" for t in component.inputs)
        _row(table, name, signature)
        sizes = {dim: in_steps(low, high, component.steps.get(dim)) for dim, (low, _, high) in component.dims.items()}
        _row(table, "", ", ".join(f"{dim} {described}" for dim, described in sizes.items()))
        if component.guidance is not None:
            twins = ", ".join(component.guidance.negative.values())
            _row(table, "guidance", f"inside, with the input {component.guidance.scale}; unconditional inputs: {twins}")
        if component.is_denoiser:
            _row(table, "attention sites", _sites(component))
            for group in left_groups(component.sites):
                _row(table, "", f"left: {group}")
            for modes, count in _plans(site.modes for site in component.sites).items():
                _row(table, "modes, low noise to high", f"{_runs(modes, _site_mode)}  ({count} sites)")
            scalings = Counter(site.scaling for site in component.sites if site.scaling)
            if scalings:
                words = ", ".join(f"{name} at {count} sites" for name, count in sorted(scalings.items()))
                _row(table, "scales of q and k", words)
            for line in _masks(component):
                _row(table, *line)
        for line in _layers(component):
            _row(table, *line)
        if component.is_denoiser:
            for number, line in enumerate(
                why_little(component, manifest.recipe, in_time=_is_fastest(manifest, folder))
            ):
                _row(table, "" if number else "little in INT8", line)
        if (reuse := component.reuse) is not None:
            kept = f"{len(reuse.computed)} of {reuse.steps} computed: {', '.join(map(str, reuse.computed))}"
            _row(table, "steps", kept)
            lost = f"{reuse.psnr:.1f} dB over {reuse.samples} samples, {reuse.psnr_all:.1f} dB with all steps computed"
            _row(table, "", f"{lost}; worst {reuse.psnr_worst:.1f} dB")
            for plan in reuse.tried:
                times = (
                    f"{plan.speed:.2f}× a step, {plan.speed_of_all:.2f}× with {plan.computed} of {reuse.steps} steps"
                )
                _row(table, "", f"tried: {plan.name}: {times}")
    _row(table, "calibration", _calibration(read_provenance(folder / manifest.calibration)))
    quality = manifest.quality
    db, site, index = quality.worst_site()
    drawn = f"{quality.samples} samples, {manifest.sampler_name(quality.sampler)} {quality.steps} steps"
    _row(
        table,
        "PSNR of the samples",
        f"{quality.psnr:.1f} dB over {drawn}; worst {quality.psnr_worst:.1f} dB, seed {quality.psnr_worst_seed}",
    )
    if quality.lpips is not None:
        _row(table, "LPIPS of the samples", f"mean {quality.lpips:.4f}; worst {quality.lpips_worst:.4f}")
    _row(table, "worst site", f"{site}, bin {index}: {db:.1f} dB signal to quantisation noise")
    if (of_layers := quality.worst_layer()) is not None:
        db, layer, index = of_layers
        _row(table, "worst layer", f"{layer}, bin {index}: {db:.1f} dB signal to quantisation noise")
    if quality.error is not None:
        _row(table, "exported arithmetic", f"relative error {quality.error:.1e} against the torch reference")
    if quality.computed:
        drawn_by = {"tensorrt": "by the bundle's engine", "torch": "by the kernels in torch"}.get(quality.measured, "")
        _row(table, "verified", f"INT8 samples {drawn_by}; full precision on {quality.computed}")
    if quality.component_errors:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in quality.component_errors.items())
        _row(table, "components", f"relative error against float32: {errors}")
    if manifest.pipeline:
        _row(table, "pipeline", f'in {manifest.pipeline}/: `trtconvert run {folder} -p "…"`')
    _row(table, "backend", f"{manifest.backend}: {manifest.backend_reason}")
    for name, component in manifest.components.items():
        of = "" if component.is_denoiser else f", {name}"
        for (backend, library, attention, layers), engines in groupby(
            component.engines, key=lambda e: (e.backend, e.library, e.attention, e.layers)
        ):
            sizes = ", ".join(f"{e.target} {_size(manifest.files[e.file].size)}" for e in engines)
            computed = f"attention: {ATTENTION[attention]}" + (f"; layers: {INT8_LAYERS[layers]}" if layers else "")
            _row(table, f"engines{of}", f"{sizes}; {backend} {library}; {computed}")
        for engine in component.engines:
            if any(error is not None for error in engine.prediction_error):
                _row(table, "prediction error", f"{engine.target}: {_by_bin(engine.prediction_error)}")
            if engine.error is not None:
                _row(table, "error", f"{engine.target}: {engine.error:.1e} relative to float32")
            for line in _engine_lines(engine, component.dims):
                _row(table, "", f"{engine.target}: {line}")
        sizes = {file: f.size for file, f in manifest.files.items() if file.startswith(component.onnx)}
        kept = sizes.pop(component.onnx + UNQUANTISED, 0)
        _row(table, f"ONNX{of}", f"{_size(sum(sizes.values()))}, any ONNX Runtime, {_in_onnx(component)}")
        if kept:
            _row(
                table,
                "",
                f"and {_size(kept)} of unquantised weights, for LoRAs and new weights of engines",
            )


def _engine_lines(engine: EngineRecord, dims: Dims) -> Iterator[str]:
    """Yields the particulars of an engine."""
    if engine.gpu:
        yield f"built on {engine.gpu}" + (f", holds the plugin library {engine.plugin}" if engine.plugin else "")
    if engine.profiles not in ([], [dims]):
        for profile in engine.profiles:
            yield "profile " + ", ".join(f"{dim} {low}..{opt}..{high}" for dim, (low, opt, high) in profile.items())
    names = ("refittable", "version_compatible", "hardware_compatible", "weight_streaming")
    if options := [name.replace("_", " ") for name in names if getattr(engine, name)]:
        yield ", ".join(options)
    if engine.refittable and engine.layers:
        anew = len({layer for layer, _ in engine.int8_constants.values()})
        yield f"{anew} INT8 layers in plugins, which take new weights and LoRAs; the others run in 16 bits"
    same = Counter((s.query_tokens, s.key_tokens, s.native_us, s.plugin_us) for s in engine.native_sites)
    for (queries, keys, native, plugin), count in same.items():
        sites = "1 site stays" if count == 1 else f"{count} sites stay"
        if plugin is None:
            why = "the plugin's attention could not be timed"
        elif native is None:
            why = "native attention alone could not be timed, but the whole engine is faster with it"
        else:
            why = f"{_microseconds(native)} against {_microseconds(plugin)}"
            why += "" if native < plugin else " alone, but the whole engine is faster with it"
        yield f"{sites} native: {queries} × {keys} tokens, {why}"
    if engine.plugin_us is not None and engine.native_us is not None:
        yield (
            f"a call takes {_microseconds(engine.plugin_us)} with the plugin, {_microseconds(engine.native_us)} with native "
            "attention at every site: the faster engine is kept"
        )
    if engine.layers_us:
        times = ", ".join(f"{_microseconds(us)} {kind}" for kind, us in engine.layers_us.items())
        yield f"a call takes {times} INT8 layers: the fastest engine is kept"
    if engine.with_plugins_us is not None and engine.plain_us is not None:
        yield (
            f"a call takes {_microseconds(engine.with_plugins_us)} with plugins, for group norms too, "
            f"{_microseconds(engine.plain_us)} without plugins: the faster engine is kept"
        )


def _in_onnx(component: ComponentRecord) -> str:
    body = "INT8, the op's function body (exact numerics, slow)"
    if component.is_denoiser and component.has_int8_layers:
        return f"attention and layers: {body}"
    layers = f"; layers: {body}" if component.has_int8_layers else ""
    return f"attention: {body if component.is_denoiser else 'its own precision'}" + layers


def _microseconds(us: float) -> str:
    return f"{us:.0f} µs" if us >= 100 else f"{us:.1f} µs"


def _calibration(made: Provenance) -> str:
    text = f"{sum(made.observed)} denoiser calls on {made.data}, {made.bins} timestep bins, statistic {made.statistic}"
    if made.skipped:
        text += f"; {len(made.skipped)} skipped as bad: {'; '.join(made.skipped)}"
    return text


def _sites(component: ComponentRecord) -> str:
    in_int8 = sum(site.in_int8 for site in component.sites)
    in_fp16 = sum(bool(site.modes) for site in component.sites) - in_int8
    return f"{len(component.sites)} found, {in_int8} in INT8" + (f", {in_fp16} in FP16 by the plan" if in_fp16 else "")


def _masks(component: ComponentRecord) -> Iterator[tuple[str, str]]:
    """Yields label and text of the rows about block masks."""
    masked = sorted((site for site in component.sites if site.sparse), key=lambda site: _mean(site.density))
    if masked:
        of_all = _mean([density for site in masked for density in site.density])
        yield "block masks", f"{len(masked)} sites compute {of_all:.0%} of their blocks, low noise to high:"
        for site in masked[:SHOWN_MASKS]:
            yield "", f"{site.name}: {', '.join(f'{density:.0%}' for density in site.density)}"
        if len(masked) > SHOWN_MASKS:
            yield "", f"and {len(masked) - SHOWN_MASKS} more with denser masks; {MANIFEST} has all"
    for index, group in enumerate(dense_groups(component.sites)):
        yield ("" if masked or index else "block masks"), f"none: {group}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _is_fastest(manifest: Manifest, folder: Path) -> bool:
    """Returns whether a bundle's plan is the fastest of its search that keeps the budget."""
    if _FRONTIER not in manifest.files:
        return False
    try:
        frontier = read_frontier(folder / _FRONTIER)
    except UserError:  # of another version
        return False
    allowed = [point.name for point in frontier.points if point.allowed]
    return bool(allowed) and frontier.chosen == allowed[0]


def _layers(component: ComponentRecord) -> Iterator[tuple[str, str]]:
    """Yields label and text of the rows about layers."""
    layers = component.layers
    if not layers:
        return
    in_int8, by_plan = sum(layer.in_int8 for layer in layers), left_by_plan(layers)
    counts = ", ".join(f"{count} {mode}" for mode, count in layer_counts(layers).items())
    yield (
        "layers",
        f"{len(layers)} found, {in_int8} in INT8"
        + (f" ({counts})" if counts else "")
        + (f", {len(by_plan)} in the model's type by the plan" if by_plan else ""),
    )
    if modulated := sum(layer.modulated for layer in layers):
        yield "", f"{modulated} of them quantise deltas from step to step (MoDiff), {_caches(component)}"
    if in_int8:
        ours, in_16_bits = map(_size, weight_bytes(layers))
        yield "", f"their weights: {ours}, {in_16_bits} in 16 bits"
    for group in left_groups(layers):
        yield "", f"left: {group}"
    if component.is_denoiser:
        for modes, count in _plans(layer.modes for layer in layers).items():
            yield "modes, low noise to high", f"{_runs(modes, _layer_mode)}  ({count} layers)"


def _caches(component: ComponentRecord) -> str:
    per_sample = sum(
        _BYTES[cache.dtype] * math.prod(size for size in cache.shape[1:] if isinstance(size, int))
        for cache in component.caches
    )
    return f"with {_size(2 * per_sample)} of caches per sample"  # the runtime holds two copies, which take turns


def _plans(rows: Iterable[Sequence[int]]) -> dict[tuple[int, ...], int]:
    """Counts the sites or layers with each row of modes."""
    return Counter(tuple(modes) for modes in rows if modes)


def _runs(modes: tuple[int, ...], name: Callable[[int], str]) -> str:
    return ", ".join(f"{len(list(run))} × {name(mode)}" for mode, run in groupby(modes))


def _site_mode(mode: int) -> str:
    return Mode(mode).name.lower()


def _layer_mode(mode: int) -> str:
    return mode_name(LayerMode(mode))


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
