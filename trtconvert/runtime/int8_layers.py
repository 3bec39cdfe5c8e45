"""INT8 layers of engines that are refittable: quantised anew, as the export does it, from weights that others have changed.

Factors and offsets of channels are those of the bundle's calibration. A layer whose weights are the bundle's again gets the
integers of the bundle's ONNX model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.linear.reference import layer_bias, layer_weight
from trtconvert.linear.sites import TensorRef
from trtconvert.weights.unquantised import Unquantised

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class _Layer:
    """An INT8 layer of a model.

    Attributes:
        weight, bias: what it was quantised from.
        exact, exact_bias: what a 16-bit product calls its weight and its bias.
        factor, offset: [K] of its input.
        tables: its node's "weight", "weight_scale" and "bias", where they lie.
        dtype: of the model.
        constants: by table, what an engine's plugins have of it; empty where the engine has a 16-bit product.
    """

    weight: TensorRef
    bias: TensorRef | None
    exact: str
    exact_bias: str
    factor: Tensor
    offset: Tensor
    tables: Mapping[str, ir.TensorProtocol]
    dtype: torch.dtype
    constants: Mapping[str, tuple[str, ...]]

    @property
    def refs(self) -> list[TensorRef]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class Int8Layers:
    """The layers of a component.

    Args:
        model: the bundle's, with its `Int8Linear` and `Int8Conv` nodes.
        unquantised: see `trtconvert.weights.unquantised`.
        constants: of the engine, see `EngineRecord`.

    Attributes:
        shapes: of the weights and biases that they were quantised from, by the names of the state dict.
        exact: what the engine's 16-bit products call their weights and biases.
    """

    def __init__(self, model: ir.Model, unquantised: Path, constants: Mapping[str, tuple[str, str]]) -> None:
        self._file = Unquantised(unquantised)
        self.shapes = self._file.shapes
        by_layer: dict[str, dict[str, tuple[str, ...]]] = {}
        for constant, (layer, table) in constants.items():
            of_layer = by_layer.setdefault(layer, {})
            of_layer[table] = (*of_layer.get(table, ()), constant)
        self._layers = dict(_layers_of(model, self._file.refs, by_layer))
        self._by_exact = {
            name: layer
            for layer in reversed(self._layers.values())  # the first of tied ones has the 16-bit weight
            if not layer.constants
            for name in (layer.exact, layer.exact_bias)
        }

    @property
    def exact(self) -> Collection[str]:
        return self._by_exact.keys()

    def readers(self, names: Collection[str]) -> list[str]:
        """The layers that read some weights or biases, those of one weight beside each other."""
        found = [name for name, layer in self._layers.items() if any(ref.name in names for ref in layer.refs)]
        return sorted(found, key=lambda name: self._layers[name].weight.name)

    def names_of(self, layer: str) -> list[str]:
        """Of its weight and bias in the state dict."""
        return [ref.name for ref in self._layers[layer].refs]

    def exact_of(self, layer: str) -> dict[str, str]:
        """Where the engine computes a layer in 16 bits: its product's weight and bias, and what in the state dict they are of."""
        of = self._layers[layer]
        return {} if of.constants else dict(zip((of.exact, of.exact_bias), self.names_of(layer), strict=False))

    def origin(self, exact: str) -> str:
        """The name in the state dict of what a 16-bit product's weight or bias is of."""
        layer = self._by_exact[exact]
        return layer.weight.name if exact == layer.exact or layer.bias is None else layer.bias.name

    def base(self, name: str, device: torch.device) -> Tensor:
        """A weight or a bias as it was when the bundle was built, FP32, a copy on a device."""
        stored = self._file[name]
        if device.type == "cuda":
            # All threads read the file, and the next one is read while this one travels.
            stored = stored.pin_memory().to(device, non_blocking=True)
        return stored.to(device, torch.float32, copy=True)

    def exact_numbers(self, exact: str, weights: Mapping[str, Tensor]) -> Tensor:
        """What a 16-bit product gets, in the model's type, as `expand_layers` has it.

        Args:
            weights: FP32, by the names of the state dict; its `origin` at least.
        """
        layer = self._by_exact[exact]
        if exact != layer.exact and layer.bias is not None:
            return layer.bias.of(weights).to(layer.dtype)
        integers, scale = _quantised(layer, weights)
        places = [1] * (integers.dim() - 2)
        of_input = layer.factor.to(scale.device).view(1, -1, *places)
        return (integers.float() * scale.view(-1, 1, *places) * of_input).to(layer.dtype)

    def constants(self, name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What plugins of the engine get for a layer, by the engine's names.

        Args:
            weights: FP32 on one device, by the names of the state dict: of the layer's weight, bias, or both.
        Raises:
            UserError: its INT8 bias follows from its weight too, and one of both is not given.
        """
        layer = self._layers[name]
        if not layer.constants:
            return {}
        given = [ref.name for ref in layer.refs if ref.name in weights]
        if layer.offset.any() and len(given) < len(layer.refs):
            raise UserError(
                f"the INT8 layer {name} is quantised anew with its bias",
                expected=" and ".join(ref.name for ref in layer.refs),
                got=given[0],
                remedy="give both",
            )
        own = layer.bias.of(weights) if layer.bias is not None and layer.bias.name in given else None
        numbers = {} if own is None else {"bias": own}
        if layer.weight.name in given:
            integers, scale = _quantised(layer, weights)
            numbers |= {"weight": integers, "weight_scale": scale}
            if layer.offset.any():
                factor, offset = layer.factor.to(scale.device), layer.offset.to(scale.device)
                numbers["bias"] = layer_bias(own, integers, scale, factor, offset)
        return _by_constant(layer, numbers)

    def as_built(self, name: str) -> dict[str, Tensor]:
        """The same for a layer whose weights are the bundle's."""
        layer = self._layers[name]
        if not layer.constants:
            return {}
        return _by_constant(layer, {table: torch.from_numpy(x.numpy().copy()) for table, x in layer.tables.items()})


def _layers_of(
    model: ir.Model,
    refs: Mapping[str, Mapping[str, TensorRef | None]],
    constants: Mapping[str, Mapping[str, tuple[str, ...]]],
) -> Iterator[tuple[str, _Layer]]:
    # ONNX tooling: loading and running a bundle does without.
    import onnx_ir as ir

    from trtconvert.export.lowering import exact_names
    from trtconvert.export.nodes.layers import inputs_of, layer_nodes, table_of

    for name, node in layer_nodes(model).items():
        of, inputs = refs.get(name), inputs_of(node)
        if of is None or (weight := of["weight"]) is None:  # a file of other layers: these stay as they are
            continue
        x, factor = inputs["x"], torch.from_numpy(table_of(inputs["x_factor"]).copy())
        offset = torch.from_numpy(table_of(inputs["x_offset"]).copy()) if "x_offset" in inputs else 0 * factor
        tables = {t: ir.convenience.get_const_tensor(inputs[t]) for t in ("weight", "weight_scale", "bias")}
        assert x.dtype is not None
        yield (
            name,
            _Layer(
                weight,
                of["bias"],
                *exact_names(node, name),
                factor,
                offset,
                {table: tensor for table, tensor in tables.items() if tensor is not None},
                getattr(torch, {"FLOAT": "float32", "FLOAT16": "float16", "BFLOAT16": "bfloat16"}[x.dtype.name]),
                constants.get(name, {}),
            ),
        )


def _quantised(layer: _Layer, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    weight = layer.weight.of(weights)
    return layer_weight(weight, layer.factor.to(weight.device))


def _by_constant(layer: _Layer, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tables by the engine's names: four integers of a weight in each INT32, biases rounded to the model's type."""
    found: dict[str, Tensor] = {}
    for table, x in numbers.items():
        if table == "weight":
            x = x.contiguous().view(torch.int32)
        elif table == "bias":
            x = x.to(layer.dtype).float()
        found |= dict.fromkeys(layer.constants.get(table, ()), x)
    return found
