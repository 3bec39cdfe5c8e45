"""Linear layers and GEGLU on one GPU of compute capability 9.0: our kernels in FP16 and INT8 beside torch's.

    python bench/linear.py [--sizes ROWSxOUTPUTSxDEPTH …] [--output FOLDER]

A layer's calls are recorded in a CUDA graph, each with another weight and input, together more than the L2 cache holds, and the
graphs of a shape take turns. Latency is that of a graph over its calls, the median of the turns; its spread is half the
distance between the quartiles. The time of INT8 and FP8 includes the quantisation of rows, unless a column says otherwise. For
GEGLU, torch's and Triton's times are of the product of both layers alone; a column has the time of the rest. Triton's kernels
have a scale for each group of 128 channels of a row and block of 128 × 128 of the weight; torchao, where it is installed, one
for each row and output, compiled. Errors are relative to float64, of inputs from N(0, 1). Writes linear.md; nothing is
asserted, tests/gpu/test_linear.py, test_int8_linear.py and test_grouped_products_on_gpu.py compare the results.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import int8_linear as int8
import torch
from attention import median_and_spread
from torch import Tensor

from trtconvert.c_structs import LINEAR_VERSION, LinearParams
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


LAYERS = [Layer(4096, 4096, 4096)]
# SDXL at 1024² and SD 1.5 at 512², each with the two halves of guidance, and sizes that are left to TensorRT.
LAYERS += [Layer(2048, 1280, 1280), Layer(2048, 1280, 5120), Layer(2048, 5120, 1280), Layer(2048, 3840, 1280)]
LAYERS += [Layer(8192, 640, 640), Layer(8192, 640, 2560), Layer(8192, 1920, 640)]
LAYERS += [Layer(8192, 320, 320), Layer(8192, 320, 1280), Layer(8192, 960, 320)]
LAYERS += [Layer(2048, 5120, 1280, True), Layer(8192, 2560, 640, True), Layer(8192, 1280, 320, True)]
LAYERS += [Layer(1024, 1280, 5120), Layer(2048, 640, 2560), Layer(154, 25600, 2048)]
# MLPs and projections of Flux, video models, PixArt-Σ and SD 3.5.
LAYERS += [Layer(4608, 12288, 3072), Layer(4608, 3072, 12288), Layer(4608, 3072, 3072), Layer(4608, 9216, 3072)]
LAYERS += [Layer(17160, 8960, 1536), Layer(17160, 1536, 8960), Layer(8192, 4608, 1152), Layer(8192, 1152, 4608)]
LAYERS += [Layer(8500, 6144, 1536), Layer(8500, 1536, 6144)]
FEW_ROWS = [
    Layer(1, 18432, 3072),
    Layer(2, 18432, 3072),
    Layer(16, 18432, 3072),
    Layer(2, 9216, 3072),
    Layer(2, 1280, 1280),
]
"""Modulations and embeddings of timesteps."""
CALLS, FEWEST_CALLS, ROUNDS, WARM_UP = 40, 8, 20, 3
GRAPH_OPERATIONS = 4e12  # most operations of a graph: 5 ms
ROTATED_BYTES = 200e6  # an H200's L2 cache is 60 MB

NAMES = (
    "cuBLAS", "ours", "torch, GEGLU", "INT8", "weights only", "Triton INT8", "torchao INT8", "_int_mm", "_int_mm compiled", "FP8",
    "FP8 product",
)  # fmt: skip
"""Names of the functions that take turns, in the order of the table."""

MOST_FEW_ROWS = 16
"""Most rows of the kernel for few rows; the weights of such layers take all of the time."""

Call = Callable[[int], object]
"""A call; the argument is the index of its tensors."""


def ours(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> None:
    """x [M, K], weight [N, K] and bias [N], or [2, N, K] and [2, N], y [M, N], all FP16."""
    pointers = [tensor.data_ptr() for tensor in (x, weight, bias, y)]
    geglu = weight.dim() == 3
    stream = torch.cuda.current_stream().cuda_stream
    given = LinearParams(ctypes.sizeof(LinearParams), LINEAR_VERSION, *x.shape, y.shape[1], 0, geglu, *pointers, stream)
    message = ctypes.create_string_buffer(512)
    if load_library().trtconvert_linear_run(ctypes.byref(given), message, len(message)):
        raise RuntimeError(message.value.decode())


def calls_of(layer: Layer) -> tuple[dict[str, Callable[[int], Tensor]], Tensor]:
    """Returns the functions that take turns, by name, each rotating over its own tensors; and the first result in float64."""
    factor = 2 if layer.geglu else 1
    of_one = 2 * (layer.rows * (layer.depth + layer.outputs) + factor * layer.outputs * layer.depth)
    sets = max(2, min(CALLS, round(ROTATED_BYTES / of_one)))

    def drawn(*shape: int, factor: float = 1.0) -> list[Tensor]:
        return [torch.randn(shape, device="cuda").mul_(factor).half() for _ in range(sets)]

    x, y = drawn(layer.rows, layer.depth), drawn(layer.rows, layer.outputs)
    weight = drawn(factor * layer.outputs, layer.depth, factor=layer.depth**-0.5)
    bias = drawn(factor * layer.outputs)
    in_int8 = [int8.Int8Layer.of(*of, layer.geglu) for of in zip(weight, bias, strict=True)]
    in_blocks = [int8.BlockLayer.of(*of) for of in zip(weight, bias, strict=True)]
    in_fp8 = [int8.Fp8Layer.of(*of) for of in zip(weight, bias, strict=True)]
    rows, fp8_rows = int8.Rows.like(x[0]), [int8.fp8_rows(of) for of in x]

    def product(i: int) -> Tensor:
        return torch.addmm(bias[i % sets], x[i % sets], weight[i % sets].T)

    def in_one(i: int) -> Tensor:
        i %= sets
        shaped = [tensor[i].unflatten(0, (2, -1)) if layer.geglu else tensor[i] for tensor in (weight, bias)]
        ours(x[i], *shaped, y[i])
        return y[i]

    def quantised(i: int) -> Tensor:
        i %= sets
        rows.quantise(x[i])
        in_int8[i].run(x[i], y[i], rows)
        return y[i]

    def weights_only(i: int) -> Tensor:
        i %= sets
        in_int8[i].run(x[i], y[i])
        return y[i]

    def int_mm(i: int, *around: Callable) -> Tensor:
        return int8.int_mm(in_int8[i % sets], x[i % sets], *around)

    found: dict[str, Callable[[int], Tensor]] = {"cuBLAS": product, "ours": in_one}
    if layer.geglu:
        found["torch, GEGLU"] = lambda i: int8.gated(product(i))
    found |= {
        "INT8": quantised,
        "weights only": weights_only,
        "Triton INT8": lambda i: in_blocks[i % sets].run(x[i % sets]),
    }
    if layer.rows > MOST_FEW_ROWS and importlib.util.find_spec("torchao"):
        of_torchao = [int8.torchao_layer(*of) for of in zip(weight, bias, strict=True)]
        found["torchao INT8"] = lambda i: int8.compiled_linear(x[i % sets], *of_torchao[i % sets])
    if layer.rows > MOST_FEW_ROWS:  # torch._int_mm refuses fewer rows
        found["_int_mm"] = lambda i: int_mm(i, int8.quantised_rows, int8.dequantised)
        found["_int_mm compiled"] = lambda i: int_mm(i, int8.compiled_rows, int8.compiled_dequantised)
        found["FP8"] = lambda i: in_fp8[i % sets].product(*int8.compiled_fp8_rows(x[i % sets]))
        found["FP8 product"] = lambda i: in_fp8[i % sets].product(*fp8_rows[i % sets])
    else:
        del found["ours"], found["INT8"]
    exact = torch.addmm(*(tensors[0].double() for tensors in (bias, x)), weight[0].double().T)
    return found, int8.gated(exact) if layer.geglu else exact


def errors_of(calls: dict[str, Callable[[int], Tensor]], exact: Tensor) -> dict[str, float]:
    """Returns ‖y − y64‖ / ‖y64‖ of each function with the first tensors; torch's GEGLU is completed in float64."""
    found = {}
    for name in ("cuBLAS", "INT8", "weights only", "Triton INT8", "torchao INT8", "_int_mm", "FP8"):
        if name not in calls:
            continue
        y = calls[name](0).double()
        y = y if y.shape == exact.shape else int8.gated(y)
        found[name] = float((y - exact).norm() / exact.norm())
    return found


