"""Cleanup after rewrites."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass


def remove_unused(model: ir.Model) -> None:
    """Removes unused nodes, functions and opset imports, in place."""
    for clean in (RemoveUnusedNodesPass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass()):
        clean(model)
