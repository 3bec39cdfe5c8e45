"""Measures a bundle of a whole model on this GPU, step and image, beside TensorRT in 16 bits and diffusers.

    python bench/whole.py BUNDLE WEIGHTS [--exact BUNDLE] [--peers plain compiled fp8] [--calls 15] [--steps 28] [--json FILE]
                          [--kernels FILE]

`trtconvert build` made the bundle from the pipeline in the folder WEIGHTS; its TensorRT engine computes. `--exact` names a
bundle of the same model without INT8 and without plugins (`bench/build.py --exact` makes one): TensorRT's own engine in the
model's type. Peers are the diffusers model of the weights, in the recipe's type: `plain`, `compiled` (torch.compile of the
model's repeated blocks if these have nearly all weights, else of the model with CUDA graphs) and `fp8` (compiled, with
torchao's FP8 in weights and activations: by row in BF16, by tensor in FP16, which torchao's scales by row do not take).

A step is one call of the denoiser with the inputs of a recorded call and fresh noise. Calls of the peer and of the engine
alternate; the medians are printed. An image is one sample of the recipe's sampler with the whole pipeline, including encoders
and VAE: the first image, then the median of three further images. The first image of the engine and of each peer comes after
one by a denoiser that predicts zeros. `--kernels` writes the engine's kernels in order, with their times in a steady loop.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine import kernels_of, write_kernels
from torch import Tensor, nn

from trtconvert import models, runtime
from trtconvert.bundle import read_manifest
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.models.placed import placed
from trtconvert.models.placement import choose_place
from trtconvert.models.recorded_calls import RecordedCalls
from trtconvert.runtime.batches import AnyBatch
from trtconvert.stages.common import RECORDED_CALLS

LEAST_FP8 = 1024
"""torchao's FP8 gets layers of this many features or more: smaller layers gain nothing."""

MOST_WEIGHTS = 0.9
"""Share of the weights that a model's repeated blocks must have if only these are compiled."""


def step_times(
    denoisers: dict[str, Callable[..., Tensor]], given: list[dict[str, Tensor]], noised: str, calls: int
) -> dict[str, list[float]]:
    """Returns the milliseconds of each denoiser's calls. Denoisers take turns, and each call has its own noise."""
    found: dict[str, list[float]] = {name: [] for name in denoisers}
    for number in range(calls + 3):
        for name, denoiser in denoisers.items():
            inputs = dict(given[number % len(given)])
            inputs[noised] = torch.randn_like(inputs[noised])
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            denoiser(**inputs)
            end.record()
            torch.cuda.synchronize()
            if number >= 3:  # the first steps set up kernels and record graphs
                found[name].append(start.elapsed_time(end))
    return found


def image_times(model: DiffusionModel, denoiser: Callable[..., Tensor], steps: int) -> tuple[float, float]:
    """Returns the seconds of the first image and the median of three further ones."""
    seconds = []
    for seed in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.sample(denoiser, [seed], steps=steps, solver="ddim")
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds[0], statistics.median(seconds[1:])


def network(denoiser: nn.Module) -> nn.Module:
    """Returns the diffusers model inside a denoiser."""
    from diffusers import ModelMixin

    return next(module for module in denoiser.modules() if isinstance(module, ModelMixin))


def compile_blocks(module: Any) -> None:
    """Compiles a model. Convolutions of a U-Net lie outside its repeated blocks, and would stay eager."""
    kinds = getattr(module, "_repeated_blocks", None) or []
    repeated = sum(p.numel() for x in module.modules() if type(x).__name__ in kinds for p in x.parameters())
    of_blocks = repeated > MOST_WEIGHTS * sum(p.numel() for p in module.parameters())
    if of_blocks:
        module.compile_repeated_blocks(dynamic=False)  # their graphs would share one record for all blocks
    else:
        module.compile(mode="reduce-overhead", dynamic=False)


