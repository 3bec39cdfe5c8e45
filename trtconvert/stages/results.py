"""What the calibration, the plan and the choice of steps left, read when a later stage asks for it, and once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True)
class Calibrated:
    """A finished calibrate stage."""

    stage: Stage

    @cached_property
    def calibration(self) -> Calibration:
        from trtconvert.calib.calibration import Calibration

        return Calibration.load(self.stage.folder / CALIBRATION)

    @cached_property
    def sites(self) -> list[Site]:
        """All that were found, those that stay as they are among them."""
        from trtconvert.attention.sites import Site

        return [Site(**site) for site in json.loads((self.stage.folder / SITES).read_text())]

    @cached_property
    def layers(self) -> list[Layer]:
        """All that were found, those that stay as they are among them."""
        from trtconvert.linear.sites import layer_from_json

        return [layer_from_json(layer) for layer in self.layers_as_json()]

    @property
    def chosen_sites(self) -> list[Site]:
        return [site for site in self.sites if not site.obstacle]

    @property
    def chosen_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if not layer.obstacle]

    def layers_as_json(self) -> list[dict[str, Any]]:
        """`layers`, without torch."""
        return json.loads((self.stage.folder / LAYERS).read_text())

    def input_ranges(self, guidance: GuidanceRecord | None) -> dict[str, list[float]]:
        """Largest magnitudes of the denoiser's inputs, by timestep bin; the calibration saw both halves of guidance together."""
        ranges = {name: x.tolist() for name, x in self.calibration.inputs.items()}
        twins = guidance.negative if guidance is not None else {}
        return ranges | {twin: ranges[name] for name, twin in twins.items() if name in ranges}


@dataclass(frozen=True)
class Planned:
    """A finished plan stage, and the calibrate stage that it is for."""

    stage: Stage
    calibrated: Calibrated

    @cached_property
    def plan(self) -> Plan:
        return Plan.of_record(json.loads((self.stage.folder / PLAN).read_text()))

    def reads(self) -> dict[str, str]:
        """What the key of a later stage reads."""
        return {"calibration": self.calibrated.stage.key, "plan": self.stage.key}

    def tables(self) -> dict[str, AttentionTables]:
        """Tables of the sites in INT8."""
        return self.calibrated.calibration.with_modes(self.plan.site_modes)

    def masks(self) -> dict[str, Tensor]:
        """Block masks [T, H, Bq, Bk] of the sites that have one in the plan."""
        shares = self.plan.shares
        return self.calibrated.calibration.masks(shares) if shares else {}


@dataclass(frozen=True)
class Steps:
    """Which denoising steps are computed, and the plan that was chosen together with them.

    Attributes:
        plans: that there were to choose from.
        stage: that chose; None where the recipe computes all steps.
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
        """None where all steps are computed."""
        if self.stage is None or not (self.stage.folder / REUSE_RECORD).is_file():
            return None
        return ReuseRecord.model_validate_json((self.stage.folder / REUSE_RECORD).read_text())

    def reads(self) -> dict[str, str]:
        """What the key of a later stage reads."""
        return {} if self.stage is None else {"steps": self.stage.key}

    def reuse(self, component: ComponentRecord) -> Reuse | None:
        """What the denoiser leaves steps out by."""
        from trtconvert.runtime.reuse import load_reuse

        if self.stage is None or self.record is None:
            return None
        return load_reuse(self.stage.folder, component.model_copy(update={"reuse": self.record}))
