"""Fuses residual connections and the layer norms behind them into a plugin, next to other plugins.

Plugins interrupt TensorRT's fusions: next to one, TensorRT adds a residual in one kernel, and norms in another. The plugin does
both in one kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from trtconvert.c_structs import RESIDUAL_NORM_MOST_CHANNELS
from trtconvert.export.lowering.projections import is_weight
from trtconvert.export.matching import is_same_shape, producer_of
from trtconvert.export.nodes.attention import is_attention
from trtconvert.export.nodes.common import DOMAIN, HALF, PLUGIN

RESIDUAL_NORM = "ResidualNorm"
"""Operator of the plugin: x, residual [..., C], weight, bias [C] → x + residual, and its layer norm."""

_VECTOR = 8  # channels per vector of the kernel
_VIEWS = ("Reshape", "Transpose", "Cast")


@dataclass(frozen=True)
class _ResidualNorm:
    """norm(x + residual). Other nodes may read the sum.

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
    """Replaces sums and their layer norms by nodes `ResidualNorm`, in place, if only linear layers are between them and
    attention.

    Replaces only 16-bit sums of equal shapes, normed over the last axis, of a supported number of channels. Elsewhere TensorRT
    fuses better. Runs after the rewrites of attention's neighbours, which do not match such nodes.

    Returns:
        The number of replaced sums.
    """
    count = 0
    for candidate in list(model.graph):  # one by one: a sum may be the next residual
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
        old = [taken.add, taken.norm]
        results = [of.outputs[0] for of in old]
        ir.convenience.replace_nodes_and_values(model.graph, taken.norm, old, [node], results, node.outputs)
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
    if channels % _VECTOR or channels > RESIDUAL_NORM_MOST_CHANNELS or not _is_last_axis(norm, total):
        return None
    if not all(is_weight(value, 1, channels) and value.dtype == total.dtype for value in (weight, bias)):
        return None
    return _ResidualNorm(add, norm, x, residual, weight, bias, norm.attributes.get_float("epsilon", 1e-5))


def _is_last_axis(norm: ir.Node, total: ir.Value) -> bool:
    """Return whether the norm is over the last axis only, with sums in FP32."""
    assert total.shape is not None
    axis = norm.attributes.get_int("axis", -1) % len(total.shape)
    return axis == len(total.shape) - 1 and norm.attributes.get_int("stash_type", 1) == ir.DataType.FLOAT


def _at_border(taken: _ResidualNorm) -> bool:
    """Return whether only linear layers are between attention and the sum or the norm."""
    readers = _readers(taken.norm.outputs[0])
    return any(map(_is_behind, (taken.x, taken.residual))) or any(map(is_attention, readers))


def _is_behind(value: ir.Value) -> bool:
    """Return whether linear layers compute a value from attention's output."""
    producer = value.producer()
    while producer is not None and (source := _source(producer)) is not None:
        producer = source.producer()
    return is_attention(producer)


def _source(node: ir.Node) -> ir.Value | None:
    """Returns the input of a view or of a step of a linear layer; None for other nodes."""
    if node.domain:
        return None
    if node.op_type in _VIEWS:
        return node.inputs[0]
    others = [value for value in node.inputs if value is not None and value.const_value is None]
    return others[0] if node.op_type in ("MatMul", "Gemm", "Add", "Sub", "Mul") and len(others) == 1 else None


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Yields the readers of a value, through linear layers and views."""
    for reader, _ in value.uses():
        yield reader
        if _source(reader) is value:
            yield from _readers(reader.outputs[0])
