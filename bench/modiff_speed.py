"""Times a step of a model: FP32, 16 bits, simulated, and in integers without and with MoDiff.

    python bench/modiff_speed.py MODEL [--weight-bits 8|4] [--act-bits N] [--runs N] [--batch N] [--device cuda]

MODEL is a shipped model (emoji-dit, digits-dit) or a recipe. `--help` lists the options.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from graphed import Graphed
from machine import speaking
from torch import Tensor, nn

from trtconvert.diffusion_model import Denoiser
from trtconvert.modiff.calibration import Calibration
from trtconvert.modiff.commands import bits_options, drawing_options, open_workspace
from trtconvert.modiff.modulated import Modulated
from trtconvert.modiff.workspace import METHODS, Variant, Workspace, told, typed_call
from trtconvert.progress import Bar, Output, Reporter

Row = dict[str, Any]

_ROWS = 15
"""Most rows of a table."""


def step_times(workspace: Workspace, variant: Variant, runs: int, report: Reporter) -> list[Row]:
    """Times a step in the middle of a trajectory of `workspace.batch` samples: the median of runs on different inputs.

    On a GPU also by torch.compile, and in a CUDA graph.
    """
    calls: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = []

    def seen(*inputs: Tensor, **named: Tensor) -> Tensor:
        calls.append((inputs, named))
        return workspace.model.denoiser(*inputs, **named)

    workspace.model.sample(seen, range(workspace.batch), steps=max(2, min(4, workspace.steps)), solver=workspace.solver)
    kept = [_on(workspace, call) for call in calls]
    half = torch.bfloat16 if workspace.dtype == torch.bfloat16 else torch.float16
    with report.live():
        with report.stage("calibrate") as bar:
            calibration = workspace.calibration(variant, told(bar))
        with report.stage("bench") as bar:
            return _rows(workspace, variant, calibration, kept, half, runs, bar)


@torch.no_grad()
def _rows(
    workspace: Workspace,
    variant: Variant,
    calibration: Calibration,
    kept: list[Any],
    half: torch.dtype,
    runs: int,
    bar: Bar,
) -> list[Row]:
    rows: list[Row] = []
    for name, dtype in (("FP32", torch.float32), (str(half).removeprefix("torch."), half)):
        plain = copy.deepcopy(workspace.model.denoiser).to(workspace.device, dtype)
        inputs = [typed_call(workspace.model, dtype, *call) for call in kept]
        rows.append(_row(f"{name}, eager", plain, inputs, runs, workspace))
        if any(isinstance(module, torch.nn.Conv2d) for module in plain.modules()):
            plain = plain.to(memory_format=torch.channels_last)
            rows.append(_row(f"{name}, eager, channels last", plain, inputs, runs, workspace))
        if workspace.device == "cuda":
            rows += _compiled(name, plain, inputs, runs, workspace)
        bar.share(name, len(rows) / _ROWS)
        del plain
    for method, ways in (("qdiff", (True, False)), ("qdiff-modiff", (False,))):
        asked = dataclasses.replace(variant, method=method)
        modulated = dataclasses.replace(workspace, dtype=half).prepared(asked, calibration).denoiser
        assert isinstance(modulated, Modulated)
        inputs = [typed_call(workspace.model, half, *call) for call in kept]
        for simulated in ways:
            modulated.simulate(simulated)
            what = "simulated" if simulated else "integers"
            rows.append(_row(f"{METHODS[asked.method]} {asked.bits}, {what}", modulated, inputs, runs, workspace))
            if workspace.device == "cuda" and not simulated:
                rows += _compiled(f"{METHODS[asked.method]} {asked.bits}, {what}", modulated, inputs, runs, workspace)
            bar.share(what, len(rows) / _ROWS)
    return rows


def _compiled(name: str, denoiser: nn.Module, inputs: list[Any], runs: int, workspace: Workspace) -> list[Row]:
    compiled, modulated = torch.compile(denoiser), denoiser if isinstance(denoiser, Modulated) else None
    return [
        _row(f"{name}, torch.compile", compiled, inputs, runs, workspace, modulated),
        _row(f"{name}, torch.compile, CUDA graph", Graphed(compiled), inputs, runs, workspace, modulated),
    ]


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def markdown(workspace: Workspace, rows: list[Row]) -> str:
    """Returns a table with the device and versions."""
    first = next((row["ms"] for row in rows if row["what"].endswith("16, eager")), rows[0]["ms"])
    lines = [
        f"{device_name(workspace.device)}, torch {torch.__version__}, a step of {workspace.batch} samples",
        "",
        "| | ms | speed, to 16 bits eager | MiB |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [f"| {row['what']} | {row['ms']:.2f} | {first / row['ms']:.2f} | {row['mib'] or ''} |" for row in rows]
    return "\n".join(lines)


def _on(workspace: Workspace, call: Any) -> Any:
    inputs, named = call
    return tuple(x.to(workspace.device) for x in inputs), {name: x.to(workspace.device) for name, x in named.items()}


def _row(
    name: str, denoiser: Denoiser, calls: list[Any], runs: int, workspace: Workspace, reset: Modulated | None = None
) -> Row:
    held = reset or (denoiser if isinstance(denoiser, Modulated) else None)
    on_gpu = workspace.device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def trajectory(times: list[float] | None) -> None:
        if held is not None:
            held.reset_cache()
        for at, (inputs, named) in enumerate(calls):
            seconds = _timed(lambda inputs=inputs, named=named: denoiser(*inputs, **named), on_gpu)
            if times is not None and at:  # the first step makes caches
                times.append(seconds)

    for _ in range(2):
        trajectory(None)
    times: list[float] = []
    while len(times) < runs:
        trajectory(times)
    mib = round(torch.cuda.max_memory_allocated() / 2**20) if on_gpu else None
    return {"what": name, "ms": 1000 * statistics.median(times), "mib": mib}


def _timed(work: Callable[[], object], on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@click.command()
@drawing_options
@bits_options(8)
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Runs of each, for the median.")
@speaking
def main(model: str, weight_bits: int, act_bits: int, runs: int, out: Output, **options: Any) -> None:
    """Time a step of MODEL at --batch: FP32, 16 bits, simulated, and in integers without and with MoDiff."""
    workspace = open_workspace(model, **options)
    times = step_times(workspace, Variant("qdiff-modiff", weight_bits, act_bits), runs, out.reporter())
    out.result({"device": device_name(workspace.device), "rows": times}, markdown(workspace, times))


if __name__ == "__main__":
    main()
