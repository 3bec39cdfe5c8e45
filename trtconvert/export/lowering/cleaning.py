"""What is left of a graph after a rewrite."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass


def remove_unused(model: ir.Model) -> None:
    """Drop the nodes, bodies and domains that nothing needs any more, in place."""
    for clean in (RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass()):
        clean(model)
