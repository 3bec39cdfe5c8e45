"""A trained model from outside against itself: the one-step consistency U-Net of the package adaptive-terrain-diffusion, whose
ONNX file takes `noisy`, `sigma` and `difficulty` and gives `denoised`.

    pip download --no-deps adaptive-terrain-diffusion==0.4.2 -d FOLDER
    python bench/terrain.py FOLDER/adaptive_terrain_diffusion-0.4.2-py3-none-any.whl [--seeds 64] [--work FOLDER]
                            [--backend tensorrt --dtype bfloat16 --attention auto --layers auto]

The script completes a recipe of `trtconvert init` with difficulties in the package's own range as conditions, and builds it.
The default modes are fixed, because a search takes hours on a CPU: attention and convolutions in INT8 except for `EXACT`.
Then the package draws a terrain of each seed twice by its own sampler: with its file on plain ONNX Runtime, and with the bundle's
denoiser in its place. With `--backend tensorrt` the script also builds the file without INT8 and without plugins, and times calls
of both engines in turn. Prints a Markdown table with the date and the machine; nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import processor
from ruamel.yaml import YAML
from whole import step_times

from trtconvert import runtime
from trtconvert.bundle import read_manifest

ROOT = Path(__file__).parents[1]
FILE = "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx"
DIFFICULTIES = 100
BATCHES, CALLS = (1, 2, 4), 200
EXACT = ["*skip_connection", "*output_blocks.2?.*", "*out_layers*"]
"""Layers that stay as they are. The first two read sums of earlier features, at the size of the image: one scale does not serve
their outliers. Half of the last miss `verify.min_site_sqnr`: they read a SiLU."""


def write_recipe(work: Path, arguments: argparse.Namespace, exact: bool = False) -> Path:
    """Returns the recipe of `init`, completed with difficulties and the INT8 parts, or without INT8 and plugins."""
    file, recipe = work / FILE, work / f"recipe{'-exact' * exact}.yaml"
    _run(work, "init", str(file), "-o", str(recipe), "--force")
    # Like the package's generator: 1 to 100 on [0, 1].
    levels = np.random.default_rng(0).permutation(np.linspace(0, 1, DIFFICULTIES, dtype=np.float32))
    np.savez(file.with_name("difficulties.npz"), difficulty=levels)
    yaml = YAML()
    found: dict[str, Any] = yaml.load(recipe)
    found["model"]["options"]["conditions"] = "difficulties.npz"
    found["model"]["dtype"] = arguments.dtype
    found["attention"]["modes"], found["layers"]["modes"] = arguments.attention, arguments.layers
    found["layers"].update(kinds=["linear", "conv"], exclude=EXACT)
    found["calibration"].update(samples=arguments.samples, batch=4)
    found["verify"].update(samples=1, min_psnr=20)  # this bench draws more samples itself
    found["engine"] = {"backend": arguments.backend}
    if exact:
        found["attention"], found["layers"] = {"modes": "fp16"}, {"modes": "off"}
        found["engine"] |= {"attention": "native", "layers": "native", "channels_last": False}
    if "auto" not in (found["attention"]["modes"], found["layers"]["modes"]):
        found.pop("plan", None)
    yaml.dump(found, recipe)
    return recipe


def _run(work: Path, *arguments: str) -> None:
    status = subprocess.run([sys.executable, "-m", "trtconvert.cli", *arguments], cwd=ROOT).returncode
    if status:
        sys.exit(f"trtconvert {arguments[0]} failed with status {status}; see {work}")


class Recorded:
    """A session as the package calls it, which keeps its outputs."""

    def __init__(self, run: Any) -> None:
        self._run, self.outputs = run, list[np.ndarray]()

    def run(self, names: Sequence[str], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        self.outputs.append(self._run(names, feeds))
        return [self.outputs[-1]]


def decibels(a: np.ndarray, b: np.ndarray, span: float) -> tuple[float, float]:
    """Returns the PSNR over all samples, and of the worst sample, for values of a span."""
    squares = ((a - b).astype(np.float64) ** 2).reshape(len(a), -1).mean(1)
    mean, worst = (float(10 * np.log10(span**2 / max(x, 1e-30))) for x in (squares.mean(), squares.max()))
    return mean, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="the wheel, or a folder that it was unpacked to")
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--samples", type=int, default=32, help="of the calibration")
    parser.add_argument("--attention", default="balanced", help="the recipe's attention.modes")
    parser.add_argument("--layers", default="static", help="the recipe's layers.modes")
    parser.add_argument("--backend", default="onnxruntime", choices=["onnxruntime", "tensorrt"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="the recipe's model.dtype")
    parser.add_argument("--work", type=Path, help="a folder to keep the recipe and the bundle in")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        if arguments.package.is_dir():
            unpacked = work / "terrain_diffusion"
            if not unpacked.exists():
                unpacked.symlink_to((arguments.package / "terrain_diffusion").resolve())
        else:
            zipfile.ZipFile(arguments.package).extractall(work)
        recipe = write_recipe(work, arguments)
        _run(work, "build", str(recipe), "-o", str(work / "bundle"), "--cache", str(work / "cache"))
        sys.path.insert(0, str(work))
        package: Any = importlib.import_module("terrain_diffusion")
        generator = package.TerrainGenerator(device="cpu")
        report(generator, work / "bundle", arguments.seeds)
        if arguments.backend == "tensorrt":
            exact = write_recipe(work, arguments, exact=True)
            _run(work, "build", str(exact), "-o", str(work / "exact"), "--cache", str(work / "cache"))
            report_times(work / "bundle", work / "exact")


def report(generator: Any, bundle: Path, seeds: int) -> None:
    """Draws with both, and prints the table."""
    session = generator.session

    def drawn(run: Any) -> tuple[np.ndarray, np.ndarray]:
        generator.session = recorded = Recorded(run)
        heights = []
        for seed in range(seeds):
            heights.append(generator.generate(1, seed=seed, zero_floor=False))
            print(f"\r{seed + 1} of {seeds} drawn", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return np.concatenate(recorded.outputs), np.concatenate(heights)

    exact = drawn(lambda names, feeds: session.run(names, feeds)[0])
    with runtime.load(bundle) as loaded, torch.no_grad():
        denoiser = loaded["denoiser"]
        given = lambda feeds: {name: torch.from_numpy(x).to(denoiser.device) for name, x in feeds.items()}  # noqa: E731
        found = drawn(lambda _, feeds: denoiser(**given(feeds)).float().cpu().numpy())
    component = read_manifest(bundle).components["denoiser"]
    sites, layers = component.sites, component.layers
    of_image = [np.clip((x + 1) / 2, 0, 1) for x in (exact[0], found[0])]
    rows = [
        ("attention sites in INT8", f"{sum(site.in_int8 for site in sites)} of {len(sites)}"),
        ("convolutions in INT8", _counted(layers, "conv")),
        ("linear layers in INT8", _counted(layers, "linear")),
        (
            "PSNR of the network's images, dB (worst)",
            "{:.1f} ({:.1f})".format(*decibels(of_image[0], of_image[1], 1.0)),
        ),
        (
            "PSNR of heights, dB (worst)",
            "{:.1f} ({:.1f})".format(*decibels(exact[1], found[1], generator.height_range)),
        ),
        ("seeds, difficulties drawn by the package", str(seeds)),
    ]
    print(f"\n{datetime.date.today()}, {processor()}, against the file on ONNX Runtime\n\n| | |\n| --- | ---: |")
    for name, value in rows:
        print(f"| {name} | {value} |")


def report_times(bundle: Path, exact: Path) -> None:
    """Prints the milliseconds of a call of both engines, for each batch."""
    print(
        f"\n{torch.cuda.get_device_name()}\n\n| batch | TensorRT, ms | trtconvert, ms | |\n| ---: | ---: | ---: | ---: |"
    )
    with runtime.load(bundle) as ours, runtime.load(exact) as plain, torch.no_grad():
        denoisers = {"trtconvert": ours["denoiser"], "TensorRT": plain["denoiser"]}
        for batch in BATCHES:
            noise = torch.randn(batch, 1, 128, 128, device="cuda")
            levels = torch.full((batch,), 1.0, device="cuda")
            inputs = {"noisy": noise, "sigma": levels, "difficulty": levels / 2}
            times = step_times(denoisers, [inputs], "noisy", CALLS)
            found, by_itself = (statistics.median(times[name]) for name in denoisers)
            print(f"| {batch} | {by_itself:.3f} | {found:.3f} | {by_itself / found:.2f}× |", flush=True)


def _counted(layers: Sequence[Any], kind: str) -> str:
    of_kind = [layer for layer in layers if layer.kind == kind]
    return f"{sum(layer.in_int8 for layer in of_kind)} of {len(of_kind)}"


if __name__ == "__main__":
    main()
