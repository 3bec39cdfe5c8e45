"""Folds transposes into the layout of attention nodes.

Models project to [B, N, H·D], view [B, N, H, D], and transpose to heads first for `scaled_dot_product_attention`. Beside a plugin
TensorRT would copy all four tensors. Layout BNHD needs no transposes.
"""

from __future__ import annotations

import copy

import onnx_ir as ir

from trtconvert.export.lowering.tokens import one_after_another, runs_of
from trtconvert.export.matching import perm_of
from trtconvert.export.nodes.attention import attention_nodes

PERMUTATION = [0, 2, 1, 3]


def fold_transposes(model: ir.Model) -> int:
    """Changes BHND nodes to BNHD if q, k and v are transposes of BNHD, or concatenations of such.

    Uses that transpose the output back read it directly; other uses get a transpose.

    Returns:
        The number of folded nodes.
    """
    count = 0
    for node in attention_nodes(model).values():
        sources = [_untransposed(value) for value in node.inputs[:3]]
        if node.attributes["layout"].as_string() != "BHND" or not all(sources):
            continue
        for index, runs in enumerate(sources):
            _replace_input(node, index, runs)
        node.attributes["layout"] = ir.AttrString("layout", "BNHD")
        output_tokens_first(node)
        count += 1
    return count


def _is_transpose(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Transpose" and perm_of(node) == PERMUTATION


def _untransposed(value: ir.Value | None) -> list[ir.Value]:
    """Returns tensors [B, N, H, D] if a value concatenates their transposes, else []."""
    joined = runs_of(value, axis=2)
    producers = [run.producer() if run is not None else None for run in joined]
    sources = [node.inputs[0] for node in producers if node is not None and _is_transpose(node)]
    found = [source for source in sources if source is not None]
    return found if len(found) == len(joined) else []


def _replace_input(node: ir.Node, index: int, runs: list[ir.Value]) -> None:
    """Replaces a heads-first input by the concatenation of [B, N, H, D] tensors."""
    old = node.inputs[index]
    joined = runs_of(old, axis=2)
    node.replace_input_with(index, one_after_another(runs, axis=1, before=node))
    for value in dict.fromkeys((old, *joined)):  # without a Concat both are equal
        producer = value.producer() if value is not None else None
        if value is not None and producer is not None and not value.uses() and not value.is_graph_output():
            producer.graph.remove(producer, safe=True)  # type: ignore[union-attr]


def output_tokens_first(node: ir.Node) -> None:
    """Changes the output of a node to BNHD, with a transpose for the readers of BHND."""
    out = node.outputs[0]
    heads_first = out.shape
    if heads_first is not None:
        out.shape = ir.Shape([heads_first[i] for i in PERMUTATION])
    back = [user for user, _ in out.uses() if _is_transpose(user)]
    others = [(user, index) for user, index in out.uses() if not _is_transpose(user)]
    graph = node.graph
    assert graph is not None
    if others or out.is_graph_output():
        transposed = ir.node("Transpose", [out], {"perm": PERMUTATION})
        result = transposed.outputs[0]
        # A copy: the types change independently.
        result.name, result.shape, result.type = f"{out.name}_heads_first", heads_first, copy.copy(out.type)
        graph.insert_after(node, transposed)
        for user, index in others:
            user.replace_input_with(index, result)
        for index, value in enumerate(graph.outputs):
            if value is out:
                graph.outputs[index] = result
                out.name, result.name = f"{out.name}_tokens_first", out.name
    for user in back:
        ir.convenience.replace_all_uses_with(user.outputs[0], out, replace_graph_outputs=True)
        graph.remove(user, safe=True)
