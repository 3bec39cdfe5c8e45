"""`trtconvert report` of a bundle with INT8 layers: gates, tiles and maps, also with many layers."""

import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
from report_pages import HOSTILE, Document, assert_shown, evaluation_of
from support import run
from tiny_layers import CHOSEN

from trtconvert.bundle import EngineRecord, LayerRecord, read_manifest, write_manifest
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.frontier import Frontier, PlanPoint
from trtconvert.calib.layer_scales import LayerScales
from trtconvert.evaluate import charts
from trtconvert.evaluate.report import FOLDED_CHARTS, gates, render, tiles
from trtconvert.linear.modes import LayerMode

MANY = 700


def point(name, speed, psnr, layer):
    layers = {"q": [layer] * 2, "skip": [layer] * 2}
    figures = {"psnr": psnr}
    return PlanPoint(
        name=name, speed=speed, figures=figures, keeps_budget=True, int8_values=0.0, modes={"a": [0]}, layers=layers
    )


FRONTIER = Frontier(
    gpu="a GPU",
    date="2026-01-01",
    limits={"psnr": 36.0},
    points=[
        point("balanced everywhere, layers static", 1.9, 41.0, 3),
        point("fp16 everywhere, layers static", 1.6, 50.0, 3),
        point("balanced everywhere", 1.2, 60.0, 0),
        point("fp16 everywhere", 1.0, 120.0, 0),
    ],
    chosen="balanced everywhere, layers static",
)


