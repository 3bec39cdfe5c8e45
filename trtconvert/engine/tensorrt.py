"""TensorRT: engines whose attention is our INT8 plugin, built on the GPU that they are for."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtconvert.engine import BackendStatus, BuildProgress
from trtconvert.engine.builder import Dims, PlanInput, build_plan
from trtconvert.errors import BackendUnavailable, TrtconvertError
from trtconvert.library import library_path

_PACKAGES = ("tensorrt", "tensorrt_bindings")
_REMEDY = "on a machine with an NVIDIA GPU: pip install tensorrt-cu13"
_ATTENTION = "plugin: INT8"


def status() -> BackendStatus:
    """Whether the bindings, the libraries, a GPU and our plugin are here."""

    def missing(detail: str, remedy: str) -> BackendStatus:
        return BackendStatus("tensorrt", _ATTENTION, False, detail, remedy)

    if device_architecture() is None:
        return missing("no NVIDIA GPU", "build on the machine that the engine is for")
    module = next((name for name in _PACKAGES if importlib.util.find_spec(name)), None)
    if module is None:
        return missing("TensorRT's Python package is not installed", _REMEDY)
    try:
        trt = importlib.import_module(module)
    except (ImportError, OSError) as error:
        return missing(
            f"{module} cannot be loaded: {error}", f"{_REMEDY}; bindings and libraries need the same version"
        )
    if library_path() is None:
        return missing(
            "libtrtconvert.so, the plugin library, is not installed", "pip install trtconvert, with a C++ compiler"
        )
    return BackendStatus("tensorrt", _ATTENTION, True, trt.__version__)


def device_architecture() -> str | None:
    """Architecture of the first GPU, like "sm90", through the driver, without torch; None where there is no GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    for value, attribute in ((major, 75), (minor, 76)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
    return f"sm{major.value}{minor.value}"


def bindings() -> Any:
    """TensorRT's Python module.

    Raises:
        BackendUnavailable: see `status`.
    """
    state = status()
    if not state.available:
        raise BackendUnavailable("TensorRT cannot be used here", got=state.detail, remedy=state.remedy)
    return importlib.import_module(next(name for name in _PACKAGES if importlib.util.find_spec(name)))


def load() -> Any:
    """TensorRT's Python module, with our plugin registered, for building. Plans carry the plugin library themselves.

    Raises:
        BackendUnavailable: see `status`.
        TrtconvertError: the plugin library is there and cannot be registered.
    """
    trt = bindings()
    registry = trt.get_plugin_registry()
    if registry.get_creator("Int8Attention", "1", "") is None and registry.load_library(str(library_path())) is None:
        raise TrtconvertError(
            f"the plugin library {library_path()} cannot be registered",
            expected=f"a library that TensorRT {trt.__version__} loads",
            got="a refusal by its plugin registry",
            remedy="pip install --force-reinstall trtconvert",
        )
    return trt


def build(onnx: Path, inputs: Sequence[PlanInput], dims: Dims, progress: BuildProgress) -> bytes:
    """A serialized engine for this machine's GPU, with the plugin library inside it.

    Args:
        onnx: a model lowered to the plugin, or to native attention.
    Raises:
        BackendUnavailable, TrtconvertError: see `load` and `build_plan`.
    """
    trt = load()

    def configure(config: Any) -> None:
        config.plugins_to_serialize = [str(library_path())]

    return build_plan(
        trt, onnx, inputs, dims, configure=configure, progress=progress, title=f"TensorRT {trt.__version__}"
    )


def build_from_function(onnx: Path, inputs: Sequence[PlanInput], dims: Dims, progress: BuildProgress) -> bytes:
    """As `build`, from a model as it is exported: its nodes are lowered to the plugin first.

    Raises:
        UserError: the model has no `Int8Attention` node.
    """
    import onnx_ir as ir

    from trtconvert.export.lowering import lower_to_plugin

    lowered = ir.load(onnx)
    lower_to_plugin(lowered)
    with tempfile.TemporaryDirectory(prefix="trtconvert-") as folder:
        path = Path(folder) / "plugin.onnx"
        ir.save(lowered, path)
        return build(path, inputs, dims, progress)
