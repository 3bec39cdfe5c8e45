"""The `Int8Linear` and `Int8Conv` nodes of a graph, and their bodies in standard ONNX operators.

A body is an executable specification for ONNX Runtime. It follows `trtconvert.linear.reference` line by line, with MatMulInteger
and ConvInteger.

| input | shape, type | meaning |
| --- | --- | --- |
| x | [B · n, …, K], of a convolution [B · n, K, *sizes]; FP16, BF16 or FP32 | |
| weight | [N, K, *kernel] INT8 | of x̂ |
| weight_scale, bias | [N] FP32 | |
| x_factor, x_offset | [K] FP32 | x̂ = (x − x_offset) · x_factor; a convolution has no x_offset |
| x_scale | [T] FP32 | of x̂ in each timestep bin, for mode 3 |
| modes | [T] INT32 | `LayerMode` of each timestep bin |
| timestep | [B] FP32, absent if T = 1 | of the denoiser |

Attributes: `timestep_max`; of a convolution `strides`, and `pads`, which are the same on both sides of an axis.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir

from trtconvert.export.nodes.common import DOMAIN, OPSET, TIMESTEP_BIN, marked_windows
from trtconvert.linear.modes import LayerMode
from trtconvert.linear.reference import LEVELS, TINY_SCALE, LayerTables

LINEAR, CONV = "Int8Linear", "Int8Conv"
OPERATORS = (LINEAR, CONV)

LAYER_METADATA = "trtconvert.layer"
"""Metadata key of a node: name of its layer."""
INPUT_GROUP_METADATA = "trtconvert.source"
"""Metadata key: name of the first layer that reads the same tensor."""
WEIGHT_METADATA, BIAS_METADATA = "trtconvert.weight", "trtconvert.bias"
"""Metadata keys: names of weight and bias in the state dict, if they are whole tensors of it."""

TABLES = tuple(field.name for field in fields(LayerTables))
TIMESTEP = "timestep"


def table_names(op: str) -> tuple[str, ...]:
    """Returns the inputs of an operator between x and the timestep, in order."""
    return tuple(name for name in TABLES if op == LINEAR or name != "x_offset")


@dataclass(frozen=True)
class LayerVariant:
    """The properties that change a body's structure. Variants share the op type and differ in the overload.

    Attributes:
        op: of `OPERATORS`.
        modes: of the table, ascending.
        timed: whether the node has a timestep.
        sizes: spatial axes of a convolution, else 0.
    """

    op: str
    modes: tuple[LayerMode, ...]
    timed: bool
    sizes: int = 0

    @property
    def overload(self) -> str:
        names = "_".join(mode.name.lower() for mode in self.modes)
        return f"{names}_{'timed' if self.timed else 'constant'}{f'_{self.sizes}d' if self.sizes else ''}"


def layer_nodes(model: ir.Model) -> dict[str, ir.Node]:
    """Returns the nodes by layer, in graph order."""
    return {
        node.metadata_props.get(LAYER_METADATA) or node.name or f"node {index}": node
        for index, node in enumerate(ir.traversal.RecursiveGraphIterator(model.graph))
        if is_layer(node)
    }


def is_layer(node: ir.Node | None) -> bool:
    """Return whether a node is one of `OPERATORS` with tables. Plugins of the same type have no metadata."""
    return (
        node is not None
        and node.domain == DOMAIN
        and node.op_type in OPERATORS
        and LAYER_METADATA in node.metadata_props
    )


def inputs_of(node: ir.Node) -> dict[str, ir.Value]:
    """Returns the inputs of a node by name."""
    names = ("x", *table_names(node.op_type), TIMESTEP)
    return {name: value for name, value in zip(names, node.inputs, strict=False) if value is not None}


def table_of(value: ir.Value) -> np.ndarray:
    """Returns the numbers of a constant input."""
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None  # the tables are initialisers
    return tensor.numpy()


def variant_of_layer(node: ir.Node) -> LayerVariant:
    """Returns the variant of the body of a node."""
    inputs = inputs_of(node)
    modes = tuple(LayerMode(mode) for mode in sorted(set(table_of(inputs["modes"]).tolist())))
    sizes = len(node.attributes["strides"].as_ints()) if node.op_type == CONV else 0
    return LayerVariant(node.op_type, modes, TIMESTEP in inputs, sizes)


def layer_body(variant: LayerVariant) -> onnx.FunctionProto:
    """Returns the FunctionProto of a variant."""
    conv = variant.op == CONV
    names = ("x", *table_names(variant.op), *((TIMESTEP,) if variant.timed else ()))
    attributes = ("timestep_max", *(("strides", "pads") if conv else ()))
    text = f"""
    <opset_import: ["": {OPSET}], domain: "{DOMAIN}">
    {variant.op} <{", ".join(attributes)}> ({", ".join(names)}) => (out) {{
        {_CONSTANTS}
        {_TIMED if variant.timed else _CONSTANT}
        {_conv(variant) if conv else _linear(variant)}
    }}"""
    function = onnx.parser.parse_function(text)
    function.overload = variant.overload
    return function


_CONSTANTS = f"""
        zero_i = Constant<value = int64[1] {{0}}>()
        one_i = Constant<value = int64[1] {{1}}>()
        minus_one = Constant<value = int64[1] {{-1}}>()
        column = Constant<value = int64[2] {{-1, 1}}>()
        zero = Constant<value = float {{0.0}}>()
        one = Constant<value = float {{1.0}}>()
        top = Constant<value = float {{{float(LEVELS)}}}>()
        bottom = Constant<value = float {{{-float(LEVELS)}}}>()
        tiny = Constant<value = float {{{TINY_SCALE!r}}}>()
        weight_only = Constant<value = int32 {{{int(LayerMode.WEIGHT_ONLY)}}}>()
        static = Constant<value = int32 {{{int(LayerMode.STATIC)}}}>()
        infinite = Reciprocal(zero)
        nan = Sub(infinite, infinite)
        x_float = Cast<to = 1>(x)
