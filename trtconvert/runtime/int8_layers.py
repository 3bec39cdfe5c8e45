"""Quantises the INT8 layers of refittable engines again, like the export, after their weights have changed.

Factors and offsets of channels come from the bundle's calibration. A layer whose weights are the bundle's again gets the integers
of the bundle's ONNX model, bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trtconvert.errors import UserError
from trtconvert.linear.reference import layer_bias, layer_weight
from trtconvert.linear.sites import TensorRef
from trtconvert.runtime.reading import Place, Source
from trtconvert.weights.unquantised import Unquantised

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class _Layer:
    """An INT8 layer of a model.

    Attributes:
        weight, bias: unquantised weight and bias.
        exact, exact_bias: names of the weight and bias of the layer's 16-bit product.
        factor, offset: [K] of the input; moved: True if an offset is not zero.
        tables: "weight", "weight_scale" and "bias" of the layer's node.
        dtype: type of the model.
        constants: constants of the engine's plugins by table; empty if the engine has a 16-bit product.
    """

    weight: TensorRef
    bias: TensorRef | None
    exact: str
    exact_bias: str
    factor: Tensor
    offset: Tensor
    moved: bool
    tables: Mapping[str, ir.TensorProtocol]
    dtype: torch.dtype
    constants: Mapping[str, tuple[str, ...]]

    @property
    def refs(self) -> list[TensorRef]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


@dataclass(frozen=True)
class Product:
    """The weight of a 16-bit product, dequantised from an INT8 layer.

    Attributes:
        weight: INT8; scale: FP32 [N]; factor: FP32 [K] of the layer's input.
        dtype: type of the model.
    """

    weight: ir.TensorProtocol
    scale: ir.TensorProtocol
    factor: Tensor
    dtype: torch.dtype

    @property
    def sources(self) -> list[Source]:
        return [source_of(self.weight), source_of(self.scale), self.factor]

    def numbers(self, integers: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
        """Dequantise the sources on one device, like `expand_layers`."""
        return _dequantised(integers, scale, factor, self.dtype)


class Int8Layers:
    """The layers of a component.

    Args:
        model: the bundle's model, with its `Int8Linear` and `Int8Conv` nodes.
        unquantised: see `trtconvert.weights.unquantised`.
        constants: see `EngineRecord`.

    Attributes:
        shapes: shapes of the unquantised weights and biases, by the names of the state dict.
        exact: names of the weights and biases of the engine's 16-bit products.
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
            for layer in reversed(self._layers.values())  # the first of tied layers has the 16-bit weight
            if not layer.constants
            for name in (layer.exact, layer.exact_bias)
        }

    @property
    def exact(self) -> Collection[str]:
        return self._by_exact.keys()

    def readers(self, names: Collection[str]) -> list[str]:
        """Return the layers that read some weights or biases, ordered by their weight."""
        found = [name for name, layer in self._layers.items() if any(ref.name in names for ref in layer.refs)]
        return sorted(found, key=lambda name: self._layers[name].weight.name)

    def names_of(self, layer: str) -> list[str]:
        """Return the names of a layer's weight and bias in the state dict."""
        return [ref.name for ref in self._layers[layer].refs]

    def together(self, layer: str, names: Collection[str]) -> list[list[str]]:
        """Group a layer's new weights that its plugins get together: with offsets, the INT8 bias depends on the weight."""
        of = self._layers[layer]
        if not of.constants:
            return []
        return [self.names_of(layer)] if of.moved else [[name] for name in self.names_of(layer) if name in names]

    def exact_of(self, layer: str) -> dict[str, str]:
        """Return the names in the state dict of a 16-bit product's weight and bias; empty for layers in plugins."""
        of = self._layers[layer]
        return {} if of.constants else dict(zip((of.exact, of.exact_bias), self.names_of(layer), strict=False))

    def origin(self, exact: str) -> str:
        """Return the name in the state dict of a 16-bit product's weight or bias."""
        layer = self._by_exact[exact]
        return layer.weight.name if exact == layer.exact or layer.bias is None else layer.bias.name

    def place(self, name: str) -> Place:
        """Return the place of an unquantised weight or bias of the build."""
        entry = self._file.entries[name]
        return Place(self._file.path, entry.start, entry.dtype, entry.shape)

    def exact_factor(self, exact: str) -> Tensor:
        """Return the factor for `exact_numbers`, on the CPU."""
        return self._by_exact[exact].factor

    def channels(self, name: str) -> list[Tensor]:
        """Return factor and offset for `constants`, on the CPU."""
        return [self._layers[name].factor, self._layers[name].offset]

    def exact_numbers(self, exact: str, weights: Mapping[str, Tensor], factor: Tensor) -> Tensor:
        """Return the weight or bias of a 16-bit product in the model's type, like `expand_layers`.

        Args:
            weights: FP32 weights by the names of the state dict, with `origin` at least.
            factor: see `exact_factor`, on the device of the weights.
        """
        layer = self._by_exact[exact]
        if exact != layer.exact and layer.bias is not None:
            return layer.bias.of(weights).to(layer.dtype)
        return _dequantised(*layer_weight(layer.weight.of(weights), factor), factor, layer.dtype)

    def constants(self, name: str, weights: Mapping[str, Tensor], channels: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the constants of a layer's plugins, by the engine's names.

        Args:
            weights: the layer's FP32 weight, bias, or both, by the names of the state dict, on one device.
            channels: see `channels`, on the device of the weights.
        Raises:
            UserError: the INT8 bias depends on the weight, and one of them is missing.
        """
        layer = self._layers[name]
        if not layer.constants:
            return {}
        given = [ref.name for ref in layer.refs if ref.name in weights]
        if layer.moved and len(given) < len(layer.refs):
            raise UserError(
                f"the INT8 layer {name} needs its weight and its bias together",
                expected=" and ".join(ref.name for ref in layer.refs),
                got=given[0],
                remedy="pass both",
            )
        own = layer.bias.of(weights) if layer.bias is not None and layer.bias.name in given else None
        numbers = {} if own is None else {"bias": own}
        if layer.weight.name in given:
            factor, offset = channels
            integers, scale = layer_weight(layer.weight.of(weights), factor)
            numbers |= {"weight": integers, "weight_scale": scale}
            if layer.moved:
                numbers["bias"] = layer_bias(own, integers, scale, factor, offset)
        return _by_constant(layer, numbers)

    def tables(self, name: str, names: Collection[str]) -> dict[str, Source]:
        """Return the bundle's tables of a layer that depend on the given weight or bias."""
        layer, wanted = self._layers[name], set[str]()
        if layer.weight.name in names:
            wanted |= {"weight", "weight_scale"}
        if layer.moved or (layer.bias is not None and layer.bias.name in names):
            wanted.add("bias")
        return {table: source_of(x) for table, x in layer.tables.items() if table in wanted & layer.constants.keys()}

    def as_built(self, name: str, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the plugins' constants for the bundle's tables."""
        return _by_constant(self._layers[name], tables)


def weights_in_constants(model: ir.Model, unquantised: Path) -> dict[str, tuple[int, ...]]:
    """Return the weights and biases of INT8 layers that constants were computed from too, with their shapes. The export leaves
    out their names.

    Args:
        model: the bundle's model; unquantised: its file of unquantised weights. Without one, weights have the names of layers.
    """
    # ONNX tooling, which loading and running a bundle do not need.
    from trtconvert.export.nodes.layers import BIAS_METADATA, WEIGHT_METADATA, inputs_of, layer_nodes

    file = Unquantised(unquantised) if unquantised.is_file() else None
    found: dict[str, tuple[int, ...]] = {}
    for name, node in layer_nodes(model).items():
        if file is None and WEIGHT_METADATA not in node.metadata_props:
            found[f"{name}.weight"] = tuple(_tensor(inputs_of(node)["weight"]).shape.numpy())
        refs = {} if file is None else file.refs.get(name, {})
        for part, key in (("weight", WEIGHT_METADATA), ("bias", BIAS_METADATA)):
            if file is not None and (ref := refs.get(part)) is not None and key not in node.metadata_props:
                found[ref.name] = file.shapes[ref.name]
    return found


def products_of(model: ir.Model, plugins: Collection[str]) -> dict[str, Product]:
    """Return the 16-bit weights that `expand_layers` makes from INT8 layers, by names without `TRANSPOSED`.

    Args:
        model: the bundle's model; plugins: layers without a 16-bit weight.
    """
    # ONNX tooling, which loading and running a bundle do not need.
    from trtconvert.export.lowering.layers import exact_names
    from trtconvert.export.nodes.layers import inputs_of, layer_nodes

    found: dict[str, Product] = {}
    for name, node in layer_nodes(model).items():
        exact, _ = exact_names(node, name)
        if name not in plugins and exact not in found:  # the first of tied layers counts
            inputs = inputs_of(node)
            weight, scale = (_tensor(inputs[table]) for table in ("weight", "weight_scale"))
            found[exact] = Product(weight, scale, _table(inputs["x_factor"]), _dtype(inputs["x"]))
    return found


def source_of(tensor: ir.TensorProtocol) -> Source:
    """Return the place of a constant in a file beside the model, or a copy of its numbers."""
    import onnx_ir as ir

    if isinstance(tensor, ir.ExternalTensor):
        dtype = _TORCH[tensor.dtype.name]
        return Place(Path(tensor.path), tensor.offset or 0, dtype, tuple(tensor.shape.numpy()))
    array = tensor.numpy()
    if tensor.dtype.name == "BFLOAT16":
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


_TORCH = {
    "FLOAT": torch.float32,
    "FLOAT16": torch.float16,
    "BFLOAT16": torch.bfloat16,
    "INT8": torch.int8,
}
"""Types of weights by their names in ONNX."""


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    import onnx_ir as ir

    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None  # the tables are initialisers
    return tensor


def _table(value: ir.Value) -> Tensor:
    return torch.from_numpy(_tensor(value).numpy().copy())


def _dtype(value: ir.Value) -> torch.dtype:
    assert value.dtype is not None
    return _TORCH[value.dtype.name]


def _layers_of(
    model: ir.Model,
    refs: Mapping[str, Mapping[str, TensorRef | None]],
    constants: Mapping[str, Mapping[str, tuple[str, ...]]],
) -> Iterator[tuple[str, _Layer]]:
    # ONNX tooling, which loading and running a bundle do not need.
    from trtconvert.export.lowering.layers import exact_names
    from trtconvert.export.nodes.layers import inputs_of, layer_nodes

    for name, node in layer_nodes(model).items():
        of, inputs = refs.get(name), inputs_of(node)
        if of is None or (weight := of["weight"]) is None:  # not in the file: the layer keeps its weights
            continue
        factor = _table(inputs["x_factor"])
        offset = _table(inputs["x_offset"]) if "x_offset" in inputs else 0 * factor
        yield (
            name,
            _Layer(
                weight,
                of["bias"],
                *exact_names(node, name),
                factor,
                offset,
                bool(offset.any()),
                {table: _tensor(inputs[table]) for table in ("weight", "weight_scale", "bias")},
                _dtype(inputs["x"]),
                constants.get(name, {}),
            ),
        )


def _dequantised(integers: Tensor, scale: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise a layer's weight, with the order of products of the export."""
    places = [1] * (integers.dim() - 2)
    of_input = factor.view(1, -1, *places)
    return integers.float().mul_(scale.view(-1, 1, *places)).mul_(of_input).to(dtype)


def _by_constant(layer: _Layer, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tables by the engine's names, with four INT8 weights in each INT32 and biases rounded to the model's type."""
    found: dict[str, Tensor] = {}
    for table, x in numbers.items():
        if table == "weight":
            x = x.contiguous().view(torch.int32)
        elif table == "bias":
            x = x.to(layer.dtype).float()
        found |= dict.fromkeys(layer.constants.get(table, ()), x)
    return found
