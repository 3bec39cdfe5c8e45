"""The results that `trtconvert analyze`, `quantize` and `dequantize` print."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trtconvert.errors import several
from trtconvert.progress import say
from trtconvert.weights.analysis import Analysis, TensorReport
from trtconvert.weights.conversion import Outcome

CANDIDATES = 10
"""Tensors in the table."""


def print_analysis(console: Console, found: Analysis) -> None:
    """Print totals, the tensors that save most, and why others do not become INT8."""
    other = found.parameters - found.in_int8
    say(console, f"{found.model}: {len(found.tensors):,} tensors, {found.parameters:,} parameters")
    say(console, f"INT8: {found.in_int8:,} ({share(found.in_int8, found.parameters)})")
    say(console, f"FP32, {found.rules.fallback.upper()} and others: {other:,} ({share(other, found.parameters)})")
    saved = found.bytes - found.bytes_after
    say(console, f"{size(found.bytes)} before, {size(found.bytes_after)} after: {share(saved, found.bytes)} less")
    if found.reads_images is not None:
        _print_structure(console, found)
    if damaged := [tensor for tensor in found.tensors if tensor.nonfinite]:
        say(console, f"{len(damaged)} tensors with NaN or Inf, {damaged[0].name} the first of them")
    if candidates := found.candidates():
        table = Table(title="largest savings by INT8", title_justify="left", pad_edge=False)
        table.add_column("tensor", overflow="fold")
        for head in ("shape", "error", "SQNR, dB", "outliers", "saved"):
            table.add_column(head, justify="right", no_wrap=True)
        for tensor in candidates[:CANDIDATES]:
            table.add_row(Text(tensor.name), *_figures(tensor, found.rules.granularity))
        console.print(table)
    reasons = Counter((t.verdict.stored, _kind(t.verdict.reason)) for t in found.tensors if t.verdict.stored != "int8")
    table = Table(title="tensors that do not become INT8", title_justify="left", pad_edge=False)
    for head in ("tensors", "stored as", "because"):
        table.add_column(head, overflow="fold")
    for (stored, reason), count in reasons.most_common():
        table.add_row(f"{count:,}", stored, Text(reason))
    if reasons:
        console.print(table)


def _print_structure(console: Console, found: Analysis) -> None:
    """Prints the numbers and sizes of tensors by role."""
    reads = "images beside latents (I2V, inpainting)" if found.reads_images else "latents alone (T2V, T2I)"
    say(console, f"the denoiser reads {reads}")
    roles: dict[str, list[TensorReport]] = {}
    for tensor in found.tensors:
        roles.setdefault(tensor.role, []).append(tensor)
    table = Table(title="tensors by role", title_justify="left", pad_edge=False)
    table.add_column("role", overflow="fold")
    for head in ("tensors", "parameters", "INT8", "before", "after"):
        table.add_column(head, justify="right", no_wrap=True)
    for role, tensors in sorted(roles.items()):
        parameters = sum(tensor.elements for tensor in tensors)
        in_int8 = sum(tensor.elements for tensor in tensors if tensor.verdict.stored == "int8")
        before, after = (sum(sizes) for sizes in zip(*((t.bytes, t.bytes_after) for t in tensors), strict=True))
        figures = f"{len(tensors):,}", f"{parameters:,}", share(in_int8, parameters), size(before), size(after)
        table.add_row(role, *figures)
    console.print(table)


def _figures(tensor: TensorReport, granularity: str) -> tuple[str, ...]:
    quality = next(found for kind, found in tensor.quality.items() if kind == granularity)
    return (
        " × ".join(map(str, tensor.shape)),
        f"{quality.relative_error:.4f}",
        "exact" if quality.sqnr is None else f"{quality.sqnr:.1f}",
        f"{tensor.outliers or 0:.2%}",
        size(tensor.bytes - tensor.bytes_after),
    )


def _kind(reason: str) -> str:
    """A reason without the figures of a single tensor."""
    for text in (
        "outliers, over",
        "elements, under",
        "dB in INT8, under",
        "of its numbers are",
        "beyond FP16",
        "below FP16",
        "beyond BF16",
        "below BF16",
    ):
        if text in reason:
            start, _, end = reason.partition(text)
            return f"… {text}{end.partition(';')[0]}" if start else reason.partition(";")[0]
    return reason


def print_outcome(console: Console, outcome: Outcome, before: int) -> None:
    """
    Args:
        before: bytes of the source's tensors.
    """
    stored = Counter(record.stored for record in outcome.records.values())
    changed = ", ".join(f"{count:,} to {name.upper()}" for name, count in stored.most_common())
    files = f"{outcome.files} file{'' if outcome.files == 1 else 's'}"
    compared = f"{size(before)} before" if outcome.bytes > before else f"{share(before - outcome.bytes, before)} less"
    say(console, f"{outcome.folder}: {files}, {size(outcome.bytes)}, {compared}, read back and as computed")
    if changed:
        say(console, f"tensors whose type changed: {changed}")
    in_int8 = {path: record for path, record in outcome.records.items() if record.stored == "int8"}
    if in_int8:
        worst = max(in_int8, key=lambda path: in_int8[path].relative_error)
        say(console, f"largest relative error in INT8: {in_int8[worst].relative_error:.4f}, {worst}")
    if outcome.left_out:
        names = several([path.name for path in outcome.left_out], 5)
        say(console, f"left out, the same weights in another form: {names}")


def outcome_values(outcome: Outcome, before: int) -> dict[str, Any]:
    """The same results for programs."""
    in_int8 = [record.relative_error for record in outcome.records.values() if record.stored == "int8"]
    return {
        "folder": outcome.folder,
        "files": outcome.files,
        "bytes_before": before,
        "bytes": outcome.bytes,
        "stored": dict(Counter(record.stored for record in outcome.records.values())),
        "worst_relative_error": max(in_int8, default=None),
        "left_out": [str(path) for path in outcome.left_out],
    }


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.2f} MiB"


def share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "0 %"
