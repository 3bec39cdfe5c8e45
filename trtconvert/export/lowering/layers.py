"""Lowers `Int8Linear` and `Int8Conv` nodes to ordinary products, and these to INT8 products by Q/DQ.

TensorRT, TensorRT-RTX and ONNX Runtime fuse Q/DQ around a product's inputs into INT8 kernels, with one scale per activation
tensor and one per output channel of the weight. Offsets and factors become part of the kernel in front. INT8 has no code for NaN
and
infinities: such kernels give arbitrary results, whereas our kernels (`int8_layers.py`) and the nodes' bodies keep them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from trtconvert.bundle import TRANSPOSED
from trtconvert.export.building import NewNodes, cleaned, graph_of, remove_unused, replace_nodes
from trtconvert.export.lowering.initializers import add_initializer, lazy_initializer, named_constant
from trtconvert.export.lowering.int8_weights import Activation, Int8Weight, int8_weight_of
from trtconvert.export.matching import is_read_once, producer_of
from trtconvert.export.nodes.layers import (
    BIAS_METADATA,
    CONV,
    INPUT_GROUP_METADATA,
    TIMESTEP,
    WEIGHT_METADATA,
    inputs_of,
    layer_nodes,
    table_of,
)
from trtconvert.export.storage import numbers_of
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS

_PRODUCTS = ("MatMul", "Gemm", "Conv")


REFIT_METADATA = "trtconvert.refitted"
"""Metadata key of a product with replaceable INT8 weights: the name of its layer."""


@contextlib.contextmanager
def timesteps_kept(model: ir.Model) -> Iterator[None]:
    """Keeps the timesteps of INT8 layers alive inside the block, in place: after `expand_layers` nothing may read them until
    nodes of plugins do.
    """
    outputs, nodes = model.graph.outputs, layer_nodes(model).values()
    timesteps = dict.fromkeys(x for node in nodes if (x := inputs_of(node).get(TIMESTEP)) is not None and x.producer())
    count = len(outputs)
    outputs.extend(x for x in timesteps if x not in outputs)
    yield
    if len(outputs) > count:
        del outputs[count:]
        cleaned(model, 1)


def expand_layers(
    model: ir.Model, *, exact: bool | Collection[str] = False, offsets: bool = False, refittable: bool = False
) -> int:
    """Replaces INT8 layers by offsets, factors and products in the type of their inputs, in place. Weights are `Int8Weight`.

    Args:
        offsets: subtract offsets from activations, for our kernels. Otherwise a larger scale covers the offsets: TensorRT 10.6
            gives wrong results where a Q follows a subtraction.
        exact: True, or the names of layers, that become 16-bit products of their own inputs with the dequantised weights. Weights
            and biases get their names in the state dict.
        refittable: mark the other products with their layer (`REFIT_METADATA`), and give them a bias where a new weight may need
            one.
    Returns:
        The number of replaced nodes.
    """
    moved: dict[tuple[ir.Value, str], ir.Value] = {}
    nodes = layer_nodes(model)
    for name, node in nodes.items():
        new = _New(node)
        key = (new.x, node.metadata_props[INPUT_GROUP_METADATA])
        if exact if isinstance(exact, bool) else name in exact:
            _exact_product(new, node, name)
        else:
            if key not in moved:
                moved[key] = _moved(new, node, offsets)
            _product(new, node, name, moved[key], offsets, refittable)
        replace_nodes([node], new.nodes)
    if nodes:
        remove_unused(model)
    return len(nodes)


def quantise_products(model: ir.Model) -> int:
    """Adds Q/DQ to products with `Int8Weight` and INT8 activations in all timestep bins, in place.

    The largest calibrated scale serves all bins, so that nothing more is clipped. Other products, such as those of mixed modes
    (`fuse_mixed_layers`), stay in 16 bits.

    Returns:
        The number of INT8 products.
    """
    count = 0
    for node in list(model.graph):
        weight = int8_weight_of(node.inputs[1]) if node.op_type in _PRODUCTS and not node.domain else None
        if weight is None or not weight.activation.is_int8 or weight.activation.is_mixed:
            continue
        graph, x, stored, new = graph_of(node), node.inputs[0], node.inputs[1], NewNodes()
        assert x is not None and stored is not None
        # Each product has its own Q/DQ. TensorRT computes equal ones once, but leaves a product of a shared DQ in 16 bits.
        node.replace_input_with(0, _quantised(new, graph, x, max(weight.activation.scales)))
        node.replace_input_with(1, _dequantised(new, graph, weight, stored))
        graph.insert_before(node, new.nodes)
        if not stored.uses():
            del graph.initializers[stored.name]  # type: ignore[arg-type]
        count += 1
    return count


def _quantised(new: NewNodes, graph: ir.Graph, x: ir.Value, scale: float) -> ir.Value:
    assert x.dtype is not None
    of_scale = named_constant(graph, f"scale {scale!r} {x.dtype}", np.array(scale, x.dtype.numpy()))
    zero = named_constant(graph, "zero point", np.array(0, np.int8))
    q = new.add("QuantizeLinear", [x, of_scale, zero], zero, x.shape)
    return new.add("DequantizeLinear", [q, of_scale, zero], x)


def _dequantised(new: NewNodes, graph: ir.Graph, weight: Int8Weight, like: ir.Value) -> ir.Value:
    stored = lazy_initializer(graph, weight.integers_name, ir.DataType.INT8, weight.shape, weight.integers)
    scale = named_constant(graph, f"{weight.name}, scale", weight.scale.astype(weight.dtype.numpy()))
    zero = named_constant(graph, f"zero points {len(weight.scale)}", np.zeros(len(weight.scale), np.int8))
    return new.add("DequantizeLinear", [stored, scale, zero], like, weight.shape, {"axis": weight.axis})


class _New(NewNodes):
    """Collects the nodes, in the type of x, that replace one node."""

    def __init__(self, node: ir.Node) -> None:
        super().__init__()
        x = node.inputs[0]
        assert x is not None and x.dtype is not None
        self.graph, self.x, self.dtype = graph_of(node), x, x.dtype

    def table(self, name: str, array: np.ndarray) -> ir.Value:
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        return add_initializer(self.graph, ir.Tensor(array.astype(self.dtype.numpy()), dtype=self.dtype, name=name))


def _moved(new: _New, node: ir.Node, offsets: bool) -> ir.Value:
    """Computes x̂ of a node. The parts of a Concat of channels are moved one by one, so that `split_products` still matches."""
    inputs, input_group = inputs_of(node), node.metadata_props[INPUT_GROUP_METADATA]
    factor = table_of(inputs["x_factor"])
    offset = _offset_of(inputs) if offsets else np.zeros_like(factor)
    x = new.x
    concat = producer_of(x, "Concat")
    widths = _widths(concat, x) if concat is not None and is_read_once(x) else None
    if concat is None or widths is None:
        return _moved_part(new, x, input_group, factor, offset, node.op_type == CONV)
    parts, start = [], 0
    for part, width in zip(concat.inputs, widths, strict=True):
        assert part is not None
        chosen = slice(start, start + width)
        parts.append(_moved_part(new, part, f"{input_group}, {start}", factor[chosen], offset[chosen], False))
        start += width
    if all(part is before for part, before in zip(parts, concat.inputs, strict=True)):
        return x
    return new.add("Concat", parts, x, attributes={"axis": -1})


def _widths(concat: ir.Node, x: ir.Value) -> list[int] | None:
    """Returns the channels of the parts of a Concat along the last axis."""
    if x.shape is None or concat.attributes.get_int("axis", 0) % len(x.shape) != len(x.shape) - 1:
        return None
    widths = [part.shape[-1] for part in concat.inputs if part is not None and part.shape is not None]
    known = [width for width in widths if isinstance(width, int)]
    return known if len(known) == len(concat.inputs) else None


def _moved_part(
    new: _New, x: ir.Value, input_group: str, factor: np.ndarray, offset: np.ndarray, is_image: bool
) -> ir.Value:
    if is_image:
        rank = len(x.shape) if x.shape is not None else 4
        factor = factor.reshape(1, -1, *[1] * (rank - 2))
    value = x
    if offset.any():
        value = new.add("Sub", [value, new.table(f"{input_group}:x_offset, {new.dtype}", offset)], x)
    if (factor != 1).any():
        value = new.add("Mul", [value, new.table(f"{input_group}:x_factor, {new.dtype}", factor)], x)
    return value


def _exact_product(new: _New, node: ir.Node, name: str) -> None:
    """Computes a layer from x itself: the weight without factors, the bias without offsets."""
    inputs, metadata = inputs_of(node), node.metadata_props
    tensor = ir.convenience.get_const_tensor(inputs["weight"])
    assert tensor is not None and inputs["weight"].name is not None
    factor, scale = table_of(inputs["x_factor"]), table_of(inputs["weight_scale"])
    shape = tensor.shape.numpy()  # type: ignore[union-attr]
    places = [1] * (len(shape) - 2)

    def weight() -> np.ndarray:
        return numbers_of(tensor).astype(np.float32) * scale.reshape(-1, 1, *places) * factor.reshape(1, -1, *places)

    bias = _without_offset(node)
    named, bias_named = exact_names(node, name)
    of_bias = None
    if metadata.get(BIAS_METADATA) is not None or bias.any():
        of_bias = new.table(bias_named, bias)
    _multiply(
        new,
        node,
        new.x,
        of_bias,
        lambda: _lazy(new, named, weight, shape),
        lambda: _lazy(new, named + TRANSPOSED, lambda: weight().T, shape[::-1]),
    )


def _multiply(
    new: _New,
    node: ir.Node,
    x: ir.Value,
    bias: ir.Value | None,
    weight: Callable[[], ir.Value],
    turned: Callable[[], ir.Value],
) -> ir.Node:
    """Computes a layer's product and sum, and returns the node of the product.

    Args:
        weight: returns the weight [N, K, …]; turned: returns the weight [K, N] of a linear layer.
    """
    result, operands = node.outputs[0], [] if bias is None else [bias]
    if node.op_type == CONV:
        kernel = weight()
        assert kernel.shape is not None
        attributes = {name: node.attributes[name].as_ints() for name in ("strides", "pads")}
        attributes["kernel_shape"] = kernel.shape.numpy()[2:]
        new.add("Conv", [x, kernel, *operands], result, attributes=attributes)
    elif x.shape is not None and len(x.shape) == 2 and operands:
        new.add("Gemm", [x, weight(), *operands], result, attributes={"transB": 1})
    else:
        product = new.add("MatMul", [x, turned()], result)
        if operands:
            new.add("Add", [product, *operands], result)
            return new.nodes[-2]
    return new.nodes[-1]


def exact_names(node: ir.Node, name: str) -> tuple[str, str]:
    """Returns the names of weight and bias in a layer's 16-bit product, without `TRANSPOSED`."""
    weight, metadata = inputs_of(node)["weight"], node.metadata_props
    return metadata.get(WEIGHT_METADATA) or f"{weight.name}, exact", metadata.get(
        BIAS_METADATA
    ) or f"{name}:bias, exact"


