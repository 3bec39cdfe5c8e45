"""Fuses RMS norms of queries and keys into the attention plugin.

Models compute x / √(mean(x²) + ε) · w (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4) before the rotary embeddings, over
the channels of each head (Flux) or across heads, over all channels of a token (Wan). A norm across heads is between a projection
and its heads, where `packing` and `shared` would not match.

Joint attention (double blocks of Flux, SD 3.5, Qwen-Image) has norms with different weights: q = cat([norm(text),
other_norm(image)]).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from trtconvert.export.building import NewNodes, cleaned, graph_of
from trtconvert.export.lowering.initializers import add_initializer
from trtconvert.export.lowering.tokens import one_after_another, runs_of
from trtconvert.export.matching import (
    axes_of,
    before_widening,
    constant_of,
    factors_of,
    is_same_shape,
    producer_of,
    without_casts,
)
from trtconvert.export.nodes.attention import append_input, attention_nodes, key_index_of
from trtconvert.export.nodes.common import HALF


def fuse_norms(model: ir.Model) -> int:
    """Replaces q and k of nodes by the inputs of their norms, and appends the weights as the input `norm`, and ε.

    `norm` is FP32: [2, D] for norms of each head, [2, H, D] for norms across heads. If the first tokens have weights of their
    own, the attribute `norm_split` is their number, and `norm` is [2, 2, D]: by q and k, and by part of the tokens. Changes
    16-bit nodes if q and k have the same kind of norm directly before the node, with one ε and constant weights; norms across
    heads also need the layout BNHD. A plugin norms before it rotates, so `fuse_rotary` runs first. The weights get another
    name: not for refittable engines.

    Returns:
        The number of changed nodes.
    """
    joined: dict[tuple[ir.Graph, tuple[ir.Value, ...], tuple[int, ...]], ir.Value] = {}
    count = 0
    for node in attention_nodes(model).values():
        normed = _normed(node) if key_index_of(node) is None else None  # the plugin gathers normed keys
        if normed is None:
            continue
        for index, tokens in enumerate(normed):
            node.replace_input_with(index, _source_of(node, tokens))
        of_q, of_k = normed
        key = (graph_of(node), (*of_q.weights, *of_k.weights), of_q.sizes)
        if key not in joined:
            joined[key] = _joined(*key)
        append_input(node, "norm", joined[key])
        node.attributes["norm_eps"] = ir.AttrFloat32("norm_eps", of_q.parts[0].epsilon)
        if of_q.split:
            node.attributes["norm_split"] = ir.AttrInt64("norm_split", of_q.split)
        count += 1
    return cleaned(model, count)


@dataclass(frozen=True)
class _Norm:
    """A matched norm.

    Attributes:
        source: the input, [B, N, H, D] or [B, H, N, D]; across heads [B, N, H·D] or a view of it.
        weight: [D], across heads [H·D].
        sizes: of the weights: (D,), across heads (H, D).
        as_heads: across heads, the Reshape of the result to [B, N, H, D].
    """

    source: ir.Value
    weight: ir.Value
    epsilon: float
    sizes: tuple[int, ...]
    as_heads: ir.Node | None = None


@dataclass(frozen=True)
class _Normed:
    """The norms of all tokens of q or k.

    Attributes:
        parts: one norm, or one of the first `split` tokens and one of the others.
    """

    parts: tuple[_Norm, ...]
    split: int = 0

    @property
    def weights(self) -> tuple[ir.Value, ...]:
        return tuple(part.weight for part in self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.parts[0].sizes

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties that q and k must share."""
        return self.parts[0].epsilon, self.sizes, self.split


def _normed(node: ir.Node) -> tuple[_Normed, _Normed] | None:
    """Matches the norms of q and k, if both have the same kind."""
    q, k = node.inputs[:2]
    if q is None or k is None or q.dtype not in HALF:
        return None
    of_q, of_k = (_tokens(value, _token_axis(node)) for value in (q, k))
    return (of_q, of_k) if of_q is not None and of_k is not None and of_q.kind == of_k.kind else None


