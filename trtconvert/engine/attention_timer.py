"""Times attention on this machine's GPU, as TensorRT engines of one node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import to_torch_dtype
from torch import Tensor

from trtconvert.attention.device_time import device_microseconds
from trtconvert.attention.modes import Mode
from trtconvert.engine.attention_choice import AttentionCase, CaseTimes, one_node_model, timestep_of
from trtconvert.engine.builder import make_log
from trtconvert.errors import BackendUnavailable, TrtconvertError
from trtconvert.export.function_body import MASK
from trtconvert.export.lowering import lower_to_native, lower_to_plugin

ROTATION = 4
"""Sets of inputs that take turns, so that none is read twice in a row."""


class AttentionTimer:
    """Times cases with TensorRT's own attention and with the plugin.

    Args:
        trt: the bindings' module; build: a plan from a lowered model; notice: told of what TensorRT cannot build itself.
    """

    def __init__(self, trt: Any, build: Callable[[ir.Model], bytes], notice: Callable[[str], None]) -> None:
        self._trt, self._build, self._notice = trt, build, notice

    def __call__(self, case: AttentionCase, modes: Collection[Mode]) -> CaseTimes:
        """
        Raises:
            TrtconvertError: the plugin's engine cannot be built, or memory ran out.
        """
        try:
            feeds = [_inputs(case) for _ in range(ROTATION)]
            plugin = self._plugin(case, modes, feeds)
            return CaseTimes(self._native(case, feeds), plugin)
        except torch.cuda.OutOfMemoryError as error:
            raise TrtconvertError(
                f"GPU memory ran out while attention of {case.query_tokens} × {case.key_tokens} tokens was timed",
                expected=f"room for {ROTATION} sets of its inputs",
                got=str(error).splitlines()[0],
                remedy="end other programs on the GPU, or set engine.attention to plugin or native, which needs no timing",
            ) from error

    def _plugin(
        self, case: AttentionCase, modes: Collection[Mode], feeds: list[dict[str, Tensor]]
    ) -> dict[Mode, float]:
        model = one_node_model(case)
        lower_to_plugin(model)
        runner = _Runner(self._trt, self._build(model))
        times = {}
        for mode in sorted(modes):
            for feed in feeds:
                feed["timestep"].fill_(timestep_of(mode))
            times[mode] = runner.microseconds(feeds)
        return times

    def _native(self, case: AttentionCase, feeds: list[dict[str, Tensor]]) -> float:
        # In a whole network TensorRT folds the transposes into the layers around, alone it would copy for each: timed without.
        # The feeds are random numbers, of which any order serves.
        model = one_node_model(case.heads_first())
        lower_to_native(model)
        try:
            plan = self._build(model)
        except TrtconvertError as error:
            self._notice(f"TensorRT has no attention of its own for {case.q} and {case.k}: {error.got}")
            return float("inf")
        return _Runner(self._trt, plan).microseconds(feeds)


def _inputs(case: AttentionCase) -> dict[str, Tensor]:
    def draw(shape: Sequence[int], dtype: ir.DataType) -> Tensor:
        made = torch.randn(*shape, device="cuda")
        return made > 0 if dtype == ir.DataType.BOOL else made.to(to_torch_dtype(dtype))

    feeds = {name: draw(shape, case.dtype) for name, shape in zip("qkv", (case.q, case.k, case.k), strict=True)}
    feeds["timestep"] = torch.zeros(case.q[0], device="cuda")
    if case.mask is not None:
        feeds[MASK] = draw(*case.mask)
    return feeds


class _Runner:
    """An engine with fixed shapes."""

    def __init__(self, trt: Any, plan: bytes) -> None:
        self._log = make_log(trt)
        self._runtime = trt.Runtime(self._log)
        self._runtime.engine_host_code_allowed = True  # the plan carries our plugin library
        engine = self._runtime.deserialize_cuda_engine(plan)
        context = None if engine is None else engine.create_execution_context()
        if engine is None or context is None:
            raise BackendUnavailable(
                "the engine that times attention cannot be loaded",
                expected="an engine that was built just now",
                got=self._log.last(),
                remedy="end other programs on the GPU, or set engine.attention to plugin or native, which needs no timing",
            )
        self._engine, self._context = engine, context
        self._names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        shape = tuple(engine.get_tensor_shape("out"))
        kinds = {trt.DataType.HALF: torch.float16, trt.DataType.BF16: torch.bfloat16, trt.DataType.FLOAT: torch.float32}
        self._out = torch.empty(shape, dtype=kinds[engine.get_tensor_dtype("out")], device="cuda")

    def microseconds(self, feeds: Sequence[Mapping[str, Tensor]]) -> float:
        """Median device time of one call in µs, over calls that take the feeds in turn."""
        return device_microseconds([partial(self._enqueue, feed) for feed in feeds])

    def _enqueue(self, feed: Mapping[str, Tensor]) -> None:
        for name in self._names - {"out"}:  # an engine without the plugin reads no timestep
            self._context.set_tensor_address(name, feed[name].data_ptr())
        self._context.set_tensor_address("out", self._out.data_ptr())
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise TrtconvertError(
                "attention could not be timed",
                expected="an engine that runs on this GPU",
                got=self._log.last(),
                remedy="set engine.attention to plugin or native, which needs no timing",
            )
