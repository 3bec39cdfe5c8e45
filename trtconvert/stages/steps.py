"""The stage that chooses the denoising steps to compute, and with them the plan."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtconvert.bundle import ReuseRecord, TriedPlan
from trtconvert.calib.identity import search_reads
from trtconvert.stages.build import Build
from trtconvert.stages.common import CHOSEN_PLAN, REUSE, REUSE_RECORD
from trtconvert.stages.converted import int8_in_torch
from trtconvert.stages.results import ComputedSteps, Planned

if TYPE_CHECKING:
    from trtconvert.calib.reuse import Found
    from trtconvert.progress import Bar


def steps_stage(build: Build, plans: Sequence[Planned]) -> ComputedSteps:
    """Chooses the denoising steps to compute, and among several plans the plan that is fastest with its steps.

    Writes the chosen plan's index, the measured trajectories, and the record of the choice; only the index if no step can be
    skipped.

    Args:
        plans: fastest first, by their times of attention and layers.
    """
    recipe = build.recipe
    section = recipe.steps
    if section.computed == "all":
        return ComputedSteps(plans)
    reads: dict[str, Any] = {
        "calibration": plans[0].calibrated.stage.key,
        "plans": [planned.stage.key for planned in plans],
        "steps": section.model_dump(mode="json"),
    } | build.kernel_reads()
    if section.computed == "auto":  # a stated share does not depend on the budget
        reads["budget"] = search_reads(recipe.plan)

    def make(folder: Path, bar: Bar) -> None:
        from safetensors.torch import save_file

        from trtconvert.calib import reuse
        from trtconvert.evaluate.budget import load_budget
        from trtconvert.models.int8_denoiser import int8_denoiser

        source, steps = build.source.placed(), section.calibrated
        seeds = range(section.seed, section.seed + section.samples)
        bar.total(reuse.drawings(steps, section.computed == "auto", len(plans)))
        measured, full = reuse.measure_trajectories(source, seeds, steps, bar)
        share, budget = None if isinstance(section.computed, str) else section.computed, load_budget(recipe.plan)
        best, number, chosen, tried = 0.0, 0, list["Found"](), list[TriedPlan]()
        for index, planned in enumerate(plans):
            # With more steps the plan would be slower than the best so far.
            most = math.ceil(steps * planned.plan.speed / best) - 1 if best else None
            if most is not None and most < 1:
                continue
            denoiser = int8_denoiser(source, *int8_in_torch(recipe, source, planned))
            of_plan = measured
            if not planned.plan.exact:
                of_plan = reuse.with_trajectories_of(denoiser, measured, source, seeds, steps, bar)
            found = reuse.search_reuse(source, denoiser, of_plan, full, seeds, steps, budget, share, bar, most)
            count = found[-1].schedule.count
            of_all = planned.plan.speed * steps / count
            tried.append(
                TriedPlan(name=planned.plan.name, speed=planned.plan.speed, computed=count, speed_of_all=of_all)
            )
            if of_all > best:
                best, number, chosen = of_all, index, found
        (folder / CHOSEN_PLAN).write_text(json.dumps(number))
        every, last = chosen[0], chosen[-1]
        if last.reuse is None:
            return
        save_file(last.reuse.found.tensors(), folder / REUSE)
        record = ReuseRecord(
            file=REUSE,
            objective=last.reuse.objective,
            limit=last.reuse.limit,
            steps=len(last.schedule.computed),
            computed=[step for step, now in enumerate(last.schedule.computed) if now],
            samples=section.samples,
            psnr=last.figures["psnr"],
            psnr_worst=last.psnr_worst,
            psnr_all=every.figures["psnr"],
            tried=tried if len(plans) > 1 else [],
        )
        (folder / REUSE_RECORD).write_text(record.model_dump_json(indent=1))

    steps = ComputedSteps(plans, build.stage("steps", reads, make))
    if steps.record is None:
        build.report.notice(
            "all denoising steps are computed: samples with skipped steps miss the budget of the section plan; lower "
            "plan.min_psnr, or set steps.computed to a number, to skip steps"
        )
    return steps
