"""TensorRT-RTX: engines for RTX GPUs, built ahead of time on a machine without any.

It hosts no plugins, so its attention is the `native` lowering in the model's own precision, which it fuses.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtconvert.engine import BackendStatus, BuildProgress
from trtconvert.engine.builder import Dims, PlanInput, build_plan

_REMEDY = "pip install 'trtconvert[rtx]'"


def status() -> BackendStatus:
    """Whether both wheels are installed."""
    attention = "native: the model's precision"
    for module, package in (
        ("tensorrt_rtx_bindings", "tensorrt_rtx_cu13_bindings"),
        ("tensorrt_rtx_libs", "tensorrt_rtx_cu13_libs"),
    ):
        if importlib.util.find_spec(module) is None:
            return BackendStatus("tensorrt_rtx", attention, False, f"{package} is not installed", _REMEDY)
    return BackendStatus("tensorrt_rtx", attention, True, importlib.metadata.version("tensorrt_rtx_cu13_libs"))


def build(onnx: Path, inputs: Sequence[PlanInput], dims: Dims, target: str, progress: BuildProgress) -> bytes:
    """A serialized engine for one target.

    Args:
        onnx: a model lowered to native attention. The parser ends the process when it meets a plugin's node.
        target: "sm75", "sm80", "sm86", "sm89" or "sm120".
    Raises:
        TrtconvertError: see `build_plan`.
    """
    trt: Any = importlib.import_module("tensorrt_rtx_bindings")

    def configure(config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), 0)

    return build_plan(trt, onnx, inputs, dims, configure=configure, progress=progress, title=f"TensorRT-RTX, {target}")
