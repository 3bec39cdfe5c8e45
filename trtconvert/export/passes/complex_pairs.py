"""Rewrites complex numbers of an exported program as pairs of real ones: the ONNX exporter supports few complex operations.

Qwen-Image and Lumina rotate queries and keys by complex products. As pairs these are x₀·cos − x₁·sin and x₁·cos + x₀·sin, which
`lowering.rotary` matches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_any, tree_map

_aten = torch.ops.aten
_REAL_TYPES = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_OF_EACH_PART = {
    operator.getitem,
    *(_aten.slice.Tensor, _aten.select.int, _aten.index.Tensor, _aten.index_select.default, _aten.split.Tensor),
    *(_aten.split_with_sizes.default, _aten.chunk.default, _aten.unbind.int, _aten.cat.default, _aten.stack.default),
    *(_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints, _aten.unflatten.int, _aten.expand.default),
    *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.permute.default, _aten.transpose.int, _aten.repeat.default),
    *(_aten.clone.default, _aten.contiguous.default, _aten.alias.default, _aten.detach_.default, _aten.detach.default),
    *(_aten.to.dtype, _aten.to.device, _aten.to.dtype_layout, _aten._to_copy.default, _aten.lift_fresh_copy.default),
}
"""Operations that act on real and imaginary parts separately."""


class _Pair(NamedTuple):
    real: Node
    imaginary: Node


def complex_as_pairs(program: ExportedProgram) -> int:
    """Replaces complex operations of a program by operations on pairs, in place. Constants stay complex and are split on use.

    Returns:
        The number of replaced nodes.
    Raises:
        NotImplementedError: an unsupported complex operation; the message names it.
    """
    graph = program.graph_module.graph
    pairs: dict[Node, _Pair] = {}
    replaced: list[Node] = []
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        if node.op == "placeholder":
            if _is_complex(node):
                with graph.inserting_before(first):
                    pairs[node] = _parts(graph, _call(graph, _aten.view_as_real.default, node))
        elif node.op == "call_function" and (_is_complex(node) or any(x in pairs for x in node.all_input_nodes)):
            replaced.append(node)
            if node.target is _aten._assert_tensor_metadata.default:  # of the complex type
                continue
            with graph.inserting_before(node):
                result = _in_pairs(graph, node, pairs)
            if isinstance(result, _Pair):
                pairs[node] = result
            else:
                node.replace_all_uses_with(result)
    for node in reversed(replaced):
        graph.erase_node(node)
    graph.lint()
    program.graph_module.recompile()
    return len(replaced)


def _is_complex(node: Node) -> bool:
    return tree_any(lambda x: isinstance(x, torch.Tensor) and x.is_complex(), node.meta.get("val"))


def _is_floating_point(node: Node) -> bool:
    return tree_any(lambda x: isinstance(x, torch.Tensor) and x.is_floating_point(), node.meta.get("val"))


def _in_pairs(graph: Graph, node: Node, pairs: dict[Node, _Pair]) -> _Pair | Node:
    call = partial(_call, graph)
    target: Any = node.target
    mixed = any(x not in pairs and _is_floating_point(x) for x in node.all_input_nodes)
    sum_of_two = target in (_aten.add.Tensor, _aten.sub.Tensor) and all(x in pairs for x in node.args)
    if (target in _OF_EACH_PART and not mixed) or sum_of_two:
        given = tree_map(_real_type, (node.args, node.kwargs))

        def of_part(index: int) -> Node:
            own = map_arg(given, lambda x: pairs[x][index] if x in pairs else x)  # other nodes are sizes
            return call(target, *own[0], **own[1])

        return _Pair(of_part(0), of_part(1))
    args: tuple[Any, ...] = node.args
    if target is _aten.view_as_complex.default:
        return _parts(graph, args[0])
    if target is _aten.view_as_real.default:
        return call(_aten.stack.default, list(pairs[args[0]]), -1)
    if target is _aten.polar.default:
        length, angle = args
        return _Pair(*(call(_aten.mul.Tensor, length, call(f, angle)) for f in (_aten.cos.default, _aten.sin.default)))
    if target is _aten.mul.Tensor and all(x in pairs for x in args):
        (a, b), (c, d) = (pairs[x] for x in args)
        ac, bd, ad, bc = (call(_aten.mul.Tensor, x, y) for x, y in ((a, c), (b, d), (a, d), (b, c)))
        return _Pair(call(_aten.sub.Tensor, ac, bd), call(_aten.add.Tensor, bc, ad))
    raise NotImplementedError(f"{target} of complex numbers")


def _parts(graph: Graph, pair: Any) -> _Pair:
    """Returns the real and imaginary parts of [..., 2]."""
    return _Pair(*(_call(graph, _aten.select.int, pair, -1, index) for index in range(2)))


def _call(graph: Graph, target: Callable[..., Any], *args: Any, **named: Any) -> Node:
    """Adds a node with the metadata of its result."""
    node = graph.call_function(target, args, named)
    with torch.no_grad():
        values = map_arg((args, named), lambda x: x.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
    return node


def _real_type(value: Any) -> Any:
    return _REAL_TYPES.get(value, value) if isinstance(value, torch.dtype) else value
