"""How long a step of a model takes, in full precision and quantised."""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.diffusion_model import Denoiser
from trtconvert.modiff.calibration import Calibration
from trtconvert.modiff.graphed import Graphed
from trtconvert.modiff.methods import METHODS
from trtconvert.modiff.modulated import Modulated
from trtconvert.modiff.study import Study, Variant, told, typed_call
from trtconvert.progress import Bar, Reporter

Row = dict[str, Any]

_ROWS = 15
"""Of a table, at most."""


def step_times(study: Study, variant: Variant, runs: int, report: Reporter) -> list[Row]:
    """Seconds of a step in the middle of a trajectory, of `study.batch` samples; the median of runs, each on inputs of its own.

    On a GPU by torch.compile as well, and in a CUDA graph.
    """
    calls: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]] = []

    def seen(*inputs: Tensor, **named: Tensor) -> Tensor:
        calls.append((inputs, named))
        return study.model.denoiser(*inputs, **named)

    # The first step of modulated layers makes their caches, so that a step to be timed follows another.
    study.model.sample(seen, range(study.batch), steps=max(2, min(4, study.steps)), solver=study.solver)
    kept = [_on(study, call) for call in calls]
    half = torch.bfloat16 if study.dtype == torch.bfloat16 else torch.float16
    with report.live():
        with report.stage("calibrate") as bar:
            calibration = study.calibration(variant, told(bar))
        with report.stage("bench") as bar:
            return _rows(study, variant, calibration, kept, half, runs, bar)


@torch.no_grad()
def _rows(
    study: Study, variant: Variant, calibration: Calibration, kept: list[Any], half: torch.dtype, runs: int, bar: Bar
) -> list[Row]:
    rows: list[Row] = []
    for name, dtype in (("FP32", torch.float32), (str(half).removeprefix("torch."), half)):
        plain = copy.deepcopy(study.model.denoiser).to(study.device, dtype)
        inputs = [typed_call(study.model, dtype, *call) for call in kept]
        rows.append(_row(f"{name}, eager", plain, inputs, runs, study))
        if any(isinstance(module, torch.nn.Conv2d) for module in plain.modules()):
            plain = plain.to(memory_format=torch.channels_last)
            rows.append(_row(f"{name}, eager, channels last", plain, inputs, runs, study))
        if study.device == "cuda":
            rows += _compiled(name, plain, inputs, runs, study)
        bar.share(name, len(rows) / _ROWS)
        del plain
    for method, ways in (("qdiff", (True, False)), ("qdiff-modiff", (False,))):
        asked = dataclasses.replace(variant, method=method)
        modulated = dataclasses.replace(study, dtype=half).prepared(asked, calibration).denoiser
        assert isinstance(modulated, Modulated)
        inputs = [typed_call(study.model, half, *call) for call in kept]
        for simulated in ways:
            modulated.simulate(simulated)
            what = "simulated" if simulated else "integers"
            rows.append(_row(f"{METHODS[asked.method]} {asked.bits}, {what}", modulated, inputs, runs, study))
            if study.device == "cuda" and not simulated:
                rows += _compiled(f"{METHODS[asked.method]} {asked.bits}, {what}", modulated, inputs, runs, study)
            bar.share(what, len(rows) / _ROWS)
    return rows


def _compiled(name: str, denoiser: nn.Module, inputs: list[Any], runs: int, study: Study) -> list[Row]:
    compiled, modulated = torch.compile(denoiser), denoiser if isinstance(denoiser, Modulated) else None
    return [
        _row(f"{name}, torch.compile", compiled, inputs, runs, study, modulated),
        _row(f"{name}, torch.compile, CUDA graph", Graphed(compiled), inputs, runs, study, modulated),
    ]


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def markdown(study: Study, rows: list[Row]) -> str:
    """A table, with what ran where."""
    first = next((row["ms"] for row in rows if row["what"].endswith("16, eager")), rows[0]["ms"])
    lines = [
        f"{device_name(study.device)}, torch {torch.__version__}, a step of {study.batch} samples",
        "",
        "| | ms | speed, to 16 bits eager | MiB |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [f"| {row['what']} | {row['ms']:.2f} | {first / row['ms']:.2f} | {row['mib'] or ''} |" for row in rows]
    return "\n".join(lines)


def _on(study: Study, call: Any) -> Any:
    inputs, named = call
    return tuple(x.to(study.device) for x in inputs), {name: x.to(study.device) for name, x in named.items()}


def _row(
    name: str, denoiser: Denoiser, calls: list[Any], runs: int, study: Study, reset: Modulated | None = None
) -> Row:
    held = reset or (denoiser if isinstance(denoiser, Modulated) else None)
    on_gpu = study.device == "cuda"
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
