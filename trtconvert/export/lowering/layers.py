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
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trtconvert.bundle import TRANSPOSED
from trtconvert.export.lowering.cleaning import remove_unused
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
        RemoveUnusedNodesPass()(model)


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
        graph, x, old = node.graph, node.inputs[0], node.outputs[0]
        assert isinstance(graph, ir.Graph) and x is not None
        new = _New(graph, x, old)
        key = (x, node.metadata_props[INPUT_GROUP_METADATA])
        if exact if isinstance(exact, bool) else name in exact:
            result = _exact_product(new, node, name)
        else:
            if key not in moved:
                moved[key] = _moved(new, node, offsets)
            result = _product(new, node, name, moved[key], offsets, refittable)
        result.name = old.name
        ir.convenience.replace_nodes_and_values(graph, node, [node], new.nodes, [old], [result])
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
        graph, x, stored = node.graph, node.inputs[0], node.inputs[1]
        assert isinstance(graph, ir.Graph) and x is not None and stored is not None
        # Each product has its own Q/DQ. TensorRT computes equal ones once, but leaves a product of a shared DQ in 16 bits.
        quantised = _quantised(graph, x, max(weight.activation.scales))
        graph.insert_before(node, quantised)
        dequantised = _dequantised(graph, weight)
        graph.insert_before(node, dequantised)
        node.replace_input_with(0, quantised[-1].outputs[0])
        node.replace_input_with(1, dequantised.outputs[0])
        if not stored.uses():
            del graph.initializers[stored.name]  # type: ignore[arg-type]
        count += 1
    return count


def _quantised(graph: ir.Graph, x: ir.Value, scale: float) -> list[ir.Node]:
    assert x.dtype is not None
    of_scale = named_constant(graph, f"scale {scale!r} {x.dtype}", np.array(scale, x.dtype.numpy()))
    zero = named_constant(graph, "zero point", np.array(0, np.int8))
    q = ir.node("QuantizeLinear", [x, of_scale, zero])
    q.outputs[0].type, q.outputs[0].shape = ir.TensorType(ir.DataType.INT8), x.shape
    dq = ir.node("DequantizeLinear", [q.outputs[0], of_scale, zero])
    dq.outputs[0].type, dq.outputs[0].shape = x.type, x.shape
    return [q, dq]


def _dequantised(graph: ir.Graph, weight: Int8Weight) -> ir.Node:
    stored = lazy_initializer(graph, weight.integers_name, ir.DataType.INT8, weight.shape, weight.integers)
    scale = named_constant(graph, f"{weight.name}, scale", weight.scale.astype(weight.dtype.numpy()))
    zero = named_constant(graph, f"zero points {len(weight.scale)}", np.zeros(len(weight.scale), np.int8))
    dq = ir.node("DequantizeLinear", [stored, scale, zero], {"axis": weight.axis})
    dq.outputs[0].type, dq.outputs[0].shape = ir.TensorType(weight.dtype), weight.shape
    return dq


class _New:
    """Collects the nodes, in the type of x, that replace one node."""

    def __init__(self, graph: ir.Graph, x: ir.Value, result: ir.Value) -> None:
        self.graph, self.nodes = graph, list[ir.Node]()
        self.x, self.result = x, result
        assert x.dtype is not None
        self.dtype = x.dtype

    def op(
        self, op_type: str, inputs: Sequence[ir.Value], like: ir.Value, attributes: Mapping[str, object] | None = None
    ) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes)  # type: ignore[arg-type]
        node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, name: str, array: np.ndarray) -> ir.Value:
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
    return new.op("Concat", parts, x, {"axis": -1})


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
        value = new.op("Sub", [value, new.constant(f"{input_group}:x_offset, {new.dtype}", offset)], x)
    if (factor != 1).any():
        value = new.op("Mul", [value, new.constant(f"{input_group}:x_factor, {new.dtype}", factor)], x)
    return value


def _exact_product(new: _New, node: ir.Node, name: str) -> ir.Value:
    """Computes a layer from x itself: the weight without factors, the bias without offsets."""
    inputs, result, metadata = inputs_of(node), node.outputs[0], node.metadata_props
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
        of_bias = new.constant(bias_named, bias)
    if node.op_type == CONV:
        operands = [new.x, _lazy(new, named, weight, shape), *([of_bias] if of_bias is not None else [])]
        return new.op("Conv", operands, result, _conv_attributes(node, shape))
    if new.x.shape is not None and len(new.x.shape) == 2 and of_bias is not None:
        return new.op("Gemm", [new.x, _lazy(new, named, weight, shape), of_bias], result, {"transB": 1})
    turned = _lazy(new, named + TRANSPOSED, lambda: weight().T, shape[::-1])
    product = new.op("MatMul", [new.x, turned], result)
    return product if of_bias is None else new.op("Add", [product, of_bias], result)


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


def _conv_attributes(node: ir.Node, shape: Sequence[int]) -> dict[str, object]:
    return {
        "strides": list(node.attributes["strides"].as_ints()),
        "pads": list(node.attributes["pads"].as_ints()),
        "kernel_shape": list(shape[2:]),
    }


def _offset_of(inputs: Mapping[str, ir.Value]) -> np.ndarray:
    """Returns the offsets [K], zeros for a convolution."""
    return table_of(inputs["x_offset"]) if "x_offset" in inputs else np.zeros_like(table_of(inputs["x_factor"]))


def bias_name(layer: str, dtype: ir.DataType) -> str:
    """Returns the name of a layer's bias that is not in the state dict."""
    return f"{layer}:bias, {dtype}"


def _product(new: _New, node: ir.Node, name: str, x: ir.Value, offsets: bool, refittable: bool) -> ir.Value:
    inputs, result, metadata = inputs_of(node), node.outputs[0], node.metadata_props
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
    of_bias = new.constant(bias_name(name, new.dtype), bias) if bias.any() or may_have_bias else None

    def product(op_type: str, operands: Sequence[ir.Value | None], attributes: Mapping[str, object] | None) -> ir.Value:
        made = new.op(op_type, [x for x in operands if x is not None], result, attributes)
        if refittable:
            new.nodes[-1].metadata_props[REFIT_METADATA] = name
        return made

    if node.op_type == CONV:
        operands = [x, _weight(new, in_place), of_bias]
        return product("Conv", operands, _conv_attributes(node, in_place.shape.numpy()))
    if new.x.shape is not None and len(new.x.shape) == 2 and of_bias is not None:
        return product("Gemm", [x, _weight(new, in_place), of_bias], {"transB": 1})
    outputs, channels = in_place.shape.numpy()
    turned = in_place.changed(f"{in_place.name}.T", np.transpose, (channels, outputs), axis=1)
    of_weight = product("MatMul", [x, _weight(new, turned)], None)
    return of_weight if of_bias is None else new.op("Add", [of_weight, of_bias], result)


def _weight(new: _New, weight: Int8Weight) -> ir.Value:
    graph = new.graph
    assert weight.name is not None
    there = graph.initializers.get(weight.name)
    if (
        there is not None
        and isinstance(there.const_value, Int8Weight)
        and there.const_value.activation == weight.activation
    ):
        return there
    name, count = weight.name, 1
    while weight.name in graph.initializers:  # tied weights with differently quantised inputs
        count += 1
        weight.name = f"{name}, {count}"
    return add_initializer(graph, weight)
