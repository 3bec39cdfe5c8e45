"""Nodes of layers that quantise the deltas of their input between steps (MoDiff), and their bodies in standard operators.

`QuantiseChange` returns codes and the new cache of the input; `LinearOfChange` and `ConvOfChange` add the product of the codes to
the cache of the output. An input group has one `QuantiseChange`. The bodies follow `trtconvert.linear.deltas` line by line, with
MatMulInteger and ConvInteger, for ONNX Runtime.

| input | shape, type | meaning |
| --- | --- | --- |
| x | [B · n, …]; FP16, BF16 or FP32 | |
| x_factor | broadcasts to x, FP32 | x̂ = x · x_factor |
| a_hat | [B, …] with the elements of x; FP16 or FP32 | cache of x̂ |
| begins | [B] BOOL | reset: the sample's caches are not read |
| scales | [B, S] FP32 | of the codes, by sample and input group |

Results: q, INT8 of x's shape, and the new a_hat; -128 and NaN where x̂ - a_hat is not finite. The other nodes compute the new
o_hat:

| input | shape, type | meaning |
| --- | --- | --- |
| q, scales, begins | as above | |
| weight, weight_scale, bias | [N, K, *kernel] INT8, [N] FP32, [N] FP32 | |
| o_hat | [B, …] with the elements of the output; FP16 or FP32 | cache of the output |

Attributes: `place`, the column of scales; of ConvOfChange `strides` and `pads`, equal on both sides of an axis.
"""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir

from trtconvert.export.nodes.common import DOMAIN, OPSET, marked_windows
from trtconvert.export.nodes.layers import LAYER_METADATA
from trtconvert.linear.deltas import BROKEN
from trtconvert.linear.reference import LEVELS

QUANTISE, LINEAR, CONV = "QuantiseChange", "LinearOfChange", "ConvOfChange"
PRODUCTS = (LINEAR, CONV)

LARGEST = "trtconvert.largest"
"""Metadata key of `QuantiseChange`: its largest scale over all timesteps."""

QUANTISE_INPUTS = ("x", "x_factor", "a_hat", "begins", "scales")
PRODUCT_INPUTS = ("q", "scales", "begins", "weight", "weight_scale", "bias", "o_hat")


def delta_nodes(model: ir.Model) -> list[ir.Node]:
    """Returns the nodes in graph order."""
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    return [node for node in nodes if node.domain == DOMAIN and node.op_type in (QUANTISE, *PRODUCTS)]


def modulated_layers(model: ir.Model) -> dict[str, ir.Node]:
    """Returns the nodes of `PRODUCTS` by layer, in graph order."""
    return {node.metadata_props[LAYER_METADATA]: node for node in delta_nodes(model) if node.op_type in PRODUCTS}


def inputs_of(node: ir.Node) -> dict[str, ir.Value]:
    """Returns the inputs of a node by name."""
    names = QUANTISE_INPUTS if node.op_type == QUANTISE else PRODUCT_INPUTS
    return {name: value for name, value in zip(names, node.inputs, strict=True) if value is not None}


def cache_of(node: ir.Node) -> ir.Value:
    """Returns the cache that a node reads."""
    return inputs_of(node)["a_hat" if node.op_type == QUANTISE else "o_hat"]


def sizes_of(node: ir.Node) -> int:
    """Returns the number of spatial axes of a convolution, else 0."""
    return len(node.attributes["strides"].as_ints()) if node.op_type == CONV else 0


def overload_of(node: ir.Node) -> str:
    """Returns the overload of a node's body."""
    return f"{sizes}d" if (sizes := sizes_of(node)) else ""


