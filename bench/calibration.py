"""Cost of observation in denoising runs of the digits model, for each kind of statistic.

    python bench/calibration.py [--threads N]

Runs without and with observation alternate, so that a busy machine slows both. Beside the wall time the table has the CPU time,
which other programs hardly change with one thread, and the least CPU time, because other programs on the processor cost caches
and clock and never make a run faster. Below the table is the cost of computing scales from the observed statistics, once for all
batches. Prints Markdown with the date and the machine; nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from machine import processor

from trtconvert.attention.ranges import RangeObserver, offsets
from trtconvert.calib.calibration import scales
from trtconvert.calib.histogram import HistogramObserver, Histograms
from trtconvert.calib.shards import Shards
from trtconvert.diffusion_model import Denoiser
from trtconvert.models.denoiser import intercepted
from trtconvert.models.digits import digits_model

ROOT = Path(__file__).parents[1]
SAMPLES, STEPS, BINS, RUNS = 16, 20, 10, 9
GOAL = 0.30


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Returns the time on the clock, and the time of the processors."""
    started, worked = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - started, time.process_time() - worked


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    torch.set_num_threads(parser.parse_args().threads)
    model = digits_model(ROOT / "recipes" / "digits-dit.safetensors")
    sites = {f"blocks.{i}.attn": block.attn.heads for i, block in enumerate(model.denoiser.blocks)}

    def denoise(denoiser: Denoiser) -> None:
        model.sample(denoiser, range(SAMPLES), steps=STEPS, solver="ddim")

    with tempfile.TemporaryDirectory() as folder:
        shards = Shards(Path(folder))
        ranges = RangeObserver(list(sites), model.timestep_max, BINS)

        def observe_ranges() -> None:
            denoise(intercepted(model, ranges))
            shards.write(0, ranges.finish(), [])

        observe_ranges()
        elements = HistogramObserver(offsets(shards, BINS), sites, model.timestep_max)

        def observe_elements() -> None:
            denoise(intercepted(model, elements))
            shards.write_counts([0], elements.histograms)

        kinds = {"none": lambda: denoise(model.denoiser), "ranges": observe_ranges, "elements": observe_elements}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for _ in range(RUNS):
            for name, run in kinds.items():
                times[name].append(seconds(run))
        kept = shards, elements.histograms
        once = {
            statistic: statistics.median(seconds(partial(make_scales, statistic, *kept))[1] for _ in range(RUNS))
            for statistic in ("batch-max", "elements", "mse")
        }

    print(f"{datetime.date.today()}, {processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{SAMPLES} samples, {STEPS} steps, {len(sites)} sites, {BINS} bins; one batch with its file, {RUNS} runs\n")
    print("| pass | median | spread | added | processors' median | spread | added | least | added | goal |")
    print("| --- |" + " --- |" * 9)
    least = {name: min(worked for _, worked in taken) for name, taken in times.items()}
    for name, taken in times.items():
        cells = [
            cell for kind in (0, 1) for cell in columns([t[kind] for t in taken], [t[kind] for t in times["none"]])
        ]
        cells += [f"{least[name]:.3f} s", f"{least[name] / least['none'] - 1:.1%}"]
        print(f"| {name} | {' | '.join(cells)} | {GOAL:.0%} |")
    print("\nScales, processors' median:", ", ".join(f"{name} {worked:.3f} s" for name, worked in once.items()))


def make_scales(statistic: str, shards: Shards, histograms: Histograms) -> None:
    scales(shards, 99, BINS, statistic=statistic, histograms=None if statistic == "batch-max" else histograms)


def columns(taken: list[float], without: list[float]) -> list[str]:
    """Returns the median, the spread, and the median share that is added to the run without observation just before."""
    added = statistics.median(one / other - 1 for one, other in zip(taken, without, strict=True))
    return [f"{statistics.median(taken):.3f} s", f"{max(taken) - min(taken):.3f} s", f"{added:.1%}"]


if __name__ == "__main__":
    main()
