"""Formats an evaluation as rows of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from trtconvert.evaluate.records import Evaluation

FIGURES = (
    ("fid", "FID ↓", ".3f"),
    ("sfid", "sFID ↓", ".3f"),
    ("kid", "KID ↓", ".4g"),
    ("inception_score", "IS ↑", ".3f"),
    ("precision", "precision ↑", ".4f"),
    ("recall", "recall ↑", ".4f"),
    ("accuracy", "accuracy ↑", ".4f"),
)
"""Field of `SetQuality`, its name with an arrow to where it is better, and its format."""


@dataclass(frozen=True)
class Row:
    """One figure of the three sets, as text; "" where it is unknown.

    Attributes:
        noise: difference between full precision and full precision of other seeds. difference: INT8 less full precision.
        within: whether the difference is at most the noise; None without a full-precision run.
    """

    name: str
    int8: str
    full: str = ""
    other: str = ""
    difference: str = ""
    noise: str = ""
    within: bool | None = None


def rows(evaluation: Evaluation) -> list[Row]:
    """Returns the figures that the evaluation has."""
    found: list[Row] = []
    for field, name, form in FIGURES:
        sets = evaluation.int8, evaluation.full, evaluation.other
        figures: list[float] = [x for quality in sets if (x := getattr(quality, field, None)) is not None]
        shown = [format(figure, form) for figure in figures]
        if len(figures) == len(sets):
            got, same, apart = figures
            shown += [format(got - same, f"+z{form}"), format(abs(same - apart), form)]  # z: no minus before zero
            found.append(Row(name, *shown, within=abs(got - same) <= abs(same - apart)))
        elif figures:
            found.append(Row(name, shown[0]))
    return found


def paired_rows(evaluation: Evaluation) -> list[tuple[str, str]]:
    """Returns the figures of INT8 against full precision of the same seeds, with their names."""
    paired = evaluation.paired
    if paired is None:
        return []
    found = [("PSNR", f"{paired.psnr:.2f} dB; worst {paired.psnr_worst:.2f} dB, seed {paired.psnr_worst_seed}")]
    if paired.psnr_all_steps is not None and paired.psnr_of_steps is not None:
        words = f"{paired.psnr_all_steps:.2f} dB; {paired.psnr_of_steps:.2f} dB between reused steps and all steps"
        found.append(("PSNR, all steps computed", words))
    if paired.ssim is not None:
        found.append(("SSIM", f"{paired.ssim:.5f}; worst {paired.ssim_worst:.5f}"))
    if paired.lpips is not None:
        found.append(("LPIPS", f"{paired.lpips:.5f}; worst {paired.lpips_worst:.5f}"))
    found.append(("FID to other seeds", f"{paired.fid_int8:.4f} for INT8, {paired.fid_full:.4f} for full precision"))
    if paired.clipped:
        found.append(("clipped elements", _clipped(paired.clipped)))
    return found


_TENSORS = {"q": "queries", "k": "keys", "v": "values"}


def _clipped(shares: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the worst share of clipped elements."""
    every = [(share, tensor, site) for site, of_site in shares.items() for tensor, share in of_site.items()]
    if not every:
        return "none: all scales are dynamic"
    share, tensor, site = max(every)
    if not share:
        return "none"
    among = sum(share > 0 for share, *_ in every)
    return f"{share:.3%} of the {_TENSORS[tensor]} of {site}" + (f", the worst of {among}" if among > 1 else "")


def watch_line(evaluation: Evaluation) -> str:
    """Returns the counts of NaN and Inf in words."""
    sets = (("INT8", evaluation.int8), ("full precision", evaluation.full), ("other seeds", evaluation.other))
    seen = [f"{quality.nonfinite} of {evaluation.samples} samples, {name}" for name, quality in sets if quality]
    broken: dict[str, dict[str, int]] = {}
    if paired := evaluation.paired:
        broken = {
            "sites in full precision": paired.nonfinite_sites,
            "sites in INT8": paired.nonfinite_int8_sites,
            "layers in INT8": paired.nonfinite_int8_layers,
        }
    for where, counts in broken.items():
        if found := [f"{name} {count}" for name, count in counts.items() if count]:
            seen.append(f"{where}: {', '.join(found)}")
    return "; ".join(seen)


def print_evaluation(console: Console, evaluation: Evaluation) -> None:
    """Prints the tables at the end of `trtconvert evaluate`."""
    drawn = f"{evaluation.samples} samples, {evaluation.solver} {evaluation.steps} steps"
    against = f"{evaluation.reference} ({evaluation.reference_count} images), features {evaluation.features}"
    table = Table(title=f"{evaluation.model}: {drawn}; against {against}", title_justify="left", pad_edge=False)
    compared = evaluation.full is not None
    for heading in ("", "INT8", *(("full precision", "other seeds", "difference", "noise") if compared else ())):
        table.add_column(heading, justify="right" if heading else "left", style="" if heading else "bold")
    for row in rows(evaluation):
        beyond = "" if row.within or row.within is None else " *"
        cells = (row.int8, row.full, row.other, row.difference + beyond, row.noise) if compared else (row.int8,)
        table.add_row(row.name, *cells)
    console.print(table)
    if compared:
        precision = f"full precision{f', {evaluation.dtype},' if evaluation.dtype else ''}"
        console.print(f"noise: {precision} against itself with other seeds; *: the difference exceeds the noise")
    for name, value in paired_rows(evaluation):
        console.print(f"{name}: {value}")
    console.print(f"NaN or Inf: {watch_line(evaluation)}")
