"""RMS norms of the heads of queries and keys, for a plugin that applies them as it reads q and k.

x / √(mean(x²) + ε) · w over the channels of each head (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4): what Flux and
others do to q and k before the rotary embeddings. For what TensorRT makes of it see `rotary`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from trtconvert.export.matching import (
    axes_of,
    before_widening,
    constant_of,
    factors_of,
    is_same_shape,
    producer_of,
    without_casts,
)
from trtconvert.export.nodes import HALF, append_input, attention_nodes


def take_norms(model: ir.Model) -> int:
    """Give nodes q and k as they are before their norms, the weights of these as the input `norm`, FP32 [2, D], and their ε.

    Only nodes in 16 bit, whose q and k are both normed right at the node, with one ε and constant weights. What a plugin
    rotates is normed first, so `take_rotary` comes before. The weights get another name: not for engines whose weights
    are to be replaced.

    Returns:
        How many nodes take their norms.
    """
    joined: dict[tuple[ir.Graph, ir.Value, ir.Value], ir.Value] = {}
    count = 0
    for node in attention_nodes(model).values():
        norms = _norms(node)
        if norms is None:
            continue
        assert isinstance(node.graph, ir.Graph)
        for index, norm in enumerate(norms):
            node.replace_input_with(index, norm.source)
        key = (node.graph, norms[0].weight, norms[1].weight)
        if key not in joined:
            joined[key] = _joined(*key)
        append_input(node, "norm", joined[key])
        node.attributes["norm_eps"] = ir.AttrFloat32("norm_eps", norms[0].epsilon)
        count += 1
    if count:
        RemoveUnusedNodesPass()(model)
    return count


@dataclass(frozen=True)
class _Norm:
    """What is normed, [B, N, H, D] or [B, H, N, D], and how; weight [D]."""

    source: ir.Value
    weight: ir.Value
    epsilon: float


def _norms(node: ir.Node) -> tuple[_Norm, _Norm] | None:
    """Those of a node's q and k, if both are normed, with one ε."""
    q, k = node.inputs[:2]
    if q is None or k is None or q.dtype not in HALF:
        return None
    of_q, of_k = _norm(q), _norm(k)
    return (of_q, of_k) if of_q is not None and of_k is not None and of_q.epsilon == of_k.epsilon else None


def _norm(value: ir.Value) -> _Norm | None:
    """How a value of four axes is a norm of another of its type."""
    for scaled, factor in factors_of(value):
        weight = before_widening(factor)
        numbers, channels = constant_of(weight), value.shape[3:] if value.shape is not None else None
        if weight is None or numbers is None or not is_same_shape(channels, numbers.shape):
            continue
        for x, reciprocal in factors_of(scaled):
            found = _of_root_mean_square(reciprocal)
            source = before_widening(x)
            if source is None or found is None or found[0] is not source:
                continue
            if source.dtype == value.dtype and is_same_shape(source.shape, value.shape):
                return _Norm(source, weight, found[1])
    return None


def _of_root_mean_square(value: ir.Value) -> tuple[ir.Value | None, float] | None:
    """x and ε of 1 / √(mean(x²) + ε), the mean over the last axis."""
    root = producer_of(without_casts(value), "Reciprocal")
    square = producer_of(without_casts(root.inputs[0]), "Sqrt") if root is not None else None
    total = producer_of(without_casts(square.inputs[0]), "Add") if square is not None else None
    for sum_of, added in itertools.permutations(total.inputs if total is not None else (), 2):
        epsilon, mean = constant_of(added), producer_of(without_casts(sum_of), "ReduceMean")
        if epsilon is None or epsilon.size != 1 or mean is None or len(mean.inputs) < 2:
            continue
        power = producer_of(without_casts(mean.inputs[0]), "Pow")
        exponent = constant_of(power.inputs[1]) if power is not None else None
        if power is None or exponent is None or exponent.size != 1 or exponent.item() != 2:
            continue
        # the last of four, as the value that is normed has: see `_norm`
        if mean.attributes.get_int("keepdims", 1) and axes_of(mean.inputs[1], 4) == [3]:
            return before_widening(power.inputs[0]), epsilon.item()
    return None


def _joined(graph: ir.Graph, of_q: ir.Value, of_k: ir.Value) -> ir.Value:
    """The weights of q and of k, FP32 [2, D], as an initializer."""
    rows = [numbers for weight in (of_q, of_k) if (numbers := constant_of(weight)) is not None]
    both = ir.Tensor(np.stack(rows).astype(np.float32), name=f"{of_q.name}+{of_k.name}")
    value = ir.Value(name=both.name, const_value=both, type=ir.TensorType(both.dtype), shape=both.shape)
    graph.register_initializer(value)
    return value
