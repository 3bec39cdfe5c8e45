"""Where the shared library with the kernels, the C API and the TensorRT plugin is."""

from __future__ import annotations

from pathlib import Path


def library_path() -> Path | None:
    """Path of libtrtconvert.so in the installed package; None when the package was not built."""
    path = Path(__file__).parent / "lib" / "libtrtconvert.so"
    return path if path.is_file() else None
