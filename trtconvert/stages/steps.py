"""The stage that chooses which denoising steps are computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.bundle import ReuseRecord
from trtconvert.calib.identity import search_reads
from trtconvert.stages.build import Build
from trtconvert.stages.common import REUSE, REUSE_RECORD
from trtconvert.stages.converted import int8_in_torch
from trtconvert.stages.results import Planned, Steps

if TYPE_CHECKING:
    from trtconvert.progress import Bar


def steps_stage(build: Build, planned: Planned) -> Steps:
    """Choose which denoising steps are computed. Leaves what was measured of trajectories, and the record of the choice; neither
    where no step can be left out."""
    recipe = build.recipe
    section = recipe.steps
    if section.computed == "all":
        return Steps()
    reads: dict[str, Any] = planned.reads() | {"steps": section.model_dump(mode="json")}
    if section.computed == "auto":  # a stated share is kept whatever the budget
        reads["budget"] = search_reads(recipe.plan)

    def make(folder: Path, bar: Bar) -> None:
        from safetensors.torch import save_file

        from trtconvert.calib import reuse
        from trtconvert.evaluate.budget import load_budget
        from trtconvert.models.int8_denoiser import int8_denoiser

        source = build.source.placed()
        seeds = range(section.seed, section.seed + section.samples)
        bar.total(reuse.drawings(section.calibrated, section.computed == "auto"))
        measured, full = reuse.measure_trajectories(source, seeds, section.calibrated, bar)
        sites, layers = int8_in_torch(recipe, source, planned)
        in_int8 = int8_denoiser(source, sites, layers)
        share = None if isinstance(section.computed, str) else section.computed
        tried = reuse.search_reuse(
            source, in_int8, measured, full, seeds, section.calibrated, load_budget(recipe.plan), share, bar
        )
        every, chosen = tried[0], tried[-1]
        if chosen.reuse is None:
            return
        save_file(chosen.reuse.found.tensors(), folder / REUSE)
        record = ReuseRecord(
            file=REUSE,
            objective=chosen.reuse.objective,
            limit=chosen.reuse.limit,
            steps=len(chosen.schedule.computed),
            computed=[step for step, now in enumerate(chosen.schedule.computed) if now],
            samples=section.samples,
            psnr=chosen.figures["psnr"],
            psnr_worst=chosen.psnr_worst,
            psnr_all=every.figures["psnr"],
        )
        (folder / REUSE_RECORD).write_text(record.model_dump_json(indent=1))

    steps = Steps(build.stage("steps", reads, make))
    if steps.record is None:
        build.report.notice(
            "all denoising steps are computed: with any of them left out the samples miss the budget of the section plan; "
            "a lower plan.min_psnr, or a number as steps.computed, leaves some out"
        )
    return steps
