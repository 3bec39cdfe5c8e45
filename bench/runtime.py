"""Host time of one call of a loaded TensorRT engine, beside the host time of TensorRT and CUDA alone.

    trtconvert compile BUNDLE && python bench/runtime.py BUNDLE [--json FILE] [--fused BUNDLE] [--devices cuda:0 cuda:1]

For the opt shape of each profile: TensorRT's enqueue alone with every address set before, our call without CUDA graphs, the
launch of a CUDA graph of the enqueue alone, and our call with CUDA graphs. Our calls are also made with all inputs at new
addresses, like a sampler's: a new address costs. Time is the host's, from entering the call to its return, median and middle
half of many calls; waits for the device are between groups of calls, outside the time. The candidates take turns, a group of
calls each. The overhead of a call is the median of the differences between neighbouring groups, because other work on the host
comes and goes, and affects all of them. Nothing is asserted.

With `--fused` and a bundle of the same model with engine.guidance: fused, the script instead times whole steps with
classifier-free guidance at the opt shape of its first profile: doubled latents, one call and the sum in torch, against one call
with guidance inside. With `--devices` it instead times whole calls on the first GPU and on all GPUs, at one, two, … times the opt
batch. Both are times from step to step, including waits for the device between groups of steps.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert import runtime
from trtconvert.runtime.batches import AnyBatch
from trtconvert.runtime.component import Component
from trtconvert.runtime.signature import dtype_of, shape_of
from trtconvert.runtime.tensorrt import TensorRTComponent

GROUPS, CALLS = 100, 10
"""Few calls between waits, so that no call waits for room in the stream's queue."""


def host_us(calls: Sequence[Callable[[], object]]) -> list[list[list[float]]]:
    """Returns the host times of calls that take turns in microseconds, for each call by groups."""
    times: list[list[list[float]]] = [[] for _ in calls]
    for group in range(-1, GROUPS):
        for call, of_call in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            found = []
            for _ in range(CALLS):
                start = time.perf_counter_ns()
                call()
                found.append((time.perf_counter_ns() - start) / 1e3)
            if group >= 0:  # the first group warms up
                of_call.append(found)
    return times


