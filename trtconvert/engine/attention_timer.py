"""Times attention on this machine's GPU in TensorRT engines of one node."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import to_torch_dtype
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.engine import SerializedEngine
from trtconvert.engine.attention_choice import AttentionCase, CaseTimes, one_node_model, timestep_of
from trtconvert.engine.engine_timer import ROTATION, EngineRunner, timing_failures
from trtconvert.errors import TrtconvertError
from trtconvert.export.lowering.native import lower_to_native
from trtconvert.export.lowering.plugin import lower_to_plugin
from trtconvert.export.nodes.attention_body import MASK

T = TypeVar("T")


class AttentionTimer:
    """Times cases with TensorRT's own attention and with the plugin.

    Args:
        trt: the bindings' module. build: builds a plan from a lowered model. notice: receives failures.
    """

    def __init__(self, trt: Any, build: Callable[[ir.Model], SerializedEngine], notice: Callable[[str], None]) -> None:
        self._trt, self._build, self._notice = trt, build, notice

    def __call__(self, case: AttentionCase, modes: Collection[Mode]) -> CaseTimes:
        """Times both. A form that cannot be built or run has infinite time.

        Raises:
            TrtconvertError: both fail, or memory ran out.
        """
        work = f"attention of {case.query_tokens} × {case.key_tokens} tokens"
        with timing_failures(work):
            feeds = [_inputs(case) for _ in range(ROTATION)]
        failures: list[TrtconvertError] = []

        def attempt(owner: str, time: Callable[[], T], otherwise: T) -> T:
            try:
                with timing_failures(f"{owner} {work}"):
                    return time()
            except TrtconvertError as error:
                failures.append(error)
                self._notice(f"{owner} attention for {case.q} and {case.k} cannot be timed alone: {error.got}")
                return otherwise

        plugin = attempt("the plugin's", lambda: self._plugin(case, modes, feeds), dict.fromkeys(modes, math.inf))
        native = attempt("TensorRT's own", lambda: self._native(case, feeds), math.inf)
        if len(failures) == 2:
            raise failures[0]
        return CaseTimes(native, plugin)

    def _plugin(
        self, case: AttentionCase, modes: Collection[Mode], feeds: list[dict[str, Tensor]]
    ) -> dict[Mode, float]:
        own = case.with_key_mask()
        if own is not case:
            feeds = [feed | _mask(own) for feed in feeds]
        model = one_node_model(own)
        lower_to_plugin(model)
        runner = EngineRunner(self._trt, self._build(model))
        times = {}
        for mode in sorted(modes):
            for feed in feeds:
                feed["timestep"].fill_(timestep_of(mode))
            times[mode] = runner.microseconds(feeds)
        return times

    def _native(self, case: AttentionCase, feeds: list[dict[str, Tensor]]) -> float:
        # Without transposes: in a whole network TensorRT folds them into other layers, alone it would copy.
        case = case.heads_first()
        model = one_node_model(case)
        lower_to_native(model)
        runner = EngineRunner(self._trt, self._build(model))
        # The feeds are random: any layout will do.
        shapes = {"q": case.q, "k": case.k, "v": case.k}
        seen = [feed | {name: feed[name].view(shape) for name, shape in shapes.items()} for feed in feeds]
        return runner.microseconds(seen)


def _inputs(case: AttentionCase) -> dict[str, Tensor]:
    feeds = {name: _drawn(shape, case.dtype) for name, shape in zip("qkv", (case.q, case.k, case.k), strict=True)}
    return feeds | {"timestep": torch.zeros(case.q[0], dtype=torch.float32, device="cuda")} | _mask(case)


def _mask(case: AttentionCase) -> dict[str, Tensor]:
    return {} if case.mask is None else {MASK: _drawn(*case.mask)}


def _drawn(shape: Sequence[int], dtype: ir.DataType) -> Tensor:
    if dtype == ir.DataType.BOOL:  # all keys are visible: hidden keys may cost no time
        return torch.ones(*shape, dtype=torch.bool, device="cuda")
    return torch.randn(*shape, device="cuda").to(to_torch_dtype(dtype))
