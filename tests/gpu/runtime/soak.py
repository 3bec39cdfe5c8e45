"""What a loaded engine stands for long: `make soak-gpu`, or on a machine with a GPU, in the repository's root,

    PYTHONPATH=. python tests/gpu/runtime/soak.py [--seconds 60] [BUNDLE]

BUNDLE holds the shipped digits model and an engine of this GPU; without one it is built. Prints counts and faults as JSON; the
exit code is 1 where there are faults.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_runtime import digits_bundle, held, make_inputs, resident

from trtconvert import runtime
from trtconvert.engine import tensorrt
from trtconvert.errors import BackendUnavailable

MOST = 16  # samples of a batch; more shapes than graphs are kept of
THREADS, STREAMS = 8, 4
DEVICE_GROWTH = 32 * 2**20
"""Bytes of device memory, which allocators and the driver round up to. Of thousands, what stays of each would be more."""
HOST_GROWTH = 64 * 2**20
"""Bytes of host memory: the driver keeps some memory of graphs. An engine that stays takes 3 MiB or more each time."""
FILLINGS = 20
HANGS_AFTER = 1800
"""Seconds for the rest of the script, which takes some hundreds. At the limit the script names its place and ends."""

Sets = list[list[torch.Tensor]]
Report = dict[str, Any]


def changing_shapes(folder: Path, calls: int, faults: list[str]) -> Report:
    """One caller, who gives another number of samples each time."""
    with runtime.load(folder, backend="tensorrt") as bundle:
        denoiser, sets, expected = bundle["denoiser"], *_prepared(bundle)
        order, wrong = random.Random(0), torch.zeros((), dtype=torch.int64, device="cuda")

        def call(count: int) -> None:
            for _ in range(count):
                index = order.randrange(len(sets))
                wrong.add_(torch.count_nonzero(denoiser(*sets[index]) != expected[index]))

        call(max(calls // 10, 10))
        device, host = held(), resident()
        call(calls)
        grown = {"device": held() - device, "host": resident() - host}
        if int(wrong):
            faults.append(f"changing shapes: {int(wrong)} elements differ from those of the first calls")
        _check_growth("changing shapes", grown, faults)
        return {"calls": calls, "shapes": len(sets), "graphs_recorded": denoiser.graphs_recorded, "grown_bytes": grown}


def loads(folder: Path, cycles: int, faults: list[str]) -> Report:
    """A bundle that is loaded, called and closed, over and over."""
    inputs = make_inputs()

    def cycle() -> None:
        with runtime.load(folder, backend="tensorrt") as bundle:
            for _ in range(3):
                bundle["denoiser"](*inputs)

    for _ in range(min(10, cycles)):
        cycle()
    device, host = held(), resident()
    for _ in range(cycles):
        cycle()
    grown = {"device": held() - device, "host": resident() - host}
    _check_growth("loads", grown, faults)
    return {"cycles": cycles, "grown_bytes": grown}


def threads(folder: Path, seconds: float, faults: list[str]) -> Report:
    """Threads that call on streams which all of them have, as a server's do."""
    with runtime.load(folder, backend="tensorrt", streams=STREAMS) as bundle:
        denoiser, sets, expected = bundle["denoiser"], *_prepared(bundle)
        streams = [torch.cuda.Stream() for _ in range(STREAMS)]
        calls, grown = [0] * THREADS, {}

        def work(number: int, until: float) -> None:
            order, differing = random.Random(number), list[torch.Tensor]()
            try:
                while time.monotonic() < until:
                    for _ in range(64):
                        index = order.randrange(len(sets))
                        with torch.cuda.stream(order.choice(streams)):
                            output = denoiser(*sets[index])
                            differing.append(torch.count_nonzero(output != expected[index]))
                        calls[number] += 1
                    for stream in streams:
                        stream.synchronize()
                    if wrong := sum(int(x) for x in differing):
                        faults.append(f"threads: {wrong} elements differ in thread {number}")
                        return
                    differing.clear()
            except Exception:
                faults.append(f"threads: {traceback.format_exc()}")

        def run(duration: float) -> None:
            until = time.monotonic() + duration
            running = [threading.Thread(target=work, args=(n, until), daemon=True) for n in range(THREADS)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join(max(until + 120 - time.monotonic(), 1))
                if thread.is_alive():
                    raise TimeoutError("threads: one hangs, 2 minutes after its end")

        run(min(seconds / 10, 30))
        calls[:] = [0] * THREADS
        device, host = held(), resident()
        run(seconds)
        grown = {"device": held() - device, "host": resident() - host}
        _check_growth("threads", grown, faults)
        return {"seconds": seconds, "threads": THREADS, "streams": STREAMS, "calls": sum(calls), "grown_bytes": grown}


def processes(folder: Path, calls: int, faults: list[str]) -> Report:
    """Two of them on one GPU at once, which compute the same."""
    command = [sys.executable, __file__, str(folder), "--calls", str(calls), "--as-one-of-two"]
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    options["env"] = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    running = [subprocess.Popen(command, **options) for _ in range(2)]
    ended = []
    for process in running:
        try:
            output, errors = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()[0], "it hangs: 10 minutes"
        if process.returncode:
            faults.append(f"processes: exit code {process.returncode}: {output[-1000:]} {errors[-2000:]}")
        else:
            ended.append(json.loads(output))
    if len({one["outputs"] for one in ended}) > 1:
        faults.append("processes: the two computed differently")
    faults += [f"processes: {fault}" for one in ended for fault in one["faults"]]
    return {"processes": len(ended), "calls": [one["calls"] for one in ended]}


def one_of_two(folder: Path, calls: int) -> Report:
    faults: list[str] = []
    with runtime.load(folder, backend="tensorrt") as bundle:
        _, expected = _prepared(bundle)
        digest = hashlib.sha256(b"".join(x.cpu().numpy().tobytes() for x in expected)).hexdigest()
    made = changing_shapes(folder, calls, faults)
    return {"calls": made["calls"], "outputs": digest, "faults": faults}


def full_memory(folder: Path, faults: list[str]) -> Report:
    """A GPU that others fill while calls are made: a call is made as ever or refused, and when there is room all are made."""
    refused, made, reasons, order = 0, 0, set[str](), random.Random(0)
    with runtime.load(folder, backend="tensorrt", streams=2) as bundle:
        denoiser, sets, expected = bundle["denoiser"], *_prepared(bundle)
        for _ in range(FILLINGS):
            for _ in range(order.randrange(20)):
                denoiser(*sets[order.randrange(len(sets))])
            streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
            outputs: list[tuple[int, torch.Tensor]] = []
            filling = _filling()
            try:
                for _ in range(20):
                    index = order.randrange(len(sets))
                    try:
                        with torch.cuda.stream(order.choice(streams)):
                            outputs.append((index, denoiser(*sets[index])))
                        made += 1
                    except BackendUnavailable as error:
                        refused += 1
                        reasons.add(error.problem)
                    except Exception:
                        faults.append(f"full memory: no user's error: {traceback.format_exc()}")
            finally:
                filling.clear()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            outputs += [(index, denoiser(*inputs)) for index, inputs in enumerate(sets)]
            torch.cuda.synchronize()
            if wrong := sum(not torch.equal(output, expected[index]) for index, output in outputs):
                faults.append(f"full memory: {wrong} outputs differ")
    if not refused:
        faults.append("full memory: no call was refused, so that nothing was tried")
    return {"fillings": FILLINGS, "calls_made": made, "calls_refused": refused, "problems": sorted(reasons)}


def _filling() -> list[torch.Tensor]:
    """All the memory that the GPU has left, in blocks of falling size."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    blocks, size = list[torch.Tensor](), 2**34
    while size >= 2**16:
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return blocks


def _prepared(bundle: runtime.LoadedBundle) -> tuple[Sets, list[torch.Tensor]]:
    """Inputs of every number of samples, and what the denoiser makes of them."""
    sets = [make_inputs(batch, seed=batch) for batch in range(1, MOST + 1)]
    expected = [bundle["denoiser"](*inputs) for inputs in sets]
    torch.cuda.synchronize()
    return sets, expected


def _check_growth(what: str, grown: dict[str, int], faults: list[str]) -> None:
    for where, limit in (("device", DEVICE_GROWTH), ("host", HOST_GROWTH)):
        if grown[where] > limit:
            faults.append(
                f"{what}: {grown[where] / 2**20:.0f} MiB of {where} memory were left, of at most {limit / 2**20:.0f}"
            )


def soak(folder: Path, *, seconds: float, calls: int, cycles: int) -> Report:
    """All of it.

    Args:
        seconds: of the threads; calls: of changing shapes; cycles: of loading.
    Returns:
        Counts, and what went wrong under "faults".
    """
    faults: list[str] = []
    parts: Sequence[tuple[str, Callable[[], Report]]] = (
        ("changing_shapes", lambda: changing_shapes(folder, calls, faults)),
        ("loads", lambda: loads(folder, cycles, faults)),
        ("threads", lambda: threads(folder, seconds, faults)),
        ("processes", lambda: processes(folder, calls // 2, faults)),
        ("full_memory", lambda: full_memory(folder, faults)),
    )
    found: Report = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat()}
    for name, part in parts:
        began = time.monotonic()
        try:
            found[name] = part()
        except Exception:
            faults.append(f"{name}: {traceback.format_exc()}")
            found[name] = {}
        found[name]["took_seconds"] = round(time.monotonic() - began, 1)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found | {"faults": faults}


def main() -> int:
    parser = argparse.ArgumentParser(description="Soaks a loaded engine of the shipped digits model.")
    parser.add_argument("bundle", nargs="?", type=Path, help="with an engine of this GPU; built where none is given")
    parser.add_argument("--seconds", type=float, default=600, help="of the threads")
    parser.add_argument("--calls", type=int, default=10_000, help="of changing shapes")
    parser.add_argument("--loads", type=int, default=100)
    parser.add_argument("--as-one-of-two", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not tensorrt.status().available:
        parser.error(f"expected a GPU, TensorRT and the library, got: {tensorrt.status().detail}")
    if given.as_one_of_two:
        print(json.dumps(one_of_two(given.bundle, given.calls)))
        return 0
    faulthandler.dump_traceback_later(1.2 * given.seconds + HANGS_AFTER, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        bundle = given.bundle or digits_bundle(Path(folder))
        found = soak(bundle, seconds=given.seconds, calls=given.calls, cycles=given.loads)
    print(json.dumps(found, indent=1))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
