"""Where the shared library with the kernels, the C API and the TensorRT plugin is."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

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
