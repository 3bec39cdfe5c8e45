"""The page of figures, docs/figures.md, from bench/results/*.json. `python tools/figures_page.py` writes the page.

Each file is one table, as a script of bench/ measured it: what was measured, the date, the card, the versions, the columns,
and rows whose cells are text, so that a figure is printed as it was taken. `ours` and `peers` name the columns, or the rows,
of the program and of its peers. The plots are made when the documentation is built (`plots`, called by tools/docs_pages.py):
the page has a comment where a plot belongs.
"""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "figures.md"
NOT_STATED = "not stated"
"""Content of a field that was not recorded with the measurement."""
_NUMBER = re.compile(r"(?:[\d.,]+ to )?(\d[\d,]*(?:\.\d+)?)")
_ALONE = re.compile(r"[-+−]?[\d,.]+((–| to | ± )[\d,.]+)?(×| %| ms| dB| MB/s| µs)?")
"""A cell with nothing but a number."""
_PLOT = re.compile(r"<!-- plot: ([\w-]+) -->")
_HEAD = """# Figures

Every figure of the documentation is on this page. A script in `bench/` measured each table, with the peers of the table in
the same run. The page is made of the files in `bench/results`, and a test holds the page to these files.
[Design](design/index.md) says how the figures came about, and what limits them.

- **Random weights.** Steps of published models are measured on random weights in the published sizes. The errors of these
  models say what the arithmetic loses, not what images lose. Tables of trained models say so.
- **Errors** of engines are relative L2 errors of one prediction against torch in FP32.
- **Names.** `precision`, `balanced`, `aggressive` and `fp8` are [modes](concepts.md#precision-modes-of-attention) of attention.
  The *gain* of an engine is the time of the 16-bit engine divided by its own time. *Plan, MiB* is the size of an engine's file.
- **Asked** and **goal** are the targets of the project. A figure that misses its target is printed as it is.
- **Repetition.** Times of an engine differ by 1 to 3 % from build to build, and from one H200 to another.
"""


@dataclass(frozen=True)
class Plot:
    """A bar chart of a table.

    Attributes:
        label: columns that name a group of bars.
        series: columns that become bars.
        unit: of the axis.
        log: a logarithmic axis.
    """

    label: list[str]
    series: list[str]
    unit: str
    log: bool = False


@dataclass(frozen=True)
class Result:
    """A file of bench/results.

    Attributes:
        order: among all files, from 1.
        group: the heading that the table stands under.
        weights: of the model, where there is one.
        rows: of cells, one for each column.
        ours, peers: names of columns, or of rows by one of the first two cells.
    """

    name: str
    order: int
    group: str
    what: str
    date: str
    card: str
    versions: str
    script: str
    columns: list[str]
    rows: list[list[str]]
    ours: list[str]
    peers: list[str]
    weights: str = ""
    notes: list[str] = field(default_factory=list)
    plot: Plot | None = None

    def __post_init__(self) -> None:
        problems = [
            f"the field {name} is empty"
            for name in ("what", "date", "card", "versions", "script")
            if not getattr(self, name)
        ]
        problems += [f"a row of {len(row)} cells: {row}" for row in self.rows if len(row) != len(self.columns)]
        named = {*self.columns, *(cell for row in self.rows for cell in row[:2])}
        problems += [f"{name!r} is no column and no row" for name in (*self.ours, *self.peers) if name not in named]
        if self.plot is not None:
            problems += [
                f"the plot's {name!r} is no column"
                for name in (*self.plot.label, *self.plot.series)
                if name not in self.columns
            ]
        if problems:
            raise ValueError(f"bench/results/{self.name}.json: {'; '.join(problems)}")


def results() -> list[Result]:
    """Returns the files, in the order of the page: groups in the order of their first tables.

    Raises:
        ValueError: a file that lacks a field, has one that is not known, or names columns that do not exist.
    """
    found = list[Result]()
    known = {f.name for f in fields(Result)} - {"name"}
    for path in sorted(RESULTS.glob("*.json")):
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if unknown := data.keys() - known:
            raise ValueError(
                f"bench/results/{path.name}: unknown fields {sorted(unknown)}; the fields are {sorted(known)}"
            )
        if "plot" in data:
            data["plot"] = Plot(**data["plot"])
        found.append(Result(name=path.stem, **data))
    first = dict[str, int]()
    for result in found:
        first[result.group] = min(result.order, first.get(result.group, result.order))
    return sorted(found, key=lambda result: (first[result.group], result.order))


