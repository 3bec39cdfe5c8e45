"""The INT8 sites and layers of a plan, with their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtconvert.errors import UserError
from trtconvert.recipe import Recipe
from trtconvert.stages.results import Planned

if TYPE_CHECKING:
    import torch

    from trtconvert.linear.sites import ConvertedLayer
    from trtconvert.models import DiffusionModel
    from trtconvert.quant.forward import Int8Layers, Int8Sites


def converted_layers(
    recipe: Recipe, model: DiffusionModel, planned: Planned, computed_on: torch.device | None = None
) -> dict[str, ConvertedLayer]:
    """Returns the layers that the plan converts, with their tables.

    Args:
        computed_on: device that quantises the weights, see `layer_tables`.
    Raises:
        UserError: the recipe requires layers that quantise deltas, but the plan has none.
    """
    from trtconvert.calib.layer_scales import is_modulated, layer_tables
    from trtconvert.linear.deltas import can_be_modulated
    from trtconvert.linear.sites import ConvertedLayer, with_input_groups_among
    from trtconvert.models.offloading import tables_device

    decisions = {name: decision for name, decision in planned.plan.layers.items() if decision.in_int8}
    modes = {name: decision.modes for name, decision in decisions.items()}
    layers = [layer for layer in planned.calibrated.layers if layer.name in decisions]
    scales = planned.calibrated.calibration.layers
    of_layers = {layer.name: scales[layer.input_group] for layer in layers}
    tables = layer_tables(model.denoiser, layers, scales, modes, tables_device(model, layers), computed_on)
    modulated = {
        layer.name
        for layer in layers
        if is_modulated(layer, recipe.layers)
        and can_be_modulated(tables[layer.name].modes.tolist())
        and (recipe.layers.modiff != "auto" or decisions[layer.name].delta)
    }
    if recipe.layers.modiff not in (False, "auto") and not modulated:
        raise UserError(
            "layers.modiff requires layers that quantise deltas, but the plan has none",
            expected="a plan with layers that are static in all timestep bins",
            got=f"{len(layers)} INT8 layers, none of them static in all bins",
            remedy="set layers.modes to static, raise the budget of the plan section, or set layers.modiff to false",
        )
    return {
        layer.name: ConvertedLayer(
            layer, tables[layer.name], of_layers[layer.name].change_scale if layer.name in modulated else None
        )
        for layer in with_input_groups_among(layers)
    }


def int8_in_torch(recipe: Recipe, model: DiffusionModel, planned: Planned) -> tuple[Int8Sites, Int8Layers]:
    """Returns INT8 sites and layers of a plan on the model's device."""
    from trtconvert.quant.forward import Int8Layers, Int8Sites

    scalings, smooth_k = planned.plan.scalings, recipe.attention.smooth_k
    sites = Int8Sites(planned.tables(), model.timestep_max, scalings, smooth_k, masks=planned.masks())
    converted = converted_layers(recipe, model, planned)
    tables = {name: layer.tables for name, layer in converted.items()}
    of_deltas = {name: layer.delta_scale for name, layer in converted.items() if layer.delta_scale is not None}
    layers = Int8Layers(tables, model.timestep_max, of_deltas, model.timesteps_fall)
    return sites.to(model.device), layers
