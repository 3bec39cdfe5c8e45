"""The report of a bundle: one self-contained HTML file for the decision to deploy the bundle.

The template draws tables and inline SVG from `charts.py`. A content security policy forbids the browser to load anything.
jinja2 escapes all text.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert.attention.modes import INT8_VALUES, Mode
from trtconvert.bundle import ComponentRecord, LayerRecord, Manifest, check_files, read_unchanged
from trtconvert.calib.calibration import Calibration, load_of_bundle
from trtconvert.calib.frontier import read_frontier
from trtconvert.calib.histogram import OCTAVES
from trtconvert.errors import UserError
from trtconvert.evaluate import charts
from trtconvert.evaluate.gates import error_limit, worst_prediction
from trtconvert.evaluate.pages import template
from trtconvert.evaluate.parts import LeftGroup, dense_groups, layer_counts, left_by_plan, left_groups, weight_bytes
from trtconvert.evaluate.records import Evaluation, read_evaluation
from trtconvert.evaluate.table import paired_rows, rows, watch_line
from trtconvert.files import whole_file
from trtconvert.linear.reference import LEVELS
from trtconvert.noise_input import at_place

SAMPLES, FRONTIER = "samples.png", "frontier.json"
"""Optional files of a bundle that the report shows."""

ATTENTION = {"plugin": "INT8", "native": "the model's own precision, not INT8"}
"""Precision of an engine's attention."""

INT8_LAYERS = {
    "": "",
    "native": "INT8, TensorRT's kernels",
    "plugin": "INT8, our kernels where there are some",
    "exact": "16 bits, with the weights that INT8 holds",
}
"""Precision of an engine's INT8 layers."""

FOLDED_CHARTS = 12
"""Charts are folded with more sites or layers than this; the weakest layers stay visible."""


@dataclass(frozen=True)
class Gate:
    """One gate of the build."""

    name: str
    limit: str
    got: str
    passed: bool


@dataclass(frozen=True)
class Tile:
    """One figure of the summary, with a note for comparison."""

    label: str
    figure: str
    note: str


def write_report(folder: Path, evaluation: Path | None, output: Path) -> None:
    """Writes the report.

    Args:
        folder: of the bundle.
        evaluation: file of `trtconvert evaluate`, or None.
        output: the HTML file.
    Raises:
        UserError: the bundle or the evaluation is missing, damaged or does not fit, or the output cannot be written.
    """
    found = read_evaluation(evaluation) if evaluation else None

    def rendered(manifest: Manifest) -> str:
        check_files(folder, manifest)
        if found is not None and found.bundle != manifest.digest:
            raise UserError(
                f"{evaluation} is the evaluation of another bundle",
                expected=f"one of the bundle {manifest.digest[:12]}…",
                got=f"one of {found.bundle[:12]}…",
                remedy=f"run `trtconvert evaluate {folder} -o FILE`, and give this file with --evaluation",
            )
        return render(folder, manifest, found)

    html = read_unchanged(folder, rendered)
    with whole_file(output, "give another file with -o") as partial:
        partial.write_text(html, encoding="utf-8")


def render(folder: Path, manifest: Manifest, evaluation: Evaluation | None) -> str:
    """Returns the report as HTML. Does not check the bundle's files."""
    components = [_component_view(name, component, manifest, folder) for name, component in manifest.components.items()]
    # A user's file of this name is not part of the manifest.
    has_frontier = FRONTIER in manifest.files and (folder / FRONTIER).is_file()
    return template("report.html.j2").render(
        manifest=manifest,
        recipe=_yaml(manifest.recipe.model_dump(mode="json")),
        gates=gates(manifest),
        tiles=tiles(manifest, evaluation),
        picture=picture_of(folder, manifest),
        reuses=[component.reuse for component in manifest.components.values() if component.reuse is not None],
        shown=min(manifest.recipe.output.grid, manifest.quality.samples),
        components=components,
        frontier=charts.frontier(read_frontier(folder / FRONTIER)) if has_frontier else None,
        evaluation=evaluation,
        figures=rows(evaluation) if evaluation else [],
        paired=paired_rows(evaluation) if evaluation else [],
        watch=watch_line(evaluation) if evaluation else "",
    )


def picture_of(folder: Path, manifest: Manifest) -> str:
    """Returns a bundle's samples as PNG in base64, "" without samples."""
    has_samples = SAMPLES in manifest.files and (folder / SAMPLES).is_file()
    return base64.b64encode((folder / SAMPLES).read_bytes()).decode() if has_samples else ""


