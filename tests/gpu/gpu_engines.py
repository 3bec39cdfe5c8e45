"""Runs TensorRT plans of tests on this machine's GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trtconvert.engine.loading import load_engine
from trtconvert.engine.logs import make_log


def output_of_plan(trt: Any, plan: bytes, feed: Mapping[str, Tensor]) -> Tensor:
    """Output of an engine with one FP16 output, for inputs on the GPU by name."""
    log = make_log(trt)
    runtime, engine = load_engine(trt, log, plan)
    assert runtime is not None and engine is not None, log.last()
    context = engine.create_execution_context()
    for name, value in feed.items():
        assert context.set_input_shape(name, tuple(value.shape))
        assert context.set_tensor_address(name, value.data_ptr())
    (name,) = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)} - feed.keys()
    output = torch.full(tuple(context.get_tensor_shape(name)), torch.nan, dtype=torch.float16, device="cuda")
    assert context.set_tensor_address(name, output.data_ptr())
    assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return output
