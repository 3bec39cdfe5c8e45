"""Conversion of weights to INT8: `trtconvert quantize` in a process of its own, against reading the same file from the disk.

python bench/weights.py [--gigabytes 2] [--rounds 5] [--folder /tmp]
python bench/weights.py --images [--samples 8] [--steps 20] [--device cpu]

Reading and conversion take turns, each from a file that is not in memory; the script prints the median of the turns' ratios.
With `--images` it instead compares samples of the shipped models from quantised files, loaded by `load_quantized`, with samples
of the original files, from the same seeds, by DDIM.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from trtconvert.evaluate.metrics import decibels
from trtconvert.models.denoiser import on_device
from trtconvert.models.digits import digits_model
from trtconvert.models.emoji import emoji_model
from trtconvert.shipped import shipped_folder
from trtconvert.weights import Int8Linear, load_quantized
from trtconvert.weights.tensor_files import TensorWriter

SIZE = 4096


def write_model(path: Path, count: int) -> None:
    """So many BF16 weights of 32 MiB."""
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 0.02
    names = [f"blocks.{index}.weight" for index in range(count)]
    with TensorWriter(path, names, 100) as writer:
        for name in names:
            writer.add(name, x.roll(len(name)), torch.bfloat16)
        writer.close({})


def forget(path: Path) -> None:
    """Takes a file out of the page cache."""
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def read_seconds(path: Path) -> float:
    forget(path)
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(2**23):
            pass
    return time.perf_counter() - started


COMMAND = """
import sys, time
from trtconvert.cli import main
from trtconvert.weights import quantisation

def peak():
    return next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))

before, wall, processors = peak(), time.perf_counter(), time.process_time()
main(sys.argv[1:], standalone_mode=False)
print(time.perf_counter() - wall, time.process_time() - processors, before, peak())
"""
"""getrusage is unsuitable: its largest resident set starts at that of the parent process."""


def run(*arguments: str) -> tuple[float, float, int, int]:
    """Returns the seconds, the seconds of processors, and the largest memory in bytes, of imports alone and of a command in a new
    process."""
    ended = subprocess.run([sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    seconds, processors, before, after = ended.stdout.splitlines()[-1].split()
    return float(seconds), float(processors), int(before) * 1024, int(after) * 1024


@torch.inference_mode()
def print_images(samples: int, steps: int, device: str, folder: Path) -> None:
    print("| | scales | INT8 layers | PSNR, dB | worst sample, dB |\n| --- | --- | ---: | ---: | ---: |")
    for name, build in (("digits-dit", digits_model), ("emoji-dit", emoji_model)):
        weights = shipped_folder() / f"{name}.safetensors"
        plain = on_device(build(weights), device)
        expected = plain.sample(plain.denoiser, range(samples), steps=steps, solver="ddim")
        for granularity in ("block", "channel"):
            output = folder / f"{name}-{granularity}"
            run("quantize", str(weights), "-o", str(output), "--granularity", granularity)
            model = build(weights)
            load_quantized(model.denoiser, output)
            moved = on_device(model, device)
            got = moved.sample(moved.denoiser, range(samples), steps=steps, solver="ddim")
            errors = (got - expected).double().square().flatten(1).mean(1)
            layers = sum(isinstance(module, Int8Linear) for module in model.denoiser.modules())
            whole, worst = (float(decibels(x)) for x in (errors.mean(), errors.max()))
            print(f"| {name} | {granularity} | {layers} | {whole:.1f} | {worst:.1f} |", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--gigabytes", type=float, default=2.0)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments.add_argument("--images", action="store_true")
    arguments.add_argument("--samples", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = arguments.parse_args()
    if given.images:
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            print_images(given.samples, given.steps, given.device, Path(name))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        model, output = Path(name, "model.safetensors"), Path(name, "int8")
        write_model(model, max(1, round(given.gigabytes * 1e9 / (2 * SIZE * SIZE))))
        size = model.stat().st_size
        print(f"{size / 1e9:.2f} GB in tensors of {2 * SIZE**2 / 1e6:.0f} MB; {os.cpu_count()} processors")
        ratios, memory, imports, written = [], 0, 0, 0
        for _ in range(given.rounds):
            shutil.rmtree(output, ignore_errors=True)
            reading = read_seconds(model)
            forget(model)
            seconds, processors, imports, most = run("quantize", str(model), "-o", str(output))
            memory, ratios = max(memory, most), [*ratios, reading / seconds]
            written = sum(path.stat().st_size for path in output.iterdir())
            print(
                f"read {size / reading / 1e6:6.0f} MB/s, quantize {size / seconds / 1e6:6.0f} MB/s, "
                f"{size / processors / 1e6:.0f} per second of a processor: {ratios[-1]:.2f} of the disk; "
                f"load {os.getloadavg()[0]:.1f}"
            )
        print(f"median              {statistics.median(ratios):8.2f} of the disk's read speed")
        print(f"memory              {memory / 1e6:8.0f} MB at most, {imports / 1e6:.0f} of them by its imports")
        print(f"files               {1 - written / size:8.1%} smaller")


if __name__ == "__main__":
    main()
