"""Engine builders, and the choice between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from trtconvert.bundle import EngineRecord
from trtconvert.errors import BackendUnavailable

BackendName = Literal["tensorrt", "tensorrt_rtx", "onnxruntime"]
SerializedEngine: TypeAlias = bytes | memoryview
"""A view of the builder's own memory needs no second copy: plans of large models take tens of gigabytes."""


class BuildWatcher(Protocol):
    """Receives the progress of a build. `trtconvert.progress.Bar` implements it."""

    def share(self, detail: str, done: float) -> None:
        """Reports the current work, and the share that is done, 0 to 1."""
        ...

    def notice(self, text: str) -> None:
        """Reports something to the user that does not end the build."""
        ...


@dataclass(frozen=True)
class BuiltEngine:
    """A serialized engine, and its record in the manifest."""

    plan: SerializedEngine
    record: EngineRecord


@dataclass(frozen=True)
class BackendStatus:
    """The availability of a backend on this machine.

    Attributes:
        attention: of its engines at converted sites.
        available: whether it can build.
        detail: its version, or the reason if it is unavailable.
        remedy: makes it available.
    """

    name: BackendName
    attention: Literal["plugin: INT8", "native: the model's precision", "function: INT8, exact numerics, for checking"]
    available: bool
    detail: str
    remedy: str = ""


def backend_statuses() -> list[BackendStatus]:
    """Returns all backends, the best first."""
    from trtconvert.engine import tensorrt, tensorrt_rtx

    return [tensorrt.status(), tensorrt_rtx.status(), _onnxruntime_status()]


def choose_backend(requested: str) -> tuple[BackendStatus, str]:
    """Returns the backend to build with, and the reason.

    Args:
        requested: a name, or "auto" for the first available backend.
    Raises:
        BackendUnavailable: the requested backend, or every backend, cannot build here.
    """
    statuses = backend_statuses()
    if requested != "auto":
        status = next(s for s in statuses if s.name == requested)
        if not status.available:
            raise BackendUnavailable(
                f"the backend {requested} cannot build on this machine",
                expected=f"the packages and the hardware of engine.backend: {requested}",
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


def version_numbers(version: str) -> tuple[int, ...]:
    """Returns major, minor and patch: bindings of version "10.6.0.post2" belong to library 10.6.0."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
