"""Loading serialized engines onto the GPU."""

from __future__ import annotations

import threading
from typing import Any

import torch

from trtconvert.engine.signals import DeferredSignals

_ONE_AT_A_TIME = threading.Lock()
"""A runtime that is made sets the log of the whole library."""


def load_engine(trt: Any, log: Any, plan: bytes) -> tuple[Any, Any | None]:
    """Load a plan onto the current device, and wait until it is there.

    TensorRT returns earlier. On a GPU that other programs use as well, an engine that was dropped right after loading, since
    a check refused it or its user closed it, made every later CUDA call of the process fail with "unspecified launch failure"
    (TensorRT 10.6, every time with eight programs on one GPU, never after the wait).

    Args:
        trt: the bindings' module; log: one of `make_log`.
    Returns:
        TensorRT's runtime, which has to outlive the engine, and the engine; None where TensorRT refuses the plan, and the log
        says why.
    """
    with DeferredSignals():
        with _ONE_AT_A_TIME:
            runtime = trt.Runtime(log)
        runtime.engine_host_code_allowed = True  # the plan carries our plugin library
        engine = runtime.deserialize_cuda_engine(plan)
        torch.cuda.synchronize()
    return runtime, engine