def _token_axis(node: ir.Node) -> int:
    return 1 if node.attributes["layout"].as_string() == "BNHD" else 2


def _tokens(value: ir.Value, token_axis: int) -> _Normed | None:
    """Matches the norms of all tokens of a value."""
    whole = _norm(value) or (_norm_across_heads(value) if token_axis == 1 else None)
    if whole is not None:
        return _Normed((whole,))
    runs = [run for run in runs_of(value, token_axis) if run is not None]
    parts = tuple(norm for run in runs if (norm := _norm(run)) is not None)
    if len(runs) != 2 or len(parts) != 2 or len({(part.epsilon, part.sizes) for part in parts}) > 1:
        return None
    split = runs[0].shape[token_axis] if runs[0].shape is not None else None
    return _Normed(parts, split) if isinstance(split, int) else None


def _norm_across_heads(value: ir.Value) -> _Norm | None:
    """Matches a norm across heads of a value [B, N, H, D]."""
    as_heads = producer_of(value, "Reshape")
    rows = as_heads.inputs[0] if as_heads is not None else None
    norm = _norm(rows) if rows is not None else None
    if norm is None or value.shape is None:
        return None
    sizes = tuple(size for size in value.shape[2:] if isinstance(size, int))
    if len(sizes) != 2 or norm.sizes != (math.prod(sizes),):
        return None
    return replace(norm, sizes=sizes, as_heads=as_heads)


def _norm(value: ir.Value) -> _Norm | None:
    """Matches a norm over the last axis."""
    if value.shape is None:
        return None
    for scaled, factor in factors_of(value):
        weight = before_widening(factor)
        numbers = constant_of(weight)
        if weight is None or numbers is None or not is_same_shape(value.shape[-1:], numbers.shape):
            continue
        for x, reciprocal in factors_of(scaled):
            found = _of_root_mean_square(reciprocal, rank=len(value.shape))
            source = before_widening(x)
            if source is None or found is None or found[0] is not source:
                continue
            if source.dtype == value.dtype and is_same_shape(source.shape, value.shape):
                return _Norm(source, weight, found[1], numbers.shape)
    return None


def _of_root_mean_square(value: ir.Value, rank: int) -> tuple[ir.Value | None, float] | None:
    """Matches 1 / √(mean(x²) + ε) over the last axis, and returns x and ε."""
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
        if mean.attributes.get_int("keepdims", 1) and axes_of(mean.inputs[1], rank) == [rank - 1]:
            return before_widening(power.inputs[0]), epsilon.item()
    return None


def _source_of(node: ir.Node, tokens: _Normed) -> ir.Value:
    """Returns the inputs of the norms as heads, in front of a node."""
    return one_after_another([_as_heads(node, part) for part in tokens.parts], _token_axis(node), before=node)


def _as_heads(node: ir.Node, norm: _Norm) -> ir.Value:
    """Returns the input of a norm as heads, in front of a node."""
    if norm.as_heads is None:
        return norm.source
    new, before = NewNodes(), norm.as_heads
    heads = new.add("Reshape", [norm.source, before.inputs[1]], norm.source, before.outputs[0].shape, before.attributes)
    graph_of(node).insert_before(node, new.nodes)
    return heads


def _joined(graph: ir.Graph, weights: tuple[ir.Value, ...], sizes: tuple[int, ...]) -> ir.Value:
    """Joins the weights of q and k to an FP32 initializer [2, *sizes], or [2, 2, *sizes] for two runs."""
    rows = [numbers.reshape(sizes) for weight in weights if (numbers := constant_of(weight)) is not None]
    name = "+".join(str(weight.name) for weight in weights) + (f" of {sizes[0]} heads" if len(sizes) > 1 else "")
    shape = (2, *sizes) if len(rows) == 2 else (2, 2, *sizes)
    return add_initializer(graph, ir.Tensor(np.stack(rows).astype(np.float32).reshape(shape), name=name))
