"""Whole denoiser steps on one GPU: torch, torch.compile, TensorRT with its own FP16 attention, TensorRT with our plugin.

    python bench/engine.py [--models flux video sdxl] [--json FILE]

Stacks of transformer blocks of full width with random weights: what is measured is time, and how far each engine's output is from
torch in FP32. Both engines come from one ONNX export and differ in the lowering of attention alone. Latency is the median of
CUDA events over repeated calls with rotating inputs; prints a Markdown table with the date and the GPU. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import tables_from_data
from trtconvert.engine import tensorrt
from trtconvert.engine.builder import PlanInput
from trtconvert.export.lowering import lower_to_native
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.models.base import DiffusionModel, InputSpec, intercepted

REPEATS = 30


@dataclass(frozen=True)
class Stack:
    """Blocks of a real architecture: batch, tokens, heads, head_dim, and how many blocks of it are run."""

    batch: int
    tokens: int
    heads: int
    head_dim: int
    blocks: int


STACKS = {
    "flux": Stack(1, 4608, 24, 128, 3),
    "video": Stack(1, 16384, 24, 128, 2),
    "sdxl": Stack(2, 4096, 10, 64, 4),
}


class Block(nn.Module):
    def __init__(self, stack: Stack) -> None:
        super().__init__()
        width = stack.heads * stack.head_dim
        self.heads = stack.heads
        self.norm_attn, self.norm_mlp = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_attn(x)
        q, k, v = (f(normed).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Denoiser(nn.Module):
    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(stack) for _ in range(stack.blocks))

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        x = x + (timestep.view(-1, 1, 1) / 1000).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return x


def no_sampler(*_args, **_named):
    raise NotImplementedError("a stack of blocks draws nothing")


def describe(name: str, stack: Stack, denoiser: nn.Module) -> DiffusionModel:
    shape = (stack.batch, stack.tokens, stack.heads * stack.head_dim)
    inputs = (InputSpec("x", "float32", shape), InputSpec("timestep", "float32", (stack.batch,)))
    return DiffusionModel(
        name, denoiser, inputs, InputSpec("out", "float32", shape), "timestep", 1000.0,
        torch.linspace(0.01, 100, 1000), {}, no_sampler,
    )  # fmt: skip


def median_ms(call: Callable[[int], object]) -> tuple[float, float]:
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
    times = sorted(start.elapsed_time(end) for start, end in events)
    return times[REPEATS // 2], times[3 * REPEATS // 4] - times[REPEATS // 4]


class Engine:
    """A plan, run on the current stream."""

    def __init__(self, trt, plan: bytes, stack: Stack) -> None:
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
        self._runtime.engine_host_code_allowed = True
        self.engine = self._runtime.deserialize_cuda_engine(plan)
        self.context = self.engine.create_execution_context()
        self.out = torch.empty(
            stack.batch, stack.tokens, stack.heads * stack.head_dim, dtype=torch.float16, device="cuda"
        )

    def __call__(self, x: Tensor, timestep: Tensor) -> Tensor:
        for name, tensor in (("x", x), ("timestep", timestep), ("out", self.out)):
            self.context.set_tensor_address(name, tensor.data_ptr())
        assert self.context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        return self.out


def bench(name: str, stack: Stack) -> list[dict]:
    torch.manual_seed(0)
    denoiser = Denoiser(stack).eval().requires_grad_(False)
    model = describe(name, stack, denoiser)
    with torch.device("cuda"):
        inputs = [(torch.randn(model.inputs[0].shape), torch.full((stack.batch,), 500.0)) for _ in range(3)]
    half = [(x.half(), t) for x, t in inputs]

    denoiser.cuda()
    tables = {}

    def observe(call):
        tables[call.name] = tables_from_data(call.q, call.k, call.v, Mode.BALANCED).to("cpu")
        return call.exact()

    with torch.no_grad():
        expected = intercepted(model, observe)(*inputs[0])
    eager = Denoiser(stack).half().cuda().eval().requires_grad_(False)
    eager.load_state_dict(denoiser.state_dict())
    denoiser.cpu()
    rows: list[dict] = []

    def row(what: str, call: Callable, built: float = 0.0, size: int = 0) -> None:
        torch.cuda.reset_peak_memory_stats()
        out = call(*half[0]).float()
        error = float((out - expected).norm() / expected.norm())
        ms, spread = median_ms(lambda i: call(*half[i % len(half)]))
        rows.append(
            {
                "model": name,
                "what": what,
                "ms": ms,
                "spread": spread,
                "error": error,
                "build_s": built,
                "plan_mb": size / 2**20,
            }
        )
        print(rows[-1], flush=True)

    with torch.no_grad():
        row("torch eager FP16 (SDPA)", eager)
        started = time.perf_counter()
        compiled = torch.compile(eager)
        compiled(*half[0])
        row("torch.compile FP16", compiled, time.perf_counter() - started)
    del eager, compiled

    trt = tensorrt.load()
    plan_inputs = [PlanInput(spec.name, spec.shape) for spec in model.inputs]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for mode in (None, Mode.PRECISION, Mode.BALANCED, Mode.AGGRESSIVE):
            chosen = {n: t.with_modes(mode or Mode.FP16) for n, t in tables.items()}
            exported = trace(model, chosen, SiteOptions(1000.0, "calibrated", True), dims={}, dtype=torch.float16)
            started = time.perf_counter()
            if mode is None:
                lower_to_native(exported)
                ir.save(exported, path)
                plan = tensorrt.build(path, plan_inputs, {}, lambda *_: None)
            else:
                ir.save(exported, path)
                plan = tensorrt.build_from_function(path, plan_inputs, {}, lambda *_: None)
            built = time.perf_counter() - started
            what = "TensorRT, its own FP16 attention" if mode is None else f"TensorRT, our plugin, {mode.name.lower()}"
            row(what, Engine(trt, plan, stack), built, len(plan))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(STACKS), default=list(STACKS))
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    rows = [row for name in arguments.models for row in bench(name, STACKS[name])]
    gpu, today = torch.cuda.get_device_name(), str(datetime.date.today())
    print(f"\n{today}, {gpu}, TensorRT {tensorrt.load().__version__}, torch {torch.__version__}\n")
    print("| stack | what | step, ms | spread | against TensorRT FP16 | rel. error | build, s | plan, MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        native = next(r["ms"] for r in rows if r["model"] == row["model"] and "its own" in r["what"])
        s = STACKS[row["model"]]
        shape = f"{row['model']}: {s.blocks} blocks, {s.batch}×{s.tokens}, {s.heads}×{s.head_dim}"
        print(
            f"| {shape} | {row['what']} | {row['ms']:.3f} | {row['spread']:.3f} | {native / row['ms']:.2f}× "
            f"| {row['error']:.4f} | {row['build_s']:.0f} | {row['plan_mb']:.0f} |"
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"gpu": torch.cuda.get_device_name(), "date": str(datetime.date.today()), "rows": rows})
        )


if __name__ == "__main__":
    main()
