"""The space of a plan search: units with their choices, and the time of each choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from trtconvert.attention.blocks import SiteBlocks
from trtconvert.attention.modes import Mode
from trtconvert.attention.sites import Site
from trtconvert.calib.block_plan import attention_seconds
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.candidates import attention_units
from trtconvert.calib.cost import AttentionShape, KernelCost
from trtconvert.calib.layer_plan import SearchedLayers, faster_modes, layer_seconds
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.sites import Layer
from trtconvert.quant.decision import Plan, Unit
from trtconvert.quant.forward import Int8Sites
from trtconvert.recipe import AttentionSection, LayersSection, PlanSection, Recipe


def kernel_cost(
    section: PlanSection, of_layers: LayersSection, *, masks: bool = False, convs: bool = False
) -> tuple[KernelCost, set[Mode], set[LayerMode]]:
    """Loads the kernel times that price a search's plans, and returns the modes that the search may choose.

    Args:
        masks: the search may choose block masks; convs: the layers include convolutions.
    Returns:
        The times, the modes of attention (including FP16) and the modes of layers (empty if the recipe states them).
    Raises:
        UserError: as `KernelCost.load`.
    """
    allowed = {Mode.FP16, *(Mode[name.upper()] for name in section.searched_modes)}
    in_int8 = {LayerMode[name.upper()] for name in section.searched_layer_modes} if of_layers.modes == "auto" else set()
    allowed_layers = {LayerMode.EXACT, *in_int8} if in_int8 else set[LayerMode]()
    cost = KernelCost.load(
        section.kernel_cost,
        allowed,
        allowed_layers,
        masks=masks,
        caches=of_layers.modiff == "auto",
        of_convs=convs and bool(in_int8),
    )
    return cost, allowed, allowed_layers


def site_scalings(
    attention: AttentionSection, section: PlanSection, sites: Iterable[Site], batch: int
) -> dict[str, str]:
    """Returns the scales of queries and keys at each site, `calibrated` or `dynamic`; `auto` uses `KernelCost.scaling` at a batch
    size. Raises as `KernelCost.load`."""
    if attention.scaling != "auto":
        return {site.name: attention.scaling for site in sites}
    stated = attention.modes if isinstance(attention.modes, list) else [attention.modes]
    searched = {"auto": section.searched_modes, "sigma-rule": ["precision", "balanced", "aggressive"]}
    modes = {Mode[name.upper()] for name in searched.get(stated[0], stated)}
    cost = KernelCost.load(section.kernel_cost)
    return {site.name: cost.scaling(AttentionShape.of(site, batch), modes) for site in sites}


@dataclass(frozen=True)
class SearchSpace:
    """The space of one search.

    Attributes:
        units: operations that are decided together, attention sites first; seconds: [T, choices] time of each unit's choices.
        layers: the layers of the search, and the decisions about the other layers.
        blocks: needed blocks of the sites that may have a block mask.
        cost: the kernel times.
    """

    units: Sequence[Unit]
    seconds: Sequence[Tensor]
    layers: SearchedLayers
    blocks: Mapping[str, SiteBlocks]
    cost: KernelCost
    _calibration: Calibration
    _timestep_max: float
    _smooth_k: bool

    @staticmethod
    def of(
        model: DiffusionModel,
        recipe: Recipe,
        sites: Sequence[Site],
        layers: Sequence[Layer],
        calibration: Calibration,
        scalings: Mapping[str, str],
        batch: int,
    ) -> SearchSpace:
        """Builds the space.

        Args:
            sites, layers: operations to convert; scalings: of each site, see `site_scalings`.
            batch: batch size of the kernel times.
        """
        section, bins, shares = recipe.plan, recipe.calibration.bins, recipe.sparse_shares
        convs = [layer for layer in layers if layer.kind == "conv"]
        cost, allowed, of_layers = kernel_cost(section, recipe.layers, masks=bool(shares), convs=bool(convs))
        blocks = {
            site.name: calibration.blocks[site.name] for site in sites if shares and site.name in calibration.blocks
        }

        def candidates(layer: Layer) -> set[LayerMode]:
            return faster_modes(cost, layer, batch, of_layers, by_default=section.layer_candidates is None)

        searched = SearchedLayers.of(model, layers, calibration, recipe.layers, candidates, bins)
        of_sites = attention_units({site.name: scalings[site.name] for site in sites}, allowed, blocks, shares)
        seconds = [
            attention_seconds(cost, AttentionShape.of(site, batch), unit, blocks.get(site.name), bins)
            for site, unit in zip(sites, of_sites, strict=True)
        ]
        cache_bytes = 2 if recipe.model.dtype == "float16" else 4
        seconds += [
            layer_seconds(cost, group, unit, batch, bins, cache_bytes) for unit, group in searched.groups.items()
        ]
        units = [*of_sites, *searched.groups]
        smooth_k = recipe.attention.smooth_k
        return SearchSpace(units, seconds, searched, blocks, cost, calibration, model.timestep_max, smooth_k)

    @property
    def sites(self) -> list[Unit]:
        """Units of attention."""
        return [unit for unit in self.units if unit.kind == "attention"]

    def int8_sites(self, plan: Plan) -> Int8Sites:
        """Returns the attention of a plan in torch, with tables on the CPU."""
        tables = self._calibration.with_modes(plan.site_modes)
        masks = self._calibration.masks(plan.shares)
        return Int8Sites(tables, self._timestep_max, plan.scalings, self._smooth_k, masks=masks)
