"""Computes layers of the same few rows, such as the shifts, scales and gates of a block, by one kernel with several results.

A kernel for a layer of few rows takes longer to start than to read the weights: SD 3's modulations are 286 such layers.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from trtconvert.c_structs import MOST_PARTS
from trtconvert.export.building import cleaned, graph_of
from trtconvert.export.lowering.initializers import concatenated
from trtconvert.export.lowering.int8_layers import INT8_LINEAR, has_few_rows
from trtconvert.export.nodes.common import DOMAIN
from trtconvert.linear.modes import LayerMode


def join_few_row_layers(model: ir.Model, profiles: Sequence[Mapping[str, int]]) -> int:
    """Joins nodes `Int8Linear` on the same 16-bit rows, with equal sizes, in place: up to `MOST_PARTS` become one node.

    Weights are joined and renamed: not for refittable engines.

    Args:
        profiles: the largest sizes of the dynamic dimensions in each optimisation profile.
    Returns:
        The number of joined nodes.
    """
    groups: dict[tuple[object, ...], list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if _is_of_few_rows(node, profiles):
            x, weight = node.inputs[:2]
            assert weight is not None
            kinds = tuple(node.attributes[name].as_int() for name in ("bias", "bfloat16"))
            groups[x, tuple(weight.shape.numpy()), kinds].append(node)  # type: ignore[union-attr]
    joined = [part for nodes in groups.values() for part in _chunks(nodes) if len(part) > 1]
    for part in joined:
        _join(part)
    return cleaned(model, sum(map(len, joined)))


def _chunks(nodes: Sequence[ir.Node]) -> list[Sequence[ir.Node]]:
    return [nodes[start : start + MOST_PARTS] for start in range(0, len(nodes), MOST_PARTS)]


def _is_of_few_rows(node: ir.Node, profiles: Sequence[Mapping[str, int]]) -> bool:
    if node.domain != DOMAIN or node.op_type != INT8_LINEAR or node.outputs[0].shape is None:
        return False
    attributes = node.attributes
    alone = not any(attributes[name].as_int() for name in ("activation", "residual"))
    if attributes["mode_set"].as_int() != 1 << LayerMode.WEIGHT_ONLY or not alone or len(node.outputs) > 1:
        return False
    return has_few_rows(node.outputs[0].shape, profiles)


def _join(nodes: Sequence[ir.Node]) -> None:
    """Replaces nodes, which are in graph order, by one node in front of the first."""
    first, graph = nodes[0], graph_of(nodes[0])
    tables = [_joined(graph, values) for values in zip(*(node.inputs[1:] for node in nodes), strict=True)]
    attributes = dict(first.attributes) | {"parts": ir.AttrInt64("parts", len(nodes))}
    node = ir.node(INT8_LINEAR, [first.inputs[0], *tables], attributes, domain=DOMAIN, num_outputs=len(nodes))
    graph.insert_before(first, node)
    for new, old in zip(node.outputs, (node.outputs[0] for node in nodes), strict=True):
        new.type, new.shape = copy.copy(old.type), old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _joined(graph: ir.Graph, values: Sequence[ir.Value | None]) -> ir.Value:
    """Returns constants one behind the other, in one initializer."""
    tensors = [value.const_value for value in values if value is not None and value.const_value is not None]
    assert len(tensors) == len(values)
    return concatenated(graph, f"{tensors[0].name}, and {len(tensors) - 1} more to {tensors[-1].name}", tensors, axis=0)
