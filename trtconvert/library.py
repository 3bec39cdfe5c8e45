"""The shared library with the kernels, their C API and the TensorRT plugin: where it is, and how it is loaded."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from pathlib import Path

from trtconvert.errors import BackendUnavailable

_PLACE = Path("lib") / "libtrtconvert.so"


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
            remedy="install with 'pip install .', which builds it",
        ) from error
