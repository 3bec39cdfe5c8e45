"""Finds and loads the shared library with the kernels, their C API and the TensorRT plugins."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from trtconvert.errors import BackendUnavailable

if TYPE_CHECKING:
    import torch

_PLACE = Path("lib") / "libtrtconvert.so"
_MESSAGE_BYTES = 512

REINSTALL = (
    "run pip install --force-reinstall --no-deps on trtconvert's wheel, or on a checkout, which compiles the library"
)
"""Remedy for a missing, old or damaged library."""


def library_path() -> Path | None:
    """Returns the path of libtrtconvert.so; None if the package was not built.

    The library lies in the package, or in site-packages for an editable install.
    """
    beside = Path(__file__).parent / _PLACE
    if beside.is_file():
        return beside
    try:
        installed = Path(str(importlib.metadata.distribution("trtconvert").locate_file(Path("trtconvert") / _PLACE)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return installed if installed.is_file() else None


@functools.cache
def load_library() -> ctypes.CDLL:
    """Loads libtrtconvert.so once.

    Raises:
        BackendUnavailable: the library is missing or does not load.
    """
    path = library_path()
    try:
        return ctypes.CDLL(str(path or "libtrtconvert.so"))
    except OSError as error:
        raise BackendUnavailable(
            "the kernel library does not load",
            expected=f"a shared library at {path}" if path else "libtrtconvert.so in the installed package",
            got=str(error),
            remedy=REINSTALL,
        ) from error


def outdated(missing: AttributeError) -> BackendUnavailable:
    """Returns the error for a library that lacks a function."""
    return BackendUnavailable(
        "the kernel library is older than the program that loads it",
        expected="the libtrtconvert.so of this version",
        got=str(missing),
        remedy=REINSTALL,
    )


def library_version() -> str:
    """Returns the version of the library. Raises BackendUnavailable without a library."""
    return _text("trtconvert_version")


def compiled_architectures() -> tuple[str, ...]:
    """Returns the architectures of the library's kernels, such as ("80", "86", "90a", "120"). Raises BackendUnavailable."""
    return tuple(_text("trtconvert_compiled_architectures").split(","))


def has_linear_kernel() -> bool:
    """Returns whether the library has a kernel of linear layers for CUDA's current GPU. Raises BackendUnavailable."""
    return bool(_function("trtconvert_linear_is_supported")())


def has_group_norm_kernel() -> bool:
    """Returns whether the library has a kernel of group norms for CUDA's current GPU. Raises BackendUnavailable."""
    return bool(_function("trtconvert_group_norm_is_supported")())


def run(name: str, params: ctypes.Structure) -> None:
    """Calls a function of the C API that takes a struct.

    Raises:
        BackendUnavailable: the library is missing, or lacks the function.
        RuntimeError: the call failed; has its message.
    """
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    if _function(name)(ctypes.byref(params), message, ctypes.c_size_t(_MESSAGE_BYTES)):
        raise RuntimeError(message.value.decode(errors="replace"))


def serves(architecture: str, compiled: Iterable[str]) -> bool:
    """Returns whether kernels compiled for some architectures run on a GPU such as "sm89".

    Later GPUs run them too by their PTX, except kernels of architecture-specific targets ("90a").
    """
    number = int(architecture.removeprefix("sm"))
    return any(number == int(name[:-1]) if name.endswith("a") else number >= int(name) for name in compiled)


@functools.cache
def serves_gpu(device: torch.device | int) -> bool:
    """Returns whether the library is there, and has kernels for a GPU."""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    try:
        return serves(f"sm{major}{minor}", compiled_architectures())
    except BackendUnavailable:
        return False


def _text(function: str) -> str:
    call = _function(function)
    call.restype = ctypes.c_char_p
    return call().decode()


def _function(name: str) -> ctypes._NamedFuncPointer:
    try:
        return getattr(load_library(), name)
    except AttributeError as error:
        raise outdated(error) from error
