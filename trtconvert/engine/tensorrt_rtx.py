"""TensorRT-RTX: engines for RTX GPUs, built on a machine without a GPU.

TensorRT-RTX hosts no plugins. Its attention is the `native` lowering in the model's precision, and INT8 layers are products
between Q/DQ.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

from trtconvert.bundle import ComponentRecord, EngineRecord
from trtconvert.engine import BackendStatus, BuildWatcher, BuiltEngine
from trtconvert.engine.builder import build_plan, tell_mixed
from trtconvert.recipe import EngineSection

_REMEDY = "pip install 'trtconvert[rtx]'"
_ATTENTION = "native: the model's precision"


def status() -> BackendStatus:
    """Checks that both wheels are installed in one version, and load."""

    def missing(detail: str) -> BackendStatus:
        return BackendStatus("tensorrt_rtx", _ATTENTION, False, detail, _REMEDY)

    modules = {"tensorrt_rtx_bindings": "tensorrt_rtx_cu13_bindings", "tensorrt_rtx_libs": "tensorrt_rtx_cu13_libs"}
    for module, package in modules.items():
        if importlib.util.find_spec(module) is None:
            return missing(f"{package} is not installed")
    try:
        version = str(importlib.import_module("tensorrt_rtx_bindings").__version__)
    except (ImportError, OSError, AttributeError) as error:
        return missing(f"tensorrt_rtx_bindings cannot be loaded: {error}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # packages with other names
        libraries = importlib.metadata.version(modules["tensorrt_rtx_libs"])
        if libraries != version:
            return missing(f"the Python bindings are of TensorRT-RTX {version}, the libraries {libraries}")
    return BackendStatus("tensorrt_rtx", _ATTENTION, True, version)


def build_engine(
    name: str, component: ComponentRecord, onnx: Path, options: EngineSection, target: str, watch: BuildWatcher
) -> BuiltEngine:
    """Builds an engine of a bundle's component for one target.

    Args:
        name: of the component.
        onnx: the model with native attention and Q/DQ. A plugin's node would make the parser end the process.
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
        component.all_inputs,
        profiles,
        configure=configure,
        watch=watch,
        title=f"TensorRT-RTX, {target}",
    )
    tell_mixed(component, "it hosts no plugins", watch)
    record = EngineRecord.of(name, "tensorrt_rtx", str(status().detail), target)
    layers = "native" if component.has_int8_layers else ""
    return BuiltEngine(plan, record.model_copy(update={"profiles": profiles, "layers": layers}))
