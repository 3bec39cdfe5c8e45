"""Generated pages of the documentation, and the rules for pages."""

from __future__ import annotations

import json
import re
import sys

import click
import pytest
from documented import PAGES
from ruamel.yaml import YAML
from support import REPOSITORY

from trtconvert.cli import main

pytest.importorskip("mkdocs")
sys.path.insert(0, str(REPOSITORY / "tools"))
import docs_pages
import figures_page

DOCS = REPOSITORY / "docs"


# Figures --------------------------------------------------------------------------------------------------------------


def test_the_page_of_figures_is_made_of_the_results():
    assert (DOCS / "figures.md").read_text(encoding="utf-8") == figures_page.page(), "python tools/figures_page.py"


@pytest.mark.parametrize("path", sorted(figures_page.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_is_on_the_page_as_it_was_measured(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    text = (DOCS / "figures.md").read_text(encoding="utf-8")
    section = text.partition(f'<a id="{path.stem}"></a>')[2].partition("<a id=")[0]
    assert f"### {result['what']}\n" in section
    rows = [
        [cell.strip(" *") for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line[:1] == "|"
    ]
    assert [cell.replace("\\|", "|") for cell in rows[0]] == result["columns"]
    assert rows[2:] == result["rows"]
    for name in ("date", "card", "versions", "script"):
        assert result[name] in section or (result[name] == figures_page.NOT_STATED and name in section.splitlines()[3])


def test_a_result_that_names_what_it_has_not_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(figures_page, "RESULTS", tmp_path)
    path = next((REPOSITORY / "bench" / "results").glob("peers-flux.json"))
    good = json.loads(path.read_text(encoding="utf-8"))
    for change, problem in (
        ({"ours": ["nobody"]}, "'nobody' is no column and no row"),
        ({"card": ""}, "the field card is empty"),
        ({"rows": [["one cell"]], "ours": [], "peers": []}, "a row of 1 cells"),
        ({"speed": 1}, "unknown fields"),
    ):
        (tmp_path / "one.json").write_text(json.dumps(good | change), encoding="utf-8")
        with pytest.raises(ValueError, match=problem):
            figures_page.results()


def test_each_plot_has_its_place_on_the_page():
    pytest.importorskip("matplotlib")
    plots = figures_page.plots()
    shown = figures_page.with_plots((DOCS / "figures.md").read_text(encoding="utf-8"))
    assert re.findall(r"\(plots/([\w-]+)\.svg\)", shown) == [r.name for r in figures_page.results() if r.name in plots]
    assert plots and all(plot.startswith(b"<?xml") and b"</svg>" in plot for plot in plots.values())


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("1,022", 1022.0),
        ("47.7 ± 0.0", 47.7),
        ("11.95 to 12.31 ms", 12.31),
        ("20.14 (19.97, 20.48)", 20.14),
        ("not run", None),
    ],
)
def test_a_bar_is_as_long_as_the_first_number_or_the_end_of_a_range(cell, found):
    assert figures_page.number(cell) == found


def test_the_figures_of_the_readme_are_those_of_the_page():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    whole = json.loads((figures_page.RESULTS / "steps-flux-whole.json").read_text("utf-8"))["rows"]
    # Names of the page without the library and the type, which the README's sentence says once.
    measured = {name.removesuffix(" BF16").removeprefix("diffusers, "): row for name, *row in whole}
    rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in readme.splitlines() if line[:1] == "|"
    ]
    said = {
        row[0].partition("**")[0]: row[1:]
        for row in rows
        if len(row) == 3 and re.fullmatch(r"[\d.]+( to [\d.]+)?", row[1])
    }
    ours = measured.pop("trtconvert, `modes: auto`")
    assert said.pop("trtconvert") == [ours[0], ours[-1]]
    named = {
        name.replace("torch.compile with torchao's FP8", "torch.compile, torchao's FP8"): row
        for name, row in said.items()
    }
    assert named == {name: [row[0], row[-1]] for name, row in measured.items()}
    build = {
        row[0]: row[1] for row in json.loads((figures_page.RESULTS / "builds-flux.json").read_text("utf-8"))["rows"]
    }
    ours, engine = int(build["all but the engine"]), int(build["the engine"])
    assert f"took {ours + engine} s from the folder" in " ".join(readme.split())
    assert f"{ours} s for calibration, search, export and verification, and {engine} s for" in " ".join(readme.split())


# Reference ------------------------------------------------------------------------------------------------------------


def commands(group: click.Group, name: str = "trtconvert") -> dict[str, click.Command]:
    found = dict[str, click.Command]()
    for key, command in group.commands.items():
        found |= commands(command, f"{name} {key}") if isinstance(command, click.Group) else {f"{name} {key}": command}
    return found


def test_the_reference_has_every_command_with_its_options():
    sections = re.split(r"^## ", docs_pages.command_reference(), flags=re.MULTILINE)[1:]
    by_name = {section.partition("`\n")[0].strip("`"): section for section in sections}
    for name, command in commands(main).items():
        (section,) = [
            text
            for shown, text in by_name.items()
            if shown == name or (shown.startswith(f"{name} ") and not shown[len(name) + 1].islower())
        ]
        options = {
            option
            for p in command.params
            if isinstance(p, click.Option)
            for option in p.opts
            if option.startswith("--")
        }
        assert {option for option in options if f"`{option}`" not in section} == set(), name


# Guides ---------------------------------------------------------------------------------------------------------------


def navigation(entries: list[object]) -> list[str]:
    found = list[str]()
    for entry in entries:
        for inner in entry.values() if isinstance(entry, dict) else [entry]:
            found += navigation(inner) if isinstance(inner, list) else [str(inner)]
    return found


def nav_of(part: str) -> list[str]:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    nav = YAML(typ="safe", pure=True).load(text)["nav"]
    (found,) = [entry[part] for entry in nav if part in entry]
    return navigation(found if isinstance(found, list) else [found])


@pytest.mark.parametrize("page", [*nav_of("Guides"), *nav_of("Quick start")])
def test_a_guide_is_short(page):
    assert len((DOCS / page).read_text(encoding="utf-8").split()) <= 600


@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if p.parent.name != "design" and p.name not in ("figures.md", "builds.md")],
    ids=lambda p: p.name,
)
def test_dates_are_on_the_page_of_figures_and_in_design(page):
    assert re.findall(r"\b20\d\d-\d\d-\d\d\b", page.read_text(encoding="utf-8")) == []
