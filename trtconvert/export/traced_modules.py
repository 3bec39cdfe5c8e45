"""The modules that torch.export traces: they emit nodes of our domain at converted sites and layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.attention.modes import Scaling, scaling_at
from trtconvert.attention.reference import AttentionTables, timestep_bin
from trtconvert.attention.sites import Handler, SiteCall, attention_hooks
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.export.delta_caches import DeltaEmitter
from trtconvert.export.nodes.attention_body import BLOCK_MASK, OP
from trtconvert.export.nodes.common import DOMAIN, SITE_METADATA, VERSION
from trtconvert.export.nodes.layers import (
    BIAS_METADATA,
    CONV,
    INPUT_GROUP_METADATA,
    LAYER_METADATA,
    LINEAR,
    WEIGHT_METADATA,
    table_names,
)
from trtconvert.guidance import guided_prediction
from trtconvert.interception import InterceptedDenoiser, Interception, samples_of
from trtconvert.linear.reference import LayerTables
from trtconvert.linear.sites import ConvertedLayer, LayerCall, layer_hooks, model_tensors
from trtconvert.mixed_types import OneType
from trtconvert.noise_input import place_of

OF_COMPONENTS = "model."
"""Prefix of components before the names of the state dict."""


@dataclass(frozen=True)
class SiteOptions:
    """Attributes of attention nodes, except for the softmax scale.

    Attributes:
        timestep_max: see `DiffusionModel`.
        scaling, smooth_k: see the recipe's attention section. scaling: of all sites, or by site.
    """

    timestep_max: float
    scaling: Scaling
    smooth_k: bool


class TracedDenoiser(nn.Module):
    """Emits a node at each converted site and layer. Tables are buffers, and become initialisers."""

    def __init__(
        self,
        denoiser: nn.Module,
        model: DiffusionModel,
        tables: Mapping[str, AttentionTables],
        layers: Mapping[str, ConvertedLayer],
        options: SiteOptions,
        caches: Sequence[InputSpec],
        masks: Mapping[str, Tensor],
    ) -> None:
        super().__init__()
        self._bins = {site: len(of_site) for site, of_site in masks.items()}
        for site, of_site in masks.items():
            # Bins with equal masks share one.
            different, of_bin = of_site.unique(dim=0, return_inverse=True)
            self.register_buffer(_blocks_of(site), different)
            self.register_buffer(_rows_of(site), of_bin)
        self._buffers_of = {site: registered(self, site, of_site) for site, of_site in tables.items()}
        hooks = dict(attention_hooks(self._attention(options)))
        self._caches, self._deltas = caches, None
        if caches:
            self._deltas = DeltaEmitter(self, layers, options.timestep_max, model.timesteps_fall)
        if layers:
            hooks |= layer_hooks(
                LayerEmitter(self, layers, model_tensors(model.denoiser), options.timestep_max, self._deltas)
            )
        self._names = [spec.name for spec in model.inputs]
        self._timestep_input, self._guidance = model.timestep_input, model.guidance
        own = [name for name in self._names if model.guidance is None or name not in model.guidance.added]
        self.intercepted = InterceptedDenoiser(
            denoiser, own, model.timestep_input, hooks, model.noise_input, around=lambda _: OneType()
        )

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self._guidance is not None:
            return guided_prediction(
                self.intercepted, dict(zip(self._names, inputs, strict=True)), self._timestep_input, self._guidance
            )
        if self._deltas is None:
            return self.intercepted(*inputs)
        own = dict(zip(self._names, inputs, strict=False))
        given = {cache.name: x for cache, x in zip(self._caches, inputs[len(own) :], strict=True)}
        timestep = own[self._timestep_input].float().reshape(-1).expand(samples_of(own, self._timestep_input))
        timestep = place_of(self.intercepted.noise_input, timestep)
        self._deltas.begin(timestep, given)
        output = self.intercepted(*own.values())
        return (output, *self._deltas.caches(list(given)))

    def _attention(self, options: SiteOptions) -> Handler:
        def handler(call: SiteCall) -> Tensor:
            if call.name not in self._buffers_of:
                return call.exact()
            named = self._buffers_of[call.name]
            buffers = [getattr(self, named[field.name]) for field in fields(AttentionTables)]
            mask = [] if call.mask is None else [call.mask]
            blocks = self._blocks(call, options.timestep_max)
            return torch.onnx.ops.symbolic(
                f"{DOMAIN}::{OP}",
                (call.q, call.k, call.v, call.timestep, *buffers, *mask, *blocks),
                {
                    "layout": "BHND",
                    "softmax_scale": float(call.scale),
                    "timestep_max": float(options.timestep_max),
                    "scaling": scaling_at(options.scaling, call.name),
                    "smooth_k": int(options.smooth_k),
                    **dict.fromkeys([BLOCK_MASK] if blocks else [], 1),
                },
                dtype=call.q.dtype,
                shape=call.q.shape,
                version=VERSION,
                metadata_props={SITE_METADATA: call.name},
            )

        return handler

    def _blocks(self, call: SiteCall, timestep_max: float) -> list[Tensor]:
        """Returns the block mask [B or 1, H, Bq, Bk] of a call as a list, empty without a mask."""
        if (bins := self._bins.get(call.name)) is None:
            return []
        different, of_bin = getattr(self, _blocks_of(call.name)), getattr(self, _rows_of(call.name))
        if len(different) == 1:
            return [different]
        row = of_bin.index_select(0, timestep_bin(call.timestep, timestep_max, bins))
        return [different.index_select(0, row)]


def _blocks_of(site: str) -> str:
    return f"{site.replace('.', '/')}:block_masks"


def _rows_of(site: str) -> str:
    return f"{site.replace('.', '/')}:block_mask_of_bin"


class TracedComponent(nn.Module):
    """Emits a node at each converted layer of a model without a timestep."""

    def __init__(self, module: nn.Module, layers: Mapping[str, ConvertedLayer]) -> None:
        super().__init__()
        self._hooks = layer_hooks(LayerEmitter(self, layers, model_tensors(module), 1.0, prefix=OF_COMPONENTS))
        self.module = module

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        with Interception(self.module, self._hooks, torch.zeros(1)):
            return self.module(*inputs)


class LayerEmitter:
    """A handler that emits a node for each converted layer, and computes the others.

    Args:
        module: is exported; gets the tables as buffers.
        layers: to convert.
        tensors: the model's parameters and buffers by name.
        timestep_max: see `DiffusionModel`.
        deltas: emits the nodes of layers with a delta scale. Required if there are any.
        prefix: of the names of tensors, which the state dict lacks.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Mapping[str, ConvertedLayer],
        tensors: Mapping[str, Tensor],
        timestep_max: float,
        deltas: DeltaEmitter | None = None,
        prefix: str = "",
    ) -> None:
        self._module, self._layers, self._timestep_max, self._deltas = module, layers, timestep_max, deltas
        self._tensors, self._prefix = tensors, prefix
        tied: dict[int, str] = {}
        self._buffers = {name: registered(module, name, layer.tables, tied) for name, layer in layers.items()}

    def __call__(self, call: LayerCall) -> Tensor:
        layer = self._layers.get(call.name)
        if layer is None:
            return call.exact()
        op = LINEAR if call.kind == "linear" else CONV
        attributes: dict[str, Any] = {"timestep_max": float(self._timestep_max)}
        outputs = len(layer.tables.bias)
        shape = (*call.x.shape[:-1], outputs)
        if call.kind == "conv":
            attributes |= {"strides": list(call.stride), "pads": [*call.padding, *call.padding]}
            sizes = zip(call.x.shape[2:], layer.tables.weight.shape[2:], call.stride, call.padding, strict=True)
            shape = (
                call.x.shape[0],
                outputs,
                *((size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sizes),
            )
        named = self._buffers[call.name]
        if layer.delta_scale is not None:
            assert self._deltas is not None
            return self._deltas.emit(call, layer, named, shape)
        inputs = [getattr(self._module, named[name]) for name in table_names(op)]
        timestep = [call.timestep] if len(layer.tables.modes) > 1 else []
        output = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{op}",
            (call.x, *inputs, *timestep),
            attributes,
            dtype=call.x.dtype,
            shape=shape,
            version=VERSION,
            metadata_props={
                LAYER_METADATA: call.name,
                INPUT_GROUP_METADATA: layer.layer.input_group,
                **{
                    key: reference.state_name(self._tensors).removeprefix(self._prefix)
                    for key, reference in ((WEIGHT_METADATA, layer.layer.weight), (BIAS_METADATA, layer.layer.bias))
                    if reference is not None
                },
            },
        )
        return output.to(call.dtype)


def registered(
    module: nn.Module, name: str, tables: AttentionTables | LayerTables, there: dict[int, str] | None = None
) -> dict[str, str]:
    """Registers the tables of a site or layer as buffers of a module.

    Args:
        there: registered buffers by the id of their tensor, which are shared. Is updated.
    Returns:
        The buffer's name of each table.
    """
    buffers = {}
    for field in fields(tables):
        table = getattr(tables, field.name)
        # Names of buffers have no dots. A module may be both a site and a layer, and both have modes.
        of_layer = "layer_" if isinstance(tables, LayerTables) and field.name == "modes" else ""
        buffer = f"{name.replace('.', '/')}:{of_layer}{field.name}"
        if there is not None and (first := there.setdefault(id(table), buffer)) != buffer:
            buffer = first
        else:
            module.register_buffer(buffer, table.clone())
        buffers[field.name] = buffer
    return buffers
