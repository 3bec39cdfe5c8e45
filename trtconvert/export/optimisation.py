"""onnxscript's optimiser, in linear instead of quadratic time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import torch


def optimise(program: torch.onnx.ONNXProgram) -> None:
    """Folds constants and removes dead nodes, in place."""
    with _few_candidates():
        program.optimize()


@dataclass(frozen=True)
class _Neighbours:
    """Stands for a graph where a pattern with several outputs is tried at a node: all nodes that read one of its inputs, in the
    order of the graph."""

    graph: Any
    node: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys(user for x in self.node.inputs if x is not None for user, _ in x.uses()))


@contextmanager
def _few_candidates() -> Iterator[None]:
    """Inside the block, patterns are tried only at operators of their first output, and further outputs only among neighbours.

    onnxscript 0.7 compares the operators late, and looks for further outputs in the whole graph at every node. Its one pattern
    with several outputs has slices of one tensor. Other versions without these classes are not patched.
    """
    try:
        from onnxscript.rewriter._basics import MatchResult
        from onnxscript.rewriter._matcher import SimplePatternMatcher
    except ImportError:
        yield
        return
    match, differs = SimplePatternMatcher.match, MatchResult().fail("another operator than the pattern's first output")

    def quick(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        outputs = self.pattern.output_nodes
        if outputs[0].op_identifier() not in (None, node.op_identifier()):
            return differs
        if len(outputs) > 1:
            graph = _Neighbours(graph if isinstance(graph, ir.Graph) else graph.graph, node)
        return match(self, model, graph, node, **options)

    with patch.object(SimplePatternMatcher, "match", quick):
        yield
