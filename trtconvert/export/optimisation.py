"""onnxscript's optimiser, in linear instead of quadratic time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


def optimise(program: torch.onnx.ONNXProgram) -> None:
    """Folds constants and removes dead nodes, in place."""
    with _first_outputs_first():
        program.optimize()


@contextmanager
def _first_outputs_first() -> Iterator[None]:
    """Inside the block, patterns with several outputs are tried only at operators of their first output.

    onnxscript 0.7 tries them at every node, and lists the whole graph each time. Other versions without these classes are not
    patched.
    """
    try:
        from onnxscript.rewriter._basics import MatchResult
        from onnxscript.rewriter._matcher import SimplePatternMatcher
    except ImportError:
        yield
        return
    match = SimplePatternMatcher.match

    def quick(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        outputs = self.pattern.output_nodes
        if len(outputs) > 1 and outputs[0].op_identifier() not in (None, node.op_identifier()):
            return MatchResult().fail("another operator than the pattern's first output")
        return match(self, model, graph, node, **options)

    with patch.object(SimplePatternMatcher, "match", quick):
        yield
