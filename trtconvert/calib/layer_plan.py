"""Layers in plans: what a recipe states, and groups of layers about which a search decides."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.calib.calibration import Calibration
from trtconvert.calib.cost import KernelCost
from trtconvert.calib.layer_scales import layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer
from trtconvert.models.offloading import tables_device
from trtconvert.quant.decision import Choice, Decision, Unit
from trtconvert.quant.forward import Int8Layers
from trtconvert.recipe import LayersSection


def stated_layers(section: LayersSection, layers: Iterable[Layer], bins: int) -> dict[str, Decision]:
    """What a recipe states of layers; `auto` is STATIC, where no search decides.

    Args:
        layers: that are converted; none where they are off.
    """
    if section.off:
        return {}
    names = section.modes if isinstance(section.modes, list) else [section.modes] * bins
    modes = [LayerMode.STATIC if name == "auto" else LayerMode[name.upper()] for name in names]
    return {layer.name: Decision(tuple(Choice(_mode_of(layer, mode)) for mode in modes)) for layer in layers}


def _mode_of(layer: Layer, mode: LayerMode) -> LayerMode:
    """What a layer has where a mode is asked for: convolutions have no scales per token."""
    if layer.weight_only:
        return LayerMode.WEIGHT_ONLY
    return LayerMode.STATIC if layer.kind == "conv" and mode == LayerMode.DYNAMIC else mode


def layer_seconds(
    cost: KernelCost, layers: Sequence[Layer], unit: Unit, batch: int, bins: int, cache_bytes: int = 2
) -> Tensor:
    """[T, choices] time of the layers of a unit together in each of its choices."""

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
        groups: units about which it decides, each with its layers, which read one tensor.
        stated: decisions about the others.
        int8: all of them in INT8, with the scales of those that may quantise deltas.
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
        """
        Args:
            layers: to convert; allowed: the modes that the search may choose, none where the recipe states them all.
            slow: names of layers that are no faster in INT8. They stay in 16 bits where the search would choose, unless they may
                quantise deltas.
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
        readers: dict[str, list[Layer]] = {}
        for layer in layers:
            if auto and not layer.weight_only:
                readers.setdefault(layer.input_group, []).append(layer)
                del stated[layer.name]
        groups = {}
        for input_group, members in readers.items():
            names = tuple(layer.name for layer in members)
            in_int8 = sorted({_mode_of(members[0], mode) for mode in allowed if mode != LayerMode.EXACT})
            by_deltas = [Choice(LayerMode.STATIC, delta=True)] if names[0] in delta_scales else []
            choices = (Choice(LayerMode.EXACT), *map(Choice, in_int8), *by_deltas)
            groups[Unit("layer", input_group, names, choices)] = members
        return SearchedLayers(
            groups,
            stated | dict.fromkeys(exact, Decision((Choice(LayerMode.EXACT),) * bins)),
            Int8Layers(tables, model.timestep_max, delta_scales, model.timesteps_fall),
        )
