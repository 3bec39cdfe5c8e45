"""Explains why less than half of a denoiser is in INT8. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtconvert.bundle import ComponentRecord, LayerRecord, SiteRecord
from trtconvert.evaluate.parts import left_groups
from trtconvert.recipe import Recipe

_SETTINGS = (
    ("excludes", "{section}.include and {section}.exclude in the recipe say so"),
    ("layers.kinds", "layers.kinds: [linear, conv] takes them in"),
    ("layers.min_rows", "a lower layers.min_rows than {min_rows} takes them in"),
    ("layers.modes: auto leaves", "layers.modes: static takes them in"),
    ("layers.include", "their names in layers.include take them in"),
)
"""Words of a reason, and the remedy."""

_NOTHING = "no setting of the recipe changes that"


@dataclass(frozen=True)
class _Group:
    """Unconverted parts of one reason: their number, and the setting that converts them."""

    count: int
    reason: str
    setting: str


def why_little(component: ComponentRecord, recipe: Recipe, *, in_time: bool = False) -> list[str]:
    """Returns two lines about attention and two about layers, each only if fewer than half are in INT8: how many are, why the
    others are not, and the setting that would convert most of them.

    Args:
        in_time: whether the plan is the fastest that the search tried, so that no budget held it back.
    """
    return [*_of_sites(component.sites, recipe, in_time), *_of_layers(component.layers, recipe, in_time)]


def _of_sites(sites: Sequence[SiteRecord], recipe: Recipe, in_time: bool) -> list[str]:
    bins = max((len(site.modes) for site in sites), default=0) or recipe.calibration.bins
    every, found = bins * len(sites), sum(mode != 0 for site in sites for mode in site.modes)
    if 2 * found >= every:
        return []
    by_plan = sum(mode == 0 for site in sites for mode in site.modes)
    groups = [
        _Group(bins * len(group.names), group.reason, _setting(group.reason, "attention", recipe))
        for group in left_groups(sites)
    ]
    if by_plan:
        groups.append(_Group(by_plan, *_plans_reason(recipe, "attention", in_time)))
    return _lines(f"attention: {found} of {every} timestep bins of its sites", groups)


def _of_layers(layers: Sequence[LayerRecord], recipe: Recipe, in_time: bool) -> list[str]:
    found = sum(layer.in_int8 for layer in layers)
    if 2 * found >= len(layers):
        return []
    groups = [
        _Group(len(group.names), group.reason, _setting(group.reason, "layers", recipe))
        for group in left_groups(layers)
    ]
    if by_plan := sum(not layer.modes and not layer.reason for layer in layers):
        groups.append(_Group(by_plan, *_plans_reason(recipe, "layers", in_time)))
    return _lines(f"layers: {found} of {len(layers)}", groups)


def _plans_reason(recipe: Recipe, section: str, in_time: bool) -> tuple[str, str]:
    """Returns why the plan left convertible parts, and the remedy."""
    modes, plan = recipe.attention.modes, recipe.plan
    if modes != "auto":
        return "attention.modes says so", "attention.modes: precision takes them in"
    if plan.point is not None:
        return f"the plan '{plan.point}' leaves them", "without plan.point the fastest plan of the search is built"
    if in_time:
        converted = "attention.modes: precision" if section == "attention" else "layers.modes: static"
        return (
            "INT8 is not faster there by the times in plan.kernel_cost",
            f"{converted} converts them all the same, or `trtconvert measure` takes times of your GPU for plan.kernel_cost",
        )
    limits = {
        "min_psnr": plan.min_psnr,
        "min_ssim": plan.min_ssim,
        "max_lpips": plan.max_lpips,
        "max_feature_distance": plan.max_feature_distance,
        "max_prediction_error": plan.max_prediction_error,
    }
    asked = ", ".join(f"plan.{name} {limit:g}" for name, limit in limits.items() if limit is not None)
    return (
        f"the plan's budget leaves them ({asked})",
        "a budget that allows more takes more in, such as a lower plan.min_psnr and a higher plan.max_prediction_error",
    )


def _setting(reason: str, section: str, recipe: Recipe) -> str:
    for words, setting in _SETTINGS:
        if words in reason:
            return setting.format(section=section, min_rows=recipe.layers.min_rows)
    return _NOTHING


def _lines(found: str, groups: list[_Group]) -> list[str]:
    groups = sorted(groups, key=lambda group: -group.count)
    reasons = "; ".join(f"{group.count}: {group.reason}" for group in groups)
    return [f"{found}; of the others {reasons}", f"what would change most: {groups[0].setting}"]