def to_fp8(module: nn.Module) -> None:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_

    def large(layer: nn.Module, _: str) -> bool:
        return isinstance(layer, nn.Linear) and min(layer.in_features, layer.out_features) >= LEAST_FP8

    by_row = next(module.parameters()).dtype == torch.bfloat16
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow() if by_row else PerTensor())
    quantize_(module, config, filter_fn=large)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--exact", type=Path, metavar="BUNDLE")
    parser.add_argument(
        "--peers", nargs="*", default=["plain", "compiled", "fp8"], choices=["plain", "compiled", "fp8"]
    )
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernels", type=Path)
    given = parser.parse_args()
    manifest = read_manifest(given.bundle)
    recipe = manifest.recipe
    rows: dict[str, dict[str, float]] = {}

    def tell(name: str, **figures: float) -> None:
        rows.setdefault(name, {}).update({key: round(value, 3) for key, value in figures.items()})
        print(json.dumps({name: rows[name]}), flush=True)
        if given.json:
            card = torch.cuda.get_device_name()
            record = {"date": str(datetime.date.today()), "card": card, "model": manifest.model, "rows": rows}
            given.json.write_text(json.dumps(record, indent=1))

    began = time.perf_counter()
    bundle = runtime.load(given.bundle, backend="tensorrt")
    engine = AnyBatch(bundle["denoiser"])
    tell("trtconvert", load_s=time.perf_counter() - began)

    section = recipe.model.model_copy(update={"weights": given.weights})
    source = models.load(section, recipe.loras, as_stored=True)
    on_gpu = placed(source, choose_place(recipe.compute, section))
    calls, noised = RecordedCalls.load(given.bundle / RECORDED_CALLS), source.inputs[0].name
    recorded = [{name: x.cuda() for name, x in inputs.items()} for inputs in calls.inputs.values()]
    of_row = next(iter(calls.expected.values())).shape[1:]
    with torch.no_grad():
        if given.kernels is not None:
            kernels = kernels_of(lambda index: engine(**recorded[index % len(recorded)]))
            write_kernels(kernels, given.kernels)
            tell("trtconvert", kernels_ms=sum(kernel.us for kernel in kernels) / 1000)
        # Encoders and the VAE load their kernels before the first image that is timed: the peers use them after the engine.
        began = time.perf_counter()
        on_gpu.sample(
            lambda **inputs: inputs[noised].new_zeros(len(inputs[noised]), *of_row), [0], steps=2, solver="ddim"
        )
        torch.cuda.synchronize()
        tell("pipeline without the denoiser", first_image_s=time.perf_counter() - began)
        first, further = image_times(on_gpu, engine, given.steps)
        tell("trtconvert", first_image_s=first, image_s=further)

        def compare(name: str, peer: Callable[..., Tensor]) -> None:
            """Tells the peer's step beside the engine's, and the peer's images."""
            times = step_times({"trtconvert": engine, name: peer}, recorded, noised, given.calls)
            ours, theirs = (statistics.median(times[of]) for of in ("trtconvert", name))
            first, further = image_times(on_gpu, peer, given.steps)
            tell(
                name, step_ms=theirs, trtconvert_step_ms=ours, ratio=theirs / ours, first_image_s=first, image_s=further
            )

        if given.exact is not None:
            exact = runtime.load(given.exact, backend="tensorrt")
            compare("tensorrt", AnyBatch(exact["denoiser"]))
            exact.close()
        module: Any = network(on_gpu.denoiser)
        for peer in given.peers:
            if peer == "fp8":
                to_fp8(module)
            if peer != "plain":
                torch.compiler.reset()
                compile_blocks(module)
            began = time.perf_counter()
            on_gpu.denoiser(**recorded[0])
            torch.cuda.synchronize()
            tell(peer, first_call_s=time.perf_counter() - began)
            # CUDA graphs of torch.compile write the next result over the last one.
            compare(peer, lambda **inputs: on_gpu.denoiser(**inputs).clone())


if __name__ == "__main__":
    main()
