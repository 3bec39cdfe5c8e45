"""`trtconvert report`: a self-contained, escaped document that a browser shows well."""

import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from report_pages import HOSTILE, Document, assert_shown, evaluation_of
from support import refusal, run

from trtconvert.attention.modes import Mode
from trtconvert.bundle import read_manifest, write_manifest
from trtconvert.calib.frontier import Frontier, PlanPoint
from trtconvert.evaluate import charts
from trtconvert.evaluate.report import gates, render


def point(name, speed, psnr, **further):
    return PlanPoint(
        name=name, speed=speed, figures={"psnr": psnr} | further, keeps_budget=psnr >= 36, int8_values=0.5,
        modes={"a": [0 if psnr > 100 else 2]},
    )  # fmt: skip


FRONTIER = Frontier(
    gpu="a GPU",
    date="2026-01-01",
    limits={"psnr": 36.0},
    points=[
        point("aggressive everywhere", 1.9, 35.2, lpips=0.0213),
        point("balanced, late steps precise", 1.7, 44.1, lpips=0.0102),
        point("fp16 everywhere", 1.0, 120.0, lpips=0.0),
    ],
    chosen="balanced, late steps precise",
)


@pytest.fixture(scope="module")
def bundle(digits_build, tmp_path_factory):
    """The digits with a frontier."""
    folder = tmp_path_factory.mktemp("report") / "bundle"
    shutil.copytree(digits_build.bundle, folder)
    (folder / "frontier.json").write_text(FRONTIER.model_dump_json())
    write_manifest(folder, read_manifest(folder))
    return folder


@pytest.fixture(scope="module")
def report(bundle, tmp_path_factory):
    """The program's report with an evaluation."""
    folder = tmp_path_factory.mktemp("html")
    (folder / "evaluation.json").write_text(evaluation_of(read_manifest(bundle)).model_dump_json())
    outcome = run("report", bundle, "--evaluation", folder / "evaluation.json", "-o", folder / "report.html")
    assert outcome.exit_code == 0, outcome.output
    return folder / "report.html"


# The document


