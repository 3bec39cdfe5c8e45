"""Attention on one GPU: our modes beside cuDNN and FlashAttention and, where importable, SageAttention and more.

    python bench/attention.py [--sweep | --prompts] [--energy SECONDS] [--output FOLDER]
    python bench/attention.py --sinks

Peers that need a package: SageAttention (sageattention), flash-attn-4, FlashAttention-3 in BF16 and FP8 (fa3-fwd), cuDNN's FP8
(nvidia-cudnn-frontend). Every time includes quantisation, unless a name says otherwise. Latency is the median of CUDA events
over rotating inputs. The queue is full before the first call, so no call waits for the host. The spread is half the distance
between the quartiles. The kernels of a shape take turns, so that all meet the same temperature and clocks of the GPU.
TFLOP/s = 4 B H N M D / time, of N queries and M keys. The error is relative L2 against FP32 attention of the same FP16 inputs.
Power is sampled through NVML while a kernel loops, after all times. Writes attention.md and attention.png; nothing is asserted.
With --sinks the script prints the errors of our modes where all queries attend to one key with a small value.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trtconvert.attention import kernel, reference
from trtconvert.attention.modes import Mode
from trtconvert.models.recorded_calls import relative_error


@dataclass(frozen=True)
class Shape:
    """The shape of one call, with as many keys as queries, or the keys of a prompt; masked: a key mask shows all keys."""

    batch: int
    heads: int
    queries: int
    dim: int
    prompt: int = 0
    masked: bool = False

    @property
    def keys(self) -> int:
        return self.prompt or self.queries

    def __str__(self) -> str:
        keys = f", {self.prompt} keys" if self.prompt else ""
        return f"{self.batch} {self.heads} {self.queries} {self.dim}{keys}{', masked' * self.masked}"

    def mask(self) -> Tensor | None:
        """[B, 1, 1, M] the key mask."""
        return torch.ones(self.batch, 1, 1, self.keys, dtype=torch.bool, device="cuda") if self.masked else None


SHAPES = [Shape(1, 24, 1024, 128), Shape(1, 24, 4096, 128), Shape(1, 24, 16384, 128)]
SHAPES += [Shape(2, 10, 4096, 64), Shape(1, 24, 16384, 64), Shape(2, 8, 4096, 40)]
# Attention of SDXL and SD 1.5 to a prompt, and the longest prompt for the kernel of one tile of keys.
PROMPTS = [Shape(2, 20, 1024, 64, 77), Shape(2, 10, 4096, 64, 77), Shape(2, 8, 4096, 40, 77), Shape(2, 8, 1024, 80, 77)]
# Of Flux, of PixArt-Σ with its 300 tokens and with fewer, and of LTX-Video.
PROMPTS += [Shape(1, 24, 4096, 128, 128), Shape(2, 16, 4096, 72, 300, True), Shape(2, 16, 4096, 72, 120, True)]
PROMPTS += [Shape(1, 32, 4992, 64, 128, True)]
SWEEP = [Shape(1, 24, n, 128) for n in (512, 2048, 8192, 32768)] + [Shape(b, 10, 4096, 64) for b in (1, 8, 16, 32)]
EIGHT_BIT_PEAK = 1979.0  # TFLOP/s of an H100 or H200: the ceiling of both products in 8 bits
ROUNDS, REPEATS, WARM_UP, ROTATION = 4, 9, 3, 3
QUEUE_CYCLES = 10_000_000  # some 5 ms of the GPU's clock, so that the host can enqueue all calls
WARM_UP_SECONDS, CALLS_PER_MARK = 1.0, 10  # of the loop for the power samples
SHAPES_PER_ROW = 7  # of the plot
LARGEST_EXACT = 4096  # tokens of the error's largest problem: exact attention holds N² logits per head

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Figure:
    shape: Shape
    name: str
    microseconds: float
    spread: float
    error: float | None
    memory: int  # bytes beyond inputs and output
    joules: float | None  # per call

    @property
    def tflops(self) -> float:
        s = self.shape
        return 4 * s.batch * s.heads * s.queries * s.keys * s.dim / self.microseconds / 1e6


def sdpa(backend: SDPBackend, mask: Tensor | None = None) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask)

    return attend


def peers(mask: Tensor | None = None) -> dict[str, Attention]:
    """Returns the installed peers that take the mask, by name."""
    if mask is not None:
        backends = {"cuDNN FP16": SDPBackend.CUDNN_ATTENTION, "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION}
        return {name: sdpa(backend, mask) for name, backend in backends.items()}
    found = {"cuDNN FP16": sdpa(SDPBackend.CUDNN_ATTENTION), "FlashAttention-2": sdpa(SDPBackend.FLASH_ATTENTION)}
    with contextlib.suppress(ImportError):
        found["SageAttention"] = importlib.import_module("sageattention").sageattn
    with contextlib.suppress(ImportError, AttributeError):
        flash4 = importlib.import_module("flash_attn.cute").flash_attn_func
        found["flash-attn-4"] = lambda q, k, v: flash4(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)
    with contextlib.suppress(ImportError):
        found |= flash3(importlib.import_module("fa3_fwd_interface").flash_attn_func)
    with contextlib.suppress(ImportError):
        found |= cudnn_fp8(importlib.import_module("cudnn"))
    return found


def flash3(attend: Callable[..., Any]) -> dict[str, Attention]:
    """Returns FlashAttention-3 (`fa3-fwd`) in BF16, and in FP8 with a scale for each head, quantised inside the time or before.
    Inputs are converted to BF16 before the time."""
    quantise = torch.compile(_to_fp8, dynamic=False)
    in_bf16, quantised = once(lambda *qkv: [x.bfloat16() for x in qkv]), once(quantise)

    def run(*qkv: Tensor, **scales: Tensor) -> Tensor:
        out = attend(*(x.transpose(1, 2) for x in qkv), **scales)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    def in_fp8(tensors: list[Tensor], scales: list[Tensor]) -> Tensor:
        return run(*tensors, **dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True)))

    return {
        "FlashAttention-3": lambda *qkv: run(*in_bf16(*qkv)),
        "FlashAttention-3 FP8": lambda *qkv: in_fp8(*quantise(*qkv)),
        "FlashAttention-3 FP8, quantised before": lambda *qkv: in_fp8(*quantised(*qkv)),
    }


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that prepares inputs outside of the timing, at their first use."""
    made: dict[int, Any] = {}

    def known(*qkv: Tensor) -> Any:
        key = qkv[0].data_ptr()
        if key not in made:
            made[key] = make(*qkv)
        return made[key]

    return known