def gates(manifest: Manifest) -> list[Gate]:
    """Returns the gates that the build passed, as in `gates.check_gates`."""
    quality, section = manifest.quality, manifest.recipe.verify
    site_db, site, index = quality.worst_site()
    max_error = error_limit(
        section, (site.modes for site in manifest.sites), (layer.modes for layer in _denoiser_layers(manifest))
    )
    found = [
        _at_least("Images against full precision, PSNR", section.min_psnr, quality.psnr),
        _at_most("Images against full precision, LPIPS", section.max_lpips, quality.lpips, ".4f"),
        _at_least(f"Worst attention site, {site} in bin {index}", section.min_site_sqnr, site_db),
    ]
    if (of_layer := quality.worst_layer()) is not None:
        db, layer, index = of_layer
        found.append(_at_least(f"Worst layer, {layer} in bin {index}", section.min_site_sqnr, db))
    title = "Exported arithmetic against the torch reference, relative error"
    found.append(_at_most(title, max_error, quality.error, ".1e"))
    title, difference = "Native against INT8 lowering, mean difference", quality.lowering_difference
    found.append(_at_most(title, quality.lowering_limit, difference, ".2e", ".2e"))
    return [*(gate for gate in found if gate is not None), *_of_predictions(manifest), *_of_components(manifest)]


def _at_least(name: str, limit: float, db: float) -> Gate:
    return Gate(name, f"at least {limit:g} dB", f"{db:.1f} dB", db >= limit)


def _at_most(name: str, limit: float | None, got: float | None, form: str, of_limit: str = "g") -> Gate | None:
    """Returns a gate, None if there is no limit or nothing was measured."""
    if limit is None or got is None:
        return None
    return Gate(name, f"at most {limit:{of_limit}}", f"{got:{form}}", got <= limit)


def _of_predictions(manifest: Manifest) -> Iterator[Gate]:
    """Yields the gates of engines that ran on their GPU."""
    limit = manifest.recipe.verify.max_prediction_error
    for engine in (engine for component in manifest.components.values() for engine in component.engines):
        worst = worst_prediction(engine.prediction_error, manifest.quality.type_error)
        if worst is None:
            continue
        index, error, own = worst
        of_type = "" if own is None else f" (its 16-bit type: {own:.4f})"
        yield Gate(
            f"Prediction of the engine on {engine.gpu or engine.target} against full precision, worst timestep bin {index}",
            "no limit" if limit is None else f"at most {limit:g}",
            f"{error:.4f}{of_type}",
            limit is None or error <= limit,
        )


def _of_components(manifest: Manifest) -> Iterator[Gate]:
    """Yields the gates of the other components: of each measured engine, else of the exported model."""
    limit = manifest.recipe.verify.max_component_error
    for name, error in manifest.quality.component_errors.items():
        engines = [engine for engine in manifest.components[name].engines if engine.error is not None]
        found = {f"Engine of {name} on {engine.gpu or engine.target}": engine.error or 0.0 for engine in engines}
        for what, measured in (found or {name: error}).items():
            title = f"{what} against float32, relative error"
            yield Gate(title, f"at most {limit:g}", f"{measured:.1e}", measured <= limit)


def tiles(manifest: Manifest, evaluation: Evaluation | None) -> list[Tile]:
    """Returns the figures at the top of the report."""
    quality, section = manifest.quality, manifest.recipe.verify
    sites = manifest.sites
    modes = [mode for site in sites for mode in site.modes]
    in_int8 = sum(site.in_int8 for site in sites)
    share = sum(Mode(mode) in INT8_VALUES for mode in modes) / len(modes) if modes else 0.0
    limit = f"SQNR; the gate is {section.min_site_sqnr:g} dB"
    found = [
        Tile("Images match full precision", f"{quality.psnr:.1f} dB", f"PSNR; the gate is {section.min_psnr:g} dB"),
        Tile("Worst attention site", f"{quality.worst_site()[0]:.1f} dB", limit),
    ]
    if (of_layer := quality.worst_layer()) is not None:
        found.append(Tile("Worst layer", f"{of_layer[0]:.1f} dB", limit))
    found.append(
        Tile(
            "Sites in INT8",
            f"{in_int8} of {len(sites)}",
            f"attention calls; both products in {share:.0%} of their timesteps",
        )
    )
    if layers := _denoiser_layers(manifest):
        converted = sum(layer.in_int8 for layer in layers)
        found.append(Tile("Layers in INT8", f"{converted} of {len(layers)}", "linear layers and convolutions"))
    for component in manifest.components.values():
        if (reuse := component.reuse) is not None:
            gained = f"{reuse.steps / len(reuse.computed):.1f}× fewer"
            lost = f"{gained}; {reuse.psnr:.1f} dB, with all {reuse.psnr_all:.1f} dB"
            found.append(Tile("Steps computed", f"{len(reuse.computed)} of {reuse.steps}", lost))
    if evaluation is not None and (first := rows(evaluation)[0]).difference:
        found.append(Tile("FID, INT8 less full precision", first.difference, f"noise between seeds {first.noise}"))
    return found


