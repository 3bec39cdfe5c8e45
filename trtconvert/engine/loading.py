"""Loading serialized engines onto the GPU."""

from __future__ import annotations

from typing import Any

import torch

from trtconvert.engine.logs import Log
from trtconvert.engine.signals import DeferredSignals


def load_engine(trt: Any, log: Log, plan: bytes) -> tuple[Any, Any | None]:
    """Load a plan onto the current device, and wait until it is there.

    TensorRT returns earlier. On a GPU that other programs use as well, an engine that was dropped right after loading, since
    a check refused it or its user closed it, made every later CUDA call of the process fail with "unspecified launch failure"
    (TensorRT 10.6, every time with eight programs on one GPU, never after the wait).

    Args:
        trt: the bindings' module; log: hears why TensorRT refuses a plan.
    Returns:
        TensorRT's runtime, which has to outlive the engine, and the engine; None where TensorRT refuses the plan.
    """
    with DeferredSignals(), log:
        runtime = trt.Runtime(log.logger)
        runtime.engine_host_code_allowed = True  # the plan carries our plugin library
        engine = runtime.deserialize_cuda_engine(plan)
        torch.cuda.synchronize()
    return runtime, engine