def cudnn_fp8(cudnn: Any) -> dict[str, Attention]:
    """Returns cuDNN in FP8 (`nvidia-cudnn-frontend`) with a scale for each tensor, with quantisation inside the time or before.

    On Hopper the output is FP8 too, and needs a scale. The scale is that of the first call's largest element, found before the
    time, like the scale of the previous step in training frameworks. The time includes the conversion of the output to FP16.
    """
    quantise = torch.compile(_to_fp8_by_tensor, dynamic=False)
    handle = functools.cache(cudnn.create_handle)
    built = functools.cache(functools.partial(_CudnnFP8, cudnn, handle))
    quantised = once(quantise)

    def run(tensors: list[Tensor], scales: list[Tensor]) -> Tensor:
        return built(tensors[0].shape, tensors[1].shape)(tensors, scales)

    return {
        "cuDNN FP8": lambda *qkv: run(*quantise(*qkv)),
        "cuDNN FP8, quantised before": lambda *qkv: run(*quantised(*qkv)),
    }


class _CudnnFP8:
    """cuDNN's graph of attention in E4M3 of queries [B, H, N, D] and keys [B, H, M, D]."""

    SOFTMAX = 256.0  # of probabilities, at most 1, so that E4M3 holds them

    def __init__(self, cudnn: Any, handle: Callable[[], Any], queries: torch.Size, keys: torch.Size) -> None:
        fp8, fp32, heuristic = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT, cudnn.heur_mode.A
        self._cudnn, self._handle = cudnn, handle()
        graph = cudnn.pygraph(
            io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=self._handle
        )
        qkv = {
            name: graph.tensor(dim=list(size), stride=list(torch.empty(size, device="meta").stride()), data_type=fp8)
            for name, size in (("q", queries), ("k", keys), ("v", keys))
        }
        scalars = {
            name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=fp32)
            for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        }
        out, _, *largest = graph.sdpa_fp8(**qkv, **scalars, attn_scale=queries[-1] ** -0.5, generate_stats=False)
        stride = list(torch.empty(queries, device="meta").stride())
        out.set_output(True).set_dim(list(queries)).set_stride(stride).set_data_type(fp8)
        for one in largest:
            one.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([heuristic])
        graph.check_support()
        graph.build_plans()
        self._graph, self._qkv, self._scalars, self._outputs = graph, qkv, scalars, (out, *largest)
        self._workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
        self._softmax = torch.tensor([1 / self.SOFTMAX, self.SOFTMAX], device="cuda").split(1)
        self._queries = queries
        self._of_output: tuple[Tensor, Tensor] | None = None  # step and scale

    def __call__(self, tensors: list[Tensor], scales: list[Tensor]) -> Tensor:
        if self._of_output is None:
            _, largest = self._run(tensors, scales, torch.ones(1, device="cuda"))
            step = largest / torch.finfo(torch.float8_e4m3fn).max
            self._of_output = step, 1 / step
        step, scale = self._of_output
        out, _ = self._run(tensors, scales, scale)
        return _from_fp8(out, step)

    def _run(self, tensors: list[Tensor], scales: list[Tensor], scale_o: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(self._queries, dtype=torch.float8_e4m3fn, device="cuda")
        largest = torch.empty(2, device="cuda").split(1)
        values = (*tensors, *scales, *self._softmax, scale_o, out, *largest)
        names = (*self._qkv.values(), *self._scalars.values(), *self._outputs)
        self._cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream().cuda_stream)
        self._graph.execute(dict(zip(names, values, strict=True)), self._workspace, handle=self._handle)
        return out, largest[1]


