"""Residual connections and the layer norms behind them, at the borders of plugins, for a plugin that computes both.

A plugin ends what TensorRT fuses. In its own engine it adds a residual inside the product before, and norms the sum while the
next kernel starts; beside a plugin it adds in a kernel of its own, since the sum is also read behind the plugin, and norms in
another: 6 to 11 µs at each of the three places in a block of SDXL at 1,024 tokens, which takes 330 (H200, kernels of an engine).
One kernel does both in 5 to 7.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from trtconvert.export.lowering.projections import is_weight
from trtconvert.export.matching import is_same_shape, producer_of
from trtconvert.export.nodes.attention import is_attention
from trtconvert.export.nodes.common import DOMAIN, HALF, PLUGIN

RESIDUAL_NORM = "ResidualNorm"
"""Operator of the plugin: x, residual [..., C], weight, bias [C] → x + residual, and its layer norm."""

_MOST_CHANNELS = 4096  # TRTCONVERT_RESIDUAL_NORM_MOST_CHANNELS of residual_norm.h
_VECTOR = 8  # channels that the kernel takes at once
_VIEWS = ("Reshape", "Transpose", "Cast")


@dataclass(frozen=True)
class _ResidualNorm:
    """norm(x + residual), with a sum that others may read as well.

    Attributes:
        weight, bias: [C], constants of the sum's type.
    """

    add: ir.Node
    norm: ir.Node
    x: ir.Value
    residual: ir.Value
    weight: ir.Value
    bias: ir.Value
    epsilon: float


def fuse_residual_norms(model: ir.Model) -> int:
    """Replace sums and their layer norms by nodes `ResidualNorm`, in place, where attention that is a plugin lies in front of the
    sum or behind the norm, with at most linear layers between.

    Only sums of two tensors of one shape in 16 bits, normed over their last axis, of as many channels as the kernel takes.
    Elsewhere TensorRT fuses them itself. Comes last of what looks for attention's neighbours: nobody looks through such a node.

    Returns:
        How many sums were taken.
    """
    count = 0
    for candidate in list(model.graph):  # one by one: a sum may be the next one's residual
        taken = _residual_norm(candidate)
        if taken is None or not _at_border(taken):
            continue
        node = ir.node(
            RESIDUAL_NORM,
            [taken.x, taken.residual, taken.weight, taken.bias],
            {"epsilon": taken.epsilon} | PLUGIN,
            domain=DOMAIN,
            num_outputs=2,
        )
        replaced = [taken.add.outputs[0], taken.norm.outputs[0]]
        for new, old in zip(node.outputs, replaced, strict=True):
            new.type, new.shape = copy.copy(old.type), old.shape
        ir.convenience.replace_nodes_and_values(
            model.graph, taken.norm, [taken.add, taken.norm], [node], replaced, node.outputs
        )
        count += 1
    return count


def _residual_norm(norm: ir.Node) -> _ResidualNorm | None:
    if norm.op_type != "LayerNormalization" or norm.domain or len(norm.inputs) < 3 or len(norm.outputs) > 1:
        return None
    total, weight, bias = norm.inputs
    add = producer_of(total, "Add")
    if add is None or total is None or weight is None or bias is None or total.is_graph_output():
        return None
    x, residual = add.inputs
    channels = total.shape[-1] if total.shape is not None else None
    if x is None or residual is None or not isinstance(channels, int) or total.dtype not in HALF:
        return None
    if not all(is_same_shape(value.shape, total.shape) and value.dtype == total.dtype for value in (x, residual)):
        return None
    if channels % _VECTOR or channels > _MOST_CHANNELS or not _is_last_axis(norm, total):
        return None
    if not all(is_weight(value, 1, channels) and value.dtype == total.dtype for value in (weight, bias)):
        return None
    return _ResidualNorm(add, norm, x, residual, weight, bias, norm.attributes.get_float("epsilon", 1e-5))


def _is_last_axis(norm: ir.Node, total: ir.Value) -> bool:
    """Whether the norm is over the last axis alone, with sums in FP32."""
    assert total.shape is not None
    axis = norm.attributes.get_int("axis", -1) % len(total.shape)
    return axis == len(total.shape) - 1 and norm.attributes.get_int("stash_type", 1) == ir.DataType.FLOAT


def _at_border(taken: _ResidualNorm) -> bool:
    return any(_is_behind(value) for value in (taken.x, taken.residual)) or _is_in_front(taken.norm.outputs[0])


def _is_behind(value: ir.Value) -> bool:
    """Whether a value is what a linear layer makes of attention's output, or such layers."""
    producer = value.producer()
    while producer is not None and (source := _source(producer)) is not None:
        producer = source.producer()
    return is_attention(producer)


def _source(node: ir.Node) -> ir.Value | None:
    """What a linear layer, one of its steps or a view computes on; None for other nodes."""
    if node.domain:
        return None
    if node.op_type in _VIEWS:
        return node.inputs[0]
    others = [value for value in node.inputs if value is not None and value.const_value is None]
    return others[0] if node.op_type in ("MatMul", "Gemm", "Add", "Sub", "Mul") and len(others) == 1 else None


def _is_in_front(value: ir.Value) -> bool:
    """Whether linear layers make attention's queries, keys or values of a value."""
    return any(is_attention(reader) for reader in _readers(value))


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Of a value, and of what linear layers and views make of it."""
    for reader, _ in value.uses():
        yield reader
        if _source(reader) is value:
            yield from _readers(reader.outputs[0])
