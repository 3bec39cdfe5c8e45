"""Caches of layers that quantise deltas, and the emission of their nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trtconvert.diffusion_model import DiffusionModel, InputSpec, require_one_size
from trtconvert.export.nodes.common import DOMAIN, VERSION
from trtconvert.export.nodes.deltas import CONV, LARGEST, LINEAR, QUANTISE
from trtconvert.export.nodes.layers import INPUT_GROUP_METADATA, LAYER_METADATA
from trtconvert.fake_tensors import in_float32_shapes, shapes_alone
from trtconvert.interception import InterceptedDenoiser
from trtconvert.linear.deltas import Steps, cache_dtype, scales_of, steps_of
from trtconvert.linear.sites import ConvertedLayer, LayerCall, layer_hooks
from trtconvert.manifest_checks import CACHE, O_HAT

LAST = f"{CACHE}timestep"
"""The cache of the last call's timesteps."""


def a_hat_of(input_group: str) -> str:
    """Returns the name of the cache of a group's input."""
    return f"{CACHE}{input_group}.a_hat"


def o_hat_of(layer: str) -> str:
    """Returns the name of the cache of a layer's output."""
    return f"{CACHE}{layer}{O_HAT}"


def _factor_of(input_group: str) -> str:
    return f"modiff:{input_group.replace('.', '/')}:x_factor"


def caches_of(
    model: DiffusionModel,
    layers: Mapping[str, ConvertedLayer],
    dims: Mapping[str, tuple[int, int, int]],
    dtype: torch.dtype,
) -> list[InputSpec]:
    """Returns the caches of a model with weights of a type, in a fixed order; [] if no layer has a delta scale.

    Runs the model once on fake tensors for the sizes.

    Raises:
        UserError: a dimension other than the batch is dynamic.
    """
    modulated = {name: layer for name, layer in layers.items() if layer.delta_scale is not None}
    if not modulated:
        return []
    batch = model.inputs[0].shape[0]
    require_fixed_sizes(model, dims)
    sizes = {name: 2 if name == batch and size[0] <= 2 <= size[2] else size[1] for name, size in dims.items()}
    found: dict[str, InputSpec] = {}
    of_type = str(cache_dtype(dtype)).removeprefix("torch.")

    def shape(x: Tensor, samples: int) -> tuple[int | str, ...]:
        folds = x.shape[0] // samples
        return (batch, *([folds] if folds > 1 else []), *x.shape[1:])

    def seen(call: LayerCall) -> Tensor:
        output = call.exact()
        if call.name in modulated:
            for name, x in ((a_hat_of(modulated[call.name].layer.input_group), call.x), (o_hat_of(call.name), output)):
                found.setdefault(name, InputSpec(name, of_type, shape(x, len(call.timestep))))
        return output

    names = [spec.name for spec in model.inputs]
    example = model.example(0, sizes)
    with torch.no_grad(), in_float32_shapes(model.denoiser), shapes_alone(model.denoiser) as mode:
        example = {name: mode.from_tensor(x) for name, x in example.items()}
        InterceptedDenoiser(model.denoiser, names, model.timestep_input, layer_hooks(seen))(**example)
    return [InputSpec(LAST, "float32", (batch,)), *found.values()]


def require_fixed_sizes(model: DiffusionModel, dims: Mapping[str, tuple[int, int, int]]) -> None:
    """
    Raises:
        UserError: a dimension other than the batch is dynamic.
    """
    require_one_size(
        model,
        dims,
        "layers.modiff needs fixed sizes of all dimensions but the batch",
        "set layers.modiff to false",
    )


class DeltaEmitter:
    """Emits the nodes of layers with a delta scale, and collects the caches of a trace.

    Args:
        module: is exported; gets the tables as buffers.
        layers: all converted layers.
        timestep_max, falls: see `scales_of` and `steps_of`.
    """

    def __init__(
        self, module: nn.Module, layers: Mapping[str, ConvertedLayer], timestep_max: float, falls: bool
    ) -> None:
        self._module, self._timestep_max, self._falls = module, timestep_max, falls
        first, deltas = dict[str, Tensor](), dict[str, Tensor]()
        for layer in layers.values():
            if layer.delta_scale is not None:
                input_group, places = layer.layer.input_group, [1] * len(layer.layer.kernel)
                if input_group not in first:
                    module.register_buffer(_factor_of(input_group), layer.tables.x_factor.view(-1, *places).clone())
                first.setdefault(input_group, layer.tables.x_scale)
                deltas.setdefault(input_group, layer.delta_scale)
        self._places = {input_group: place for place, input_group in enumerate(first)}
        self._largest = {
            input_group: float(torch.cat([first[input_group], deltas[input_group]]).max()) for input_group in first
        }
        for name, tables in (("first", first), ("changes", deltas)):
            module.register_buffer(f"modiff:{name}", torch.stack(list(tables.values()), 1))
        self._steps: Steps | None = None
        self._scales: Tensor | None = None
        self._given: Mapping[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._codes: dict[str, Tensor] = {}

    def begin(self, timestep: Tensor, caches: Mapping[str, Tensor]) -> None:
        """Starts a call of the denoiser, with timesteps [B] and the caches of the last call."""
        self._given, self._made, self._codes = caches, {}, {}
        steps = self._steps = steps_of(timestep, caches[LAST], self._falls)
        first, deltas = (getattr(self._module, f"modiff:{name}") for name in ("first", "changes"))
        self._scales = scales_of(steps.reset, timestep, first, deltas, self._timestep_max)
        self._made[LAST] = steps.last

    def caches(self, names: Sequence[str]) -> list[Tensor]:
        """Returns the caches after the call. Caches of layers that were not called are unchanged."""
        return [self._made.get(name, self._given[name] + 0) for name in names]

    def emit(self, call: LayerCall, layer: ConvertedLayer, tables: Mapping[str, str], shape: Sequence[int]) -> Tensor:
        """Emits the nodes of a call, and returns the output of a shape.

        Args:
            tables: the module's buffer of each of the layer's tables.
        """
        assert self._steps is not None and self._scales is not None
        input_group, reset = layer.layer.input_group, self._steps.reset
        place = {"place": self._places[input_group]}
        if input_group not in self._codes:
            name = a_hat_of(input_group)
            given = self._given[name]
            factor = getattr(self._module, _factor_of(input_group))
            self._codes[input_group], self._made[name] = torch.onnx.ops.symbolic_multi_out(
                f"{DOMAIN}::{QUANTISE}",
                (call.x, factor, given, reset, self._scales),
                dict(place),
                dtypes=(torch.int8, given.dtype),
                shapes=(call.x.shape, given.shape),
                version=VERSION,
                metadata_props={INPUT_GROUP_METADATA: input_group, LARGEST: repr(self._largest[input_group])},
            )
        name = o_hat_of(call.name)
        given = self._given[name]
        attributes: dict[str, Any] = dict(place)
        if call.kind == "conv":
            attributes |= {"strides": list(call.stride), "pads": [*call.padding, *call.padding]}
        weight, weight_scale, bias = (
            getattr(self._module, tables[table]) for table in ("weight", "weight_scale", "bias")
        )
        self._made[name] = torch.onnx.ops.symbolic(
            f"{DOMAIN}::{CONV if call.kind == 'conv' else LINEAR}",
            (self._codes[input_group], self._scales, reset, weight, weight_scale, bias, given),
            attributes,
            dtype=given.dtype,
            shape=given.shape,
            version=VERSION,
            metadata_props={LAYER_METADATA: call.name, INPUT_GROUP_METADATA: input_group},
        )
        return self._made[name].reshape(shape).to(call.dtype)
