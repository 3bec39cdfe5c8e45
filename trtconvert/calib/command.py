"""`trtconvert calibrate`: from a recipe to a calibration file, on one process or on the processes of torchrun."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

import torch

from trtconvert import models
from trtconvert.bundle import covering
from trtconvert.cache import Cache
from trtconvert.calib.calibrate import calibrate, observations_folder, parts_to_convert, refuse_without_blocks
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.distributed import Ranks
from trtconvert.calib.shards import Shards
from trtconvert.errors import UserError
from trtconvert.files import one_at_a_time, whole_file
from trtconvert.models.fixed_sizes import refuse_fixed_sizes
from trtconvert.models.guidance import fused_form
from trtconvert.models.identity import identity
from trtconvert.models.placed import placed
from trtconvert.models.placement import choose_place
from trtconvert.models.saved import with_dtype
from trtconvert.progress import Reporter
from trtconvert.recipe import Recipe


def calibrate_recipe(
    recipe: Recipe, output: Path, cache: Cache, ranks: Ranks, report: Reporter, *, skip_bad: bool
) -> Calibration:
    """Calibrates by a recipe; rank 0 writes the file. An interrupted run prints how to resume.

    Raises:
        UserError: see `calibrate`; or the recipe loads a calibration from a file.
        BackendUnavailable: the device does not exist.
        RankLost: another process has ended.
    """
    section = recipe.calibration
    if section.from_ is not None:
        raise UserError(
            "there is nothing to calibrate",
            expected="a recipe without calibration.from",
            got=f"calibration.from: {section.from_}",
            remedy="remove calibration.from from the recipe",
        )
    recipe = recipe.model_copy(update={"model": with_dtype(recipe.model)})
    weights = identity(recipe.model, recipe.loras)
    place = choose_place(recipe.compute, recipe.model)
    work = observations_folder(cache, recipe, weights, place)
    alone = one_at_a_time(work) if ranks.rank == 0 else contextlib.nullcontext()
    # The output path is opened first, so that a path that cannot be written fails before hours of work.
    target = whole_file(output, "give another file with -o") if ranks.rank == 0 else contextlib.nullcontext()
    with alone:
        with target as partial, _telling_how_to_resume(work, ranks), report.live(), report.stage("calibrate") as bar:
            ranks.gather(None)  # the other ranks wait until rank 0 holds the folder's lock
            model = models.load(recipe.model, recipe.loras, as_stored=place.on_gpu)
            if recipe.engine.guidance == "fused":
                fused_form(model)  # refuses models without a fused form
            dims = [
                dict(model.dims) | {name: (size.min, size.opt, size.max) for name, size in ranges.items()}
                for ranges in recipe.engine.ranges()
            ]
            if model.diffusers is None:  # pipelines were observed at several sizes
                refuse_fixed_sizes(model, covering(dims))
            model = placed(model, place, report.notice)
            parts = parts_to_convert(model, recipe.attention, recipe.layers)
            if recipe.sparse_shares:
                for sizes in dims:
                    refuse_without_blocks(model, parts.sites, sizes, section.bins)
            made = calibrate(
                model, section, weights, parts.sites, work, bar, ranks, skip_bad=skip_bad, layers=parts.layers,
                of_layers=recipe.layers, shares=recipe.sparse_shares, dtype=recipe.model.dtype,
            )  # fmt: skip
            if partial is not None:
                made.save(partial)
        ranks.gather(None)  # the other ranks wait until rank 0 has written
        shutil.rmtree(work, ignore_errors=True)
    return made


@contextlib.contextmanager
def _telling_how_to_resume(work: Path, ranks: Ranks):
    try:
        yield
    except BaseException:  # including signals: SystemExit and KeyboardInterrupt
        kept = Shards(work)
        finished, counted = len(kept.batches()), len(kept.counted())
        if finished:
            of = f"{finished} batches" + (f" ({counted} of them counted)" if counted else "")
            print(
                f"rank {ranks.rank}: {of} finished and kept in {work}; the same command resumes there", file=sys.stderr
            )
        raise


def summary(made: Calibration) -> list[str]:
    """Describes a calibration in lines of text."""
    p = made.provenance
    lines = [
        f"{len(made.tables)} sites of {p.model}, {p.bins} timestep bins, statistic {p.statistic}",
        *([f"inputs of layers: {len(made.layers)}"] if made.layers else []),
        f"{sum(p.observed)} denoiser calls observed; per bin: {', '.join(map(str, p.observed))}",
    ]
    if made.blocks:
        densities = torch.stack([blocks.densities().mean(0) for blocks in made.blocks.values()]).mean(0).tolist()
        shares = next(iter(made.blocks.values())).shares
        each = ", ".join(f"{density:.0%} at {share:g}" for share, density in zip(shares, densities, strict=True))
        lines.append(f"blocks that {len(made.blocks)} sites need, by the share of attention that may be lost: {each}")
    if made.outliers:
        worst = max(
            (float(share.max()), site, name[0])
            for site, shares in made.outliers.items()
            for name, share in shares.items()
        )
        lines.append(f"clipped elements: at most {worst[0]:.3%} of a head, in {worst[2]} of {worst[1]}")
    if p.skipped:
        lines += [f"{len(p.skipped)} skipped as bad:", *(f"  {bad}" for bad in p.skipped)]
    return lines
