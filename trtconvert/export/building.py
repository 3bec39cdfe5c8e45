"""Nodes that rewrites add, and the cleanup behind them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass
from onnx_ir.tape import Tape

Shape = Sequence[int | ir.SymbolicDim | None] | ir.Shape


class NewNodes(Tape):
    """A tape whose values have types and shapes."""

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        like: ir.Value,
        shape: Shape | None = None,
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
    ) -> ir.Value:
        """Adds a node with one result, of the type of another value and of a shape, by default that of the value."""
        result = self.op(op_type, inputs, attributes, domain=domain)
        result.type = copy.copy(like.type)  # types change independently
        shape = like.shape if shape is None else shape
        result.shape = None if shape is None else ir.Shape(shape)
        return result

    def constant(self, numbers: Any) -> ir.Value:
        """Adds a constant. Python's integers become INT64."""
        array = np.asarray(numbers)
        tensor = ir.tensor(array)
        value = self.op("Constant", [], {"value": tensor})
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(array.shape)
        return value

    def reshaped(self, x: ir.Value, sizes: Sequence[int], shape: Shape) -> ir.Value:
        """Adds a Reshape to sizes, where 0 is the size of x. The result has a shape."""
        return self.add("Reshape", [x, self.constant(sizes)], x, shape)


def graph_of(node: ir.Node) -> ir.Graph:
    """Returns the graph of a node outside of functions."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def replace_nodes(old: Sequence[ir.Node], new: Sequence[ir.Node]) -> None:
    """Replaces nodes. The outputs of the last new node take over the names, types, shapes and readers of the last old one's."""
    last = old[-1]
    ir.convenience.replace_nodes_and_values(graph_of(last), last, old, new, last.outputs, new[-1].outputs)


def cleaned(model: ir.Model, changes: int) -> int:
    """Removes unused nodes if a rewrite made changes, and returns the number of changes."""
    if changes:
        RemoveUnusedNodesPass()(model)
    return changes


def remove_unused(model: ir.Model) -> None:
    """Removes unused nodes, functions and opset imports, in place."""
    for clean in (RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass()):
        clean(model)
