"""TensorRT-RTX: engines for RTX GPUs, built ahead of time on a machine without any.

It hosts no plugins, so its attention is the `native` lowering in the model's own precision, which it fuses.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from trtconvert.bundle import ComponentRecord, EngineRecord
from trtconvert.engine import BackendStatus, BuildWatcher, BuiltEngine
from trtconvert.engine.builder import build_plan
from trtconvert.recipe import EngineSection

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


def build_engine(
    name: str, component: ComponentRecord, onnx: Path, options: EngineSection, target: str, watch: BuildWatcher
) -> BuiltEngine:
    """An engine of a bundle's component for one target.

    Args:
        name: of the component.
        onnx: the model lowered to native attention. The parser ends the process when it meets a plugin's node.
        target: "sm75", "sm80", "sm86", "sm89" or "sm120".
    Raises:
        TrtconvertError, KeyboardInterrupt: see `build_plan`.
    """
    trt: Any = importlib.import_module("tensorrt_rtx_bindings")
    profiles = component.profiles or [component.dims]

    def configure(config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), 0)
        if options.workspace_mb is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mb << 20)

    plan = build_plan(
        trt,
        onnx.read_bytes(),
        onnx,
        component.inputs,
        profiles,
        configure=configure,
        watch=watch,
        title=f"TensorRT-RTX, {target}",
    )
    record = EngineRecord.of(name, "tensorrt_rtx", str(status().detail), target)
    return BuiltEngine(plan, record.model_copy(update={"profiles": profiles}))
