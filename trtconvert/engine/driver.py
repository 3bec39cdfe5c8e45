"""The NVIDIA driver and CUDA's current GPU, without torch where possible.

The current GPU is the one of the thread, which `torch.cuda.set_device` chooses, or else the first. TensorRT builds for it.
"""

from __future__ import annotations

import ctypes
import os
import sys

from trtconvert.errors import first_line


def cuda_problem() -> str:
    """Returns why torch cannot use GPUs, such as a driver older than CUDA; "" if it can.

    TensorRT's Runtime would end the process. No memory of a GPU is used.
    """
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        return first_line(error)
    return ""


def device_architecture() -> str | None:
    """Returns the architecture of the current GPU, like "sm90", without torch; None without a GPU."""
    found = _gpu()
    if found is None:
        return None
    driver, device = found
    major, minor = ctypes.c_int(), ctypes.c_int()
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    for value, attribute in ((major, 75), (minor, 76)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
    return f"sm{major.value}{minor.value}"


def device_name() -> str:
    """Returns the name of the current GPU, like "NVIDIA H200", or ""."""
    found = _gpu()
    if found is None:
        return ""
    driver, device = found
    name = ctypes.create_string_buffer(256)
    return "" if driver.cuDeviceGetName(name, len(name), device) else name.value.decode(errors="replace")


def fork_problem() -> tuple[str, str] | None:
    """Returns why CUDA cannot be used in a process that was forked from one with CUDA, and a remedy; None for other processes."""
    torch = sys.modules.get("torch")
    if not (torch is not None and torch.cuda._is_in_bad_fork()) and _asked_driver()[2] != _NOT_INITIALISED:
        return None
    return (
        "this process was forked from one that uses CUDA, and CUDA cannot start in it",
        "start processes by spawn, multiprocessing.get_context('spawn'), or use CUDA in the forked processes alone: before it "
        "forks, a parent must neither load a bundle onto a GPU nor call torch.cuda",
    )


def driver_problem() -> tuple[str, str] | None:
    """Returns why the driver has no usable GPU, and a remedy; None if it has one."""
    if problem := fork_problem():
        return problem
    driver, _, failure = _asked_driver()
    if driver is not None and failure == 0:
        return None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if driver is None or failure in (_NO_DEVICE, _INVALID_DEVICE):
        if driver is not None and hidden is not None:
            return (
                f"no NVIDIA GPU, with CUDA_VISIBLE_DEVICES={hidden!r}",
                "name a GPU in CUDA_VISIBLE_DEVICES, or unset it",
            )
        return (
            "no NVIDIA GPU",
            "run `trtconvert compile BUNDLE` on a machine with a GPU; bundles are built without one",
        )
    words = ctypes.c_char_p()
    driver.cuGetErrorString(failure, ctypes.byref(words))
    return (
        f"the NVIDIA driver fails with error {failure}: {(words.value or b'unknown').decode(errors='replace')}",
        "check that nvidia-smi works; restart the machine after an update of the driver; in a container, pass the GPU through",
    )


_NOT_INITIALISED, _NO_DEVICE, _INVALID_DEVICE = 3, 100, 101
"""CUDA_ERROR_NOT_INITIALIZED, which cuInit returns in forked processes alone, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_INVALID_DEVICE."""


def _gpu() -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    driver, device, failure = _asked_driver()
    return None if driver is None or failure else (driver, device)


def _asked_driver() -> tuple[ctypes.CDLL | None, ctypes.c_int, int]:
    """Returns the driver or None, its handle of the current GPU, and its error code."""
    device = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, device, 0
    if failure := driver.cuInit(0):
        return driver, device, failure
    if driver.cuCtxGetDevice(ctypes.byref(device)) == 0:  # the thread uses a GPU
        return driver, device, 0
    return driver, device, driver.cuDeviceGet(ctypes.byref(device), 0)
