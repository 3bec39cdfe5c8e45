"""Block masks of attention.sparse in a model: computed blocks by share, and images with masks against images without.

    python bench/block_masks.py RECIPE [--shares 0.01 0.03 0.1] [--samples 4] [--steps 10] [--device cuda]

The blocks are calibrated as the recipe's calibration section says. Attention is otherwise exact, so only the skipped blocks
matter. `computed` is the share of computed blocks over all sites that may have masks and all timestep bins, with the minimum
over sites and bins, and the mean of each bin from low noise up. `time` is the time of attention with masks at the sites where
masks save time, relative to attention without masks, in a mode, by the kernels' measured times. PSNR is over all samples, and
of the worst sample. Below the table is the CPU time of the calibration with and without blocks. Runs on a CPU or a GPU; prints
a table, nothing is asserted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trtconvert import models
from trtconvert.attention.blocks import mask_at
from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import expand_blocks
from trtconvert.attention.sites import SiteCall
from trtconvert.bars import NoBar
from trtconvert.calib.block_plan import stated_blocks
from trtconvert.calib.calibrate import calibrate, parts_to_convert, refuse_without_blocks
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.evaluate.verify import psnr
from trtconvert.models.denoiser import intercepted, on_device
from trtconvert.quant.decision import Choice, Decision
from trtconvert.recipe import load_recipe

SEED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.03, 0.1])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mode", choices=[mode.name.lower() for mode in Mode], default="precision")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    recipe, shares = load_recipe(given.recipe), sorted(given.shares)
    model = on_device(models.load(recipe.model, recipe.loras), given.device)
    sites = parts_to_convert(model, recipe.attention, recipe.layers.model_copy(update={"modes": "off"})).sites
    sizes = {name: (opt, opt, opt) for name, (_, opt, _) in model.dims.items()}
    refuse_without_blocks(model, sites, sizes, recipe.calibration.bins)

    def calibrated(shares: list[float]) -> tuple[Calibration, float]:
        started = time.process_time()
        with tempfile.TemporaryDirectory() as work:
            made = calibrate(model, recipe.calibration, "", sites, Path(work) / "observed", NoBar(), shares=shares)
        return made, time.process_time() - started

    made, worked = calibrated(shares)
    _, without = calibrated([])

    def images(masks: dict[str, Tensor]) -> Tensor:
        def attend(call: SiteCall) -> Tensor:
            if call.name not in masks:
                return call.exact()
            chosen = mask_at(masks[call.name], call.timestep, model.timestep_max)
            seen = expand_blocks(chosen, call.q.shape[2], call.k.shape[2])
            grouped = call.q.shape[1] != call.k.shape[1]
            return scaled_dot_product_attention(call.q, call.k, call.v, seen, scale=call.scale, enable_gqa=grouped)

        with torch.no_grad():
            seeds = range(SEED, SEED + given.samples)
            return model.sample(intercepted(model, attend), seeds, steps=given.steps, solver="ddim").cpu()

    exact, mode, cost = images({}), Mode[given.mode.upper()], KernelCost.load(recipe.plan.kernel_cost, masks=True)
    plan = {site.name: Decision((Choice(mode),) * recipe.calibration.bins) for site in sites}
    shapes = {
        site.name: AttentionShape(1, site.heads, site.query_tokens, site.key_tokens, site.head_dim) for site in sites
    }
    print("| may be lost | computed | fewest | by bin | sites with masks | time | PSNR, dB | worst |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for share in shares:
        masks = {name: blocks.mask([share] * recipe.calibration.bins) for name, blocks in made.blocks.items()}
        density = torch.stack([mask.double().mean((1, 2, 3)) for mask in masks.values()])  # [sites, bins]
        found, _ = stated_blocks(share, recipe.plan, sites, plan, made.blocks, 1, made.provenance.observed)
        chosen = {name for name, decision in found.items() if decision.shares}
        dense = sum(cost.seconds(shape, mode) for shape in shapes.values()) * recipe.calibration.bins
        saved = sum(
            cost.seconds(shapes[name], mode) * (1 - cost.masked_ratio(shapes[name], mode, float(of_bin)))
            for name, of_site in zip(masks, density, strict=True)
            if name in chosen
            for of_bin in of_site
        )
        each = psnr(got := images(masks), exact)
        of_all = float(psnr(got.flatten()[None], exact.flatten()[None]))
        by_bin = " ".join(f"{x:.0%}" for x in density.mean(0).tolist())
        print(
            f"| {share:g} | {density.mean():.1%} | {density.min():.0%} | {by_bin} | {len(chosen)} of {len(sites)} "
            f"| {1 - saved / dense:.3f} | {of_all:.1f} | {each.min():.1f} |",
            flush=True,
        )
    print(f"\ncalibration: {worked:.1f} s of processors' time, {without:.1f} s without blocks")


if __name__ == "__main__":
    main()
