"""Engine builders, and the choice between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Protocol

from trtconvert.bundle import EngineRecord
from trtconvert.errors import BackendUnavailable

BackendName = Literal["tensorrt", "tensorrt_rtx", "onnxruntime"]


class BuildWatcher(Protocol):
    """Who is told how a build goes; `trtconvert.progress.Bar` is one."""

    def share(self, detail: str, done: float) -> None:
        """What the builder is at, and the share that is done, 0 to 1."""
        ...

    def notice(self, text: str) -> None:
        """Something that the user should know and that does not end the build."""
        ...


@dataclass(frozen=True)
class BuiltEngine:
    """A serialized engine, and what the manifest says of it."""

    plan: bytes
    record: EngineRecord


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


def version_numbers(version: str) -> tuple[int, ...]:
    """Major, minor and patch; "10.6.0.post2" of the bindings is the library's 10.6.0."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
