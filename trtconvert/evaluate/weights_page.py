"""The page of `trtconvert analyze`: one self-contained HTML file."""

from __future__ import annotations

from pathlib import Path

from trtconvert.evaluate import charts
from trtconvert.evaluate.pages import template
from trtconvert.files import whole_file
from trtconvert.weights.analysis import GRANULARITIES, Analysis, TensorReport
from trtconvert.weights.blocks import OCTAVES
from trtconvert.weights.tables import share, size

SHOWN = 400
"""Largest tensors that get heat maps: more make browsers slow. The JSON file has all."""


def write_page(found: Analysis, output: Path) -> None:
    """Writes the page.

    Raises:
        UserError: the place cannot be written.
    """
    with whole_file(output, "give another file with -o") as partial:
        partial.write_text(render(found), encoding="utf-8")


def render(found: Analysis) -> str:
    """Returns the page as HTML."""
    measured = [tensor for tensor in found.tensors if tensor.quality and len(tensor.shape) > 1]
    shown = sorted(sorted(measured, key=lambda t: -t.bytes)[:SHOWN], key=lambda t: t.name)
    return template("weights.html.j2").render(
        found=found,
        saved=share(found.bytes - found.bytes_after, found.bytes),
        in_int8=share(found.in_int8, found.parameters),
        maps=_maps(shown),
        shown=len(shown),
        measured=len(measured),
        size=size,
    )


def _maps(tensors: list[TensorReport]) -> list[tuple[str, str, charts.HeatMap]]:
    maps = []
    spread = {t.name: [count / t.elements or None for count in t.histogram] for t in tensors if sum(t.histogram)}
    if any(value is not None for row in spread.values() for value in row):
        text = (
            "Share of the weights by magnitude, in octaves below the largest. INT8 with one scale for all ends in the eighth; "
            "a scale per block or channel reaches as far below the largest there."
        )
        columns = [*("max" if octave == 0 else f"−{octave}" for octave in range(OCTAVES - 1)), "less"]
        maps.append(("Distribution of each layer", text, charts.heat_map(spread, columns, charts.RANGE_RAMP, _percent)))
    quality = {t.name: [t.quality[kind].sqnr if kind in t.quality else None for kind in GRANULARITIES] for t in tensors}
    if any(value is not None for row in quality.values() for value in row):
        text = (
            "Signal to quantisation noise in dB with a scale per block, channel or tensor; dark cells are the weakest."
        )
        ramp = charts.ERROR_RAMP
        drawn = charts.heat_map(quality, list(GRANULARITIES), ramp, lambda db: f"{db:.1f}", inverted=True)
        maps.append(("Error of each layer", text, drawn))
    return maps


def _percent(value: float) -> str:
    return f"{value:.1%}" if value >= 0.0005 else "<0.1%"
