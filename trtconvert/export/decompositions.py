"""Decomposes exported programs for torch's ONNX exporter, without a second trace of the program where it needs none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._export.utils import _is_cia_op, _is_preservable_cia_op  # pyright: ignore[reportPrivateUsage]
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, Node

_ATEN = torch.ops.aten


@contextmanager
def decomposed_in_place() -> Iterator[None]:
    """Inside the block, `ExportedProgram.run_decompositions` rewrites single operators where the exporter needs no more.

    torch's own method traces the whole program again, to make it functional. A second trace of a U-Net takes longer than the
    first, and most denoisers write into no tensor.
    """
    traced_again = ExportedProgram.run_decompositions

    def decomposed(self: ExportedProgram, table: Mapping[Any, Any] | None = None, **options: Any) -> ExportedProgram:
        if table is not None and _rewritten(self.graph, table):
            return self
        return traced_again(self, table, **options)  # pyright: ignore[reportArgumentType]

    ExportedProgram.run_decompositions = decomposed  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        ExportedProgram.run_decompositions = traced_again


def _rewritten(graph: Graph, table: Collection[Any]) -> bool:
    """Rewrites operators that the exporter takes in another form only. Returns False, and changes nothing, if the graph has an
    operator that only a second trace decomposes.

    Args:
        table: operators that the exporter lacks.
    """
    changes = list[Callable[[], None]]()
    for node in graph.nodes:
        rewriting = _CHANGES.get(node.target)
        if node.op in ("placeholder", "output") or (rewriting is None and _stays(node, table)):
            continue
        change = None if rewriting is None else rewriting(node)
        if change is None:
            return False
        changes.append(change)
    for change in changes:
        change()
    graph.eliminate_dead_code()
    return True


def _stays(node: Node, table: Collection[Any]) -> bool:
    """True if a second trace would keep the operator: it writes into no tensor, and has no decomposition."""
    op = node.target
    if not isinstance(op, OpOverload):  # arithmetic of sizes; not a higher-order operator or a submodule
        return node.op == "call_function" and getattr(op, "__module__", "") in ("_operator", "math")
    decomposes = op in table or (_is_cia_op(op) and not _is_preservable_cia_op(op))
    return not op._schema.is_mutable and not decomposes


_Change = Callable[[Node], Callable[[], None] | None]
"""Returns a function that rewrites a node; None if this node cannot be rewritten. Changes of earlier nodes may replace inputs."""


def _without_effect(node: Node) -> Callable[[], None]:
    if any(user.op == "output" for user in node.users):  # the program's signature has the node's name
        return lambda: _become(node, _ATEN.clone.default, _input(node))

    def change() -> None:
        node.replace_all_uses_with(_input(node))
        node.graph.erase_node(node)

    return change


def _dropout(node: Node) -> Callable[[], None] | None:
    training = node.args[2]
    return None if training else _without_effect(node)


def _conversion(node: Node) -> Callable[[], None]:
    dtype = node.meta["val"].dtype
    if dtype == _input(node).meta["val"].dtype:
        return _without_effect(node)
    return lambda: _become(node, _ATEN._to_copy.default, _input(node), dtype=dtype)


def _unchanged(_node: Node) -> Callable[[], None]:
    return lambda: None


def _chunk(node: Node) -> Callable[[], None] | None:
    parts = node.meta["val"]
    axis = node.args[2] if len(node.args) > 2 else 0
    size = parts[0].shape[axis] if parts else None
    return (lambda: _become(node, _ATEN.split.Tensor, _input(node), size, axis)) if isinstance(size, int) else None


def _view(node: Node) -> Callable[[], None]:
    """A view of a tensor that `contiguous` made, which is removed, is a reshape."""
    return lambda: _become(node, _ATEN.reshape.default, *node.args)


def _flatten(node: Node) -> Callable[[], None]:
    def change() -> None:
        x = _input(node)
        rank = x.meta["val"].dim()
        first, last = (axis % max(rank, 1) for axis in (*node.args[1:], *(0, -1)[len(node.args) - 1 :]))
        merged = node.meta["val"].shape[first]
        sizes = [*_sizes(node, x, range(first)), merged if isinstance(merged, int) else -1]
        _become(node, _ATEN.reshape.default, x, [*sizes, *_sizes(node, x, range(last + 1, rank))])

    return change


def _unflatten(node: Node) -> Callable[[], None]:
    def change() -> None:
        x = _input(node)
        axis, sizes = cast("tuple[int, Sequence[Any]]", node.args[1:])
        rank = x.meta["val"].dim()
        before, after = _sizes(node, x, range(axis % rank)), _sizes(node, x, range(axis % rank + 1, rank))
        _become(node, _ATEN.reshape.default, x, [*before, *sizes, *after])

    return change


def _sizes(node: Node, x: Node, axes: range) -> list[int | Node]:
    """Returns sizes of an input of a node; those of dynamic axes are new nodes before it."""
    found = list[int | Node]()
    for axis in axes:
        size = x.meta["val"].shape[axis]
        if not isinstance(size, int):
            with node.graph.inserting_before(node):
                dynamic = node.graph.call_function(_ATEN.sym_size.int, (x, axis))
            dynamic.meta = node.meta | {"val": size}
            size = dynamic
        found.append(size)
    return found


def _input(node: Node) -> Node:
    x = node.args[0]
    assert isinstance(x, Node)
    return x


def _become(node: Node, target: OpOverload, *args: Any, **named: Any) -> None:
    """Changes the operator of a node. Users and output stay."""
    node.target, node.args, node.kwargs = target, args, named


_CHANGES: dict[Any, _Change] = {
    _ATEN.alias.default: _without_effect,
    _ATEN.chunk.default: _chunk,
    _ATEN.contiguous.default: _without_effect,
    _ATEN.detach.default: _without_effect,
    _ATEN.detach_.default: _without_effect,
    _ATEN.dropout.default: _dropout,
    _ATEN.flatten.using_ints: _flatten,
    _ATEN.reshape.default: _unchanged,
    _ATEN.to.device: _conversion,
    _ATEN.to.dtype: _conversion,
    _ATEN.to.dtype_layout: _conversion,
    _ATEN.type_as.default: _conversion,
    _ATEN.unflatten.int: _unflatten,
    _ATEN.view.default: _view,
}
"""Operators that a second trace would rewrite, with the same results. Inputs of reshapes may have any strides."""