# Each shape compiles a kernel; beyond dynamo's default limit of eight, peers would quantise without torch.compile.
torch._dynamo.config.recompile_limit = 64


@torch.compile(dynamic=False)
def _from_fp8(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).half()


def _to_fp8_by_tensor(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each tensor in E4M3, with its scale [1] FP32."""
    scales = [x.float().abs().amax().reshape(1) / torch.finfo(torch.float8_e4m3fn).max for x in tensors]
    return [(x / s).to(torch.float8_e4m3fn) for x, s in zip(tensors, scales, strict=True)], scales


def _to_fp8(*tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each tensor [B, H, N, D] in E4M3, with its scales [B, H] FP32."""
    scales = [x.float().abs().amax((2, 3)) / torch.finfo(torch.float8_e4m3fn).max for x in tensors]
    return [(x / s[:, :, None, None]).to(torch.float8_e4m3fn) for x, s in zip(tensors, scales, strict=True)], scales


def ours(mode: Mode, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None = None) -> Attention:
    tables = reference.tables_from_data(*inputs, mode)
    timestep = torch.zeros(inputs[0].shape[0], device="cuda")
    # The dispatcher of torch's custom operators would take longer than a short launch.
    return lambda q, k, v: kernel._run_cuda(q, k, v, timestep, tables, mask=mask, scaling="dynamic")


def time_calls(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Returns the microseconds of each call."""
    for i in range(WARM_UP):
        calls[i % len(calls)]()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUE_CYCLES)
    for i, (start, end) in enumerate(events):
        start.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def median_and_spread(times: list[float]) -> tuple[float, float]:
    """Returns the median, and half the interquartile distance."""
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (high - low) / 2


def joules_per_call(call: Callable[[], object], seconds: float) -> float | None:
    """Returns the joules of a call: the GPU's mean power in a loop of calls, times the time of one call; None without NVML."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    except Exception:  # without the module, the driver library or permission, the energy is left out
        return None
    samples: list[float] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.01):
            samples.append(nvml.nvmlDeviceGetPowerUsage(device) / 1e3)

    # NVML averages over a second: wait until the earlier load has left the average.
    loop(call, WARM_UP_SECONDS)
    thread = threading.Thread(target=sample)
    thread.start()
    elapsed, calls = loop(call, seconds)
    done.set()
    thread.join()
    return sum(samples) / len(samples) * elapsed / calls if samples else None


def loop(call: Callable[[], object], seconds: float) -> tuple[float, int]:
    """Returns the seconds of the loop and the number of calls. The queue is never empty: no kernel waits for the host."""
    torch.cuda.synchronize()
    marks = [torch.cuda.Event() for _ in range(2)]
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for mark in marks:
            mark.synchronize()
            for _ in range(CALLS_PER_MARK):
                call()
            mark.record()
            calls += CALLS_PER_MARK
    torch.cuda.synchronize()
    return time.perf_counter() - start, calls


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = zip(q.flatten(0, 1).float(), k.flatten(0, 1).float(), v.flatten(0, 1).float(), strict=True)
    rows = [torch.softmax(x @ y.T * x.shape[-1] ** -0.5, -1) @ z for x, y, z in heads]
    return torch.stack(rows).unflatten(0, q.shape[:2])


@dataclass(frozen=True)
class Candidate:
    """A kernel with inputs to rotate over."""

    name: str
    calls: list[Callable[[], Tensor]]
    error: float | None
    memory: int


def inputs_of(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.randn(shape.batch, shape.heads, tokens, shape.dim, device="cuda").half()
        for tokens in (shape.queries, shape.keys, shape.keys)
    )
    return q, k, v


def candidates(shape: Shape) -> list[Candidate]:
    """Returns the kernels that take this shape, each called once."""
    sets = [inputs_of(shape) for _ in range(ROTATION)]
    expected = exact(*sets[0]) if shape.queries <= LARGEST_EXACT else None
    by_name = {name: [attend] * ROTATION for name, attend in peers(shape.mask()).items()}
    for mode in Mode:
        by_name[f"mode {int(mode)} {mode.name.lower()}"] = [ours(mode, inputs, shape.mask()) for inputs in sets]
    found = []
    for name, attends in by_name.items():
        calls = [lambda a=a, x=x: a(*x) for a, x in zip(attends, sets, strict=True)]
        try:
            out = calls[0]()
        except Exception as refusal:  # peers refuse a shape by any exception
            print(f"{shape} {name}: {str(refusal).splitlines()[0]}")
            continue
        error = None if expected is None else relative_error(out, expected)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        del out
        calls[0]()
        found.append(Candidate(name, calls, error, torch.cuda.max_memory_allocated() - before))
    return found


def measure(shape: Shape) -> list[Figure]:
    found = candidates(shape)
    times: dict[str, list[float]] = {c.name: [] for c in found}
    for _ in range(ROUNDS):
        for c in found:
            times[c.name] += time_calls(c.calls)
    return [Figure(shape, c.name, *median_and_spread(times[c.name]), c.error, c.memory, None) for c in found]


def with_energy(figures: list[Figure], seconds: float) -> list[Figure]:
    """Returns the figures of one shape, with each kernel looped for this many seconds."""
    calls = {c.name: c.calls[0] for c in candidates(figures[0].shape)}
    return [replace(f, joules=joules_per_call(calls[f.name], seconds)) for f in figures]


def table(figures: list[Figure]) -> str:
    lines = ["| B H N D | attention | µs | TFLOP/s | of best peer | of 8-bit peak | error | workspace MB | J |"]
    lines.append("| --- | --- |" + " ---: |" * 7)
    for f in figures:
        best = max((p.tflops for p in figures if p.shape == f.shape and not p.name.startswith("mode")), default=None)
        lines.append(
            f"| {f.shape} | {f.name} | {f.microseconds:.1f} ± {f.spread:.1f} | {f.tflops:.0f} | "
            f"{'' if best is None else f'{f.tflops / best:.2f}'} | {f.tflops / EIGHT_BIT_PEAK:.0%} | "
            f"{'' if f.error is None else f'{f.error:.4f}'} | {f.memory / 1e6:.0f} | "
            f"{'' if f.joules is None else f'{f.joules:.3f}'} |"
        )
    return "\n".join(lines)


def plot(figures: list[Figure], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(f.shape for f in figures))
    names = list(dict.fromkeys(f.name for f in figures))
    width = 0.8 / len(names)
    rows = [shapes[i : i + SHAPES_PER_ROW] for i in range(0, len(shapes), SHAPES_PER_ROW)]
    figure, grid = pyplot.subplots(
        len(rows), squeeze=False, sharey=True, figsize=(12, 3.6 * len(rows)), layout="constrained"
    )
    for axes, row in zip(grid[:, 0], rows, strict=True):
        for i, name in enumerate(names):
            values = {f.shape: f.tflops for f in figures if f.name == name}
            axes.bar([x + i * width for x in range(len(row))], [values.get(s, 0) for s in row], width, label=name)
        axes.set_xlim(-0.3, SHAPES_PER_ROW)
        axes.set_xticks([x + 0.4 - width / 2 for x in range(len(row))], [str(s) for s in row])
        axes.set_ylabel("TFLOP/s")
    grid[-1, 0].set_xlabel("B H N D")
    grid[0, 0].legend(fontsize="small")
    figure.suptitle(f"{title}, quantisation included")
    figure.savefig(path, dpi=100)


SINKS = ((16384, 128), (16384, 64), (4096, 128), (1024, 64), (4096, 40), (77, 64))
"""Numbers of keys and of channels."""


def sink_inputs(keys: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v of 4 heads and 512 queries. All queries attend to key 5, whose value is multiplied by 0.05."""
    q = torch.randn(1, 4, 512, dim, device="cuda")
    k, v = (torch.randn(1, 4, keys, dim, device="cuda") for _ in "kv")
    direction = F.normalize(torch.randn(dim, device="cuda"), dim=0)
    k[:, :, 5], v[:, :, 5] = 2.2 * dim**0.5 * direction, 0.05 * v[:, :, 5]
    return (q + 4 * direction).half(), k.half(), v.half()


def sink_table() -> str:
    """Returns the relative L2 errors with sinks, with calibrated and with dynamic scales."""
    modes = (Mode.PRECISION, Mode.BALANCED, Mode.AGGRESSIVE, Mode.FP8)
    names = [f"{mode.name.lower()}, {scaling}" for mode in modes for scaling in ("calibrated", "dynamic")]
    lines = [f"| keys | channels | {' | '.join(names)} |", "| ---: " * (2 + len(names)) + "|"]
    timestep = torch.zeros(1, device="cuda")
    for keys, dim in SINKS:
        torch.manual_seed(0)
        q, k, v = sink_inputs(keys, dim)
        expected = exact(q, k, v)
        errors = []
        for mode in modes:
            tables = reference.tables_from_data(q, k, v, mode)
            for scaling in ("calibrated", "dynamic"):
                out = kernel._run_cuda(q, k, v, timestep, tables, scaling=scaling)
                errors.append(f"{relative_error(out, expected):.4f}")
        lines.append(f"| {keys:,} | {dim} | {' | '.join(errors)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sweep", action="store_true", help="also N 512…32768 and B 1…32")
    which.add_argument("--prompts", action="store_true", help="only attention to prompts")
    parser.add_argument(
        "--energy", type=float, default=0.0, metavar="SECONDS", help="sample power this long per kernel"
    )
    parser.add_argument("--sinks", action="store_true", help="only the errors of our modes with attention sinks")
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    arguments = parser.parse_args()
    title = f"{torch.cuda.get_device_name()}, {datetime.date.today()}"
    if arguments.sinks:
        print(f"{title}, torch {torch.__version__}\n\n{sink_table()}")
        return
    by_shape = []
    for shape in PROMPTS if arguments.prompts else SHAPES + PROMPTS + (SWEEP if arguments.sweep else []):
        by_shape.append(measure(shape))
        torch.cuda.empty_cache()
    if arguments.energy:
        by_shape = [with_energy(figures, arguments.energy) for figures in by_shape]
    figures = [figure for figures in by_shape for figure in figures]
    text = f"{title}, torch {torch.__version__}, median of {ROUNDS * REPEATS}\n\n{table(figures)}\n"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "attention.md").write_text(text)
    plot(figures, arguments.output / "attention.png", title)
    print(text)


if __name__ == "__main__":
    main()
