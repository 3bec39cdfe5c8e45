"""Fuses INT8 convolutions behind group norms into plugins: the norm's kernel writes INT8, and the convolution reads INT8.

TensorRT's INT8 convolutions need another layout than its 16-bit ones and our group norms, and gain nothing between them. The
plugin's convolution is an implicit product of windows and weights, and adds the residual behind it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from trtconvert.c_structs import IMAGE_MARKS
from trtconvert.export.building import cleaned, graph_of, replace_nodes
from trtconvert.export.lowering.group_norms import GROUP_NORM, fuse_group_norms
from trtconvert.export.lowering.initializers import named_constant, packed, scales_of_bins
from trtconvert.export.lowering.int8_weights import Int8Weight, int8_weight_of
from trtconvert.export.lowering.layers import expand_layers
from trtconvert.export.matching import constant_of, is_read_once, is_same_shape, only_reader, producer_of
from trtconvert.export.nodes.common import DOMAIN, HALF, PLUGIN
from trtconvert.export.nodes.layers import CONV, layer_nodes
from trtconvert.linear.convs import NOT_NORMED, PIXELS, obstacle, too_small
from trtconvert.linear.modes import LayerMode

INT8_GROUP_NORM, INT8_CONV = "Int8GroupNorm", "Int8Conv"
"""Operators of the plugins."""
MARK_WORDS = IMAGE_MARKS // 4


@dataclass(frozen=True)
class _Conv:
    """A convolution behind a group norm.

    Attributes:
        norm: node `GroupNorm`, which only the convolution reads.
        factor: [C] FP32 between norm and convolution, or None.
        conv: node `Conv`; weight: its weight.
        residual, add: the tensor that the only reader of the result adds, and that reader, or None.
    """

    norm: ir.Node
    factor: np.ndarray | None
    conv: ir.Node
    weight: Int8Weight
    residual: ir.Value | None
    add: ir.Node | None


def fuse_int8_convs(model: ir.Model, profiles: Sequence[Mapping[str, int]]) -> int:
    """Replaces convolutions with INT8 weights behind nodes `GroupNorm` by `Int8Conv`, and the norms by `Int8GroupNorm`, in place.

    Only static layers of sizes that pay. Runs after `fuse_group_norms`.

    Args:
        profiles: opt sizes of the dynamic dimensions in each optimisation profile.
    Returns:
        The number of replaced convolutions.
    """
    count = 0
    for node in list(model.graph):  # one by one: a residual may be another one's result
        found = _found(node, profiles)
        if isinstance(found, _Conv):
            _replace(found)
            count += 1
    return cleaned(model, count)


def left_convs(model: ir.Model, profiles: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """Returns the INT8 convolutions that `fuse_int8_convs` would leave in 16 bits, with the reasons.

    They must be expanded as 16-bit convolutions: a factor in front costs a kernel, and hides tokens from `fuse_group_norms`.

    Args:
        model: with our `Int8Conv` nodes; is not changed.
        profiles: as in `fuse_int8_convs`.
    """
    names = [name for name, node in layer_nodes(model).items() if node.op_type == CONV]
    if not names:
        return {}
    model = model.clone()
    expand_layers(model, offsets=True)
    fuse_group_norms(model)
    reasons = dict.fromkeys(names, PIXELS)  # products of tokens, with their group norm
    for node in model.graph:
        found = _found(node, profiles)
        if found is not None:
            weight = int8_weight_of(node.inputs[1])
            assert weight is not None
            reasons[weight.activation.input_group] = found if isinstance(found, str) else ""
    return {name: reason for name, reason in reasons.items() if reason}


def _found(conv: ir.Node, profiles: Sequence[Mapping[str, int]]) -> _Conv | str | None:
    """Matches a convolution with INT8 weights, or returns why it stays in 16 bits; None for other nodes."""
    weight = int8_weight_of(conv.inputs[1]) if conv.op_type == "Conv" and not conv.domain else None
    if weight is None:
        return None
    if any(mode != LayerMode.STATIC for mode in weight.activation.modes):
        return "with activations of 16 bits in some timestep bins"
    pads = conv.attributes["pads"].as_ints()
    half = len(pads) // 2
    if reason := obstacle(weight.shape.numpy(), conv.attributes["strides"].as_ints(), pads[:half], pads[half:]):
        return reason
    x, factor = conv.inputs[0], None
    if x is None or x.dtype not in HALF or conv.outputs[0].dtype != x.dtype:
        return "not of images in 16 bits"
    read_once = is_read_once(x)
    if (mul := producer_of(x, "Mul")) is not None and (numbers := constant_of(mul.inputs[1])) is not None:
        x, factor = mul.inputs[0], numbers.astype(np.float32).reshape(-1)
        read_once = read_once and x is not None and is_read_once(x)
    norm = x.producer() if x is not None else None
    if x is None or norm is None or norm.domain != DOMAIN or norm.op_type != GROUP_NORM:
        return NOT_NORMED
    if not read_once or norm.attributes["channels_last"].as_int():
        return "with an input that other nodes read too"
    if reason := _too_small(conv, weight, profiles):
        return reason
    residual, add = _residual(conv)
    return _Conv(norm, factor, conv, weight, residual, add)


def _too_small(conv: ir.Node, weight: Int8Weight, profiles: Sequence[Mapping[str, int]]) -> str:
    shape = conv.outputs[0].shape
    for sizes in profiles:
        known = shape.evaluate(sizes) if shape is not None else None
        if known is None or not known.is_static():
            return "of unknown sizes"
        batch, outputs, height, width = known.numpy()
        if reason := too_small(batch * height * width, outputs, math.prod(weight.shape.numpy()[1:])):
            return reason
    return ""


def _residual(conv: ir.Node) -> tuple[ir.Value | None, ir.Node | None]:
    """Returns the image that the only reader of a convolution adds, and that reader."""
    result = conv.outputs[0]
    add = only_reader(result, "Add")
    if add is None or not is_read_once(result):
        return None, None
    other = add.inputs[1] if add.inputs[0] is result else add.inputs[0]
    if other is None or other is result or other.dtype != result.dtype or constant_of(other) is not None:
        return None, None
    fits = is_same_shape(other.shape, result.shape) and is_same_shape(add.outputs[0].shape, result.shape)
    return (other, add) if fits else (None, None)


def _replace(taken: _Conv) -> None:
    conv, weight, activation, graph = taken.conv, taken.weight, taken.weight.activation, graph_of(taken.conv)
    table = scales_of_bins(graph, activation)
    of_table = {"timestep": int(len(table) > 1), "timestep_max": float(activation.timestep_max)}

    payload, marks = _int8_norm(graph, taken, table, of_table)
    outputs, channels, *kernel = weight.shape.numpy()
    channels_last = packed(
        graph,
        f"trtconvert/{weight.name}, channels last",
        (outputs, *kernel, channels // 4),
        lambda: weight.integers().transpose(0, 2, 3, 1),
    )
    inputs = [payload, marks, channels_last, named_constant(graph, f"{weight.name}: scale", weight.scale)]
    bias = constant_of(conv.inputs[2]) if len(conv.inputs) > 2 else None
    if bias is not None:
        inputs.append(named_constant(graph, f"{conv.inputs[2].name}: FP32", bias.astype(np.float32)))  # type: ignore[union-attr]
    if taken.residual is not None:
        inputs.append(taken.residual)
    strides, pads = conv.attributes["strides"].as_ints(), conv.attributes["pads"].as_ints()
    attributes: dict[str, Any] = of_table | {
        "stride_y": strides[0], "stride_x": strides[1], "pad_y": pads[0], "pad_x": pads[1],
        "bias": int(bias is not None), "residual": int(taken.residual is not None),
        "bfloat16": int(conv.outputs[0].dtype == ir.DataType.BFLOAT16),
    }  # fmt: skip
    node = ir.node(INT8_CONV, [*inputs, *table], attributes | PLUGIN, domain=DOMAIN)
    replace_nodes([conv] if taken.add is None else [conv, taken.add], [node])


def _int8_norm(
    graph: ir.Graph, taken: _Conv, table: Sequence[ir.Value], of_table: Mapping[str, Any]
) -> tuple[ir.Value, ir.Value]:
    """Adds the INT8 norm in front of a convolution.

    Returns:
        The payload, INT32 [B, H, W, C / 4] with four channels in each, and the marks of its images, INT32 [B, MARK_WORDS].
    """
    norm = taken.norm
    inputs = [value for value in norm.inputs if value is not None]
    attributes: dict[str, Any] = {name: norm.attributes[name].value for name in ("epsilon", "groups", "silu")}
    attributes |= dict(of_table) | {"shift": int(len(inputs) > 3), "factor": int(taken.factor is not None)}
    if taken.factor is not None:
        inputs.append(named_constant(graph, f"{taken.weight.activation.input_group}: factor", taken.factor))
    node = ir.node(INT8_GROUP_NORM, [*inputs, *table], attributes | PLUGIN, domain=DOMAIN, num_outputs=2)
    shape = norm.outputs[0].shape
    assert shape is not None
    batch, channels, height, width = shape
    assert isinstance(channels, int)
    payload, marks = node.outputs
    payload.type, payload.shape = ir.TensorType(ir.DataType.INT32), ir.Shape([batch, height, width, channels // 4])
    marks.type, marks.shape = ir.TensorType(ir.DataType.INT32), ir.Shape([batch, MARK_WORDS])
    graph.insert_after(norm, node)
    return payload, marks
