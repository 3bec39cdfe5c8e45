"""Geometry and colours of the report's charts. The template draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trtconvert.attention.modes import Mode
from trtconvert.calib import frontier as search
from trtconvert.evaluate.parts import mode_name
from trtconvert.linear.modes import LayerMode

ERROR_RAMP = ("#fff4e8", "#fddcb0", "#f8b06a", "#de7431", "#9c3d10")
RANGE_RAMP = ("#eef5fb", "#c9def0", "#86b6dd", "#3f82bd", "#164e86")
"""Light to dark in even steps of lightness: readable in grey and with colour blindness."""

MODE_FILLS = {
    Mode.FP16: "#e3e6ea",
    Mode.PRECISION: "#c3e6d6",
    Mode.BALANCED: "#6cbb9b",
    Mode.AGGRESSIVE: "#17694c",
    Mode.FP8: "#24306e",
}

LAYER_FILLS = {
    LayerMode.WEIGHT_ONLY: "#c3e6d6",
    LayerMode.DYNAMIC: "#6cbb9b",
    LayerMode.STATIC: "#17694c",
}

DARK_INK, LIGHT_INK = "#000000", "#ffffff"
"""Black or white has a contrast of at least 4.5 : 1 on any colour."""

EXACT_DB = 119.9
"""PSNR from here on means equality: `verify.psnr` ends at 120 dB."""


@dataclass(frozen=True)
class Cell:
    """One field of a heat map: text, colour, and colour of the text."""

    text: str
    fill: str
    ink: str


@dataclass(frozen=True)
class HeatMap:
    """Sites or layers by timestep bins.

    Attributes:
        columns: heads of the columns. rows: name of the site or layer, and cells.
        legend: colours and their meaning, from left to right.
    """

    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    legend: Sequence[tuple[str, str]]


def heat_map(
    values: Mapping[str, Sequence[float | None]],
    columns: Sequence[str],
    ramp: Sequence[str],
    form: Callable[[float], str],
    *,
    log: bool = False,
    inverted: bool = False,
) -> HeatMap:
    """Returns a heat map of numbers.

    Args:
        values: by site or layer, a number per column, or None.
        ramp: colours from the smallest to the largest value, reversed if `inverted`.
        form: formats a number.
        log: colours follow the logarithm of positive values.
    """
    scale = math.log if log else float
    known = [value for row in values.values() for value in row if value is not None]
    low, high = min(known), max(known)
    span = (scale(high) - scale(low)) or 1.0

    def share(value: float) -> float:
        position = (scale(value) - scale(low)) / span
        return 1 - position if inverted else position

    def cell(value: float | None) -> Cell:
        if value is None:
            return Cell("–", "transparent", "inherit")
        fill = blend(ramp, share(value))
        return Cell(form(value), fill, ink_on(fill))

    rows = [(site, [cell(value) for value in row]) for site, row in values.items()]
    return HeatMap(columns, rows, [(blend(ramp, share(value)), form(value)) for value in (low, high)])


def mode_map(
    modes: Mapping[str, Sequence[int]], columns: Sequence[str], fills: Mapping[Mode, str] | Mapping[LayerMode, str]
) -> HeatMap:
    """Returns the mode of each site or layer by timestep bin, in the colours of `MODE_FILLS` or `LAYER_FILLS`."""
    cells = {int(mode): Cell(mode_name(mode), fill, ink_on(fill)) for mode, fill in fills.items()}
    legend = [(cell.fill, cell.text) for cell in cells.values()]
    return HeatMap(columns, [(name, [cells[mode] for mode in row]) for name, row in modes.items()], legend)


def blend(ramp: Sequence[str], share: float) -> str:
    """Returns the colour at a share, 0 to 1, of a ramp of #rrggbb colours."""
    position = min(max(share, 0.0), 1.0) * (len(ramp) - 1)
    index = min(int(position), len(ramp) - 2)
    weight = position - index
    pairs = zip(_channels(ramp[index]), _channels(ramp[index + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * weight):02x}" for a, b in pairs)


def ink_on(fill: str) -> str:
    """Returns the ink with more contrast on a colour (WCAG 2.2)."""
    dark, light, here = (luminance(colour) for colour in (DARK_INK, LIGHT_INK, fill))
    return DARK_INK if (here + 0.05) / (dark + 0.05) >= (light + 0.05) / (here + 0.05) else LIGHT_INK


def luminance(colour: str) -> float:
    """Returns the relative luminance of #rrggbb, 0 to 1 (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in _channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


# Line charts of the ranges --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """A chart's area and its ticks, in units of the SVG.

    Attributes:
        width, height: of the whole chart. left, top, right, bottom: edges of the area.
        xticks, yticks: position on the axis, and text.
    """

    width: int
    height: int
    left: float
    top: float
    right: float
    bottom: float
    xticks: Sequence[tuple[float, str]] = ()
    yticks: Sequence[tuple[float, str]] = ()

    def x(self, share: float) -> float:
        """Returns the position at a share of the width, from the left."""
        return self.left + (self.right - self.left) * share

    def y(self, share: float) -> float:
        """Returns the position at a share of the height, from the bottom."""
        return self.bottom - (self.bottom - self.top) * share


@dataclass(frozen=True)
class LineChart:
    """Curves in a frame.

    Attributes:
        axis: title of the horizontal axis. description: for screen readers.
        lines: by curve, the class of its colour, its name, and the points of an SVG polyline.
    """

    title: str
    axis: str
    description: str
    frame: Frame
    lines: Sequence[tuple[str, str, str]]


def head_charts(
    ranges: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], starts: Sequence[str]
) -> list[LineChart]:
    """Returns one chart per site: a curve per tensor and head over timestep bins, all on one logarithmic axis.

    Args:
        ranges: by site and tensor ("q", "k", "v"), [T][H] positive numbers.
        starts: first timestep of each bin.
    """
    everything = [x for site in ranges.values() for tensor in site.values() for row in tensor for x in row]
    low, high = math.log10(min(everything)), math.log10(max(everything))
    margin = max(0.05 * (high - low), 0.02)
    low, high = low - margin, high + margin
    frame = Frame(340, 198, left=40.0, top=10.0, right=330.0, bottom=160.0)

    def x(index: int) -> float:
        return frame.x((index + 0.5) / len(starts))

    def y(value: float) -> float:
        return frame.y((math.log10(value) - low) / (high - low))

    every = math.ceil(len(starts) / 5)
    ticked = replace(
        frame,
        xticks=[(x(index), start) for index, start in enumerate(starts) if index % every == 0],
        yticks=[(y(tick), f"{tick:g}") for tick in log_ticks(10**low, 10**high)],
    )
    charts = []
    for site, tensors in ranges.items():
        curves = {
            tensor: [[(x(index), y(value)) for index, value in enumerate(head)] for head in zip(*rows, strict=True)]
            for tensor, rows in tensors.items()
        }
        description = (
            f"Ranges of queries, keys and values of {site} over the timestep, a line per head. The largest of each are in "
            "the tables above."
        )
        charts.append(LineChart(site, "timestep", description, ticked, _lines(curves)))
    return charts


def _lines(curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]]) -> list[tuple[str, str, str]]:
    """Returns `LineChart.lines` of [H] lists of points by tensor."""
    return [
        (tensor, f"{tensor}, head {head}", " ".join(f"{x:.1f},{y:.1f}" for x, y in points))
        for tensor, heads in curves.items()
        for head, points in enumerate(heads)
    ]


SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

SMALLEST_SHARE = 1e-4
"""Lower end of the logarithmic axis of histograms. Smaller shares are drawn there."""


def magnitude_charts(counts: Mapping[str, Mapping[str, Sequence[Sequence[int]]]], first_octave: int) -> list[LineChart]:
    """Returns one histogram per site: a curve per tensor and head over octaves of magnitude, all on the same axes.

    Args:
        counts: by site and tensor ("q", "k", "v"), [H][octaves].
        first_octave: exponent of the first octave's lower end, as a power of two.
    """
    rows = [row for site in counts.values() for tensor in site.values() for row in tensor]
    used = [index for row in rows for index, count in enumerate(row) if count / sum(row) > SMALLEST_SHARE]
    low, high = min(used), max(used)
    frame = Frame(340, 198, left=62.0, top=10.0, right=330.0, bottom=160.0)

    def x(index: int) -> float:
        return frame.x((index - low + 0.5) / (high - low + 1))

    def y(share: float) -> float:
        return frame.y(1 - math.log10(max(share, SMALLEST_SHARE)) / math.log10(SMALLEST_SHARE))

    every = math.ceil((high - low + 1) / 6)
    octaves = range(low, high + 1, every)
    ticked = replace(
        frame,
        xticks=[(x(index), "2" + str(first_octave + index).translate(SUPERSCRIPT)) for index in octaves],
        yticks=[(y(10.0**power), f"{10.0 ** (power + 2):g} %") for power in range(-4, 1)],
    )
    charts = []
    for site, tensors in counts.items():
        curves = {
            tensor: [[(x(i), y(head[i] / sum(head))) for i in range(low, high + 1)] for head in heads]
            for tensor, heads in tensors.items()
        }
        description = f"Histogram of the magnitudes of queries, keys and values of {site}, a line per head."
        charts.append(LineChart(site, "magnitude relative to the range", description, ticked, _lines(curves)))
    return charts


def log_ticks(low: float, high: float) -> list[float]:
    """Returns at most six round numbers inside a range; powers of ten for wide ranges."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1,)):
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 6:
            break
    return ticks


def linear_ticks(low: float, high: float) -> list[float]:
    """Returns at most seven round numbers inside a range."""
    step = 10 ** math.floor(math.log10((high - low) / 6))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 6)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