"""

_TIMED = f"""
        last_timestep = Constant<value_float: float = @timestep_max>()
        {TIMESTEP_BIN}
        batch = Shape(bin)
"""

_CONSTANT = """
        bin = Identity(zero_i)
        batch = Identity(one_i)
"""

_BROKEN = """
        is_nan = IsNaN(moved)
        is_infinite = IsInf(moved)
        is_broken = Or(is_nan, is_infinite)
        marked = Cast<to = 1>(is_broken)
"""

_MODE = """
        mode_rows = Gather<axis = 0>(modes, bin)
        mode = ReduceMin<keepdims = 0>(mode_rows)
"""


def _linear(variant: LayerVariant) -> str:
    """Returns the lines of a linear layer. Rows have the shape [B, n, K].

    The two scales are not multiplied first: ONNX Runtime 1.31 would fuse MatMulIntegerToFloat, which misreads scales per row.
    """
    modes = variant.modes
    lines = [
        """
        moved_raw = Sub(x_float, x_offset)
        moved = Mul(moved_raw, x_factor)
        channels = Shape<start = -1>(x)
        of_samples = Concat<axis = 0>(batch, minus_one, channels)
        rows = Reshape(moved, of_samples)
        weight_t = Transpose<perm = [1, 0]>(weight)
"""
    ]
    if len(modes) > 1:
        lines.append(_MODE)
    if LayerMode.STATIC in modes:
        lines.append("""
        calibrated = Gather<axis = 0>(x_scale, bin)
        of_rows = Constant<value = int64[3] {-1, 1, 1}>()
        step_static = Reshape(calibrated, of_rows)
""")
    if LayerMode.DYNAMIC in modes:
        lines.append("""
        magnitude = Abs(rows)
        largest = ReduceMax<keepdims = 1>(magnitude, minus_one)
        measured = Div(largest, top)
        step_dynamic = Max(measured, tiny)
""")
    if LayerMode.STATIC in modes and LayerMode.DYNAMIC in modes:
        lines.append("""
        is_static = Equal(mode, static)
        step = Where(is_static, step_static, step_dynamic)
""")
    elif modes != (LayerMode.WEIGHT_ONLY,):
        lines.append(f"step = Identity({'step_static' if LayerMode.STATIC in modes else 'step_dynamic'})")
    if modes != (LayerMode.WEIGHT_ONLY,):
        lines.append(f"""
        {_BROKEN}
        marked_rows = Reshape(marked, of_samples)
        most_marked = ReduceMax<keepdims = 1>(marked_rows, minus_one)
        is_broken_row = Greater(most_marked, zero)
        over = Div(rows, step)
        rounded = Round(over)
        clipped = Clip(rounded, bottom, top)
        q = Cast<to = 3>(clipped)
        sums = MatMulInteger(q, weight_t)
        products = Cast<to = 1>(sums)
        weighed = Mul(products, weight_scale)
        scaled = Mul(weighed, step)
        y_biased = Add(scaled, bias)
        y_int8 = Where(is_broken_row, nan, y_biased)
