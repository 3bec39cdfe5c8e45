"""Scales of activations in INT8 layers: one, one per timestep bin, one per token; and remedies for outliers.

    python bench/layer_scales.py [--samples N] [--steps N] [--bins N]

The script measures the digits model with all its layers in INT8 and attention in full precision. The first table has images:
PSNR of the same seeds against full precision, with compensated weights (`trtconvert.linear.compensation`) and with weights
rounded to the nearest. The second table has layers alone, on rows of full-precision runs at timesteps outside of the
calibration: the mean and the largest of the layers' errors ‖y − y_exact‖ / ‖y_exact‖. The second table compares the default
equalisation with remedies that papers propose for outliers: a rotation of the input channels (a normalised Hadamard matrix, as
QuaRot) in place of the equalisation, and a 16-bit branch of low rank beside the INT8 product (the largest singular values of the
equalised weight, as SVDQuant). All weights are INT8 per output channel. docs/design/layers.md has the cost of each remedy.
Prints Markdown tables with the date and the machine; nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from machine import processor
from scipy.linalg import hadamard
from torch import Tensor

from trtconvert.bars import NoBar
from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.layer_observer import LayerObserver
from trtconvert.calib.layer_scales import LayerScales, layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.evaluate.verify import psnr
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS, LayerTables, quantise_weight
from trtconvert.linear.sites import Layer, model_tensors
from trtconvert.models.denoiser import intercepted
from trtconvert.models.digits import digits_model
from trtconvert.quant.forward import Int8Layers
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection

ROOT = Path(__file__).parents[1]
FIRST_SEED = 100_000
RANK = 8
ROWS_OF_A_CALL = 16


def calibrated(model: DiffusionModel, layers: list[Layer], bins: int, **fields: bool) -> Mapping[str, LayerScales]:
    with tempfile.TemporaryDirectory() as folder:
        section = LayersSection.model_validate(fields)
        sites = parts_to_convert(model, AttentionSection(), section).sites
        return calibrate(
            model, CalibrationSection(bins=bins), "", sites, Path(folder) / "batches", NoBar(), layers=layers,
            of_layers=section,
        ).layers  # fmt: skip


def tables_of(
    model: DiffusionModel, layers: list[Layer], scales: Mapping[str, LayerScales], mode: LayerMode, bins: int
) -> dict[str, LayerTables]:
    modes = {layer.name: torch.full((bins,), int(mode), dtype=torch.int32) for layer in layers}
    return layer_tables(model.denoiser, layers, scales, modes)


def images(model: DiffusionModel, tables: dict[str, LayerTables] | None, samples: int, steps: int) -> Tensor:
    handler = None if tables is None else Int8Layers(tables, model.timestep_max).handler()
    denoiser = intercepted(model, layers=handler)
    return model.sample(denoiser, range(FIRST_SEED, FIRST_SEED + samples), steps=steps, solver="ddim")


def rounded(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).round().clamp(-LEVELS, LEVELS) * scale


def in_int8(weight: Tensor) -> Tensor:
    stored, scale = quantise_weight(weight)
    return stored.float() * scale[:, None]


def rotation(channels: int) -> Tensor:
    """Returns an orthogonal matrix: Hadamard matrices along the diagonal, of the largest size that divides the channels."""
    size = channels & -channels
    return torch.block_diag(*[torch.from_numpy(hadamard(size)).float() / size**0.5] * (channels // size))


def best_scale(x: Tensor) -> float:
    """Returns the scale of least squared error, by the search of the calibration."""
    top = float(x.abs().amax())
    return min(
        (top * (1 - step / 20) / LEVELS for step in range(11)), key=lambda s: float((x - rounded(x, s)).square().sum())
    )


def of_outliers(seen: Tensor, held: Tensor, weight: Tensor, factor: Tensor) -> dict[str, float]:
    """Returns the errors of y = x · weightᵀ, one static scale each, made of `seen` and measured on `held`.

    Args:
        seen, held: [R, K]. weight: [N, K]. factor: [K] of equalisation.
    """
    exact = held @ weight.T
    turned, equalised = rotation(weight.shape[1]), weight / factor

    def error(y: Tensor) -> float:
        return float((y - exact).norm() / exact.norm())

    u, s, v = torch.linalg.svd(equalised, full_matrices=False)
    branch = (u[:, :RANK] * s[:RANK]) @ v[:RANK]
    moved, scale = held * factor, best_scale(seen * factor)
    return {
        "as it is": error(rounded(held, best_scale(seen)) @ in_int8(weight).T),
        "equalised": error(rounded(moved, scale) @ in_int8(equalised).T),
        "rotated": error(rounded(held @ turned, best_scale(seen @ turned)) @ in_int8(weight @ turned).T),
        f"equalised, rank {RANK}": error(rounded(moved, scale) @ in_int8(equalised - branch).T + moved @ branch.T),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bins", type=int, default=10)
    options = parser.parse_args()
    model = digits_model(ROOT / "recipes" / "digits-dit.safetensors")
    layers = parts_to_convert(model, AttentionSection(), LayersSection()).layers
    layers = [replace(layer, weight_only=False) for layer in layers]
    scales = {bins: calibrated(model, layers, bins) for bins in (1, options.bins)}
    plain = calibrated(model, layers, options.bins, equalise=False)
    cases: dict[str, Callable[[], dict[str, LayerTables]]] = {
        "one scale": lambda: tables_of(model, layers, scales[1], LayerMode.STATIC, 1),
        f"one per bin, of {options.bins}": lambda: tables_of(
            model, layers, scales[options.bins], LayerMode.STATIC, options.bins
        ),
        "one per bin, not equalised": lambda: tables_of(model, layers, plain, LayerMode.STATIC, options.bins),
        "one per token": lambda: tables_of(model, layers, scales[options.bins], LayerMode.DYNAMIC, options.bins),
        "INT8 weights alone": lambda: tables_of(model, layers, scales[1], LayerMode.WEIGHT_ONLY, 1),
    }
    nearest = {
        bins: {name: of.rounded_to_nearest() for name, of in of_bins.items()} for bins, of_bins in scales.items()
    }
    cases |= {
        "one scale, weights to the nearest": lambda: tables_of(model, layers, nearest[1], LayerMode.STATIC, 1),
        "one per token, weights to the nearest": lambda: tables_of(
            model, layers, nearest[options.bins], LayerMode.DYNAMIC, options.bins
        ),
        "INT8 weights alone, to the nearest": lambda: tables_of(model, layers, nearest[1], LayerMode.WEIGHT_ONLY, 1),
    }
    full = images(model, None, options.samples, options.steps)
    print(
        f"{datetime.date.today()}, {processor()}, torch {torch.__version__}, digits DiT, {len(layers)} layers, ", end=""
    )
    print(f"{options.samples} samples, ddim {options.steps} steps\n")
    print("| scales of activations | PSNR, mean of samples | against one scale |\n| --- | --- | --- |")
    found: dict[str, Tensor] = {}
    for name, make in cases.items():
        found[name] = psnr(images(model, make(), options.samples, options.steps), full)
        gain = found[name] - found["one scale"]
        error = float(gain.std() / len(gain) ** 0.5)
        print(
            f"| {name} | {float(found[name].mean()):.2f} dB | {float(gain.mean()):+.2f} ± {error:.2f} dB |", flush=True
        )

    sources = {layer.input_group for layer in layers}
    rows = []
    for seed in (0, 1):
        observer = LayerObserver(sources, model.timestep_max, 1, rows=ROWS_OF_A_CALL)
        denoiser = intercepted(model, layers=observer)
        model.sample(denoiser, range(seed, seed + 1), steps=20 + seed, solver="ddim")
        rows.append(observer.finish())
    tensors = model_tensors(model.denoiser)
    errors: dict[str, list[float]] = {}
    for layer in layers:
        seen, held = (of_run[layer.input_group].sample.flatten(0, 1) for of_run in rows)
        weight = layer.weight.of(tensors).float().flatten(1)
        for name, error in of_outliers(seen, held, weight, scales[1][layer.input_group].x_factor).items():
            errors.setdefault(name, []).append(error)
    print("\n| a layer, one static scale | mean error | largest error |\n| --- | --- | --- |")
    for name, of_layers in errors.items():
        print(f"| {name} | {statistics.mean(of_layers):.4f} | {max(of_layers):.4f} |")


if __name__ == "__main__":
    main()
