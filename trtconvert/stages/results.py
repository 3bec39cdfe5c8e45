"""Outputs of the calibration, the plan and the choice of steps, for later stages; read on first use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from trtconvert.bundle import ComponentRecord, GuidanceRecord, ReuseRecord
from trtconvert.cache import Stage
from trtconvert.quant.decision import Plan
from trtconvert.stages.common import CALIBRATION, CHOSEN_PLAN, LAYERS, PLAN, REUSE_RECORD, SITES

if TYPE_CHECKING:
    from torch import Tensor

    from trtconvert.attention.reference import AttentionTables
    from trtconvert.attention.sites import Site
    from trtconvert.calib.calibration import Calibration
    from trtconvert.linear.sites import Layer
    from trtconvert.reuse.schedule import Reuse


class _SentByFields:
    """Pickles the fields of a dataclass without its cached properties: another process reads the files itself."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Calibrated(_SentByFields):
    """A finished calibrate stage."""

    stage: Stage

    @cached_property
    def calibration(self) -> Calibration:
        from trtconvert.calib.calibration import Calibration

        return Calibration.load(self.stage.folder / CALIBRATION)

    @cached_property
    def sites(self) -> list[Site]:
        """All sites, including those that are not converted."""
        from trtconvert.attention.sites import Site

        return [Site(**site) for site in json.loads((self.stage.folder / SITES).read_text())]

    @cached_property
    def layers(self) -> list[Layer]:
        """All layers, including those that are not converted."""
        from trtconvert.linear.sites import Layer

        return TypeAdapter(list[Layer]).validate_python(self.layers_as_json())

    @property
    def chosen_sites(self) -> list[Site]:
        return [site for site in self.sites if not site.obstacle]

    @property
    def chosen_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if not layer.obstacle]

    def layers_as_json(self) -> list[dict[str, Any]]:
        """Returns `layers` as JSON values, without torch."""
        return json.loads((self.stage.folder / LAYERS).read_text())

    def input_ranges(self, guidance: GuidanceRecord | None) -> dict[str, list[float]]:
        """Returns the largest magnitudes of the denoiser's inputs by timestep bin. Inputs of the two halves of guidance share a
        range, because the calibration observed both together."""
        ranges = {name: x.tolist() for name, x in self.calibration.inputs.items()}
        twins = guidance.negative if guidance is not None else {}
        return ranges | {twin: ranges[name] for name, twin in twins.items() if name in ranges}


@dataclass(frozen=True)
class Planned(_SentByFields):
    """A finished plan stage, and the calibrate stage that it belongs to."""

    stage: Stage
    calibrated: Calibrated

    @cached_property
    def plan(self) -> Plan:
        return Plan.of_record(json.loads((self.stage.folder / PLAN).read_text()))

    def reads(self) -> dict[str, str]:
        """Returns the part of a later stage's key about the plan."""
        return {"calibration": self.calibrated.stage.key, "plan": self.stage.key}

    def tables(self) -> dict[str, AttentionTables]:
        """Returns scales and modes of the INT8 sites, by site."""
        return self.calibrated.calibration.with_modes(self.plan.site_modes)

    def masks(self) -> dict[str, Tensor]:
        """Returns block masks [T, H, Bq, Bk] of the sites that have one in the plan."""
        shares = self.plan.shares
        return self.calibrated.calibration.masks(shares) if shares else {}


@dataclass(frozen=True)
class ComputedSteps(_SentByFields):
    """The choice of the computed denoising steps, and of the plan.

    Attributes:
        plans: the plans to choose from.
        stage: the stage that chose; None if the recipe computes all steps.
    """

    plans: Sequence[Planned]
    stage: Stage | None = None

    @cached_property
    def planned(self) -> Planned:
        """The chosen plan."""
        if self.stage is None:
            return self.plans[0]
        return self.plans[json.loads((self.stage.folder / CHOSEN_PLAN).read_text())]

    @cached_property
    def record(self) -> ReuseRecord | None:
        """Record of the choice; None if all steps are computed."""
        if self.stage is None or not (self.stage.folder / REUSE_RECORD).is_file():
            return None
        return ReuseRecord.model_validate_json((self.stage.folder / REUSE_RECORD).read_text())

    def reads(self) -> dict[str, str]:
        """Returns the part of a later stage's key about the steps."""
        return {} if self.stage is None else {"steps": self.stage.key}

    def reuse(self, component: ComponentRecord) -> Reuse | None:
        """Returns the schedules of computed steps; None if all steps are computed."""
        from trtconvert.runtime.reuse import load_reuse

        if self.stage is None or self.record is None:
            return None
        return load_reuse(self.stage.folder, component.model_copy(update={"reuse": self.record}))
