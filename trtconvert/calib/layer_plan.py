"""Layers in plans: a recipe's modes, and the groups of layers that a search decides about."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

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
    """[T, choices] time of all layers of a unit in each of its choices. Engines compute q, k and v as one product."""
    products = _products(layers)

    def seconds(choice: Choice) -> float:
        if choice.delta:
            return sum(cost.modulated_seconds(layer, batch, cache_bytes) for layer in layers)
        return sum(cost.layer_seconds(layer, batch, LayerMode(choice.mode)) for layer in products)

    row = [seconds(choice) for choice in unit.choices]
    return torch.tensor(row, dtype=torch.float64).expand(bins, -1)


_QKV = 3
"""Most layers of one input group that engines join, see `trtconvert.export.lowering.packing`."""


def _products(layers: Sequence[Layer]) -> list[Layer]:
    """Joins linear layers of one input group that have the same size, such as q, k and v."""
    by_size: dict[int, list[Layer]] = {}
    for layer in layers:
        by_size.setdefault(layer.out_channels, []).append(layer)
    found = []
    for alike in by_size.values():
        if 1 < len(alike) <= _QKV and all(layer.kind == "linear" for layer in alike):
            alike = [replace(alike[0], out_channels=sum(layer.out_channels for layer in alike))]
        found += alike
    return found


def faster_modes(
    cost: KernelCost, layer: Layer, batch: int, allowed: Collection[LayerMode], by_default: bool
) -> set[LayerMode]:
    """Returns the INT8 modes that a search tries for a layer: of convolutions and of linear layers beside plugins those that are
    faster than 16 bits.

    Args:
        allowed: modes of the recipe; by_default: whether the recipe leaves the modes open.
    """
    modes = {mode_of(layer, mode) for mode in allowed if mode != LayerMode.EXACT}
    if layer.kind == "linear" and not layer.beside_plugins:
        return modes
    if by_default and layer.kind == "linear" and cost.is_beside_plugins(layer):
        # Kernels that quantise rows give each row a scale of its own. GEGLU's kernel, which holds a part of a row, does not.
        modes = {LayerMode.DYNAMIC, LayerMode.STATIC} if layer.gated else {LayerMode.DYNAMIC}
    exact = cost.layer_seconds(layer, batch, LayerMode.EXACT)
    return {mode for mode in modes if cost.layer_seconds(layer, batch, mode) < exact}


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
        candidates: Callable[[Layer], Collection[LayerMode]],
        bins: int,
    ) -> SearchedLayers:
        """Prepares the layers of a search.

        Args:
            layers: layers to convert.
            candidates: returns the INT8 modes that the search may choose for a layer, if the recipe does not state modes. A layer
                without candidates stays in 16 bits, unless the layer may quantise deltas.
        """
        delta_scales = {
            layer.name: scale
            for layer in layers
            if section.modiff == "auto" and (scale := calibration.layers[layer.input_group].change_scale) is not None
        }
        stays = section.few_rows != "auto"
        searched = {x.name for x in layers if section.modes == "auto" and not (stays and x.weight_only)}
        modes_of = {layer.name: sorted(candidates(layer)) for layer in layers if layer.name in searched}
        exact = [name for name, modes in modes_of.items() if not modes and name not in delta_scales]
        layers = [layer for layer in layers if layer.name not in exact]
        stated = stated_layers(section, layers, bins)
        modes = {name: decision.modes for name, decision in stated.items()}
        tables = layer_tables(model.denoiser, layers, calibration.layers, modes, tables_device(model, layers))
        readers = by_input_group(layer for layer in layers if layer.name in searched)
        groups = {}
        for input_group, members in readers.items():
            names = tuple(layer.name for layer in members)
            for name in names:
                del stated[name]
            by_deltas = [Choice(LayerMode.STATIC, delta=True)] if names[0] in delta_scales else []
            choices = (Choice(LayerMode.EXACT), *map(Choice, modes_of[names[0]]), *by_deltas)
            groups[Unit("layer", input_group, names, choices)] = members
        return SearchedLayers(
            groups,
            stated | dict.fromkeys(exact, Decision((Choice(LayerMode.EXACT),) * bins)),
            Int8Layers(tables, model.timestep_max, delta_scales, model.timesteps_fall),
        )
