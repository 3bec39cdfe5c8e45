"""Layers in plans: a recipe's modes, and the groups of layers that a search decides about."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.calib.calibration import Calibration
from trtconvert.calib.cost import KernelCost
from trtconvert.calib.layer_scales import by_input_group, layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer
from trtconvert.models.offloading import tables_device
from trtconvert.quant.decision import Choice, Decision, Unit
from trtconvert.quant.forward import Int8Layers
from trtconvert.recipe import LayersSection


def stated_layers(section: LayersSection, layers: Iterable[Layer], bins: int) -> dict[str, Decision]:
    """Returns the decisions of a recipe about converted layers; `auto` is STATIC if there is no search."""
    if section.off:
        return {}
    names = section.modes if isinstance(section.modes, list) else [section.modes] * bins
    modes = [LayerMode.STATIC if name == "auto" else LayerMode[name.upper()] for name in names]
    return {layer.name: Decision(tuple(Choice(mode_of(layer, mode)) for mode in modes)) for layer in layers}


def mode_of(layer: Layer, mode: LayerMode) -> LayerMode:
    """Returns a layer's mode for a wanted mode: convolutions have no scales per token."""
    if layer.weight_only:
        return LayerMode.WEIGHT_ONLY
    return LayerMode.STATIC if layer.kind == "conv" and mode == LayerMode.DYNAMIC else mode


def layer_seconds(
    cost: KernelCost, layers: Sequence[Layer], unit: Unit, batch: int, bins: int, cache_bytes: int = 2
) -> Tensor:
    """[T, choices] time of all layers of a unit in each of its choices."""

    def seconds(layer: Layer, choice: Choice) -> float:
        if choice.delta:
            return cost.modulated_seconds(layer, batch, cache_bytes)
        return cost.layer_seconds(layer, batch, LayerMode(choice.mode))

    row = [sum(seconds(layer, choice) for layer in layers) for choice in unit.choices]
    return torch.tensor(row, dtype=torch.float64).expand(bins, -1)


@dataclass(frozen=True)
class SearchedLayers:
    """Layers in a search.

    Attributes:
        groups: units that the search decides about, each with the layers of one input group.
        stated: decisions about the other layers.
        int8: all layers in INT8, with the scales of deltas of those that may quantise deltas.
    """

    groups: dict[Unit, list[Layer]]
    stated: dict[str, Decision]
    int8: Int8Layers

    @staticmethod
    def of(
        model: DiffusionModel,
        layers: Sequence[Layer],
        calibration: Calibration,
        section: LayersSection,
        allowed: Collection[LayerMode],
        bins: int,
        slow: Collection[str] = (),
    ) -> SearchedLayers:
        """Prepares the layers of a search.

        Args:
            layers: layers to convert; allowed: modes that the search may choose, none if the recipe states the modes.
            slow: names of layers that INT8 does not make faster. Where the search would decide they stay in 16 bits, unless they
                may quantise deltas.
        """
        delta_scales = {
            layer.name: scale
            for layer in layers
            if section.modiff == "auto" and (scale := calibration.layers[layer.input_group].change_scale) is not None
        }
        auto = section.modes == "auto"
        exact = [layer.name for layer in layers if auto and layer.name in slow and layer.name not in delta_scales]
        layers = [layer for layer in layers if layer.name not in exact]
        stated = stated_layers(section, layers, bins)
        modes = {name: decision.modes for name, decision in stated.items()}
        tables = layer_tables(model.denoiser, layers, calibration.layers, modes, tables_device(model, layers))
        readers = by_input_group(layer for layer in layers if auto and not layer.weight_only)
        groups = {}
        for input_group, members in readers.items():
            names = tuple(layer.name for layer in members)
            for name in names:
                del stated[name]
            in_int8 = sorted({mode_of(members[0], mode) for mode in allowed if mode != LayerMode.EXACT})
            by_deltas = [Choice(LayerMode.STATIC, delta=True)] if names[0] in delta_scales else []
            choices = (Choice(LayerMode.EXACT), *map(Choice, in_int8), *by_deltas)
            groups[Unit("layer", input_group, names, choices)] = members
        return SearchedLayers(
            groups,
            stated | dict.fromkeys(exact, Decision((Choice(LayerMode.EXACT),) * bins)),
            Int8Layers(tables, model.timestep_max, delta_scales, model.timesteps_fall),
        )
