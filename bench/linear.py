"""Linear layers and GEGLU on one GPU of compute capability 9.0: our kernel beside torch's `addmm`, which is cuBLAS.

    python bench/linear.py [--output FOLDER]

A layer's calls are recorded in a CUDA graph, each with another weight and input, together more than the L2 cache holds, and the
graphs of a shape take turns. Latency is that of a graph over its calls, the median of the turns; its spread is half the distance
between the quartiles. Of GEGLU cuBLAS has the product of both layers alone, and a third column what torch needs besides. Writes
linear.md; nothing is asserted, tests/gpu/test_linear.py compares the results.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from attention import median_and_spread
from torch import Tensor
from torch.nn import functional as F

from trtconvert.errors import BackendUnavailable
from trtconvert.library import has_linear_kernel, load_library


@dataclass(frozen=True)
class Layer:
    """outputs × depth, twice with GEGLU, on rows."""

    rows: int
    outputs: int
    depth: int
    geglu: bool = False

    def __str__(self) -> str:
        what, two = ("GEGLU of ", "2 · ") if self.geglu else ("", "")
        return f"{what}{self.rows:,} × {two}{self.outputs:,} × {self.depth:,}"


# Of SDXL at 1024², of Stable Diffusion 1.5 at 512², each with the two halves of guidance, and sizes that are left to TensorRT.
LAYERS = [Layer(2048, 1280, 1280), Layer(2048, 1280, 5120), Layer(2048, 3840, 1280)]
LAYERS += [Layer(8192, 640, 640), Layer(8192, 640, 2560), Layer(8192, 1920, 640)]
LAYERS += [Layer(8192, 320, 320), Layer(8192, 320, 1280), Layer(8192, 960, 320)]
LAYERS += [Layer(2048, 5120, 1280, True), Layer(8192, 2560, 640, True), Layer(8192, 1280, 320, True)]
LAYERS += [Layer(1024, 1280, 5120), Layer(2048, 640, 2560), Layer(154, 25600, 2048)]
CALLS, ROUNDS, WARM_UP = 40, 25, 3
ROTATED_BYTES = 200e6  # an H200's L2 cache is 60 MB

NAMES = ("cuBLAS", "ours", "torch, GEGLU")
"""Of what takes turns, in the order of the table; the last for GEGLU alone."""

Call = Callable[[int], object]
"""With the index of its tensors."""


class Params(ctypes.Structure):
    """TrtConvertLinearParams of linear.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("struct_size", "version")),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("in_channels", "out_channels", "data_type", "geglu")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "y", "stream")),
    ]


def ours(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> None:
    """x [M, K], weight [N, K] and bias [N], or [2, N, K] and [2, N], y [M, N], all FP16."""
    pointers = [tensor.data_ptr() for tensor in (x, weight, bias, y)]
    geglu = weight.dim() == 3
    stream = torch.cuda.current_stream().cuda_stream
    given = Params(ctypes.sizeof(Params), 1, *x.shape, y.shape[1], 0, geglu, *pointers, stream)
    message = ctypes.create_string_buffer(512)
    if load_library().trtconvert_linear_run(ctypes.byref(given), message, len(message)):
        raise RuntimeError(message.value.decode())


def calls_of(layer: Layer) -> dict[str, Call]:
    """What takes turns, by name, over tensors of its own that rotate."""
    factor = 2 if layer.geglu else 1
    of_one = 2 * (layer.rows * (layer.depth + layer.outputs) + factor * layer.outputs * layer.depth)
    sets = max(2, min(CALLS, round(ROTATED_BYTES / of_one)))

    def drawn(*shape: int) -> list[Tensor]:
        return [torch.randn(shape, device="cuda").mul_(layer.depth**-0.5).half() for _ in range(sets)]

    x, y = drawn(layer.rows, layer.depth), drawn(layer.rows, layer.outputs)
    weight, bias = drawn(factor * layer.outputs, layer.depth), drawn(factor * layer.outputs)

    def product(i: int) -> Tensor:
        return torch.addmm(bias[i % sets], x[i % sets], weight[i % sets].T)

    def in_torch(i: int) -> Tensor:
        value, gate = product(i).chunk(2, dim=-1)
        return value * F.gelu(gate)

    def in_one(i: int) -> None:
        i %= sets
        shaped = [tensor[i].unflatten(0, (2, -1)) if layer.geglu else tensor[i] for tensor in (weight, bias)]
        ours(x[i], *shaped, y[i])

    found: dict[str, Call] = {"cuBLAS": product, "ours": in_one}
    return found | {"torch, GEGLU": in_torch} if layer.geglu else found


def recorded(call: Call) -> torch.cuda.CUDAGraph:
    """A graph of calls one after another."""
    graph = torch.cuda.CUDAGraph()
    call(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Of one of the calls in a graph."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / CALLS


def measured(calls: dict[str, Call]) -> dict[str, tuple[float, float]]:
    """Median microseconds, and half the distance between the quartiles, of what takes turns."""
    graphs = {name: recorded(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn, (name, graph) in itertools.product(range(ROUNDS), graphs.items()):
        time = microseconds(graph)
        if turn >= WARM_UP:
            times[name].append(time)
    return {name: median_and_spread(of_turns) for name, of_turns in times.items()}


def row(layer: Layer, found: dict[str, tuple[float, float]]) -> str:
    cells = [f"{found[name][0]:.1f} ± {found[name][1]:.1f}" if name in found else "" for name in NAMES]
    faster = found["cuBLAS"][0] / found["ours"][0]
    return f"| {layer} | {' | '.join(cells)} | {faster:.2f}× |"


def write_table(lines: list[str], path: Path) -> None:
    """Write lines of Markdown below what they were measured on, and print them."""
    text = f"{torch.cuda.get_device_name()}, {datetime.date.today()}, torch {torch.__version__}, FP16\n\n"
    text += "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    arguments = parser.parse_args()
    if not has_linear_kernel():
        raise BackendUnavailable(
            "there is nothing to measure",
            expected="a GPU of compute capability 9.0, and a library compiled for 90a",
            got="no kernel for linear layers here",
            remedy="run it on an H100 or H200",
        )
    lines = ["| rows × outputs × depth | cuBLAS, µs | ours, µs | torch with GEGLU, µs | against cuBLAS |"]
    lines.append("| --- |" + " ---: |" * 4)
    for layer in LAYERS:
        lines.append(row(layer, measured(calls_of(layer))))
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    write_table(lines, arguments.output / "linear.md")


if __name__ == "__main__":
    main()
