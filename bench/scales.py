"""Gain of calibrated scales per timestep bin over one scale for all timesteps, on the digits model.

    python bench/scales.py [--samples N] [--steps N] [--bins N] [--statistic batch-max|elements|mse] [--percentile P]

The same data, modes and seeds; only the number of timestep bins differs. PSNR against full precision is given over all pixels,
where one deviating sample can outweigh all others, and as the mean over samples, with the standard error of the paired
difference. SQNR is that of each attention's output on full-precision activations, as the mean over sites and parts of the
schedule. The ratio of the scales bounds the gain, because rounding noise is proportional to scales. Prints a Markdown table
with the date and the machine; nothing is asserted.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from machine import processor
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.bars import NoBar
from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.data import SITE_SAMPLES
from trtconvert.evaluate import metrics
from trtconvert.evaluate.verify import output_sqnr, psnr
from trtconvert.models.denoiser import intercepted
from trtconvert.models.digits import digits_model
from trtconvert.quant.forward import Int8Layers, Int8Sites
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection

ROOT = Path(__file__).parents[1]
FIRST_SEED = 100_000
BATCH = 64
INT8_MODES = [mode for mode in Mode if mode != Mode.FP16]


@dataclass(frozen=True)
class Figures:
    """PSNR over all pixels, PSNR of each sample [N], and the mean SQNR of the sites, in dB."""

    pooled: float
    per_sample: Tensor
    sqnr: float


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bins", type=int, default=10)
    parser.add_argument("--statistic", choices=["batch-max", "elements", "mse"], default="batch-max")
    parser.add_argument("--percentile", type=float, default=99.0)
    options = parser.parse_args()
    model = digits_model(ROOT / "recipes" / "digits-dit.safetensors")
    sites = parts_to_convert(model, AttentionSection(), LayersSection(modes="off")).sites

    def draw(denoiser) -> torch.Tensor:
        starts = range(FIRST_SEED, FIRST_SEED + options.samples, BATCH)
        ends = FIRST_SEED + options.samples
        seeds = [range(start, min(start + BATCH, ends)) for start in starts]
        return torch.cat([model.sample(denoiser, held, steps=options.steps, solver="ddim") for held in seeds])

    full = draw(model.denoiser)
    none = Int8Layers({}, model.timestep_max)
    tables: dict[int, Mapping[str, Mapping[str, Tensor]]] = {}
    found: dict[tuple[Mode, int], Figures] = {}
    for bins in (1, options.bins):
        section = CalibrationSection(bins=bins, statistic=options.statistic, percentile=options.percentile)
        with tempfile.TemporaryDirectory() as folder:
            calibration = calibrate(model, section, "", sites, Path(folder) / "batches", NoBar())
        tables[bins] = calibration.tables
        for mode in INT8_MODES:
            modes = {site.name: torch.full((bins,), int(mode), dtype=torch.int32) for site in sites}
            int8 = Int8Sites(calibration.with_modes(modes), model.timestep_max, "calibrated", True)
            # SQNR is always over ten parts of the schedule, also with one bin.
            by_site, _ = output_sqnr(model, int8, none, options.bins, FIRST_SEED, SITE_SAMPLES, NoBar())
            sqnr = statistics.mean(db for row in by_site.values() for db in row if db is not None)
            images = draw(intercepted(model, int8.handler()))
            found[mode, bins] = Figures(metrics.psnr(images, full), psnr(images, full), sqnr)

    print(f"{datetime.date.today()}, {processor()}, torch {torch.__version__}")
    print(
        f"digits DiT, {options.samples} samples, ddim {options.steps} steps, statistic {options.statistic}, percentile "
        f"{options.percentile:g}, 1 bin against {options.bins}, scaling calibrated\n"
    )
    print(
        "| mode | PSNR, all pixels | with bins | PSNR, mean of samples | with bins | gain | SQNR | with bins | gain |"
    )
    print("| --- |" + " --- |" * 8)
    for mode in INT8_MODES:
        one, several = found[mode, 1], found[mode, options.bins]
        gain = several.per_sample - one.per_sample
        error = float(gain.std() / len(gain) ** 0.5)
        cells = [mode.name.lower(), f"{one.pooled:.2f} dB", f"{several.pooled:.2f} dB"]
        cells += [f"{float(x.per_sample.mean()):.2f} dB" for x in (one, several)]
        cells += [f"{float(gain.mean()):+.2f} ± {error:.2f} dB", f"{one.sqnr:.2f} dB", f"{several.sqnr:.2f} dB"]
        print(f"| {' | '.join([*cells, f'{several.sqnr - one.sqnr:+.2f} dB'])} |")
    smaller = {name: headroom(tables[1], tables[options.bins], f"{name}_scale") for name in ("q", "k", "v")}
    print(
        "\nA bin's own scale is smaller by, on average: " + ", ".join(f"{n} {db:.2f} dB" for n, db in smaller.items())
    )


def headroom(one: Mapping[str, Mapping[str, Tensor]], several: Mapping[str, Mapping[str, Tensor]], name: str) -> float:
    """Returns the mean ratio of the scale of all timesteps to the bin's scale, over sites, bins and heads, in dB."""
    return statistics.mean(float((20 * (one[site][name] / several[site][name]).log10()).mean()) for site in one)


if __name__ == "__main__":
    main()