@pytest.fixture(scope="module")
def bundle(layered_build, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "bundle"
    shutil.copytree(layered_build.bundle, folder)
    (folder / "frontier.json").write_text(FRONTIER.model_dump_json())
    write_manifest(folder, read_manifest(folder))
    return folder


@pytest.fixture(scope="module")
def report(bundle, tmp_path_factory):
    path = tmp_path_factory.mktemp("html") / "report.html"
    assert run("report", bundle, "-o", path).exit_code == 0
    return path


@pytest.fixture(scope="module")
def many(bundle, tmp_path_factory):
    """A manifest with the number of layers of SDXL, and a folder with their calibration."""
    manifest = read_manifest(bundle)
    names = [f"down_blocks.1.attentions.0.transformer_blocks.{i}.attn1.to_q" for i in range(MANY)]
    sizes = {"kind": "linear", "in_channels": 64, "out_channels": 64, "rows": 4096}
    modes = [LayerMode.WEIGHT_ONLY, LayerMode.STATIC]
    layers = [LayerRecord(name=name, weight=name, modes=modes, **sizes) for name in names]
    layers += [LayerRecord(name=f"time.{i}", weight="t", reason=f"it has {1 + i % 2} rows", **sizes) for i in range(60)]
    layers += [LayerRecord(name="left", weight="l", **sizes)]
    component = manifest.components["denoiser"].model_copy(update={"layers": layers})
    sqnr = {name: [30.0 + i / 10, None] for i, name in enumerate(names)}
    quality = manifest.quality.model_copy(update={"layer_sqnr": sqnr})
    folder = tmp_path_factory.mktemp("many")
    scales = {name: LayerScales(torch.ones(64), torch.zeros(64), torch.tensor([0.1, 0.2])) for name in names}
    calibration = Calibration.load(bundle / manifest.calibration)
    replace(calibration, layers=scales).save(folder / manifest.calibration)
    return folder, manifest.model_copy(update={"components": {"denoiser": component}, "quality": quality})


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def section(html, name):
    return html.replace("<wbr>", "").split(f'<section id="{name}"')[1].split("</section>")[0]


# Gates and tiles


def test_the_worst_layer_has_a_gate_and_a_tile(bundle):
    manifest = read_manifest(bundle)
    db, layer, index = manifest.quality.worst_layer()
    gate = next(gate for gate in gates(manifest) if "layer" in gate.name)
    assert (gate.name, gate.limit) == (f"Worst layer, {layer} in bin {index}", "at least 15 dB")
    assert gate.got == f"{db:.1f} dB" and gate.passed
    found = {tile.label: tile.figure for tile in tiles(manifest, None)}
    assert found["Worst layer"] == f"{db:.1f} dB" and found["Layers in INT8"] == f"{len(CHOSEN)} of 13"


@pytest.mark.parametrize("db", [14.9, math.nan])
def test_a_layer_below_the_limit_is_a_missed_gate(bundle, db):
    manifest = read_manifest(bundle)
    quality = manifest.quality.model_copy(update={"layer_sqnr": {"skip": [40.0, db]}})
    bad = manifest.model_copy(update={"quality": quality})
    assert [gate.passed for gate in gates(bad)] == [True, True, False, True, True]
    assert math.isnan(db) or "with a gate that is missed" in render(bundle, bad, None)  # no bundle has NaN


def test_the_limit_of_the_error_is_that_of_bundles_with_int8_layers(bundle):
    manifest = read_manifest(bundle)

    def limit(modes):
        component = manifest.components["denoiser"]
        layers = [x.model_copy(update={"modes": modes}) for x in component.layers]
        changed = {"denoiser": component.model_copy(update={"layers": layers})}
        return next(
            g.limit for g in gates(manifest.model_copy(update={"components": changed})) if "arithmetic" in g.name
        )

    assert [limit([mode] * 2) for mode in (LayerMode.STATIC, LayerMode.DYNAMIC)] == ["at most 0.03"] * 2
    assert limit([LayerMode.WEIGHT_ONLY] * 2) == limit([]) == "at most 0.01"


# The page


def test_the_report_is_well_formed_and_describes_layers_like_sites(report, bundle):
    html = report.read_text(encoding="utf-8")
    Document(html)
    assert "INT8 attention and layers whose scales" in text_of(html) and '<a href="#layers">' in html
    layers = section(html, "layers")
    for name in CHOSEN:
        assert layers.count(f'<th scope="row">{name}</th>') == (2 if name not in "kv" else 1)  # k and v share q's range
    for title in ("Error of each layer", "Range of each input"):
        assert f"<h3>{title}</h3>" in layers
    assert "Mode of each layer" not in layers  # all are static
    assert f"{len(CHOSEN)} of 13 linear layers and convolutions have INT8 weights ({len(CHOSEN)} static)" in text_of(
        layers
    )
    assert "<details>" not in layers
    assert "<code>time</code>: it has 1 rows for each sample" in layers


def test_ranges_are_what_the_scales_cover(report, bundle):
    scales = Calibration.load(bundle / read_manifest(bundle).calibration).layers
    ranges = section(report.read_text(encoding="utf-8"), "layers").split("Range of each input")[-1]
    row = ranges.split('<th scope="row">skip</th>')[1].split("</tr>")[0]
    assert re.findall(r">([\d.]+)<", row) == [f"{127 * x:#.3g}".rstrip(".") for x in scales["skip"].x_scale.tolist()]


def test_weakest_layers_are_shown_and_others_folded(many):
    folder, manifest = many
    html = section(render(folder, manifest, None), "layers")
    shown, folded = html.split("<details>")
    assert f"The {FOLDED_CHARTS} weakest layers" in shown and shown.count("<tr><th") == FOLDED_CHARTS + 1
    first = re.search(r'<th scope="row">(.*?)</th>', shown)[1]
    assert first.endswith("transformer_blocks.0.attn1.to_q")
    assert folded.count("<tr><th") == 3 * (MANY + 1) and "weight-only" in folded
    left = text_of(html.split("Layers in the model's own precision")[1])
    assert "left : the plan leaves it so time.0 , time.1 , time.2 and 57 more: it has 1 to 2 rows" in left


def test_a_bundle_whose_layers_were_all_left_says_why(bundle):
    manifest = read_manifest(bundle)
    component = manifest.components["denoiser"]
    layers = [x.model_copy(update={"modes": [], "reason": "the recipe excludes it"}) for x in component.layers]
    changed = component.model_copy(update={"layers": layers})
    quality = manifest.quality.model_copy(update={"layer_sqnr": {}})
    none = manifest.model_copy(update={"components": {"denoiser": changed}, "quality": quality})
    text = text_of(render(bundle, none, None))
    assert "0 of 13 linear layers and convolutions have INT8 weights." in text and "and 10 more: the recipe" in text
    assert "INT8 attention whose scales" in text and not any("layer" in gate.name for gate in gates(none))


def test_text_of_layers_is_escaped(bundle):
    manifest = read_manifest(bundle)
    component = manifest.components["denoiser"]
    hostile = component.layers[0].model_copy(update={"name": HOSTILE, "modes": [], "reason": HOSTILE})
    changed = component.model_copy(update={"layers": [*component.layers, hostile]})
    html = render(bundle, manifest.model_copy(update={"components": {HOSTILE: changed}}), evaluation_of(manifest))
    assert "<script" not in html and "alert(" in html
    Document(html)


def test_an_engine_says_how_its_layers_are_computed(bundle):
    manifest = read_manifest(bundle)
    component = manifest.components["denoiser"]
    record = EngineRecord.of("denoiser", "tensorrt", "10.6", "sm90")
    engines = [record.model_copy(update={"file": component.onnx, "layers": layers}) for layers in ("plugin", "")]
    changed = {"denoiser": component.model_copy(update={"engines": engines})}
    text = text_of(render(bundle, manifest.model_copy(update={"components": changed}), None))
    assert text.count("attention: INT8; layers: INT8, our kernels where there are some") == 1
    assert "with INT8 attention and layers as the op's function body" in text


def test_other_models_of_a_pipeline_tell_their_layers(bundle):
    manifest = read_manifest(bundle)
    component = manifest.components["denoiser"]
    encoder = component.model_copy(update={"timestep_input": "", "sites": []})
    both = manifest.model_copy(update={"components": {"denoiser": component, "text_encoder": encoder}})
    html = render(bundle, both, None)
    assert f"{len(CHOSEN)} of 13 in INT8 ({len(CHOSEN)} static): weights of" in text_of(section(html, "files"))
    assert section(html, "layers").count("linear layers and convolutions have") == 1


# The frontier


def test_plans_tell_their_layers(report):
    html = report.read_text(encoding="utf-8")
    table = html.split("The plans as a table")[1].split("</table>")[0]
    rows = [re.sub("<[^>]*>", " ", row).split() for row in table.split("</tr>")]
    assert rows[0][-4:] == ["Layers", "in", "INT8", "Budget"]
    assert [row[-4:-1] for row in rows[1:5]] == [["2", "of", "2"], ["2", "of", "2"], ["0", "of", "2"], ["0", "of", "2"]]
    assert "speed of attention and layers relative to FP16" in html


def test_layers_that_are_alike_in_all_plans_are_not_told():
    alike = [point.model_copy(update={"layers": {}}) for point in FRONTIER.points]
    found = charts.frontier(FRONTIER.model_copy(update={"points": alike}))
    assert not found.with_layers and charts.frontier(FRONTIER).with_layers


def test_modes_of_layers_are_named():
    cells = charts.mode_map({"a": [1, 2, 3]}, "012", charts.LAYER_FILLS).rows[0][1]
    assert [cell.text for cell in cells] == ["weight-only", "dynamic", "static"]


# A browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it(report, page, tmp_path, width, scheme):
    assert_shown(page, report, tmp_path / "page.png", width, scheme)


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_hundreds_of_layers(many, page, tmp_path, width):
    path = tmp_path / "report.html"
    path.write_text(render(*many, None), encoding="utf-8")
    assert path.stat().st_size < 4 * 2**20
    assert_shown(page, path, tmp_path / "page.png", width, "light")
    folded = page.evaluate("document.documentElement.scrollHeight")
    page.evaluate("document.querySelectorAll('#layers details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.documentElement.scrollHeight") > 5 * folded
