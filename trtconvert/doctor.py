"""Findings of `trtconvert doctor`: what this machine can build and run."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtconvert.cache import default_folder
from trtconvert.engine import backend_statuses
from trtconvert.engine.tensorrt import device_architecture, device_name, driver_problem
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.files import free_space, require_writable
from trtconvert.library import REINSTALL, compiled_architectures, library_path, serves

WANTED_FREE = 2 * 2**30
"""Free disk space in bytes that a build of a large model needs."""


@dataclass(frozen=True)
class Finding:
    """One finding; `good` is None if the thing is absent but not needed."""

    what: str
    good: bool | None
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Returns all findings, with backends in order of preference."""
    findings = [Finding("Python", True, platform.python_version())]
    findings += [_package(name) for name in ("torch", "onnx", "onnxruntime")]
    architecture = device_architecture()
    if architecture:
        findings.append(Finding("GPU", True, f"{device_name()}, {architecture}"))
    else:
        why, _ = driver_problem() or ("none", "")  # the backend that needs a GPU has the remedy
        findings.append(Finding("GPU", None, f"{why}: engines run elsewhere, ONNX Runtime here"))
    findings.append(_kernels(architecture))
    for status in backend_statuses():
        what = f"backend {status.name}"
        detail = f"{status.detail}; attention: {status.attention}"
        findings.append(Finding(what, status.available, detail, "" if status.available else status.remedy))
    return [*findings, _cache()]


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Prints a table with a remedy for each missing thing."""
    table = Table(show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        sign = {True: "[green]yes[/]", False: "[red]no[/]", None: "-"}[finding.good]
        remedy = f"\nremedy: {finding.remedy}" if finding.remedy else ""
        table.add_row(finding.what, sign, escape(finding.detail + remedy))
    console.print(table)


def _cache() -> Finding:
    try:
        folder = default_folder()
        require_writable(folder / "probe", "set XDG_CACHE_HOME to another folder")
    except UserError as error:
        return Finding("cache", False, f"{error.problem}: {error.got}", error.remedy)
    free = free_space(folder)
    detail = f"{folder}, {free / 2**30:.0f} GiB free"
    return Finding("cache", free >= WANTED_FREE, detail, "" if free >= WANTED_FREE else "free disk space")


def _kernels(gpu: str | None) -> Finding:
    what, remedy = "kernels and plugin", REINSTALL
    library = library_path()
    if library is None:
        return Finding(what, False, "libtrtconvert.so is missing", remedy)
    try:
        compiled = compiled_architectures()
    except BackendUnavailable as error:
        return Finding(what, False, error.got, error.remedy)
    detail = f"{library.name} for {', '.join(f'sm_{name}' for name in compiled)}"
    if gpu is None or serves(gpu, compiled):
        return Finding(what, True, detail)
    too_old = int(gpu.removeprefix("sm")) < 80
    remedy = (
        "set engine.attention: native, or use a GPU of sm80 or later"
        if too_old
        else "compile the library with TRTCONVERT_CUDA_ARCHITECTURES for this GPU too"
    )
    return Finding(what, False, f"{detail}, not {gpu}", remedy)


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, False, "not installed", "pip install trtconvert")
