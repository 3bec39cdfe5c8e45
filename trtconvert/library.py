"""The shared library with the kernels, their C API and the TensorRT plugin: where it is, and how it is loaded."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from trtconvert.errors import BackendUnavailable

_PLACE = Path("lib") / "libtrtconvert.so"

REINSTALL = "pip install --force-reinstall --no-deps with trtconvert's wheel, or with its checkout, which compiles it"
"""The remedy where the library is missing, old or damaged."""


def library_path() -> Path | None:
    """Path of libtrtconvert.so; None when the package was not built.

    It lies in the package. An editable install leaves it in site-packages, away from the sources.
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
    """libtrtconvert.so, loaded once.

    Raises:
        BackendUnavailable: there is none, or it does not load.
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
    """The error of a library that lacks a function."""
    return BackendUnavailable(
        "the kernel library is older than the program that loads it",
        expected="the libtrtconvert.so that was built with this version",
        got=str(missing),
        remedy=REINSTALL,
    )


def library_version() -> str:
    """Version of the library. Raises BackendUnavailable where there is none."""
    return _text("trtconvert_version")


def compiled_architectures() -> tuple[str, ...]:
    """Architectures that the library holds kernels for, such as ("80", "86", "90a", "120"). Raises BackendUnavailable."""
    return tuple(_text("trtconvert_compiled_architectures").split(","))


def has_linear_kernel() -> bool:
    """Whether the library has its kernel for linear layers, for the GPU that CUDA takes by itself. Raises BackendUnavailable."""
    return bool(_function("trtconvert_linear_is_supported")())


def has_group_norm_kernel() -> bool:
    """Whether the library has its kernel for group norms, for the GPU that CUDA takes by itself. Raises BackendUnavailable."""
    return bool(_function("trtconvert_group_norm_is_supported")())


def serves(architecture: str, compiled: Iterable[str]) -> bool:
    """Whether kernels compiled for some architectures run on a GPU, like "sm89".

    Each brings PTX too, which later GPUs compile for themselves, but for those of one GPU only ("90a").
    """
    number = int(architecture.removeprefix("sm"))
    return any(number == int(name[:-1]) if name.endswith("a") else number >= int(name) for name in compiled)


def _text(function: str) -> str:
    call = _function(function)
    call.restype = ctypes.c_char_p
    return call().decode()


def _function(name: str) -> ctypes._NamedFuncPointer:
    try:
        return getattr(load_library(), name)
    except AttributeError as error:
        raise outdated(error) from error