def _without_offset(node: ir.Node) -> np.ndarray:
    """Returns the bias [N] for the layer's own input."""
    inputs = inputs_of(node)
    bias, offset = table_of(inputs["bias"]), _offset_of(inputs)
    if not offset.any():
        return bias
    tensor = ir.convenience.get_const_tensor(inputs["weight"])
    assert tensor is not None
    sums = numbers_of(tensor).astype(np.float64) @ (offset * table_of(inputs["x_factor"])).astype(np.float64)
    return (bias - sums * table_of(inputs["weight_scale"])).astype(np.float32)


def _lazy(new: _New, name: str, numbers: Callable[[], np.ndarray], shape: Sequence[int]) -> ir.Value:
    return lazy_initializer(new.graph, name, new.dtype, shape, lambda: numbers().astype(new.dtype.numpy()))


def _offset_of(inputs: Mapping[str, ir.Value]) -> np.ndarray:
    """Returns the offsets [K], zeros for a convolution."""
    return table_of(inputs["x_offset"]) if "x_offset" in inputs else np.zeros_like(table_of(inputs["x_factor"]))


def bias_name(layer: str, dtype: ir.DataType) -> str:
    """Returns the name of a layer's bias that is not in the state dict."""
    return f"{layer}:bias, {dtype}"


