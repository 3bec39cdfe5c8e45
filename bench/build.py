"""Figures of the main job on this machine: times and memory of `trtconvert build` on the digits recipe, and of `--help`.

    python bench/build.py
    python bench/build.py --models sd15 sdxl … [--work FOLDER] [--backend tensorrt|onnxruntime] [--json FILE]
                          [--engine FIELD=VALUE …] [--kinds KIND …] [--plan FIELD=VALUE …] [--alone] [--exact [only]]

With `--models`, whole pipelines in published sizes with random weights (bench/published.py) are made and built, `modes: auto`:
the seconds of every stage, the most memory of the host and of the GPU, and figures of the manifest. `--engine attention=plugin
layers=native` builds one engine of the denoiser, where `auto` builds and times several. `--kinds linear conv` are the recipe's
`layers.kinds`, and `--plan layer_candidates=static,dynamic` sets a list of its plan section. `--alone` leaves text encoders out,
and converts the denoiser alone. `--exact` also builds the denoiser without INT8 and without plugins, for `bench/whole.py`;
`--exact only` builds nothing else. Gates are set so wide that random weights pass them: their figures are printed, not asserted.
The search keeps the default limit on the error of predictions. The script reuses a pipeline in the folder, and the stages in its
cache: a stopped build continues.

Each command is a fresh process with an empty cache of its own, except the second build, which finds the first one's. Prints a
Markdown table with the date and the machine; nothing is asserted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import processor

ROOT = Path(__file__).parents[1]
RUNS = 3


def run(arguments: list[str]) -> tuple[float, float]:
    """Returns the wall seconds and the peak resident memory in GiB of one process."""
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
    """Returns the median seconds, their spread (largest less smallest), and largest memory of several runs."""
    times, memory = zip(*(run(arguments) for _ in range(count)), strict=True)
    return statistics.median(times), max(times) - min(times), max(memory)


RECIPE: dict[str, Any] = {
    "attention": {"modes": "auto"},
    "layers": {"modes": "auto"},
    "components": {"all": {}},
    "calibration": {"samples": 16, "batch": 4, "steps": 20, "bins": 10},
    # A PSNR budget has no meaning for random weights.
    "plan": {"samples": 4, "steps": 20, "min_psnr": 25},
    "verify": {"samples": 16, "steps": 20, "min_psnr": 0, "min_site_sqnr": -20, "max_prediction_error": None},
    "output": {"grid": 4},
}
"""Sections of every recipe."""

EXACT: dict[str, Any] = {
    "attention": {"modes": "fp16"},
    "layers": {"modes": "off"},
    "components": {},
    "calibration": {"samples": 1, "batch": 1, "steps": 10, "bins": 10},
    "verify": RECIPE["verify"] | {"samples": 1, "steps": 10},
}
"""Sections of a model that TensorRT computes in its own type by itself. No sample matters."""

EXACT_ENGINE = {"attention": "native", "layers": "native", "channels_last": False}

OF_MODEL: dict[str, dict[str, Any]] = {
    "flux": {
        "calibration": {"samples": 8, "batch": 1, "steps": 10, "bins": 10},
        # Predictions of random weights in BF16 alone err by a half.
        "plan": {"samples": 2, "steps": 10, "max_prediction_error": None},
    },
    "wan": {
        "calibration": {"samples": 2, "batch": 1, "steps": 10, "bins": 10},
        "plan": {"samples": 1, "steps": 10},
        "verify": {"samples": 1, "steps": 20},
    },
}


@contextlib.contextmanager
def watched_gpu() -> Iterator[dict[str, float]]:
    """Yields the largest device memory in use inside the block, in GiB, sampled four times a second."""
    found, done = {"gpu_gib": 0.0}, threading.Event()
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={card}"]

    def watch() -> None:
        while not done.wait(0.25):
            with contextlib.suppress(OSError, ValueError, IndexError):
                used = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
                found["gpu_gib"] = max(found["gpu_gib"], float(used) / 1024)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def build_model(
    name: str,
    work: Path,
    engine: dict[str, Any],
    kinds: list[str],
    plan: dict[str, Any],
    alone: bool,
    exact: bool = False,
) -> dict[str, Any]:
    """Builds one pipeline; returns the seconds of its stages, its memory, and figures of the manifest."""
    from published import PUBLISHED

    folder = work / ("alone" if alone else "pipelines") / name
    if not (folder / "model_index.json").is_file():
        command = [sys.executable, str(ROOT / "bench/published.py"), name, "-o", str(folder.parent)]
        subprocess.run(command + ["--alone"] * alone, check=True)
    recipe = {section: dict(fields) for section, fields in RECIPE.items()}
    for section, fields in OF_MODEL.get(name, {}).items():
        recipe[section] |= fields
    tokens = {"tokens": PUBLISHED[name].embedded} if alone else {}
    recipe["model"] = {"source": "diffusers", "weights": str(folder), "options": PUBLISHED[name].options | tokens}
    recipe["engine"] = engine
    recipe["plan"] |= plan
    if kinds:
        recipe["layers"]["kinds"] = kinds
    if alone:
        recipe["components"] = {}
    title = f"{name}-exact" if exact else "-".join([name, *kinds, *itertools.chain(*plan.values())])
    if exact:
        recipe |= EXACT
        recipe["engine"] = engine | EXACT_ENGINE
    file = work / f"{title}.yaml"
    file.write_text(json.dumps(recipe))  # JSON is YAML
    command = [sys.executable, "-m", "trtconvert.cli", "--debug", "build", str(file), "-o", str(work / "out" / title)]
    started = time.perf_counter()
    # A full pipe would block the program.
    with watched_gpu() as seen, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, "--cache", str(work / "cache"), "--json"],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert process.stderr is not None
        for line in process.stderr:
            _tell(line, time.perf_counter() - started)
        _, status, usage = os.wait4(process.pid, 0)
        output.seek(0)
        result = json.loads(output.read()) if status == 0 else {}
    row: dict[str, Any] = {"model": title, "status": status, "seconds": round(time.perf_counter() - started, 1)}
    row |= {"host_gib": round(usage.ru_maxrss / 2**20, 1), "gpu_gib": round(seen["gpu_gib"], 1)}
    if status == 0:
        quality = result["manifest"]["quality"]
        engines = [e for c in result["manifest"]["components"].values() for e in c["engines"]]
        row |= {"stages": result["seconds"], "bytes": result["bytes"], "gpu_bytes": result["gpu_bytes"]}
        row |= {"reused": result["reused"], "psnr": quality["psnr"]}
        row |= {"type_error": quality["type_error"], "prediction_error": [e["prediction_error"] for e in engines][:1]}
    return row


def _tell(line: str, seconds: float) -> None:
    """Returns finished stages, and output lines that are no events."""
    try:
        event = json.loads(line)
    except ValueError:
        print(line, end="", flush=True)
        return
    if event["event"] == "finished":
        print(
            f"{seconds:7.1f} s  {event['stage']}: {event['elapsed_s']:.1f} s{' (cache)' * event['reused']}", flush=True
        )
    elif event["event"] in ("notice", "error"):
        print(f"{seconds:7.1f} s  {json.dumps(event)}", flush=True)


def print_models(rows: list[dict[str, Any]]) -> None:
    print("| model | all | calibrate, search, export, verify | engines | host | GPU | PSNR |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        stages = row.get("stages", {})
        engines = sum(seconds for name, seconds in stages.items() if name.startswith("engine"))
        ours = sum(stages.values()) - engines
        print(
            f"| {row['model']} | {row['seconds']:.0f} s | {ours:.0f} s | {engines:.0f} s | {row['host_gib']} GiB | "
            f"{row['gpu_gib']} GiB | {row.get('psnr', float('nan')):.1f} dB |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "trtconvert-bench-build")
    parser.add_argument("--backend", default="tensorrt")
    parser.add_argument("--engine", nargs="+", default=[], metavar="FIELD=VALUE", help="of the recipe's engine section")
    parser.add_argument("--kinds", nargs="+", default=[], metavar="KIND")
    parser.add_argument("--plan", nargs="+", default=[], metavar="FIELD=VALUE", help="of the recipe's plan section")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--exact", nargs="?", const="also", choices=["also", "only"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.models:
        measure_digits()
        return
    given.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in given.models:
        engine = {"backend": given.backend} | dict(field.split("=", 1) for field in given.engine)
        plan = {field: value.split(",") for field, value in (text.split("=", 1) for text in given.plan)}
        for exact in {None: [False], "also": [False, True], "only": [True]}[given.exact]:
            rows.append(build_model(name, given.work, engine, given.kinds, plan, given.alone, exact))
            print(json.dumps(rows[-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps({"date": str(datetime.date.today()), "models": rows}, indent=1))
    print_models(rows)


def measure_digits() -> None:
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