def step_us(calls: Sequence[Callable[[], object]]) -> list[list[float]]:
    """Returns the microseconds from call to call of functions that take turns, by groups. Each group waits for all GPUs."""
    gpus = range(torch.cuda.device_count())
    times: list[list[float]] = [[] for _ in calls]
    for group in range(-2, GROUPS // 2):  # the first two record graphs and warm up
        for call, of_call in zip(calls, times, strict=True):
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            for gpu in gpus:
                torch.cuda.synchronize(gpu)
            if group >= 0:
                of_call.append((time.perf_counter_ns() - start) / 1e3 / CALLS)
    return times


def example(denoiser: Component, profile: dict[str, tuple[int, int, int]], samples: int = 1) -> list[Tensor]:
    """Returns inputs of a profile's opt shape, on the GPU: zeros, because the host's time does not depend on values.

    Args:
        samples: factor of the opt batch.
    """
    sizes = {name: opt * (samples if name.partition("_")[0] == "batch" else 1) for name, (_, opt, _) in profile.items()}
    return [
        torch.zeros(shape_of(spec.shape, sizes), dtype=dtype_of(spec), device=denoiser.device)
        for spec in denoiser.signature.component.inputs
    ]


class Raw:
    """The enqueue alone, on a context with shapes and addresses already set."""

    def __init__(self, denoiser: TensorRTComponent, profile: int, inputs: list[Tensor]) -> None:
        engine = denoiser.engine
        given = denoiser(*inputs)
        outputs = given if isinstance(given, tuple) else (given,)
        self._kept = (engine, inputs, outputs)
        self.context = engine.create_execution_context()
        self.context.set_optimization_profile_async(profile, torch.cuda.current_stream().cuda_stream)
        for name, x in zip(denoiser.signature.names, inputs, strict=True):
            self.context.set_input_shape(name, tuple(x.shape))
            self.context.set_tensor_address(name, x.data_ptr())
        for spec, x in zip(denoiser.signature.component.outputs, outputs, strict=True):
            self.context.set_tensor_address(spec.name, x.data_ptr())

    def __call__(self) -> None:
        if not self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise SystemExit("TensorRT could not run the engine")


def recorded(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of a call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def figures(
    component: str,
    what: str,
    alone: Callable[[], object],
    ours: Callable[..., object],
    inputs: list[Tensor],
    others: list[Tensor],
) -> list[dict[str, Any]]:
    """Returns rows of the wrapped function, of the call, and of the call with inputs that move."""
    turns = itertools.cycle([others, inputs])
    kinds = {
        f"{what} alone": alone,
        f"{what} in our call": lambda: ours(*inputs),
        f"{what} in our call, inputs elsewhere every time": lambda: ours(*next(turns)),
    }
    shape = " ".join("×".join(map(str, x.shape)) or "scalar" for x in inputs)
    rows: list[dict[str, Any]] = []
    times = host_us(list(kinds.values()))
    for kind, groups in zip(kinds, times, strict=True):
        quartiles = statistics.quantiles(itertools.chain(*groups), n=4)
        found = dict(zip(("low", "us", "high"), quartiles, strict=True))
        beside = [statistics.median(mine) - statistics.median(its) for mine, its in zip(groups, times[0], strict=True)]
        over = statistics.median(beside) if rows else None
        rows.append({"component": component, "inputs": shape, "what": kind} | found | {"over": over})
    return rows


def bench(folder: Path) -> list[dict[str, Any]]:
    rows = []
    with (
        runtime.load(folder, backend="tensorrt") as graphs,
        runtime.load(folder, backend="tensorrt", graphs=0) as plain,
    ):
        for name, denoiser in graphs.components.items():
            assert isinstance(denoiser, TensorRTComponent)
            for number, profile in enumerate(denoiser.signature.profiles):
                inputs, others = example(denoiser, profile), example(denoiser, profile)
                raw = Raw(denoiser, number, inputs)
                rows += figures(name, "enqueue", raw, plain[name], inputs, others)
                rows += figures(name, "graph launch", recorded(raw).replay, denoiser, inputs, others)
    return rows


def guided_steps(separate: Path, fused: Path) -> dict[str, Callable[[], object]]:
    """Returns a step with guidance, by the place that computes the sum."""
    with_halves, with_sum = (runtime.load(folder, backend="tensorrt")["denoiser"] for folder in (separate, fused))
    component = with_sum.signature.component
    if component.guidance is None:
        raise SystemExit(f"{fused} was not built with engine.guidance: fused")
    given = dict(zip(with_sum.signature.names, example(with_sum, with_sum.signature.profiles[0]), strict=True))
    negative, sample = component.guidance.negative, component.inputs[0].name
    pairs = {name: torch.cat([given[twin], given[name]]) for name, twin in negative.items()}
    timesteps = torch.cat([given[component.timestep_input]] * 2)
    shared = {name: given[name] for name in with_halves.signature.names if name not in (sample, *negative)}

    def in_torch() -> Tensor:
        x = torch.cat([given[sample]] * 2)
        both = with_halves(**{**shared, **pairs, sample: x, component.timestep_input: timesteps})
        unconditional, conditional = both.chunk(2)
        return unconditional + 7.5 * (conditional - unconditional)

    batch = len(given[sample])
    return {
        f"batch {batch}, two halves, the sum in torch": in_torch,
        f"batch {batch}, guidance inside": lambda: with_sum(**given),
    }


def shared_calls(folder: Path, devices: Sequence[str]) -> list[dict[str, Callable[[], object]]]:
    """Times a call on one GPU and on all GPUs, for several batches."""
    one = runtime.load(folder, backend="tensorrt", device=devices[0])["denoiser"]
    every = runtime.load(folder, backend="tensorrt", devices=devices)["denoiser"]
    drawn = AnyBatch(one)
    found = []
    for times in range(1, len(devices) + 1):
        inputs = example(one, dict(one.signature.profiles[0]), times)
        batch = len(inputs[0])
        found.append(
            {
                f"batch {batch}, one GPU": lambda inputs=inputs: drawn(*inputs),
                f"batch {batch}, {len(devices)} GPUs": lambda inputs=inputs: every(*inputs),
            }
        )
    return found


def compared(steps: dict[str, Callable[[], object]]) -> list[dict[str, Any]]:
    """Returns rows of functions that take turns, each with its speed relative to the first."""
    rows = []
    for what, times in zip(steps, step_us(list(steps.values())), strict=True):
        low, middle, high = statistics.quantiles(times, n=4)
        first = rows[0]["us"] if rows else middle
        rows.append({"what": what, "us": middle, "low": low, "high": high, "speedup": first / middle})
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument(
        "--fused", type=Path, help="a bundle of the same model with engine.guidance: fused, to compare with"
    )
    parser.add_argument("--devices", nargs="+", help="GPUs to share calls out among, such as cuda:0 cuda:1")
    arguments = parser.parse_args()
    heading = {"date": str(datetime.date.today()), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(", ".join(heading.values()), end="\n\n")
    if arguments.fused or arguments.devices:
        steps = [guided_steps(arguments.bundle, arguments.fused)] if arguments.fused else []
        steps += shared_calls(arguments.bundle, arguments.devices) if arguments.devices else []
        rows = [row for one in steps for row in compared(one)]
        print("| what | step, µs | middle half | speedup |")
        print("| --- | --- | --- | --- |")
        for row in rows:
            print(f"| {row['what']} | {row['us']:.1f} | {row['low']:.1f}–{row['high']:.1f} | {row['speedup']:.2f}× |")
        if arguments.json:
            arguments.json.write_text(json.dumps(heading | {"rows": rows}))
        return
    rows = bench(arguments.bundle)
    print("| component, inputs | what | host, µs | middle half | over what it wraps, µs |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        over = "" if row["over"] is None else f"{row['over']:+.1f}"
        print(
            f"| {row['component']}, {row['inputs']} | {row['what']} | {row['us']:.1f} "
            f"| {row['low']:.1f}–{row['high']:.1f} | {over} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(heading | {"rows": rows}))


if __name__ == "__main__":
    main()
