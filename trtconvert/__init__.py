"""trtconvert: diffusion models to TensorRT engines with INT8 attention and layers that follow the denoising timestep."""

import os
import sys
from typing import TYPE_CHECKING, Any

if sys.platform != "linux":
    raise ImportError(
        "trtconvert runs on Linux only\n  expected: linux\n"
        f"  got: {sys.platform}\n  remedy: use it in WSL 2, in a container, or on another machine; see docs/installation.md"
    )

# Turns off ONNX Runtime's telemetry, which writes a device id and events into the user's cache at import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from trtconvert.optimization import optimize

__all__ = ["optimize"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported on demand: the command line does not need it.
    if name == "optimize":
        from trtconvert.optimization import optimize

        return optimize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
