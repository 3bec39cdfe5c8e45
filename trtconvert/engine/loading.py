"""Loading serialized engines onto the GPU."""

from __future__ import annotations

from typing import Any

import torch

from trtconvert.engine import SerializedEngine
from trtconvert.engine.logs import Log
from trtconvert.engine.signals import DeferredSignals


def load_engine(trt: Any, log: Log, plan: SerializedEngine) -> tuple[Any, Any | None]:
    """Loads a plan onto the current device, and waits for the device.

    TensorRT returns earlier. Dropping an engine before the device is done made later CUDA calls fail with "unspecified launch
    failure" on a shared GPU (TensorRT 10.6).

    Args:
        trt: the bindings' module. log: receives TensorRT's reason for a refusal.
    Returns:
        TensorRT's runtime, which must outlive the engine, and the engine, None if TensorRT refuses the plan.
    """
    with DeferredSignals(), log:
        runtime = trt.Runtime(log.logger)
        runtime.engine_host_code_allowed = True  # the plan carries our plugin library
        engine = runtime.deserialize_cuda_engine(plan)
        torch.cuda.synchronize()
    return runtime, engine
