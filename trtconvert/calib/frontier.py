"""What the plan's search tried, as a file: each plan's modes, speed and quality. Free of torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from trtconvert.errors import UserError, first_line


class _Record(BaseModel):
    # A plan whose samples are NaN has no PSNR, which JSON has no number for.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class PlanPoint(_Record):
    """A plan that was sampled.

    Attributes:
        name: what it is.
        speed: attention time of FP16 everywhere over this plan's, by the kernels' measured times.
        figures: what was measured of its samples against full precision, by the name of the measure.
        keeps_budget: whether every figure keeps its limit.
        allowed: whether it has no other modes than the search may choose.
        int8_values: share of sites and denoising steps whose second product is INT8 too.
        modes: site: `Mode` per timestep bin.
        layers: layer: `LayerMode` per timestep bin, where the search decided about layers.
    """

    name: str
    speed: float
    figures: dict[str, float]
    keeps_budget: bool
    allowed: bool = True
    int8_values: float
    modes: dict[str, list[int]]
    layers: dict[str, list[int]] = {}

    @property
    def psnr(self) -> float:
        """dB."""
        return self.figures["psnr"]

    @property
    def in_int8(self) -> int:
        """Timestep bins of sites and layers that are not in full precision."""
        return sum(mode != 0 for row in (*self.modes.values(), *self.layers.values()) for mode in row)


class Frontier(_Record):
    """All plans that a search tried.

    Attributes:
        gpu, date: where and when the kernels' times were measured.
        limits: of the measures that have one.
        points: fastest first.
        chosen: name of the point that was built.
    """

    gpu: str
    date: str
    limits: dict[str, float]
    points: list[PlanPoint]
    chosen: str = ""

    def choose(self, name: str | None) -> PlanPoint:
        """The fastest allowed plan that keeps the budget, or the named one, which must keep it too.

        Raises:
            UserError: there is no such plan, or it misses the budget.
        """
        kept = [point for point in self.points if point.keeps_budget]
        if name is None:
            # Equal samples have a PSNR that ends somewhere; a budget beyond it leaves full precision everywhere, but in layers
            # whose modes are stated.
            exact = min(self.points, key=lambda point: point.in_int8)
            return next((point for point in kept if point.allowed), exact)
        found = next((point for point in self.points if point.name == name), None)
        if found is not None and found.keeps_budget:
            return found
        others = "; ".join(f"{point.name} ({point.speed:.3f}×, {point.psnr:.1f} dB)" for point in kept)
        figures = ", ".join(f"{key} {value:.4g}" for key, value in found.figures.items()) if found else "no such plan"
        limits = ", ".join(f"{key} {value:g}" for key, value in self.limits.items())
        raise UserError(
            f"the plan '{name}' " + ("misses the budget" if found else "was not tried"),
            expected=f"one that keeps {limits}: {others or 'none does'}",
            got=figures,
            remedy="correct plan.point, or the limits in the plan section",
        )


def read_frontier(path: Path) -> Frontier:
    """
    Raises:
        UserError: not a frontier.
    """
    try:
        return Frontier.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(
            f"{path} is not a frontier",
            expected="the plans that a search tried, as a build writes them",
            got=first_line(error),
            remedy="build the bundle again",
        ) from error
