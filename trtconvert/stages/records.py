"""Sites and layers in the manifest's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from trtconvert.bundle import LayerRecord, SiteRecord
from trtconvert.recipe import Recipe
from trtconvert.stages.results import Planned

if TYPE_CHECKING:
    from trtconvert.attention.sites import Site
    from trtconvert.calib.component_layers import ComponentLayers
    from trtconvert.linear.sites import ConvertedLayer, Layer


def layer_records(
    recipe: Recipe, planned: Planned, converted: Mapping[str, ConvertedLayer], batch: int
) -> list[LayerRecord]:
    """Returns the records of all layers; batch: batch size of the kernel times."""
    from trtconvert.linear import convs

    decisions = planned.plan.layers
    modulated = {name for name, layer in converted.items() if layer.delta_scale is not None}
    searched = recipe.attention.modes == "auto" and recipe.layers.modes == "auto"

    def record(layer: Layer) -> LayerRecord:
        if (decision := decisions.get(layer.name)) is not None and decision.in_int8:
            return _layer_record(layer, decision.modes, layer.name in modulated)
        if searched and layer.kind == "conv" and not layer.obstacle and (slow := convs.left(layer, batch)):
            reason = f"it is a convolution {slow}, and layers.modes: auto leaves it in 16 bits"
            layer = replace(layer, obstacle=reason)
        return _layer_record(layer, [])

    return [record(layer) for layer in planned.calibrated.layers]


def component_records(found: ComponentLayers) -> list[LayerRecord]:
    converted = [_layer_record(layer.layer, layer.tables.modes.tolist()) for layer in found.converted.values()]
    return converted + [_layer_record(layer, []) for layer in found.left]


def _layer_record(layer: Layer, modes: list[int], modulated: bool = False) -> LayerRecord:
    return LayerRecord(
        name=layer.name,
        kind=layer.kind,
        in_channels=layer.in_channels,
        out_channels=layer.out_channels,
        kernel=list(layer.kernel),
        rows=layer.rows,
        weight=layer.weight.name,
        modes=modes,
        reason=layer.obstacle,
        modulated=modulated,
    )


def site_records(planned: Planned, sparse: bool) -> list[SiteRecord]:
    """Returns the records of all sites; sparse: True if the recipe asks for block masks."""
    from trtconvert.attention.blocks import obstacle_to_blocks

    plan = planned.plan
    modes, shares = plan.site_modes, plan.shares
    blocks = planned.calibrated.calibration.blocks if shares else {}
    densities = {site: blocks[site].density(row) for site, row in shares.items()}

    def dense(site: Site) -> str:
        if not sparse or site.obstacle or site.name in shares:
            return ""
        return obstacle_to_blocks(site) or plan.dense.get(site.name, "the plan keeps it dense")

    return [
        SiteRecord(
            name=s.name,
            heads=s.heads,
            head_dim=s.head_dim,
            modes=modes.get(s.name, []),
            scaling=plan.attention[s.name].scaling if s.name in modes else "",  # type: ignore[arg-type]  # the plan wrote it
            reason=s.obstacle,
            sparse=shares.get(s.name, []),
            density=densities.get(s.name, []),
            dense=dense(s),
        )
        for s in planned.calibrated.sites
    ]