def delta_body(op: str, sizes: int) -> onnx.FunctionProto:
    """Returns the FunctionProto of an operator.

    Args:
        sizes: see `sizes_of`.
    """
    names, results = (QUANTISE_INPUTS, "q, a_new") if op == QUANTISE else (PRODUCT_INPUTS, "o_new")
    lines = _QUANTISE if op == QUANTISE else _PRODUCT.replace("«product»", _conv(sizes) if sizes else _LINEAR)
    function = onnx.parser.parse_function(f"""
    <opset_import: ["": {OPSET}], domain: "{DOMAIN}">
    {op} <place{", strides, pads" if sizes else ""}> ({", ".join(names)}) => ({results}) {{
        minus_one = Constant<value = int64[1] {{-1}}>()
        column = Constant<value = int64[2] {{-1, 1}}>()
        zero = Constant<value = float {{0.0}}>()
        infinite = Reciprocal(zero)
        nan = Sub(infinite, infinite)
        batch = Shape(begins)
        of_samples = Concat<axis = 0>(batch, minus_one)
        anew = Reshape(begins, column)
        of_group = Constant<value_int: int = @place>()
        group_scale = Gather<axis = 1>(scales, of_group)
        scale = Reshape(group_scale, column)
        {lines}
    }}""")
    function.overload = f"{sizes}d" if sizes else ""
    return function


_QUANTISE = f"""
        broken_code = Constant<value = float {{{float(BROKEN)}}}>()
        top = Constant<value = float {{{float(LEVELS)}}}>()
        bottom = Constant<value = float {{{-float(LEVELS)}}}>()
        x_float = Cast<to = 1>(x)
        moved = Mul(x_float, x_factor)
        rows = Reshape(moved, of_samples)
        a_float = Cast<to = 1>(a_hat)
        a_rows = Reshape(a_float, of_samples)
        known = Where(anew, zero, a_rows)
        delta = Sub(rows, known)
        inverse = Reciprocal(scale)
        over = Mul(delta, inverse)
        rounded = Round(over)
        clipped = Clip(rounded, bottom, top)
        is_nan = IsNaN(delta)
        is_infinite = IsInf(delta)
        is_broken = Or(is_nan, is_infinite)
        numbers = Where(is_broken, broken_code, clipped)
        codes = Cast<to = 3>(numbers)
        x_shape = Shape(x)
        q = Reshape(codes, x_shape)
        moves = Mul(clipped, scale)
        moved_on = Add(known, moves)
        sum = Where(is_broken, nan, moved_on)
        a_shape = Shape(a_hat)
        shaped = Reshape(sum, a_shape)
        a_new = CastLike(shaped, a_hat)
"""

_PRODUCT = f"""
        broken_code = Constant<value = int32 {{{BROKEN}}}>()
        q_wide = Cast<to = 6>(q)
        is_broken = Equal(q_wide, broken_code)
        marked = Cast<to = 1>(is_broken)
        «product»
        is_reached = Greater(reached, zero)
        weighed = Where(is_reached, nan, weighed_all)
        products_shape = Shape(products)
        bias_full = Expand(of_outputs, products_shape)
        bias_rows = Reshape(bias_full, of_samples)
        o_float = Cast<to = 1>(o_hat)
        o_rows = Reshape(o_float, of_samples)
        known = Where(anew, bias_rows, o_rows)
        weighed_rows = Reshape(weighed, of_samples)
        added = Mul(weighed_rows, scale)
        sum = Add(known, added)
        o_shape = Shape(o_hat)
        shaped = Reshape(sum, o_shape)
        o_new = CastLike(shaped, o_hat)
"""

_LINEAR = """
        weight_t = Transpose<perm = [1, 0]>(weight)
        sums = MatMulInteger(q, weight_t)
        products = Cast<to = 1>(sums)
        weighed_all = Mul(products, weight_scale)
        reached = ReduceMax<keepdims = 1>(marked, minus_one)
        of_outputs = Identity(bias)
"""


def _conv(sizes: int) -> str:
    return f"""
        by_channel = Constant<value = int64[{sizes + 2}] {{1, -1, {", ".join(["1"] * sizes)}}}>()
        sums = ConvInteger<strides: ints = @strides, pads: ints = @pads>(q, weight)
        products = Cast<to = 1>(sums)
        of_scales = Reshape(weight_scale, by_channel)
        weighed_all = Mul(products, of_scales)
        one_i = Constant<value = int64[1] {{1}}>()
        {marked_windows("reached")}
        of_outputs = Reshape(bias, by_channel)
    """
