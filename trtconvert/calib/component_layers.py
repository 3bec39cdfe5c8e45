"""INT8 layers of a pipeline's other models: text encoders and VAEs, which have no timestep.

The layers are calibrated on the pipeline's inputs during the conversion, under a limit on the error of the outputs: layers with
the largest errors of their own output stay in their type, as many as the limit requires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtconvert.calib.layer_observer import LayerObserver
from trtconvert.calib.layer_plan import stated_layers
from trtconvert.calib.layer_scales import LayerScales, by_input_group, choose_scales, layer_tables
from trtconvert.diffusion_model import ModelComponent
from trtconvert.errors import GateError, UserError
from trtconvert.interception import Interception
from trtconvert.linear.reference import LayerTables
from trtconvert.linear.sites import (
    ConvertedLayer,
    Layer,
    LayerCall,
    LayerFinder,
    LayerHandler,
    layer_hooks,
    model_tensors,
    select_layers,
    with_input_groups_among,
)
from trtconvert.quant.forward import Int8Layers
from trtconvert.recipe import LayersSection

ROWS = 256
"""Whole rows of a layer's input to observe: there are only one or a few calls."""

SHARE = 0.7
"""Share of the error limit for INT8 layers; the component's 16-bit type takes the rest."""

SHARES_KEPT = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)
"""Shares of the layers to try in INT8, those with the smallest errors of their own output first."""


@dataclass(frozen=True)
class ComponentLayers:
    """The layers of a component.

    Attributes:
        converted: INT8 layers by name.
        left: the other layers, with the reason in `obstacle`.
        error: largest relative L2 error of an output in torch, with only these layers in INT8.
    """

    converted: dict[str, ConvertedLayer]
    left: list[Layer]
    error: float


@torch.no_grad()
def component_layers(
    source: ModelComponent, section: LayersSection, limit: float, *, replaceable: bool = False
) -> ComponentLayers:
    """Chooses the INT8 layers of a component.

    Args:
        section: how layers are chosen and scales are made, as for the denoiser.
        limit: relative L2 error of each of the component's outputs.
        replaceable: engines may get other weights, see `Calibration.rounded_to_nearest`.
    Raises:
        UserError: no layer can be INT8, or NaN or Inf at the input of a layer.
        GateError: no layer is within the limit.
    """
    finder = LayerFinder(source.module)
    exact = _run(source, finder)
    # The recipe's patterns refer to names of the denoiser.
    chosen, left = select_layers(finder.layers(), ["*"], [], section.min_rows, section.kinds, section.few_rows)
    if not chosen:
        reasons = sorted({layer.obstacle for layer in left})
        raise UserError(
            f"{source.name} has no layer that can be INT8",
            expected="at least one linear layer or convolution with enough channels and rows",
            got="; ".join(reasons) or "no layer at all",
            remedy=f"set components.{source.name}.layers to exact",
        )
    observer = LayerObserver({layer.input_group for layer in chosen}, 1.0, 1, rows=ROWS)
    _run(source, observer)
    seen, tensors = observer.finish(), model_tensors(source.module)
    scales: dict[str, LayerScales] = {
        name: choose_scales(
            layers,
            seen[name],
            tensors,
            1,
            statistic=section.scales,
            percentile=100.0,
            equalise=section.equalise,
            offsets=section.offsets,
        )
        for name, layers in by_input_group(chosen).items()
    }
    if replaceable:
        scales = {name: of.rounded_to_nearest() for name, of in scales.items()}
    stated = stated_layers(section.model_copy(update={"modes": "static"}), chosen, 1)
    tables = layer_tables(source.module, chosen, scales, {name: decision.modes for name, decision in stated.items()})
    decibels = _decibels(source, tables)
    by_quality = sorted(chosen, key=lambda layer: -decibels[layer.name])
    error, kept = math.inf, list[Layer]()
    for share in SHARES_KEPT:
        best = {layer.name for layer in by_quality[: max(1, round(share * len(chosen)))]}
        kept = [layer for layer in chosen if layer.name in best]
        in_int8 = {layer.name: tables[layer.name] for layer in kept}
        error = _error(_run(source, Int8Layers(in_int8, 1.0).handler()), exact)
        if error <= SHARE * limit:
            worse = [
                replace(layer, obstacle=f"INT8 would leave {decibels[layer.name]:.0f} dB of its output")
                for layer in chosen
                if layer.name not in in_int8
            ]
            converted = {
                layer.name: ConvertedLayer(layer, tables[layer.name]) for layer in with_input_groups_among(kept)
            }
            return ComponentLayers(converted, left + worse, error)
    raise GateError(
        f"gate missed: no layer of {source.name} can be INT8 within the error limit of components",
        expected=f"an error of at most {SHARE:g} of verify.max_component_error, {SHARE * limit:g}",
        got=f"{error:.3g} with the {len(kept)} best layers for INT8, of {len(chosen)}",  # pyright: ignore[reportPossiblyUnbound]
        remedy=f"set components.{source.name}.layers to exact, or raise verify.max_component_error",
    )


def _run(source: ModelComponent, handler: LayerHandler) -> tuple[Tensor, ...]:
    with Interception(source.module, layer_hooks(handler), torch.zeros(1)):
        return source.module(*(source.example[spec.name] for spec in source.inputs))


def _decibels(source: ModelComponent, tables: Mapping[str, LayerTables]) -> dict[str, float]:
    """Returns the ratio of signal to quantisation noise of each layer's output in dB, with exact inputs."""
    layers, found = Int8Layers(tables, 1.0), dict[str, float]()

    def compare(call: LayerCall) -> Tensor:
        exact = call.exact()
        if call.name in tables:
            noise = (layers.output(call).double() - exact.double()).square().sum()
            found[call.name] = float(10 * (exact.double().square().sum() / noise.clamp_min(1e-30)).log10())
        return exact

    _run(source, compare)
    return found


def _error(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Returns the largest relative L2 error of an output; infinite if an output is not finite."""
    pairs = [(a.double(), b.double()) for a, b in zip(got, exact, strict=True)]
    errors = [float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs]
    return max(error if math.isfinite(error) else math.inf for error in errors)
