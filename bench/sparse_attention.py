"""Attention that computes less, on one GPU: block masks and dropped keys beside dense attention in the same mode.

    python bench/sparse_attention.py [--output FOLDER]

The script measures three speedups, for head dims of 64 and 128 and the modes aggressive, balanced and fp8: a window of 512 tokens
at 131,072 tokens, half of the blocks at random at 16,384, and attention to four fifths of the keys at 4,096 to 16,384, with the
choice of the keys outside and inside the time. Every time includes quantisation and the kernels' lists of a block mask.
Times are those of bench/attention.py: medians of CUDA events, dense and sparse calls in turns. A dense kernel under a mask of all
blocks shows the cost of the mask itself. Writes sparse_attention.md; nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from pathlib import Path

import torch
from attention import ROTATION, ROUNDS, Shape, inputs_of, median_and_spread, time_calls
from torch import Tensor

from trtconvert.attention import kernel, reference
from trtconvert.attention.masks import window_mask
from trtconvert.attention.modes import Mode
from trtconvert.attention.pruning import kept_keys, key_importance, most_important

MODES = (Mode.AGGRESSIVE, Mode.BALANCED, Mode.FP8)
DIMS = (64, 128)
WINDOW, WINDOW_TOKENS, WINDOW_HEADS = 512, 1 << 17, 8
DENSITY, DENSITY_TOKENS = 0.5, 16384
DROPPED, PRUNED_TOKENS = 0.2, (4096, 8192, 16384)
HEADS = 24
WINDOW_SPEEDUP, DENSITY_SPEEDUP, PRUNED_SAVING = 20.0, 1.7, 0.15
"""Smallest speedups that were asked for."""

Attend = Callable[..., Tensor]


def attention(inputs: tuple[Tensor, Tensor, Tensor], mode: Mode) -> Attend:
    """Returns a call of the kernels; keyword arguments are the operator's."""
    tables = reference.tables_from_data(*inputs, mode)
    timestep = torch.zeros(inputs[0].shape[0], device="cuda")
    return lambda **options: kernel._run_cuda(*inputs, timestep, tables, scaling="dynamic", **options)


def times(calls: dict[str, list[Callable[[], object]]]) -> dict[str, tuple[float, float]]:
    """Returns the median microseconds and their spread of each kind of call, which take turns."""
    for kind in calls.values():
        kind[0]()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, kind in calls.items():
            found[name] += time_calls(kind)
    return {name: median_and_spread(of_kind) for name, of_kind in found.items()}


def row(
    shape: Shape, mode: Mode, name: str, dense: tuple[float, float], sparse: tuple[float, float], wanted: str
) -> str:
    ratio = dense[0] / sparse[0]
    return (
        f"| {shape} | {mode.name.lower()} | {name} | {dense[0]:.0f} ± {dense[1]:.0f} | {sparse[0]:.0f} ± {sparse[1]:.0f} | "
        f"{ratio:.2f} | {1 - 1 / ratio:.1%} | {wanted} |"
    )


def masked(shape: Shape, mode: Mode, masks: dict[str, tuple[Tensor, str]]) -> list[str]:
    attends = [attention(inputs_of(shape), mode) for _ in range(ROTATION)]
    calls = {"dense": [lambda a=a: a() for a in attends]}
    calls |= {name: [lambda a=a, m=mask: a(block_mask=m) for a in attends] for name, (mask, _) in masks.items()}
    found = times(calls)
    return [row(shape, mode, name, found["dense"], found[name], wanted) for name, (_, wanted) in masks.items()]


def pruned(shape: Shape, mode: Mode) -> list[str]:
    sets = [inputs_of(shape) for _ in range(ROTATION)]
    kept = kept_keys(shape.keys, DROPPED)

    def chosen(inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return most_important(key_importance(*inputs[:2]), kept)

    given = [(attention(inputs, mode), inputs, chosen(inputs)) for inputs in sets]
    found = times(
        {
            "dense": [lambda a=a: a() for a, _, _ in given],
            "chosen before": [lambda a=a, k=index: a(key_index=k) for a, _, index in given],
            "chosen inside": [lambda a=a, x=inputs: a(key_index=chosen(x)) for a, inputs, _ in given],
        }
    )
    wanted = f"saves ≥ {PRUNED_SAVING:.0%}"
    return [
        row(shape, mode, f"{DROPPED:.0%} of keys dropped, {name}", found["dense"], found[name], wanted)
        for name in ("chosen before", "chosen inside")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/bench"), metavar="FOLDER")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    lines = ["| B H N D | mode | | dense µs | sparse µs | faster | saved | wanted |"]
    lines.append("| --- | --- | --- |" + " ---: |" * 5)
    for dim in DIMS:
        window = window_mask(WINDOW_TOKENS, WINDOW_TOKENS, WINDOW, device="cuda")
        side = DENSITY_TOKENS // reference.BLOCK
        random = torch.rand(1, HEADS, side, side, device="cuda") < DENSITY
        random |= torch.eye(side, dtype=torch.bool, device="cuda")
        every = torch.ones(1, 1, side, side, dtype=torch.bool, device="cuda")
        for mode in MODES:
            shape = Shape(1, WINDOW_HEADS, WINDOW_TOKENS, dim)
            lines += masked(shape, mode, {f"window of {WINDOW}": (window, f"≥ {WINDOW_SPEEDUP:.0f} ×")})
            torch.cuda.empty_cache()
            density = f"{random.float().mean():.1%} of blocks at random"
            masks = {density: (random, f"≥ {DENSITY_SPEEDUP} ×"), "all blocks": (every, "")}
            lines += masked(Shape(1, HEADS, DENSITY_TOKENS, dim), mode, masks)
            torch.cuda.empty_cache()
            for tokens in PRUNED_TOKENS:
                lines += pruned(Shape(1, HEADS, tokens, dim), mode)
            torch.cuda.empty_cache()
            print("\n".join(lines), flush=True)
    title = f"{torch.cuda.get_device_name()}, {datetime.date.today()}, torch {torch.__version__}"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "sparse_attention.md").write_text(title + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
