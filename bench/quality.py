"""Quality of INT8 samples of the digits model: FID, KID, IS, precision and recall, beside full precision and its own noise.

    python bench/quality.py [--bundle FOLDER] [--samples N] [--steps N] [--work FOLDER]
    python bench/quality.py --evaluation evaluation.json

Draws with ONNX Runtime, whose INT8 arithmetic is exact, and with the torch model; finished shards in the work folder are
not drawn again. Without a bundle, builds one. The second form prints an evaluation that is there already, such as one that
torchrun made. Prints a Markdown table with the date and the machine; nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import processor

from trtconvert.evaluate.evaluation import Evaluation, read_evaluation
from trtconvert.evaluate.table import paired_rows, rows, watch_line

ROOT = Path(__file__).parents[1]


def trtconvert(*arguments: object) -> None:
    """Run the program; its own output goes to the terminal's error stream."""
    command = [sys.executable, "-m", "trtconvert.cli", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)


def measured(options: argparse.Namespace, folder: Path) -> Evaluation:
    """Evaluate the bundle, built first if there is none."""
    bundle, output = options.bundle, folder / "evaluation.json"
    if bundle is None:
        bundle = folder / "bundle"
        trtconvert("build", "recipes/digits-dit.yaml", "-o", bundle)
    arguments = ["--weights", "recipes/digits-dit.safetensors", "-n", options.samples, "--steps", options.steps]
    work = ["--work", options.work.absolute()] if options.work else []
    trtconvert("evaluate", bundle.absolute(), *arguments, *work, "-o", output)
    return read_evaluation(output)


def show(found: Evaluation) -> None:
    """The table, and what it was measured on."""
    print(
        f"{found.created[:10]}, {processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    )
    print(
        f"{found.samples} samples, {found.solver} {found.steps} steps, against {found.reference} "
        f"({found.reference_count} images), features {found.features}\n"
    )
    print("| figure | INT8 | full precision | full precision, other seeds | difference | noise |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows(found):
        print(f"| {row.name} | {row.int8} | {row.full} | {row.other} | {row.difference} | {row.noise} |")
    print("\n| INT8 against full precision, same seeds | |\n| --- | --- |")
    for name, value in [*paired_rows(found), ("NaN or Inf", watch_line(found))]:
        print(f"| {name} | {value} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--evaluation", type=Path)
    options = parser.parse_args()
    if options.evaluation:
        show(read_evaluation(options.evaluation))
        return
    with tempfile.TemporaryDirectory() as folder:
        show(measured(options, Path(folder)))


if __name__ == "__main__":
    main()