""")
    if LayerMode.WEIGHT_ONLY in modes:
        lines.append("""
        rows_stored = CastLike(rows, x)
        rows_used = Cast<to = 1>(rows_stored)
        weight_float = Cast<to = 1>(weight_t)
        products_16bit = MatMul(rows_used, weight_float)
        scaled_16bit = Mul(products_16bit, weight_scale)
        y_16bit = Add(scaled_16bit, bias)
""")
    lines.append(_chosen(modes, "y"))
    if variant.timed:
        lines.append("""
        of_samples_t = Constant<value = int64[3] {-1, 1, 1}>()
        unknown = Reshape(t_nan, of_samples_t)
        y_known = Where(unknown, nan, y)
""")
    lines.append(f"""
        leading = Shape<end = -1>(x)
        outputs = Shape(bias)
        shape = Concat<axis = 0>(leading, outputs)
        shaped = Reshape({"y_known" if variant.timed else "y"}, shape)
        out = CastLike(shaped, x)
""")
    return "".join(lines)


def _conv(variant: LayerVariant) -> str:
    """Returns the lines of a convolution. Images are [B, -1] where they are scaled per sample."""
    modes, ones = variant.modes, ", ".join(["1"] * variant.sizes)
    lines = [
        f"""
        of_channels = Constant<value = int64[{variant.sizes + 2}] {{1, -1, {ones}}}>()
        factor = Reshape(x_factor, of_channels)
        moved = Mul(x_float, factor)
        outputs_scale = Reshape(weight_scale, of_channels)
        outputs_bias = Reshape(bias, of_channels)
        of_samples = Concat<axis = 0>(batch, minus_one)
"""
    ]
    if len(modes) > 1:
        lines.append(_MODE)
    if LayerMode.STATIC in modes:
        lines.append(f"""
        {_BROKEN}
        {marked_windows("in_window")}
        is_broken_window = Greater(in_window, zero)
        calibrated = Gather<axis = 0>(x_scale, bin)
        step = Reshape(calibrated, column)
        x_shape = Shape(x)
        flat = Reshape(moved, of_samples)
        over = Div(flat, step)
        rounded = Round(over)
        clipped = Clip(rounded, bottom, top)
        q_flat = Cast<to = 3>(clipped)
        q = Reshape(q_flat, x_shape)
        sums = ConvInteger<strides: ints = @strides, pads: ints = @pads>(q, weight)
        products = Cast<to = 1>(sums)
        y_shape = Shape(products)
        weighed = Mul(products, outputs_scale)
        weighed_flat = Reshape(weighed, of_samples)
        scaled_flat = Mul(weighed_flat, step)
        scaled = Reshape(scaled_flat, y_shape)
        y_biased = Add(scaled, outputs_bias)
        y_int8 = Where(is_broken_window, nan, y_biased)
""")
    if LayerMode.WEIGHT_ONLY in modes:
        lines.append("""
        stored = CastLike(moved, x)
        used = Cast<to = 1>(stored)
        weight_float = Cast<to = 1>(weight)
        products_16bit = Conv<strides: ints = @strides, pads: ints = @pads>(used, weight_float)
        scaled_16bit = Mul(products_16bit, outputs_scale)
        y_16bit = Add(scaled_16bit, outputs_bias)
""")
    lines.append(_chosen(modes, "y"))
    if variant.timed:
        lines.append("""
        y_full = Shape(y)
        y_flat = Reshape(y, of_samples)
        unknown = Reshape(t_nan, column)
        y_flat_known = Where(unknown, nan, y_flat)
        y_known = Reshape(y_flat_known, y_full)
""")
    lines.append(f"out = CastLike({'y_known' if variant.timed else 'y'}, x)")
    return "".join(lines)


def _chosen(modes: tuple[LayerMode, ...], name: str) -> str:
    if modes == (LayerMode.WEIGHT_ONLY,):
        return f"{name} = Identity(y_16bit)"
    if LayerMode.WEIGHT_ONLY not in modes:
        return f"{name} = Identity(y_int8)"
    return f"""
        is_weight_only = Equal(mode, weight_only)
        {name} = Where(is_weight_only, y_16bit, y_int8)
"""
