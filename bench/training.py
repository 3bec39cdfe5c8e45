"""Forward and backward of attention on one GPU: `Int8Attention` beside torch's own in FP16.

    python bench/training.py [--output FOLDER]

The forward is INT8; the backward computes the gradients of unquantised attention at the same queries, keys and values, with
torch's FlashAttention, whose forward it runs again. Times are medians of CUDA events over rounds that take turns, behind a full
queue, so no call waits for the host. "calibrated" has scales from data, "measured" measures scales in each call. Writes
training.md; nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from linear import write_table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert.attention import Int8Attention

SHAPES = [(1, 24, 4096, 128), (2, 10, 4096, 64), (1, 24, 16384, 128)]  # batch, heads, tokens, head_dim
ROUNDS, WARM_UP, BUSY_MS = 20, 5, 5.0

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def timed(attend: Attend, tensors: list[Tensor], gradient: Tensor) -> tuple[float, float]:
    """Returns the milliseconds of the forward and of the backward."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda._sleep(int(BUSY_MS * 1e6))  # the clock has some GHz; the host enqueues meanwhile
    events[0].record()
    out = attend(*tensors)
    events[1].record()
    torch.autograd.grad(out, tensors, gradient)
    events[2].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])


def rows(shape: tuple[int, int, int, int]) -> list[str]:
    """Returns the lines of the table for one shape."""
    heads, dim = shape[1], shape[3]
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    ]
    gradient = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16)
    timestep = torch.full((shape[0],), 500.0, device="cuda")
    calls: dict[str, Attend] = {"torch FP16": scaled_dot_product_attention}
    for mode in ("precision", "balanced"):
        for calibrated in (False, True):
            attention = Int8Attention(heads, dim, precision_mode=mode).cuda()
            if calibrated:
                attention.calibrate([(*(x.detach() for x in tensors), timestep)])  # type: ignore[list-item]
            name = f"{mode}, {'calibrated' if calibrated else 'measured'}"
            calls[name] = lambda q, k, v, attention=attention: attention(q, k, v, timestep)  # type: ignore[misc]
    q, k, v = (x.float() for x in tensors)
    exact = torch.autograd.grad(scaled_dot_product_attention(q, k, v), tensors, gradient.float())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name, attend in calls.items():
            found = timed(attend, tensors, gradient)
            if turn >= WARM_UP:
                times[name].append(found)
    medians = {name: [statistics.median(column) for column in zip(*of, strict=True)] for name, of in times.items()}
    own = medians["torch FP16"]
    lines = []
    for name, (forward, backward) in medians.items():
        got = torch.autograd.grad(calls[name](*tensors), tensors, gradient)
        worst = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, exact, strict=True))
        lines.append(
            f"| {' '.join(map(str, shape))} | {name} | {forward:.3f} | {backward:.3f} | {backward / own[1]:.2f} | "
            f"{(forward + backward) / sum(own):.2f} | {worst:.1e} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    arguments = parser.parse_args()
    lines = [
        "| B H N D | attention | forward, ms | backward, ms | backward / FP16's | both / FP16's | error of gradients |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for shape in SHAPES:
        lines += rows(shape)
    write_table(lines, arguments.output / "training.md")


if __name__ == "__main__":
    main()
