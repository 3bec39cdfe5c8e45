"""The C APIs of the kernel library, called by tests with structs of their own."""

from __future__ import annotations

import ctypes
import functools

from trtconvert.library import library_path


@functools.cache
def c_library() -> ctypes.CDLL:
    """The library, with functions of its own: on those of `load_library` the package declares its structs as arguments."""
    return ctypes.CDLL(str(library_path()))
