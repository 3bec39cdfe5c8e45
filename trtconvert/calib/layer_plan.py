"""Layers in plans: the modes that a recipe states, and groups of layers whose modes a search chooses."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.candidates import LAYERS_OF, MODULATED
from trtconvert.calib.cost import KernelCost
from trtconvert.calib.knapsack import Plan
from trtconvert.calib.layer_scales import layer_tables
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer
from trtconvert.quant.forward import Int8Layers
from trtconvert.recipe import LayersSection


def layer_modes(section: LayersSection, layers: Iterable[Layer], bins: int) -> Plan:
    """The modes of layers that a recipe states; `auto` is STATIC, where no search decides.

    Args:
        layers: that are converted; none where they are off.
    """
    if section.off:
        return {}
    names = section.modes if isinstance(section.modes, list) else [section.modes] * bins
    rows = [LayerMode.STATIC if name == "auto" else LayerMode[name.upper()] for name in names]
    plan = {}
    for layer in layers:
        plan[layer.name] = torch.tensor([_mode_of(layer, mode) for mode in rows], dtype=torch.int32)
    return plan


def _mode_of(layer: Layer, mode: LayerMode) -> LayerMode:
    """What a layer has where a mode is asked for: convolutions have no scales per token."""
    if layer.weight_only:
        return LayerMode.WEIGHT_ONLY
    return LayerMode.STATIC if layer.kind == "conv" and mode == LayerMode.DYNAMIC else mode


def layer_seconds(
    cost: KernelCost, layers: Sequence[Layer], batch: int, modes: Collection[int], cache_bytes: int = 2
) -> list[float]:
    """Time of layers together in 16 bits and in each `LayerMode` of some, or `MODULATED`; infinite in others, up to as many as
    attention has."""

    def seconds(layer: Layer, mode: int) -> float:
        if mode == MODULATED:
            return cost.modulated_seconds(layer, batch, cache_bytes)
        return cost.layer_seconds(layer, batch, LayerMode(mode))

    return [
        sum(seconds(layer, mode) for layer in layers) if mode in (LayerMode.EXACT, *modes) else math.inf
        for mode in range(len(Mode))
    ]


def layer_row(row: Tensor) -> Tensor:
    """[T] `LayerMode` of a group's row, in which `MODULATED` is static."""
    return row.masked_fill(row == MODULATED, int(LayerMode.STATIC))


@dataclass(frozen=True)
class SearchedLayers:
    """Layers in a search: groups of those that read one tensor, whose modes it chooses, and others, whose modes are stated.

    Attributes:
        groups: the layers, by the first one that reads their tensor.
        modes: that each group may have beside `LayerMode.EXACT`, `MODULATED` among them where it may quantise changes.
        fixed: layer: [T] `LayerMode` of the others.
        int8: all of them in INT8, with the scales of those that may quantise changes.
    """

    groups: dict[str, list[Layer]]
    modes: dict[str, set[int]]
    fixed: Plan
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
                quantise changes.
        """
        change_scales = {
            layer.name: scale
            for layer in layers
            if section.modiff == "auto" and (scale := calibration.layers[layer.source].change_scale) is not None
        }
        exact = {
            layer.name
            for layer in layers
            if section.modes == "auto" and layer.name in slow and layer.name not in change_scales
        }
        layers = [layer for layer in layers if layer.name not in exact]
        stated = layer_modes(section, layers, bins)
        groups: dict[str, list[Layer]] = {}
        for layer in layers:
            if section.modes == "auto" and not layer.weight_only:
                groups.setdefault(layer.source, []).append(layer)
        modes = {
            source: {int(_mode_of(members[0], mode)) for mode in allowed if mode != LayerMode.EXACT}
            | ({MODULATED} if members[0].name in change_scales else set())
            for source, members in groups.items()
        }
        searched = {layer.name for members in groups.values() for layer in members}
        tables = layer_tables(model.denoiser, layers, calibration.layers, stated)
        return SearchedLayers(
            groups,
            modes,
            {name: row for name, row in stated.items() if name not in searched}
            | {name: torch.zeros(bins, dtype=torch.int32) for name in exact},
            Int8Layers(tables, model.timestep_max, change_scales, model.timesteps_fall),
        )

    @property
    def names(self) -> dict[str, list[str]]:
        """The names of each group's layers."""
        return {source: [layer.name for layer in members] for source, members in self.groups.items()}

    def seconds(self, cost: KernelCost, batch: int, cache_bytes: int) -> Tensor:
        """[G, modes] time of each group, see `layer_seconds`."""
        rows = [
            layer_seconds(cost, members, batch, self.modes[source], cache_bytes)
            for source, members in self.groups.items()
        ]
        return torch.tensor(rows, dtype=torch.float64).view(-1, len(Mode))

    def in_plan(self, plan: Plan) -> Int8Layers:
        """How the layers that a plan converts compute. Their caches, if any, are empty."""
        int8 = self.int8
        tables, scales = {name: int8.tables[name] for name, row in self.fixed.items() if row.any()}, {}
        for source, members in self.names.items():
            row = plan[LAYERS_OF + source]
            if row.any():
                tables |= {name: int8.tables[name].with_modes(layer_row(row)) for name in members}
            if (row == MODULATED).all():
                scales |= {name: int8.change_scales[name] for name in members}
        return Int8Layers(tables, int8.timestep_max, scales, int8.falls)

    def rows(self, of_groups: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """The modes of each layer, given those of the groups."""
        fixed = {name: row.tolist() for name, row in self.fixed.items()}
        return fixed | {name: of_groups[source] for source, members in self.names.items() for name in members}
