"""The denoiser as a TensorRT engine: INT8 attention in our plugin, torch tensors in and out without copies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtconvert.bundle import ComponentRecord, EngineRecord
from trtconvert.errors import BackendUnavailable
from trtconvert.runtime.signature import Signature


class TensorRTDenoiser:
    """A callable denoiser on a GPU.

    Takes the inputs of the component's signature by position or by name. Tensors on the engine's device, contiguous and of
    the signature's type, are read where they lie; others are copied first. Work is enqueued on the caller's current
    stream, and the output, a fresh tensor in the signature's type, is ready in stream order. It lies on the device of the
    first input, so a caller whose tensors are on the CPU waits for it. Safe from several threads: each takes an execution
    context of its own.

    Args:
        path: the serialized engine; record: its entry in the manifest; component: the signature.

    Raises:
        BackendUnavailable: TensorRT refuses the engine here; the message carries what it logged.
    """

    def __init__(self, path: Path, record: EngineRecord, component: ComponentRecord) -> None:
        from trtconvert.engine.builder import make_log
        from trtconvert.engine.tensorrt import bindings

        trt = bindings()
        self._log = make_log(trt)
        self._runtime = trt.Runtime(self._log)
        self._runtime.engine_host_code_allowed = True  # the plan carries our plugin library
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise BackendUnavailable(
                f"TensorRT cannot load {path.name}",
                expected=f"TensorRT {record.library} on a GPU of {record.target}, which it was built for",
                got=f"TensorRT {trt.__version__}: {self._log.last()}",
                remedy="run `trtconvert compile` on this machine",
            )
        self.signature = Signature(component)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._contexts = threading.local()

    @property
    def device_memory(self) -> int:
        """Bytes of device memory that one execution context takes beside the weights."""
        return int(self._engine.device_memory_size_v2)

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """
        Raises:
            UserError: an input is missing, unknown, or of a type or shape outside the signature.
        """
        checked = self.signature.check(inputs, named)
        context: Any = getattr(self._contexts, "context", None)
        if context is None:
            context = self._contexts.context = self._engine.create_execution_context()
        kept = []  # until the work is enqueued: the allocator reuses memory in stream order
        for name, x in checked.items():
            x = x.to(self.device).contiguous()
            kept.append(x)
            context.set_input_shape(name, tuple(x.shape))
            context.set_tensor_address(name, x.data_ptr())
        spec = self.signature.component.outputs[0]
        output = torch.empty(
            tuple(context.get_tensor_shape(spec.name)), dtype=getattr(torch, spec.dtype), device=self.device
        )
        context.set_tensor_address(spec.name, output.data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream(self.device).cuda_stream):
            raise BackendUnavailable(
                "TensorRT could not run the engine",
                expected="an enqueue on the current stream",
                got=self._log.last(),
                remedy="run with CUDA_LAUNCH_BLOCKING=1 and report the message",
            )
        return output.to(next(iter(checked.values())).device)
