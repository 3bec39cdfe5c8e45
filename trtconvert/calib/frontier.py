"""The frontier: modes, speed and quality of each plan that a search tried, as a file. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trtconvert.bundle import SparseShares
from trtconvert.documents import read_json
from trtconvert.errors import UserError, first_problem
from trtconvert.quant.decision import Plan
from trtconvert.recipe import LayerModeName, ModeName


class _Record(BaseModel):
    # PSNR may be NaN, which JSON cannot hold as a number.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


_SiteModes = Annotated[list[Annotated[int, Field(ge=0, lt=len(get_args(ModeName)))]], Field(min_length=1)]
_LayerModes = Annotated[list[Annotated[int, Field(ge=0, le=len(get_args(LayerModeName)))]], Field(min_length=1)]


class PlanPoint(_Record):
    """A plan that was sampled.

    Attributes:
        name: how the plan was made.
        speed: attention time of FP16 everywhere divided by the plan's, by the kernels' measured times.
        figures: of its samples against full precision, by name of the measure.
        keeps_budget: true if every figure is within its limit.
        allowed: true if the plan has only modes that the search may choose.
        int8_values: share of sites and denoising steps with an INT8 second product.
        modes: site: `Mode` per timestep bin.
        layers: layer: `LayerMode` per timestep bin, of layers that the search decided about.
        modulated: those of these layers that quantise deltas from step to step (MoDiff).
        sparse: site: share of its attention that may be lost per timestep bin, 0 for all blocks; of sites with block masks.
        density: share of computed blocks, over all sites and denoising steps.
    """

    name: str
    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    figures: dict[str, float]
    keeps_budget: bool
    allowed: bool = True
    int8_values: Annotated[float, Field(ge=0, le=1)]
    modes: dict[str, _SiteModes]
    layers: dict[str, _LayerModes] = {}
    modulated: list[str] = []
    sparse: dict[str, SparseShares] = {}
    density: Annotated[float, Field(gt=0, le=1)] = 1.0

    @field_validator("figures")
    @classmethod
    def _with_psnr(cls, figures: dict[str, float]) -> dict[str, float]:
        if "psnr" not in figures:
            raise ValueError("psnr is missing")
        return figures

    @model_validator(mode="after")
    def _of_sites(self) -> PlanPoint:
        if bad := [site for site, row in self.sparse.items() if len(row) != len(self.modes.get(site, ()))]:
            raise ValueError(f"sparse: {bad[0]} has other timestep bins, or none")
        if bad := [layer for layer in self.modulated if layer not in self.layers]:
            raise ValueError(f"modulated: {bad[0]} is none of the layers")
        return self

    def plan(self, scalings: Mapping[str, str]) -> Plan:
        """Returns the plan; scalings: of queries and keys by site, as in the search."""
        record = {"sites": self.modes, "layers": self.layers, "scalings": scalings, "sparse": self.sparse}
        return Plan.of_record(record | {"modulated": self.modulated, "name": self.name, "speed": self.speed})

    @property
    def psnr(self) -> float:
        """PSNR in dB."""
        return self.figures["psnr"]

    @property
    def in_int8(self) -> int:
        """Number of timestep bins of sites and layers outside of full precision, and of sites that skip blocks."""
        rows = (*self.modes.values(), *self.layers.values(), *self.sparse.values())
        return sum(choice != 0 for row in rows for choice in row)


class Frontier(_Record):
    """All plans that a search tried.

    Attributes:
        gpu, date: of the measurement of the kernels' times.
        limits: of the measures that have one.
        points: fastest first.
        chosen: name of the point that was built.
    """

    gpu: str
    date: str
    limits: dict[str, float]
    points: Annotated[list[PlanPoint], Field(min_length=1)]
    chosen: str = ""

    @model_validator(mode="after")
    def _of_one_search(self) -> Frontier:
        if self.chosen and self.chosen not in {point.name for point in self.points}:
            raise ValueError(f"chosen is '{self.chosen}', but no point has this name")
        if len({(*sorted(point.modes), *sorted(point.layers)) for point in self.points}) > 1:
            raise ValueError("points of different sites or layers")
        return self

    def choose(self, name: str | None) -> PlanPoint:
        """Returns the fastest allowed plan within the budget, or the named plan; UserError if that does not exist or exceeds the
        budget."""
        kept = [point for point in self.points if point.keeps_budget]
        if name is None:
            # The PSNR of equal samples is finite; a budget above it leaves full precision, except in layers with stated modes.
            exact = min(self.points, key=lambda point: point.in_int8)
            return next((point for point in kept if point.allowed), exact)
        found = next((point for point in self.points if point.name == name), None)
        if found is not None and found.keeps_budget:
            return found
        others = "; ".join(f"{point.name} ({point.speed:.3f}×, {point.psnr:.1f} dB)" for point in kept)
        figures = ", ".join(f"{key} {value:.4g}" for key, value in found.figures.items()) if found else "no such plan"
        limits = ", ".join(f"{key} {value:g}" for key, value in self.limits.items())
        raise UserError(
            f"the plan '{name}' " + ("exceeds the budget" if found else "was not tried"),
            expected=f"a plan within {limits}: {others or 'there is none'}",
            got=figures,
            remedy="correct plan.point, or the limits in the plan section",
        )

    def rivals(self) -> list[PlanPoint]:
        """Returns the plan of `choose`, and slower plans that may become faster when denoising steps are skipped, too: the
        fastest plans with a half, and with a tenth, of the squared error that the budget allows."""
        found = [self.choose(None)]
        if (least := self.limits.get("psnr")) is not None:
            for share in _SHARES_OF_ERROR:
                enough = least - 10 * math.log10(share)
                kept = (p for p in self.points if p.keeps_budget and p.allowed and p.psnr >= enough)
                if (point := next(kept, None)) is not None and point not in found:
                    found.append(point)
        return found


_SHARES_OF_ERROR = (0.5, 0.1)

FRONTIER_DB = (60, 50, 40, 30)
"""PSNR that the error model predicts at points of the frontier; each point is then sampled."""

DECADES = 0.2
"""A search bisects until its limits on the modelled error are this close, in decades."""

USUAL_BISECTIONS, USUAL_FIXED = 3, 4
"""Numbers of bisections and of fixed plans that most searches sample."""


def usual_drawings(*, masks: bool) -> int:
    """Returns the number of plans that most searches sample; masks: with and without block masks."""
    return (len(FRONTIER_DB) + USUAL_BISECTIONS) * (1 + masks) + USUAL_FIXED


MOST_RIVALS = 1 + len(_SHARES_OF_ERROR)
"""Largest number of `Frontier.rivals`."""


MODELLED, SEARCHED = "model, {} dB", "search, error 10^{:.2f}"
"""Names of the plans that a search makes: of a predicted PSNR, and of a limit on the modelled error."""


def named_fixed(point: str | None) -> str | None:
    """Returns `plan.point` if it names a fixed plan, which a search must sample; None for plans that searches make."""
    made = tuple(name.partition("{")[0] for name in (MODELLED, SEARCHED))
    return None if point is None or point.startswith(made) else point


def read_frontier(path: Path) -> Frontier:
    """Reads a frontier; UserError if the file is not a frontier."""
    try:
        return Frontier.model_validate(read_json(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a frontier",
            expected="a search's plans, as a build writes them",
            got=first_problem(error),
            remedy="build the bundle again",
        ) from error