def test_the_report_is_well_formed_and_loads_nothing(report):
    html = report.read_text(encoding="utf-8")
    document = Document(html)
    links = [value for _, attributes in document.elements for name in ("src", "href", "xlink:href", "srcset", "data")
             if (value := attributes.get(name))]  # fmt: skip
    assert links and all(value.startswith(("data:", "#")) for value in links)
    assert "url(" not in html and "@import" not in html and not document.all("script", "iframe", "object")
    policy = next(a["content"] for a in document.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "script" not in policy


def test_charts_are_well_formed_svg(report):
    drawings = re.findall(r"<svg.*?</svg>", report.read_text(encoding="utf-8"), re.DOTALL)
    assert len(drawings) == 13  # twice six sites, and the frontier
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert root.attrib["role"] == "img" and root.attrib["aria-label"]


def test_the_report_is_readable_by_screen_readers(report):
    document = Document(report.read_text(encoding="utf-8"))
    assert document.all("html")[0]["lang"] == "en"
    assert all(image["alt"] for image in document.all("img")) and document.all("img")
    levels = [int(tag[1]) for tag, _ in document.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert all(head.get("scope") in ("row", "col") for head in document.all("th"))
    identifiers = [attributes["id"] for _, attributes in document.elements if "id" in attributes]
    assert len(set(identifiers)) == len(identifiers)
    anchors = {link["href"][1:] for link in document.all("a")}
    assert anchors <= set(identifiers)


def test_everything_is_escaped(bundle):
    manifest = read_manifest(bundle)
    component = manifest.components["denoiser"]
    left = component.sites[0].model_copy(update={"name": HOSTILE, "modes": [], "reason": HOSTILE})
    hostile = manifest.model_copy(
        update={
            "model": HOSTILE,
            "backend_reason": HOSTILE,
            "versions": {HOSTILE: HOSTILE},
            "recipe": manifest.recipe.model_copy(
                update={"model": manifest.recipe.model.model_copy(update={"source": HOSTILE})}
            ),
            "components": {HOSTILE: component.model_copy(update={"sites": [*component.sites, left]})},
        }
    )
    html = render(bundle, hostile, evaluation_of(manifest, reference=HOSTILE, features=HOSTILE, backend=HOSTILE))
    assert "<script" not in html and "alert(" in html
    Document(html)


def test_the_report_shows_the_manifest(report, bundle):
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", report.read_text(encoding="utf-8")))
    manifest = read_manifest(bundle)
    for site in manifest.components["denoiser"].sites:
        assert site.name in text
    for part in ("within noise", "beyond noise", "+0.250", "0.125", "built", "balanced, late steps precise", "exact"):
        assert part in text, part
    for value in (manifest.digest, *(record.sha256 for record in manifest.files.values())):
        assert value in text
    assert f"{manifest.quality.psnr:.1f} dB" in text


def test_a_report_without_an_evaluation_is_well_formed(digits_build, tmp_path):
    outcome = run("report", digits_build.bundle, "-o", tmp_path / "report.html")
    assert outcome.exit_code == 0, outcome.output
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    Document(html)
    assert "trtconvert evaluate" in html and 'id="frontier"' not in html


def test_a_missed_gate_is_not_called_passed(bundle):
    manifest = read_manifest(bundle)
    bad = manifest.model_copy(update={"quality": manifest.quality.model_copy(update={"psnr": float("nan")})})
    assert [gate.passed for gate in gates(manifest)] == [True] * 4
    assert [gate.passed for gate in gates(bad)] == [False, True, True, True]
    assert "every gate is passed" not in render(bundle, bad, None)


# What it refuses


def test_an_evaluation_of_another_bundle(bundle, tmp_path):
    other = evaluation_of(read_manifest(bundle), bundle="0" * 64)
    (tmp_path / "evaluation.json").write_text(other.model_dump_json())
    outcome = run("report", bundle, "--evaluation", tmp_path / "evaluation.json", "-o", tmp_path / "report.html")
    refusal(outcome, "is the evaluation of another bundle")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"points": []}', FRONTIER.model_dump_json().replace("1.9", '"x"')])
def test_invalid_frontiers_are_refused(digits_build, tmp_path, content):
    folder = tmp_path / "bundle"
    shutil.copytree(digits_build.bundle, folder)
    (folder / "frontier.json").write_text(content)
    write_manifest(folder, read_manifest(folder))
    refusal(run("report", folder, "-o", tmp_path / "report.html"), "frontier.json is not a frontier")


def test_a_damaged_bundle(bundle, tmp_path):
    folder = tmp_path / "bundle"
    shutil.copytree(bundle, folder)
    (folder / "samples.png").write_bytes(b"")
    refusal(run("report", folder, "-o", tmp_path / "report.html"), "samples.png")


# Charts


@pytest.mark.parametrize(
    "ramp",
    [charts.ERROR_RAMP, charts.RANGE_RAMP, tuple(charts.MODE_FILLS.values()), tuple(charts.LAYER_FILLS.values())],
)
def test_text_can_be_read_on_every_colour(ramp):
    for share in torch.linspace(0, 1, 101).tolist():
        fill = charts.blend(ramp, share)
        light, dark = sorted((charts.luminance(fill), charts.luminance(charts.ink_on(fill))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, fill  # WCAG 2.2, 1.4.3


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_of_the_page_can_be_read_in_both_schemes(scheme):
    style = (Path(charts.__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    block = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    pairs = [(text, paper) for text in ("ink", "soft", "accent") for paper in ("paper", "card")]
    pairs += [(text, f"{text}-paper") for text in ("good", "fair", "bad")]
    for text, paper in pairs:
        light, dark = sorted((charts.luminance(colours[text]), charts.luminance(colours[paper])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, paper)


def test_ramps_darken():
    fills = (charts.MODE_FILLS, charts.LAYER_FILLS)
    for ramp in (charts.ERROR_RAMP, charts.RANGE_RAMP, *(tuple(of.values()) for of in fills)):
        shades = [charts.luminance(colour) for colour in ramp]
        assert shades == sorted(shades, reverse=True)


def test_heat_maps_mark_the_worst_and_leave_gaps():
    found = charts.heat_map({"a": [10.0, None], "b": [30.0, 20.0]}, ["0", "500"], charts.ERROR_RAMP, str, inverted=True)
    (_, (worst, gap)), (_, (best, _)) = found.rows
    assert worst.fill == charts.ERROR_RAMP[-1] and best.fill == charts.ERROR_RAMP[0]
    assert gap.text == "–"
    assert charts.heat_map({"a": [1.0]}, ["0"], charts.ERROR_RAMP, str).rows[0][1][0].text == "1.0"  # no span at all


def test_modes_are_named():
    assert [cell.text for cell in charts.mode_map({"a": [*Mode]}, "01234", charts.MODE_FILLS).rows[0][1]] == [
        "fp16", "precision", "balanced", "aggressive", "fp8",
    ]  # fmt: skip


def test_the_frontier_puts_faster_to_the_right_and_better_up():
    found = charts.frontier(FRONTIER)
    fast, chosen, exact = found.points
    assert exact.x < chosen.x < fast.x and exact.y < chosen.y < found.budget < fast.y
    assert found.chosen == chosen and exact.exact and exact.psnr == "exact"
    # Labels stay inside: those of points in the right half end there.
    assert [point.label_anchor for point in (exact, fast)] == ["start", "end"]
    assert charts.frontier(FRONTIER.model_copy(update={"chosen": ""})).chosen is None


def test_fastest_of_several_exact_plans_is_named():
    slower = FRONTIER.points[-1].model_copy(update={"name": "exact too", "speed": FRONTIER.points[-1].speed / 1.01})
    found = charts.frontier(FRONTIER.model_copy(update={"points": [*FRONTIER.points, slower]}))
    assert [point.exact for point in found.points[-2:]] == [True, False]
    assert [point.psnr for point in found.points[-2:]] == ["exact"] * 2


def test_a_plan_whose_samples_are_nan_lies_on_the_lower_edge():
    nothing = FRONTIER.points[0].model_copy(update={"name": "broken", "figures": {"psnr": math.nan, "lpips": math.nan}})
    found = charts.frontier(FRONTIER.model_copy(update={"points": [nothing, *FRONTIER.points]}))
    assert found.points[0].y == found.frame.bottom and not found.points[0].exact
    assert [point.y for point in found.points[1:]] == [point.y for point in charts.frontier(FRONTIER).points]


def test_the_plans_are_listed_with_every_figure_and_whether_they_keep_the_budget(bundle, tmp_path):
    assert run("report", bundle, "-o", tmp_path / "report.html").exit_code == 0
    table = (tmp_path / "report.html").read_text(encoding="utf-8").split("The plans as a table")[1].split("</table>")[0]
    rows = [re.sub("<[^>]*>", " ", row).split() for row in table.split("</tr>")]
    assert rows[0][-7:] == ["PSNR", "LPIPS", "↓", "Both", "products", "INT8", "Budget"]
    assert rows[1] == ["aggressive", "everywhere", "1.900", "×", "35.2", "dB", "0.0213", "50%", "missed"]
    assert rows[2][-4:] == ["dB", "0.0102", "50%", "kept"] and "built" in rows[2]


def test_histograms_are_shares_per_octave_on_one_pair_of_axes():
    counts = {"a": {"q": [[0, 0, 1, 99, 0]]}, "b": {"q": [[0, 50, 50, 0, 0], [0, 0, 0, 100, 0]]}}
    one, two = charts.magnitude_charts(counts, first_octave=-3)
    assert [text for _, text in one.frame.xticks] == ["2⁻²", "2⁻¹", "2⁰"]
    assert [text for _, text in one.frame.yticks] == ["0.01 %", "0.1 %", "1 %", "10 %", "100 %"]

    def heights(chart, line):
        return [float(point.split(",")[1]) for point in chart.lines[line][2].split()]

    frame = one.frame
    assert heights(one, 0)[0] == frame.bottom  # nothing lies on the axis
    assert heights(one, 0)[1] == pytest.approx(frame.yticks[2][0], abs=0.1)  # one in a hundred
    assert heights(two, 1)[2] == pytest.approx(frame.top, abs=0.1)  # all of them
    assert [name for _, name, _ in two.lines] == ["q, head 0", "q, head 1"]


def test_ticks_are_round_and_inside():
    assert charts.linear_ticks(0.99, 2.01) == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8, 2.0])
    assert charts.log_ticks(0.9, 1100) == [1, 10, 100, 1000]
    assert charts.log_ticks(2.1, 6.4) == [3, 4, 5, 6]


# A browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it(report, page, tmp_path, width, scheme):
    assert_shown(page, report, tmp_path / "page.png", width, scheme)


def test_the_browser_itself_would_complain(page, tmp_path):
    """The browser checks find a page with requests, errors and overflow."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<img src="missing.png"><script>console.error("x")</script><div style="width:2000px;height:9px">wide</div>'
    )
    page.open(bad, 390)
    assert page.complaints() and len(page.requests()) > 1
    assert page.evaluate("document.documentElement.scrollWidth > innerWidth || innerWidth > 390")
