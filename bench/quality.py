"""Quality of INT8 samples of a model that ships: FID, KID, IS, precision and recall, beside full precision and its own noise.

    python bench/quality.py [--model NAME] [--bundle FOLDER | --modes MODE … | --candidates MODE …] [--bins N] [--no-layers]
                            [--samples N] [--steps N] [--work FOLDER] [--output FILE]
                            [--device cuda --int8 torch --batch N --dtype float16] [--ranks N]
    python bench/quality.py --evaluation evaluation.json

Draws with ONNX Runtime, which computes INT8 exactly, and with the torch model, or with `--int8 torch` with our kernels
inside the torch model; finished shards in the work folder are not drawn again. Without a bundle, builds one with the recipe's
modes, with other modes (one, or one for each timestep bin from low noise up), or with the modes that `auto` finds among the
candidates. `--ranks` sets the number of processes under torchrun. The second form prints an existing evaluation. Prints
Markdown tables with the date and the machine, and the plans that the build's search tried; nothing is asserted.
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

from trtconvert.attention.modes import Mode
from trtconvert.bundle import read_manifest
from trtconvert.calib.frontier import read_frontier
from trtconvert.evaluate.records import Evaluation, read_evaluation
from trtconvert.evaluate.table import paired_rows, rows, watch_line

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"


def trtconvert(*arguments: object, ranks: int = 1) -> None:
    """Runs the program; its own output goes to the terminal's error stream."""
    module = ["-m", "trtconvert.cli"]
    if ranks > 1:
        module = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *module]
    subprocess.run([sys.executable, *module, *map(str, arguments)], check=True, stdout=sys.stderr, cwd=ROOT)


def built(options: argparse.Namespace, folder: Path) -> Path:
    """Builds the shipped recipe's bundle, perhaps with other modes, without an engine, because no figure here uses one."""
    from ruamel.yaml import YAML

    yaml = YAML()
    recipe = yaml.load(RECIPES / f"{options.model}.yaml")
    recipe["model"]["weights"] = str(RECIPES / recipe["model"]["weights"])
    recipe["engine"]["backend"] = "onnxruntime"
    plan = recipe.setdefault("plan", {})
    if "features_weights" in plan:
        plan["features_weights"] = str(RECIPES / plan["features_weights"])
    if options.bins:
        recipe["calibration"]["bins"] = options.bins
    if options.no_layers:
        recipe["layers"] = {"modes": "off"}  # the default converts layers together with attention
    if options.modes:
        recipe["attention"]["modes"] = options.modes if len(options.modes) > 1 else options.modes[0]
        recipe["verify"]["min_psnr"] = 0.0  # measure, never refuse
    if options.candidates:
        recipe["attention"]["modes"] = "auto"
        plan["candidates"] = options.candidates
        plan["point"] = None  # the fastest of them
    yaml.dump(recipe, folder / "recipe.yaml")
    trtconvert("build", folder / "recipe.yaml", "-o", folder / "bundle")
    return folder / "bundle"


def measured(options: argparse.Namespace, bundle: Path, output: Path) -> Evaluation:
    """Evaluates a bundle."""
    own = options.model.removesuffix("-dit")
    arguments = ["--weights", RECIPES / f"{options.model}.safetensors", "-n", options.samples, "--steps", options.steps]
    arguments += ["--features", f"{own}-classifier", "--reference", own]
    arguments += ["--device", options.device, "--int8", options.int8, "--batch", options.batch]
    arguments += ["--dtype", options.dtype]
    work = ["--work", options.work.absolute()] if options.work else []
    trtconvert("evaluate", bundle.absolute(), *arguments, *work, "-o", output, ranks=options.ranks)
    return read_evaluation(output)


def show_plans(bundle: Path) -> None:
    """Prints the bundle's plan, and the other tried plans."""
    sites = [site for site in read_manifest(bundle).sites if site.modes]
    modes = [mode for site in sites for mode in site.modes]
    share = sum(mode >= Mode.BALANCED for mode in modes) / len(modes)
    print(f"\nBoth products in INT8 at {share:.0%} of sites and timestep bins.")
    if (bundle / "frontier.json").is_file():
        tried = read_frontier(bundle / "frontier.json")
        print(
            f"\n| plan, times of an {tried.gpu} | speed | PSNR | both products INT8 | budget |\n| --- | --- | --- | --- | --- |"
        )
        for p in tried.points:
            name = f"{p.name} (built)" if p.name == tried.chosen else p.name
            kept = ("kept" if p.keeps_budget else "missed") + ("" if p.allowed else ", no candidate")
            print(f"| {name} | {p.speed:.3f} | {p.psnr:.1f} dB | {p.int8_values:.0%} | {kept} |")


def show(found: Evaluation) -> None:
    """Prints the table, and the machine of the measurement."""
    print(
        f"{found.created[:10]}, {processor()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"
    )
    print(
        f"{found.samples} samples, {found.solver} {found.steps} steps, against {found.reference} "
        f"({found.reference_count} images), features {found.features}; INT8: {found.backend}; "
        f"full precision: {found.dtype or 'not drawn'}\n"
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
    parser.add_argument("--model", choices=["digits-dit", "emoji-dit"], default="digits-dit")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--bins", type=int)
    parser.add_argument("--no-layers", action="store_true")
    parser.add_argument("--output", type=Path, help="keep the evaluation in this file")
    parser.add_argument("--modes", nargs="+", choices=["auto", "sigma-rule", *(mode.name.lower() for mode in Mode)])
    parser.add_argument("--candidates", nargs="+", choices=[mode.name.lower() for mode in Mode])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--int8", choices=["bundle", "torch"], default="bundle")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--evaluation", type=Path)
    options = parser.parse_args()
    if options.evaluation:
        show(read_evaluation(options.evaluation))
        return
    with tempfile.TemporaryDirectory() as folder:
        bundle = options.bundle or built(options, Path(folder))
        show(measured(options, bundle, (options.output or Path(folder) / "evaluation.json").absolute()))
        show_plans(bundle)


if __name__ == "__main__":
    main()
