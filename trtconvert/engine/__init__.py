"""Engine builders, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trtconvert.errors import BackendUnavailable

BackendName = Literal["tensorrt", "tensorrt_rtx", "onnxruntime"]

BuildProgress = Callable[[str, float], None]
"""Called with the builder's phase and the share that is done, 0 to 1."""


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can build here.

    Attributes:
        attention: what its engines run at converted sites.
        available: whether it can build on this machine.
        detail: the version when it can, otherwise what is missing.
        remedy: what would make it available.
    """

    name: BackendName
    attention: Literal["plugin: INT8", "native: the model's precision", "function: INT8, exact numerics, for checking"]
    available: bool
    detail: str
    remedy: str = ""


def backend_statuses() -> list[BackendStatus]:
    """All backends, the best first."""
    from trtconvert.engine import tensorrt, tensorrt_rtx

    return [tensorrt.status(), tensorrt_rtx.status(), _onnxruntime_status()]


def choose_backend(requested: str) -> tuple[BackendStatus, str]:
    """The backend to build with, and why.

    Args:
        requested: "auto" for the first that is available, or a name.
    Raises:
        BackendUnavailable: the requested one, or every one, cannot build here.
    """
    statuses = backend_statuses()
    if requested != "auto":
        status = next(s for s in statuses if s.name == requested)
        if not status.available:
            raise BackendUnavailable(
                f"the backend {requested} cannot build on this machine",
                expected=f"what engine.backend: {requested} asks for",
                got=status.detail,
                remedy=status.remedy,
            )
        return status, "the recipe asks for it"
    for index, status in enumerate(statuses):
        if status.available:
            passed = "; ".join(f"{s.name}: {s.detail}" for s in statuses[:index])
            return (
                status,
                f"the first that can build here ({passed})" if passed else "the first choice, and it can build here",
            )
    raise BackendUnavailable(
        "no backend can build on this machine",
        expected="TensorRT with a GPU, TensorRT-RTX or ONNX Runtime",
        got="; ".join(f"{s.name}: {s.detail}" for s in statuses),
        remedy=statuses[-1].remedy,
    )


def _onnxruntime_status() -> BackendStatus:
    import importlib.metadata

    attention = "function: INT8, exact numerics, for checking"
    try:
        return BackendStatus("onnxruntime", attention, True, importlib.metadata.version("onnxruntime"))
    except importlib.metadata.PackageNotFoundError:
        return BackendStatus("onnxruntime", attention, False, "not installed", "pip install onnxruntime")