def recorded(call: Call, calls: int = CALLS) -> torch.cuda.CUDAGraph:
    """Returns a graph of calls one after another."""
    graph = torch.cuda.CUDAGraph()
    call(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, calls: int = CALLS) -> float:
    """Returns the microseconds of a call in a graph."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def measured(calls: Mapping[str, Call], number: int = CALLS) -> dict[str, tuple[float, float]]:
    """Returns the median microseconds, and half the distance between the quartiles, of functions that take turns."""
    graphs = {name: recorded(call, number) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn, (name, graph) in itertools.product(range(ROUNDS), graphs.items()):
        time = microseconds(graph, number)
        if turn >= WARM_UP:
            times[name].append(time)
    return {name: median_and_spread(of_turns) for name, of_turns in times.items()}


def row(layer: Layer, found: dict[str, tuple[float, float]], errors: dict[str, float]) -> str:
    cells = [f"{found[name][0]:.1f} ± {found[name][1]:.1f}" if name in found else "" for name in NAMES]
    best = "INT8" if "INT8" in found else "weights only"
    faster = [
        f"{found['cuBLAS'][0] / found[name][0]:.2f}×" if name in found else "" for name in ("ours", best, "Triton INT8")
    ]
    told = ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
    return f"| {layer} | {' | '.join(cells)} | {' | '.join(faster)} | {told} |"


def write_table(lines: list[str], path: Path) -> None:
    """Writes and prints a description of the machine, and lines of Markdown below."""
    text = f"{torch.cuda.get_device_name()}, {datetime.date.today()}, torch {torch.__version__}, FP16\n\n"
    text += "\n".join(lines) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"\n{text}")


def size(text: str) -> Layer:
    """Reads a layer of the command line."""
    rows, outputs, depth = map(int, text.split("x"))
    return Layer(rows, outputs, depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=size, default=LAYERS + FEW_ROWS, metavar="ROWSxOUTPUTSxDEPTH")
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    arguments = parser.parse_args()
    if not has_linear_kernel():
        raise BackendUnavailable(
            "there is nothing to measure",
            expected="a GPU of compute capability 9.0, and a library compiled for 90a",
            got="no kernel for linear layers here",
            remedy="run it on an H100 or H200",
        )
    lines = [f"| rows × outputs × depth | {', µs | '.join(NAMES)}, µs | ours | INT8 | Triton | relative errors |"]
    lines.append("| --- |" + " ---: |" * (len(NAMES) + 3) + " --- |")
    for layer in arguments.sizes:
        operations = 2 * layer.rows * layer.outputs * layer.depth * (2 if layer.geglu else 1)
        number = max(FEWEST_CALLS, min(CALLS, round(GRAPH_OPERATIONS / operations)))
        calls, exact = calls_of(layer)
        errors = errors_of(calls, exact)
        del exact
        lines.append(row(layer, measured(calls, number), errors))
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
    write_table(lines, arguments.output / "linear.md")


if __name__ == "__main__":
    main()
