"""Seconds that a loaded engine takes to change its LoRAs.

    python bench/loras.py BUNDLE [--rank 16]

A LoRA with random numbers for every linear layer of the bundle's denoiser is set, set at another strength, and taken away, of an
engine that was built with engine.refittable. Before, what of it is the host's: reading the bundle's weights, and adding to them.
That is all that is measured where TensorRT cannot be used. The goal is 2 s for an SDXL-sized U-Net. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import processor
from safetensors.torch import save_file

from trtconvert import runtime
from trtconvert.bundle import read_manifest
from trtconvert.engine import tensorrt
from trtconvert.runtime.loras import BuiltWeights, additions_of


def timed(name: str, work: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = work()
    print(f"| {name} | {time.perf_counter() - started:.2f} s |")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    component = read_manifest(arguments.bundle).components["denoiser"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else processor()
    print(f"{datetime.date.today()}, {where}\n\n| | time |\n| --- | --- |")

    built = timed("open the bundle's weights", lambda: BuiltWeights(arguments.bundle / component.onnx))
    layers = {name: shape for name, shape in built.shapes.items() if name.endswith(".weight") and len(shape) == 2}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lora.safetensors")
        tensors: dict[str, torch.Tensor] = {}
        for name, (rows, columns) in layers.items():
            module = name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = torch.randn(arguments.rank, columns).half()
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, arguments.rank).half() / 1000
        save_file(tensors, file)
        added = timed("read the LoRA", lambda: additions_of([(file, 1.0)], "denoiser", built.shapes, "the denoiser"))
        timed(
            f"add it to {len(added)} weights",
            lambda: [built.with_additions(name, additions, device) for name, additions in added.items()],
        )
        if not tensorrt.status().available:
            return
        with runtime.load(arguments.bundle, backend="tensorrt") as bundle:
            denoiser = bundle["denoiser"]
            for name, loras in (
                ("first set_loras", [(file, 1.0)]),
                ("another strength", [(file, 0.5)]),
                ("none", []),
            ):
                timed(name, lambda loras=loras: denoiser.set_loras(loras))


if __name__ == "__main__":
    main()