def _denoiser_layers(manifest: Manifest) -> list[LayerRecord]:
    return [layer for component in manifest.components.values() if component.is_denoiser for layer in component.layers]


def _component_view(name: str, component: ComponentRecord, manifest: Manifest, folder: Path) -> dict[str, Any]:
    """Returns the template's values of one model of the bundle."""
    converted = {site.name: site.modes for site in component.sites if site.modes}
    view: dict[str, Any] = {
        "name": name,
        "record": component,
        "left": left_groups(component.sites),
        "dense": dense_groups(component.sites),
        "layers": _layers_view(component),
        "engines": [
            (engine, ATTENTION[engine.attention], INT8_LAYERS[engine.layers], manifest.files[engine.file].size)
            for engine in component.engines
        ],
        "onnx_size": manifest.files[component.onnx].size,
        "maps": [],
        "calibration": None,
        "heads": [],
        "histograms": [],
        "unfolded": len(converted) <= FOLDED_CHARTS,
    }
    if not converted:
        return view
    bins = len(next(iter(converted.values())))
    places = torch.arange(bins, dtype=torch.float64) * component.timestep_max / bins
    starts = [f"{timestep:g}" for timestep in at_place(component.noise_input, places).tolist()]
    calibration = load_of_bundle(folder, manifest)
    ranges = _ranges(calibration.tables, converted)
    clipped = {site: _worst_share(calibration.outliers[site]) for site in converted if site in calibration.outliers}
    sqnr = {site: row for site, row in manifest.quality.site_sqnr.items() if site in converted}
    view["maps"] = [
        (
            "Error of each site",
            "Signal to quantisation noise in dB against exact attention; more is better, and dark cells are the weakest.",
            _decibel_map(sqnr, starts),
        ),
        (
            "Precision of each site",
            "The mode of each timestep bin; darker modes compute more in INT8.",
            charts.mode_map(converted, starts, charts.MODE_FILLS),
        ),
        *(
            (
                f"Range of {what}",
                f"The magnitude that INT8 covers (127 times the scale), of the {largest}.",
                _range_map({site: [max(row) for row in of[tensor]] for site, of in ranges.items()}, starts),
            )
            for tensor, what, largest in (
                ("q", "queries", "head with the largest"),
                ("k", "keys", "head with the largest"),
                ("v", "values", "head and channel with the largest"),
            )
        ),
    ]
    if masked := {site.name: site.density for site in component.sites if site.sparse}:
        view["maps"].append(
            (
                "Blocks that are computed",
                "Share of the blocks of 128 queries × 128 keys that the block mask of each site keeps, over all heads.",
                charts.heat_map(masked, starts, charts.RANGE_RAMP, lambda share: f"{share:.0%}"),
            )
        )
    if clipped:
        view["maps"].append(
            (
                "Clipped elements",
                "Share of queries, keys or values beyond the range of INT8, of the worst head.",
                charts.heat_map(clipped, starts, charts.ERROR_RAMP, lambda share: f"{share:.2%}"),
            )
        )
    view["calibration"] = calibration.provenance
    if component.has_int8_layers:
        view["layers"] |= _layer_maps(component, manifest, calibration, starts)
    view["heads"] = charts.head_charts(ranges, starts)
    counted = {site: _by_tensor(calibration.magnitudes[site]) for site in converted if site in calibration.magnitudes}
    if counted:
        view["histograms"] = charts.magnitude_charts(counted, OCTAVES.start)
    return view