def page() -> str:
    """Returns the content of docs/figures.md."""
    lines, group = [_HEAD], ""
    for result in results():
        if result.group != group:
            group = result.group
            lines += [f"## {group}", ""]
        lines += _section(result)
    return "\n".join(lines).rstrip() + "\n"


def _section(result: Result) -> Iterator[str]:
    yield f'<a id="{result.name}"></a>'
    yield from (f"### {result.what}", "")
    how = {"date": result.date, "card": result.card, "versions": result.versions, "script": f"`{result.script}`"}
    missing = [name for name, text in how.items() if NOT_STATED in text]
    told = [text for name, text in how.items() if name not in missing]
    told += [f"weights: {result.weights}"] if result.weights else []
    told += [f"not recorded: {', '.join(missing)}"] if missing else []
    yield " · ".join(told)
    yield ""
    if result.plot is not None:
        yield from (f"<!-- plot: {result.name} -->", "")
    yield "| " + " | ".join(map(_cell, result.columns)) + " |"
    yield "| " + " | ".join("---:" if _is_of_numbers(result, i) else "---" for i in range(len(result.columns))) + " |"
    for row in result.rows:
        cells = [f"**{_cell(c)}**" if i < 2 and c in result.ours else _cell(c) for i, c in enumerate(row)]
        yield "| " + " | ".join(cells) + " |"
    yield ""
    for note in result.notes:
        yield from (note, "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _is_of_numbers(result: Result, column: int) -> bool:
    cells = [row[column] for row in result.rows if row[column]]
    return column > 0 and bool(cells) and all(_ALONE.fullmatch(c) for c in cells)


def with_plots(markdown: str) -> str:
    """Returns the page with plots in place of its comments."""
    named = {result.name: result for result in results()}
    return _PLOT.sub(lambda m: f"![{named[m[1]].what}: {_plot(named[m[1]]).unit}](plots/{m[1]}.svg)", markdown)


def plots() -> dict[str, bytes]:
    """Returns the plots as SVG, by the name of the result."""
    return {result.name: _drawn(result) for result in results() if result.plot is not None}


def _plot(result: Result) -> Plot:
    assert result.plot is not None
    return result.plot


def number(cell: str) -> float | None:
    """Returns the first number of a cell, the upper one of a range; None where there is none."""
    found = _NUMBER.search(cell)
    return float(found[1].replace(",", "")) if found else None


def _drawn(result: Result) -> bytes:
    """Returns a chart as SVG, with a bar for each series in each row. The program is green, its peers are grey."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plot = _plot(result)
    columns = [result.columns.index(name) for name in plot.series]
    names = [", ".join(row[result.columns.index(name)] for name in plot.label).replace("`", "") for row in result.rows]
    labels = [textwrap.fill(name, 36) for name in names]
    greens, greys = (
        iter(("#2e7d32", "#66bb6a", "#a5d6a7", "#1b5e20")),
        iter(("#616161", "#9e9e9e", "#bdbdbd", "#757575", "#cfcfcf")),
    )
    colours = [next(greens) if name in result.ours else next(greys) for name in plot.series]
    with plt.rc_context({"svg.hashsalt": result.name, "font.size": 9}):
        width = 0.8 / len(columns)
        figure, axes = plt.subplots(figsize=(8.5, 0.8 + max(0.24 * len(labels) * len(columns), 0.34 * len(labels))))
        for i, (column, name) in enumerate(zip(columns, plot.series, strict=True)):
            for y, row in enumerate(result.rows):
                value = number(row[column])
                if value is None:
                    continue
                of_row = "#2e7d32" if any(cell in result.ours for cell in row[:2]) else "#9e9e9e"
                bar = axes.barh(
                    y + (i - (len(columns) - 1) / 2) * width, value, width * 0.92,
                    color=colours[i] if len(columns) > 1 else of_row, label=name.replace("`", "") if y == 0 else None,
                )  # fmt: skip
                axes.bar_label(bar, labels=[_shown(row[column])], padding=3, fontsize=7)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlabel(plot.unit)
        axes.spines[["top", "right"]].set_visible(False)
        if plot.log:
            axes.set_xscale("log")
        if len(columns) > 1:
            figure.legend(loc="outside upper center", ncols=min(len(columns), 4), frameon=False, fontsize=8)
        axes.margins(x=0.08)
        figure.set_layout_engine("constrained")
        held = io.BytesIO()
        figure.savefig(held, format="svg", metadata={"Date": None}, facecolor="white")
        plt.close(figure)
    return held.getvalue()


def _shown(cell: str) -> str:
    """Returns the label of a bar: its number, or its range."""
    found = _NUMBER.search(cell)
    return found[0].replace(" to ", "–") if found else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
