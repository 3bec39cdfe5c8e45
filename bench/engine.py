"""Denoiser steps on one GPU: torch, torch.compile, TensorRT with its own FP16 attention, with our plugin, with the faster.

    python bench/engine.py [--models sd15 sdxl flux video] [--peers torch engines] [--exports FOLDER] [--json FILE]

Parts of the architectures in full width with random weights: residual blocks and transformer blocks of two U-Nets, blocks of
two diffusion transformers. What is measured is time, and how far each output is from torch in FP32. The engines come from one
ONNX export and differ in the lowering of attention alone; the plugin's has timestep bins of three modes, so that one engine
gives the times of all three, and their mean is that of a plan that uses each for a third of the steps. `auto` is what
`trtconvert compile` keeps: each site's attention is the one that was faster alone on this GPU, or TensorRT's own is everywhere,
where that makes the faster engine. The time of its build is that of all that it builds and times.

Engines are called as our runtime does, through a CUDA graph. Latency is the median of CUDA events over repeated calls with
rotating inputs; memory is the device's beside what lies there before, at its peak, for engines their weights and their
scratch. Prints a Markdown table with the date and the GPU; `--json` keeps the figures. `--exports` keeps the ONNX models for
further runs. Nothing is asserted. The host's time per call is measured by bench/runtime.py.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables, tables_from_data
from trtconvert.bundle import TensorRecord
from trtconvert.engine import tensorrt
from trtconvert.engine.engine_timer import denoiser_microseconds
from trtconvert.export import storage
from trtconvert.export.nodes import attention_nodes
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.models.base import DiffusionModel, InputSpec, intercepted
from trtconvert.recipe import EngineSection

REPEATS = 30
STEPS = 50
"""Of an image."""
TEXT_TOKENS, TEXT_WIDTH = 77, 2048
MODES = (Mode.PRECISION, Mode.BALANCED, Mode.AGGRESSIVE)


@dataclass(frozen=True)
class Level:
    """Blocks of one resolution: tokens, heads, head_dim, how many blocks follow a residual block, and whether they attend to
    text as well."""

    tokens: int
    heads: int
    head_dim: int
    blocks: int
    convolutional: bool = True

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Stack:
    """What of an architecture is run, and how many of such are in the whole model."""

    batch: int
    levels: tuple[Level, ...]
    what: str


STACKS = {
    "sd15": Stack(
        2,
        (Level(4096, 8, 40, 1), Level(1024, 8, 80, 1), Level(256, 8, 160, 1)),
        "SD 1.5 at 512²: a fifth of the U-Net's blocks",
    ),
    "sdxl": Stack(2, (Level(4096, 10, 64, 2), Level(1024, 20, 64, 10)), "SDXL at 1024²: a sixth of the U-Net's blocks"),
    "flux": Stack(1, (Level(4608, 24, 128, 3, False),), "Flux at 1024²: 3 of 57 blocks, 4096 + 512 tokens"),
    "video": Stack(1, (Level(16384, 24, 128, 2, False),), "video DiT: 2 blocks, 16,384 tokens"),
}


class Attention(nn.Module):
    def __init__(self, level: Level, context: int) -> None:
        super().__init__()
        self.heads = level.heads
        self.q, self.out = nn.Linear(level.width, level.width), nn.Linear(level.width, level.width)
        self.k, self.v = nn.Linear(context, level.width), nn.Linear(context, level.width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x [B, N, C], context [B, M, C']."""
        q, k, v = (
            f(y).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, context), (self.v, context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block: attention to itself, to text where the model has it, and the MLP."""

    def __init__(self, level: Level, text: int) -> None:
        super().__init__()
        width = level.width
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if text else 2))
        self.self_attention = Attention(level, width)
        self.cross_attention = Attention(level, text) if text else None
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, text: Tensor | None) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.self_attention(normed, normed)
        if self.cross_attention is not None and text is not None:
            x = x + self.cross_attention(self.norms[1](x), text)
        return x + self.mlp(self.norms[-1](x))


class Residual(nn.Module):
    """A residual block of two convolutions, on tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        image = x.transpose(1, 2).unflatten(2, (side, side))
        return (image + self.layers(image)).flatten(2).transpose(1, 2)


class Denoiser(nn.Module):
    def __init__(self, stack: Stack) -> None:
        super().__init__()
        text = TEXT_WIDTH if stack.levels[0].convolutional else 0
        layers: list[nn.Module] = []
        for before, level in zip((None, *stack.levels), stack.levels, strict=False):
            if before is not None:
                layers.append(Shrink(before, level))
            if level.convolutional:
                layers.append(Residual(level.width))
            layers += [Block(level, text) for _ in range(level.blocks)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, timestep: Tensor, text: Tensor | None = None) -> Tensor:
        x = x + (timestep.view(-1, 1, 1) / 1000).to(x.dtype)
        for layer in self.layers:
            x = layer(x, text) if isinstance(layer, Block) else layer(x)
        return x


class Shrink(nn.Module):
    """From one level's tokens and width to the next's."""

    def __init__(self, before: Level, level: Level) -> None:
        super().__init__()
        self.factor = before.tokens // level.tokens
        self.layer = nn.Linear(before.width * self.factor, level.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unflatten(1, (-1, self.factor)).flatten(2))


def no_sampler(*_args: object, **_named: object) -> Tensor:
    raise NotImplementedError("a stack of blocks draws nothing")


def describe(name: str, stack: Stack) -> DiffusionModel:
    torch.manual_seed(0)
    first, last = stack.levels[0], stack.levels[-1]
    inputs = [
        InputSpec("x", "float32", (stack.batch, first.tokens, first.width)),
        InputSpec("timestep", "float32", (stack.batch,)),
    ]
    if first.convolutional:
        inputs.append(InputSpec("text", "float32", (stack.batch, TEXT_TOKENS, TEXT_WIDTH)))
    return DiffusionModel(
        name, Denoiser(stack).eval().requires_grad_(False), tuple(inputs),
        InputSpec("out", "float32", (stack.batch, last.tokens, last.width)), "timestep", 1000.0,
        torch.linspace(0.01, 100, 1000), {}, no_sampler,
    )  # fmt: skip


def timestep_of(mode: Mode) -> float:
    """The middle of a mode's timestep bin."""
    return (MODES.index(mode) + 0.5) / len(MODES) * 1000


Inputs = dict[str, Tensor]
Call = Callable[[int], Tensor]


def median_ms(call: Call) -> tuple[float, float]:
    """Median and spread (largest less smallest of the middle half) of CUDA-event times; `call` gets a rotating index."""
    for i in range(5):
        call(i)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    torch.cuda.synchronize()
    for i, (start, end) in enumerate(events):
        start.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    low, middle, high = statistics.quantiles([start.elapsed_time(end) for start, end in events], n=4)
    return middle, high - low


def image_s(call: Call) -> float:
    """Seconds that the steps of one image take one after another, nothing waited for between them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for step in range(STEPS):
        call(step)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


class Engine:
    """A plan, its calls with each of some inputs in a CUDA graph."""

    def __init__(self, trt: Any, plan: bytes, inputs: list[Inputs]) -> None:
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self._runtime.engine_host_code_allowed = True
        free = torch.cuda.mem_get_info()[0]
        self.engine = self._runtime.deserialize_cuda_engine(plan)
        self.context = self.engine.create_execution_context()
        self.memory = free - torch.cuda.mem_get_info()[0]
        names = {self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)}
        self.out = torch.empty(tuple(self.engine.get_tensor_shape("out")), dtype=torch.float16, device="cuda")
        self._graphs = [self._recorded({name: feed[name] for name in names - {"out"}}) for feed in inputs]

    def _recorded(self, feed: Inputs) -> torch.cuda.CUDAGraph:
        for name, tensor in (*feed.items(), ("out", self.out)):
            self.context.set_tensor_address(name, tensor.data_ptr())
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            assert self.context.execute_async_v3(stream.cuda_stream)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            assert self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        return graph

    def __call__(self, index: int) -> Tensor:
        self._graphs[index % len(self._graphs)].replay()
        return self.out


class Notices:
    """Prints what a build has to say, and the times by which it chooses."""

    def share(self, detail: str, done: float) -> None:
        if "µs" in detail:
            print(detail, flush=True)

    def notice(self, text: str) -> None:
        print(f"notice: {text}", flush=True)


@dataclass(frozen=True)
class Row:
    """A line of the table. Time of a step in milliseconds, of all steps of an image in seconds, memory and plan in MiB."""

    model: str
    what: str
    ms: float
    spread: float
    image_s: float
    error: float
    memory: float
    build_s: float = 0.0
    plan: float = 0.0


class Bench:
    """One stack: its rows, as they are measured."""

    def __init__(self, name: str, stack: Stack) -> None:
        self.model, self.stack, self.rows = describe(name, stack), stack, list[Row]()
        denoiser = self.model.denoiser.cuda()
        with torch.device("cuda"):
            self.inputs = [
                {
                    spec.name: torch.full((stack.batch,), 500.0) if spec.name == "timestep" else torch.randn(spec.shape)
                    for spec in self.model.inputs
                }
                for _ in range(3)
            ]
        self.tables: dict[str, AttentionTables] = {}

        def observe(call):
            found = [tables_from_data(call.q, call.k, call.v, mode).to("cpu") for mode in MODES]
            fields = {field: torch.cat([getattr(t, field) for t in found]) for field in vars(found[0])}
            self.tables[call.name] = AttentionTables(**fields)
            return call.exact()

        with torch.no_grad():
            intercepted(self.model, observe)(**self.inputs[0])
            # At the middle of each mode's timestep bin.
            steps = {mode: torch.full_like(self.inputs[0]["timestep"], timestep_of(mode)) for mode in MODES}
            self.expected = {mode: denoiser(**self.inputs[0] | {"timestep": t}) for mode, t in steps.items()}
        self.half = [{n: x if n == "timestep" else x.half() for n, x in feed.items()} for feed in self.inputs]
        denoiser.cpu()

    def add(
        self, what: str, call: Call, memory: float, build_s: float = 0.0, plan: int = 0, mode: Mode = MODES[0]
    ) -> None:
        """Time a call, at a timestep of a mode's bin."""
        for feed in self.half:
            feed["timestep"].fill_(timestep_of(mode))
        expected = self.expected[mode]
        error = float((call(0).float() - expected).norm() / expected.norm())
        ms, spread = median_ms(call)
        row = Row(self.model.name, what, ms, spread, image_s(call), error, memory / 2**20, build_s, plan / 2**20)
        self.rows.append(row)
        print(row, flush=True)

    def torch_rows(self) -> None:
        eager = Denoiser(self.stack).half().cuda().eval().requires_grad_(False)
        eager.load_state_dict(self.model.denoiser.state_dict())
        for what, compiled in (("torch eager FP16 (SDPA)", False), ("torch.compile FP16, with CUDA graphs", True)):
            started = time.perf_counter()
            forward = torch.compile(eager, mode="reduce-overhead") if compiled else eager
            for i in range(3 * compiled):
                forward(**self.half[i])
            built = time.perf_counter() - started
            torch.cuda.reset_peak_memory_stats()
            forward(**self.half[0])
            memory = torch.cuda.max_memory_allocated() - self._held()
            self.add(what, lambda i, forward=forward: forward(**self.half[i % 3]), memory, built if compiled else 0.0)
        torch._dynamo.reset()

    def _held(self) -> int:
        """Bytes on the GPU that are no model's."""
        return sum(x.nbytes for named in (*self.inputs, *self.half, self.expected) for x in named.values())

    def export(self, folder: Path) -> Path:
        """The ONNX model in a folder, made unless it is there."""
        path = folder / f"{self.model.name}.onnx"
        if not path.exists():
            started = time.perf_counter()
            options = SiteOptions(1000.0, "calibrated", True)
            partial = path.with_suffix(".partial")
            storage.save(trace(self.model, self.tables, options, dims={}, dtype=torch.float16), partial)
            partial.rename(path)
            print(f"exported in {time.perf_counter() - started:.0f} s", flush=True)
        return path

    def engine_rows(self, path: Path) -> None:
        trt = tensorrt.load()
        exported = ir.load(path)
        sites = list(attention_nodes(exported))
        inputs = [
            TensorRecord(name=x.name, dtype="float32" if x.name == "timestep" else "float16", shape=list(x.shape))
            for x in self.model.inputs
        ]
        options = EngineSection()
        plans: dict[frozenset[str], tuple[bytes, float]] = {}  # and seconds, by the sites that are native

        def build(native: Collection[str]) -> bytes:
            key = frozenset(native)
            if key not in plans:  # what `auto` builds may be one of the others
                started = time.perf_counter()
                model = tensorrt.lowered(exported, native, options)
                plan = tensorrt.build_lowered(trt, model, path, inputs, [{}], options, Notices())
                plans[key] = plan, time.perf_counter() - started
            return plans[key][0]

        started = time.perf_counter()
        time_engine = partial(denoiser_microseconds, trt, inputs, "timestep", [{}])
        auto = tensorrt.fastest_engine(trt, exported, [{}], build, time_engine, options, Notices())
        chosen = time.perf_counter() - started
        for what, native in (("its own FP16 attention", sites), ("our plugin", [])):
            self._engine(trt, f"TensorRT, {what}", build(native), not native, plans[frozenset(native)][1])
        kept = f"{len(auto.native_sites) if auto.with_plugin else len(sites)} of {len(sites)} sites native"
        self._engine(trt, f"TensorRT, auto: {kept}", auto.plan, auto.with_plugin, chosen)

    def _engine(self, trt: Any, what: str, plan: bytes, with_plugin: bool, built: float) -> None:
        """Time an engine. One with the plugin is timed in each mode, by the timestep."""
        engine = Engine(trt, plan, self.half)
        if with_plugin:
            for mode in MODES:
                self.add(f"{what}, {mode.name.lower()}", engine, engine.memory, built, len(plan), mode)
        else:
            self.add(what, engine, engine.memory, built, len(plan))
        del engine
        gc.collect()


def print_table(rows: list[Row]) -> None:
    print(
        f"| stack | what | step, ms | spread | {STEPS} steps, s | against TensorRT FP16 | rel. error | memory, MiB | build, s "
        "| plan, MiB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        native = next((r.ms for r in rows if r.model == row.model and "its own" in r.what), float("nan"))
        print(
            f"| {STACKS[row.model].what} | {row.what} | {row.ms:.3f} | {row.spread:.3f} | {row.image_s:.3f} "
            f"| {native / row.ms:.2f}× | {row.error:.4f} | {row.memory:.0f} | {row.build_s:.0f} | {row.plan:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(STACKS), default=list(STACKS))
    parser.add_argument("--peers", nargs="+", choices=["torch", "engines"], default=["torch", "engines"])
    parser.add_argument(
        "--exports", type=Path, help="keep the exported models here; with `--peers torch` they are made as well"
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with torch.no_grad(), tempfile.TemporaryDirectory() as temporary:
        exports = arguments.exports or Path(temporary)
        exports.mkdir(parents=True, exist_ok=True)
        for name in arguments.models:
            bench = Bench(name, STACKS[name])
            if "torch" in arguments.peers:
                bench.torch_rows()
            if arguments.exports:
                bench.export(exports)
            if "engines" in arguments.peers:
                bench.engine_rows(bench.export(exports))
            rows += bench.rows
            del bench
            gc.collect()
            torch.cuda.empty_cache()
    gpu, today = torch.cuda.get_device_name(), str(datetime.date.today())
    print(f"\n{today}, {gpu}, TensorRT {tensorrt.status().detail}, torch {torch.__version__}\n")
    print_table(rows)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"gpu": gpu, "date": today, "rows": [asdict(row) for row in rows]}, indent=1)
        )


if __name__ == "__main__":
    main()