def _layers_view(component: ComponentRecord) -> dict[str, Any] | None:
    """Returns the template's values of a model's layers, None without layers."""
    layers = component.layers
    if not layers:
        return None
    in_int8, in_16_bits = weight_bytes(layers)
    by_plan = left_by_plan(layers)
    return {
        "found": len(layers),
        "converted": sum(layer.in_int8 for layer in layers),
        "counts": ", ".join(f"{count} {mode}" for mode, count in layer_counts(layers).items()),
        "in_int8": in_int8,
        "in_16_bits": in_16_bits,
        "left": [*([LeftGroup("the plan leaves it so", by_plan)] if by_plan else []), *left_groups(layers)],
        "weakest": None,
        "maps": [],
    }


def _layer_maps(
    component: ComponentRecord, manifest: Manifest, calibration: Calibration, starts: list[str]
) -> dict[str, Any]:
    """Returns the maps of a denoiser's INT8 layers, and a map of the weakest if there are many."""
    converted = {layer.name: layer.modes for layer in component.layers if layer.in_int8}
    sqnr = {name: row for name, row in manifest.quality.layer_sqnr.items() if name in converted}
    inputs = {name: scales for name, scales in calibration.layers.items() if name in converted}
    equalised = sum(bool((scales.x_factor != 1).any()) for scales in inputs.values())
    moved = sum(bool(scales.x_offset.any()) for scales in inputs.values())
    view: dict[str, Any] = {}

    def of_errors(title: str, rows: Mapping[str, Sequence[float | None]]) -> tuple[str, str, charts.HeatMap]:
        text = "Signal to quantisation noise in dB against the layer in full precision; dark cells are the weakest."
        return title, text, _decibel_map(rows, starts)

    seen = {name: [db for db in row if db is not None] for name, row in sqnr.items()}
    weakest = sorted((name for name in sqnr if seen[name]), key=lambda name: min(seen[name]))[:FOLDED_CHARTS]
    if weakest and len(converted) > FOLDED_CHARTS:
        view["weakest"] = of_errors(f"The {len(weakest)} weakest layers", {name: sqnr[name] for name in weakest})
    maps = [of_errors("Error of each layer", sqnr)] if weakest else []
    if len({mode for row in converted.values() for mode in row}) > 1:
        text = "The mode of each timestep bin: INT8 weights alone, a scale per token, or the bin's static scale."
        maps.append(("Mode of each layer", text, charts.mode_map(converted, starts, charts.LAYER_FILLS)))
    text = (
        "The magnitude that INT8 covers (127 times the scale). Layers that read the same tensor share it, under the name of "
        f"the first. Of {len(inputs)} inputs {equalised} have channels that are equalised, {moved} that are moved."
    )
    largest = {name: (scales.x_scale * LEVELS).tolist() for name, scales in inputs.items()}
    return view | {"maps": [*maps, ("Range of each input", text, _range_map(largest, starts))]}


def _decibel_map(rows: Mapping[str, Sequence[float | None]], starts: Sequence[str]) -> charts.HeatMap:
    return charts.heat_map(rows, starts, charts.ERROR_RAMP, lambda db: f"{db:.1f}", inverted=True)


def _range_map(rows: Mapping[str, Sequence[float]], starts: Sequence[str]) -> charts.HeatMap:
    return charts.heat_map(rows, starts, charts.RANGE_RAMP, lambda value: f"{value:#.3g}".rstrip("."), log=True)


def _by_tensor(counts: Mapping[str, Tensor]) -> dict[str, list[list[int]]]:
    """Returns [H][octaves] by tensor, without empty heads."""
    return {name[0]: [row for row in table.tolist() if sum(row)] for name, table in counts.items()}


def _worst_share(shares: Mapping[str, Tensor]) -> list[float | None]:
    """Returns [T] the largest share of any tensor and head."""
    return [float(x) for x in torch.cat(list(shares.values()), 1).amax(1)]


def _ranges(
    tables: Mapping[str, Mapping[str, Tensor]], sites: Mapping[str, list[int]]
) -> dict[str, dict[str, list[list[float]]]]:
    """Returns [T][H] magnitudes that INT8 covers, by site and tensor; of values, the largest channel."""
    return {
        site: {
            "q": (tables[site]["q_scale"] * 127).tolist(),
            "k": (tables[site]["k_scale"] * 127).tolist(),
            "v": (tables[site]["v_scale"].amax(-1) * 127).tolist(),
        }
        for site in sites
    }


def _yaml(content: Any) -> str:
    from ruamel.yaml import YAML

    text = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.width = 72
    yaml.dump(content, text)
    return text.getvalue()