def _product(new: _New, node: ir.Node, name: str, x: ir.Value, offsets: bool, refittable: bool) -> None:
    inputs, metadata = inputs_of(node), node.metadata_props
    scales, bias = table_of(inputs["x_scale"]), table_of(inputs["bias"])
    offset = _offset_of(inputs)
    if not offsets and offset.any():
        moved = np.abs(offset) * table_of(inputs["x_factor"])
        scales = (scales + moved.max() / LEVELS).astype(np.float32)
        bias = _without_offset(node)
    timed = inputs.get(TIMESTEP)
    activation = Activation(
        metadata[INPUT_GROUP_METADATA],
        tuple(scales.tolist()),
        tuple(LayerMode(mode) for mode in table_of(inputs["modes"]).tolist()),
        timed,
        node.attributes["timestep_max"].as_float(),
    )
    stored, scale = inputs["weight"], table_of(inputs["weight_scale"])
    tensor = ir.convenience.get_const_tensor(stored)
    assert tensor is not None
    # Tied layers share one initialiser.
    in_place = Int8Weight(
        f"{stored.name}, expanded", lambda: numbers_of(tensor), tensor.shape.numpy(), scale, 0, activation, new.dtype
    )  # type: ignore[union-attr]
    may_have_bias = refittable and (BIAS_METADATA in metadata or offset.any())
    of_bias = new.table(bias_name(name, new.dtype), bias) if bias.any() or may_have_bias else None

    def turned() -> ir.Value:
        outputs, channels = in_place.shape.numpy()
        return _weight(new, in_place.changed(f"{in_place.name}.T", np.transpose, (channels, outputs), axis=1))

    product = _multiply(new, node, x, of_bias, lambda: _weight(new, in_place), turned)
    if refittable:
        product.metadata_props[REFIT_METADATA] = name


def _weight(new: _New, weight: Int8Weight) -> ir.Value:
    graph = new.graph
    assert weight.name is not None
    there = graph.initializers.get(weight.name)
    if (known := int8_weight_of(there)) is not None and known.activation == weight.activation:
        assert there is not None
        return there
    name, count = weight.name, 1
    while weight.name in graph.initializers:  # tied weights with differently quantised inputs
        count += 1
        weight.name = f"{name}, {count}"
    return add_initializer(graph, weight)
