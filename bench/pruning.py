"""Quality loss of pruned attention: images of the shipped digits model with skipped keys, against images with all keys.

    python bench/pruning.py [--samples 16] [--steps 20]

Attention is otherwise exact, so only the skipped keys matter. Shares are of keys, by equal parts of the schedule from low
noise up. PSNR is over all samples, of the range of the unpruned ones. Runs on a CPU; prints a table, nothing is asserted.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from trtconvert.attention import Int8Attention
from trtconvert.attention.sites import SiteCall
from trtconvert.models.denoiser import intercepted
from trtconvert.models.digits import digits_model

WEIGHTS = Path(__file__).parents[1] / "recipes" / "digits-dit.safetensors"
SCHEDULES: list[tuple[float, ...]] = [
    *((0.0, 0.0, share, share) for share in (0.1, 0.2, 0.3)),
    (0.0, 0.0, 0.0, 0.2),
    *((share,) for share in (0.1, 0.2, 0.3)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    model = digits_model(WEIGHTS)
    modules: dict[tuple[int, int], Int8Attention] = {}

    def images(schedule: tuple[float, ...] | None) -> Tensor:
        def pruned(call: SiteCall) -> Tensor:
            heads, dim = call.q.shape[1], call.q.shape[3]
            if (attention := modules.get((heads, dim))) is None:
                attention = modules[heads, dim] = Int8Attention(heads, dim, precision_mode="fp16", block_q=16)
            return attention(call.q, call.k, call.v, call.timestep, enable_pruning=True, pruning_ratio=schedule)[0]

        denoiser = model.denoiser if schedule is None else intercepted(model, pruned)
        with torch.no_grad():
            return model.sample(denoiser, list(range(given.samples)), steps=given.steps, solver="ddim")

    exact = images(None)
    span = (exact.max() - exact.min()).item()
    print("| keys dropped, from low noise up | PSNR, dB |\n| --- | ---: |")
    for schedule in SCHEDULES:
        error = (images(schedule) - exact).square().mean().item()
        print(f"| {', '.join(f'{share:.0%}' for share in schedule)} | {10 * math.log10(span**2 / error):.1f} |")


if __name__ == "__main__":
    main()
