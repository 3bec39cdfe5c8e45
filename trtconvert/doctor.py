"""What this machine can build and run."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtconvert.cache import default_folder
from trtconvert.engine import backend_statuses
from trtconvert.engine.tensorrt import device_architecture
from trtconvert.files import free_space
from trtconvert.library import library_path

WANTED_FREE = 2 * 2**30
"""Bytes of free disk below which a build of a large model is likely to fail."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `good` is None where it is neither needed nor missing."""

    what: str
    good: bool | None
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings, backends in order of preference."""
    findings = [Finding("Python", True, platform.python_version())]
    findings += [_package(name) for name in ("torch", "onnx", "onnxruntime")]
    architecture = device_architecture()
    findings.append(
        Finding(
            "GPU",
            None if architecture is None else True,
            architecture or "none: engines run elsewhere, ONNX Runtime here",
        )
    )
    library = library_path()
    findings.append(
        Finding("kernels and plugin", True, library.name)
        if library
        else Finding(
            "kernels and plugin", False, "libtrtconvert.so is missing", "pip install trtconvert, with a C++ compiler"
        )
    )
    for status in backend_statuses():
        what = f"backend {status.name}"
        detail = f"{status.detail}; attention: {status.attention}"
        findings.append(Finding(what, status.available, detail, "" if status.available else status.remedy))
    folder = default_folder()
    free = free_space(folder)
    findings.append(
        Finding(
            "cache",
            free >= WANTED_FREE,
            f"{folder}, {free / 2**30:.0f} GiB free",
            "" if free >= WANTED_FREE else "free disk space",
        )
    )
    return findings


def print_findings(console: Console, findings: list[Finding]) -> None:
    """A table with a remedy under each thing that is missing."""
    table = Table(show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        sign = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}[finding.good]
        remedy = f"\nremedy: {finding.remedy}" if finding.remedy else ""
        table.add_row(finding.what, sign, escape(finding.detail + remedy))
    console.print(table)


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", "pip install trtconvert")