# The frontier ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A plan as text, with its position.

    Attributes:
        speed: of attention, and of layers if the search chose them, relative to FP16 everywhere. psnr: in dB. further: the
            other figures.
        int8_values: share of sites and steps with both products in INT8.
        layers: number of INT8 layers. blocks: computed share of attention's blocks.
        kept: whether the plan keeps the budget. allowed: whether the search may choose it. chosen: whether it was built.
        exact: whether it is the fastest plan with the samples of full precision: only this one is labelled.
        label_anchor: SVG's text-anchor of the label.
    """

    name: str
    speed: str
    psnr: str
    further: Sequence[str]
    int8_values: str
    layers: str
    blocks: str
    kept: bool
    allowed: bool
    chosen: bool
    exact: bool
    x: float
    y: float
    label_anchor: str


@dataclass(frozen=True)
class Frontier:
    """Plans by speed and quality.

    Attributes:
        points: fastest first. budget: height of the budget's line.
        further: headings of the figures other than PSNR.
        with_layers: whether plans differ in their layers. with_masks: whether plans have block masks.
        gpu, date: of the kernel times.
    """

    frame: Frame
    points: Sequence[Point]
    chosen: Point | None
    budget: float
    budget_text: str
    further: Sequence[str]
    with_layers: bool
    with_masks: bool
    gpu: str
    date: str


FIGURES = {
    "ssim": "SSIM ↑",
    "lpips": "LPIPS ↓",
    "feature_distance": "feature distance ↓",
    "prediction_error": "prediction error ↓",
}
"""Figures of a plan other than PSNR. The arrow points to better values."""


def frontier(tried: search.Frontier) -> Frontier:
    """Returns the chart and the table of the plans of a search."""
    frame = Frame(680, 330, left=52.0, top=34.0, right=664.0, bottom=284.0)
    min_psnr = tried.limits["psnr"]
    measured = [(point.speed, point.psnr) for point in tried.points]
    further = [name for name in FIGURES if name in tried.points[0].figures]
    speeds = [speed for speed, _ in measured]
    finite = [db for _, db in measured if math.isfinite(db) and db < EXACT_DB]
    low_x, high_x = min(speeds), max(speeds)
    pad = 0.06 * (high_x - low_x) or 0.05
    low_x, high_x = low_x - pad, high_x + pad
    low_y, high_y = min([*finite, min_psnr]) - 3, max([*finite, min_psnr]) + 3

    def x(speed: float) -> float:
        return frame.x((speed - low_x) / (high_x - low_x))

    def y(db: float) -> float:
        # Exact plans are drawn above the upper edge, NaN on the lower edge.
        if not math.isfinite(db):
            return frame.bottom
        return frame.top - 12 if db >= EXACT_DB else frame.y((db - low_y) / (high_y - low_y))

    first_exact = next((point for point in tried.points if point.psnr >= EXACT_DB), None)
    points = [
        Point(
            point.name,
            f"{point.speed:.3f} ×",
            "exact" if point.psnr >= EXACT_DB else f"{point.psnr:.1f} dB",
            [f"{point.figures[name]:.4g}" for name in further],
            f"{point.int8_values:.0%}",
            f"{sum(map(any, point.layers.values()))} of {len(point.layers)}"
            + (f", {len(point.modulated)} by deltas" if point.modulated else ""),
            f"{point.density:.1%}",
            point.keeps_budget,
            point.allowed,
            point.name == tried.chosen,
            point is first_exact,
            round(x(point.speed), 1),
            round(y(point.psnr), 1),
            "end" if x(point.speed) > frame.x(0.5) else "start",
        )
        for point in tried.points
    ]
    best = next((point for point in points if point.chosen), None)
    ticked = replace(
        frame,
        xticks=[(x(tick), f"{tick:.3g} ×") for tick in linear_ticks(low_x, high_x)],
        yticks=[(y(tick), f"{tick:g}") for tick in linear_ticks(low_y, high_y)],
    )
    headings = [FIGURES[name] for name in further]
    budget, with_layers = round(y(min_psnr), 1), len({point.layers for point in points}) > 1
    with_masks, text = any(point.sparse for point in tried.points), f"budget, {min_psnr:g} dB"
    return Frontier(ticked, points, best, budget, text, headings, with_layers, with_masks, tried.gpu, tried.date)
