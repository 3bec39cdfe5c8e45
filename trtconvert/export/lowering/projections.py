"""Projections: products with constant weights, reshaped to heads. Joins projections of one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtconvert.export.building import NewNodes, graph_of
from trtconvert.export.lowering.initializers import add_initializer, concatenated
from trtconvert.export.lowering.int8_weights import Int8Weight, all_of_one_activation
from trtconvert.export.matching import is_same_shape, only_reader, producer_of


@dataclass(frozen=True)
class Projection:
    """x @ weight (+ bias), reshaped to [B, N, H, D].

    Attributes:
        x: [B, N, C]; weight: [C, H·D]; bias: [H·D].
        steps: values between x and the attention, the last one first.
    """

    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    heads: int
    head_dim: int
    steps: tuple[ir.Value, ...]

    def serves_only(self, node: ir.Node) -> bool:
        """Return whether only the node reads the projection."""
        user: ir.Node | None = node
        for value in self.steps:
            if value.is_graph_output() or any(other is not user for other, _ in value.uses()):
                return False
            user = value.producer()
        return True


def projection(value: ir.Value | None) -> Projection | None:
    """Matches the projection of a value [B, N, H, D]: a product of [B, N, C] with constant weights [C, H·D]."""
    reshape = producer_of(value, "Reshape")
    if value is None or reshape is None or value.shape is None or len(value.shape) != 4:
        return None
    heads, head_dim = value.shape[2:]
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        return None
    width = heads * head_dim
    product, bias = reshape.inputs[0], None
    steps = [value, product]
    if (add := producer_of(product, "Add")) is not None:
        bias = next((x for x in add.inputs if is_weight(x, 1, width)), None)
        product = next((x for x in add.inputs if x is not bias), None)
        if bias is None:
            return None
        steps.append(product)
    matmul = producer_of(product, "MatMul")
    if matmul is None:
        return None
    x, weight = matmul.inputs
    if x is None or weight is None or not is_weight(weight, 2, width) or not _same_tokens(x, value):
        return None
    return Projection(x, weight, bias, heads, head_dim, tuple(step for step in steps if step is not None))


def join(parts: Sequence[Projection], sizes: Sequence[int], before: ir.Node) -> ir.Value:
    """Computes projections of one tensor [B, N, C] as one product. Weights are renamed: not for refittable engines.

    Args:
        parts: of one type, all with a bias or none.
        sizes: of the axes that the channels of all parts are split into.
        before: the product is inserted in front of this node.
    Returns:
        [B, N, *sizes].
    """
    graph, x, new = graph_of(before), parts[0].x, NewNodes()
    assert x.shape is not None
    tokens = x.shape[:2]
    flat = [*tokens, math.prod(sizes)]
    product = new.add("MatMul", [x, _beside(graph, [part.weight for part in parts])], x, flat)
    if biases := [part.bias for part in parts if part.bias is not None]:
        product = new.add("Add", [product, _beside(graph, biases)], x, flat)
    joined = new.reshaped(product, [0, 0, *sizes], [*tokens, *sizes])
    graph.insert_before(before, new.nodes)
    return joined


def is_weight(value: ir.Value | None, rank: int, width: int) -> bool:
    """Return whether a value is a constant of a rank and a last axis of a width."""
    if value is None or value.const_value is None:
        return False
    shape = value.const_value.shape
    return len(shape) == rank and shape[-1] == width


def bias_behind(product: ir.Value, width: int) -> tuple[ir.Value, ir.Node] | tuple[None, None]:
    """Returns the constant [N] that the only reader of a product adds, and that node."""
    add = only_reader(product, "Add")
    bias = next((x for x in add.inputs if is_weight(x, 1, width)), None) if add is not None else None
    return (bias, add) if add is not None and bias is not None and bias.dtype == product.dtype else (None, None)


def _same_tokens(x: ir.Value, heads: ir.Value) -> bool:
    """Return whether the Reshape keeps tokens in their batch elements, unlike windowed attention."""
    if x.shape is None or heads.shape is None or len(x.shape) != 3:
        return False
    # Equal numbers of elements: if one axis is equal, so is the other.
    return is_same_shape(x.shape[:1], heads.shape[:1]) or is_same_shape(x.shape[1:2], heads.shape[1:2])


def _beside(graph: ir.Graph, weights: Sequence[ir.Value]) -> ir.Value:
    """Concatenates weights along the last axis as an initializer that is computed when it is written."""
    tensors = [weight.const_value for weight in weights if weight.const_value is not None]
    # Names are short: TensorRT allows 4096 bytes. A module called twice has its weights joined twice.
    name = base = f"{weights[0].name} and {len(weights) - 1} more"
    count = 1
    while name in graph.initializers:
        count += 1
        name = f"{base}, {count}"
    if (in_int8 := all_of_one_activation(tensors)) is not None:
        return add_initializer(graph, Int8Weight.beside(name, in_int8))
    return concatenated(graph, name, tensors, axis=-1)
