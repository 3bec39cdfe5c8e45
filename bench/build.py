"""Figures of the main job on this machine: times and memory of `trtconvert build` on the digits recipe, and of `--help`.

    python bench/build.py

Each command is a fresh process with an empty cache of its own, except the second build, which finds the first one's. Prints a
Markdown table with the date and the machine; nothing is asserted.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import processor

ROOT = Path(__file__).parents[1]
RUNS = 3


def run(arguments: list[str]) -> tuple[float, float]:
    """Wall seconds and peak resident memory in GiB of one process."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "trtconvert.cli", *arguments], stdout=subprocess.DEVNULL, cwd=ROOT
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"trtconvert {' '.join(arguments)} failed with status {status}")
    return seconds, usage.ru_maxrss / 2**20


def measure(arguments: list[str], count: int) -> tuple[float, float, float]:
    """Median seconds, their spread (largest less smallest), and largest memory of several runs."""
    times, memory = zip(*(run(arguments) for _ in range(count)), strict=True)
    return statistics.median(times), max(times) - min(times), max(memory)


def main() -> None:
    rows = [("`trtconvert --help`", *measure(["--help"], RUNS), "0.5 s")]
    builds = []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(RUNS):
            arguments = [
                "build",
                "recipes/digits-dit.yaml",
                "-o",
                f"{folder}/out",
                "--cache",
                f"{folder}/cache-{index}",
            ]
            builds.append(run(arguments))
        times, memory = zip(*builds, strict=True)
        rows.append(
            ("build, empty cache", statistics.median(times), max(times) - min(times), max(memory), "120 s, 4 GB")
        )
        rows.append(("build again, nothing changed", *measure(arguments, RUNS), "5 s"))
    print(
        f"{datetime.date.today()}, {processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}\n"
    )
    print(f"| command | median of {RUNS} | spread | peak memory | goal |\n| --- | --- | --- | --- | --- |")
    for name, median, spread, peak, goal in rows:
        print(f"| {name} | {median:.2f} s | {spread:.2f} s | {peak:.2f} GiB | {goal} |")


if __name__ == "__main__":
    main()
