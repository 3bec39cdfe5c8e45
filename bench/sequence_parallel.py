"""One attention of a long sequence on several GPUs, beside one GPU with all tokens.

    torchrun --standalone --nproc_per_node 2 bench/sequence_parallel.py [--tokens 65536] [--heads 24] [--dim 128]
        [--output FOLDER]

FP16 tensors of one sample. Each process times the exchange and its attention together, and the slowest counts; quantisation is
inside every time, the comparison of shapes is not. One GPU computes the same attention alone, the others wait. Times are medians
of rounds that take turns. The error is that of a process's part against one GPU's. Rank 0 writes sequence_parallel.md; nothing
is asserted.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from linear import write_table
from torch import Tensor

from trtconvert.attention import Int8Attention, SequenceParallelAttention

ROUNDS, WARM_UP = 12, 4


def milliseconds(call: Callable[[], Tensor]) -> float:
    """Returns the milliseconds of the slowest process, from a common start."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor([start.elapsed_time(end)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, processes = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(0)  # the same in every process
    shape = (1, given.heads, given.tokens, given.dim)
    whole = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16) for _ in range(3)]
    own = [x.chunk(processes, 2)[rank].contiguous() for x in whole]
    timestep = torch.full((1,), 500.0, device="cuda")
    lines = [
        "| attention | GPUs | ms | TFLOP/s | times one GPU | relative difference |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    flops = 4 * given.heads * given.tokens**2 * given.dim
    for mode in ("precision", "aggressive"):
        attention = Int8Attention(given.heads, given.dim, precision_mode=mode).cuda()
        attention.calibrate([(*whole, timestep)])  # type: ignore[list-item]
        expected = attention(*whole, timestep)
        assert isinstance(expected, Tensor)
        expected = expected.chunk(processes, 2)[rank].float()
        calls = {"one GPU": lambda attention=attention: attention(*whole, timestep) if rank == 0 else own[0]}
        for method in ("ulysses", "ring"):
            if method == "ring" or given.heads % processes == 0:
                made = SequenceParallelAttention(attention, method, check_shapes=False)
                calls[method] = lambda made=made: made(*own, timestep)  # type: ignore[misc]
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(ROUNDS):
            for name, call in calls.items():
                time = milliseconds(call)  # type: ignore[arg-type]
                if turn >= WARM_UP:
                    times[name].append(time)
        medians = {name: statistics.median(of) for name, of in times.items()}
        for name, time in medians.items():
            alone = name == "one GPU"
            differs = 0.0 if alone else ((calls[name]().float() - expected).norm() / expected.norm()).item()  # type: ignore[union-attr]
            lines.append(
                f"| {mode}, {name} | {1 if alone else processes} | {time:.2f} | {flops / time / 1e9:,.0f} | "
                f"{medians['one GPU'] / time:.2f} | {differs:.1e} |"
            )
    if rank == 0:
        write_table([f"B H N D: {' '.join(map(str, shape))}", "", *lines], given.output / "sequence_parallel.md")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
