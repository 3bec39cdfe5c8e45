"""Times TensorRT engines on this machine's GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trtconvert.attention.device_time import device_microseconds
from trtconvert.bundle import Dims, TensorRecord
from trtconvert.engine import SerializedEngine
from trtconvert.engine.loading import load_engine
from trtconvert.engine.logs import make_log
from trtconvert.errors import TrtconvertError, first_line
from trtconvert.export.delta_caches import LAST
from trtconvert.manifest_checks import CACHE

ROTATION = 4
"""Sets of inputs used in turn, so that none is in the GPU's cache. Caches are one set, see `denoiser_microseconds`."""

_REMEDY = (
    "end other programs on the GPU, or set engine.attention to plugin or native, which need no timing, in the recipe or by "
    "`trtconvert compile --set`"
)


@contextmanager
def timing_failures(work: str) -> Iterator[None]:
    """Converts CUDA errors inside the block.

    Args:
        work: the timed work, in words.
    Raises:
        TrtconvertError: memory ran out, or CUDA failed.
    """
    try:
        yield
    except RuntimeError as error:  # includes OutOfMemoryError
        raise TrtconvertError(
            f"{work} could not be timed",
            expected=f"room on the GPU for {ROTATION} sets of inputs, and an engine that a CUDA graph can record",
            got=first_line(error),
            remedy=_REMEDY,
        ) from error


class EngineRunner:
    """A loaded plan.

    Args:
        trt: the bindings' module.
    Raises:
        TrtconvertError: TensorRT does not load the plan.
    """

    def __init__(self, trt: Any, plan: SerializedEngine) -> None:
        self._log = make_log(trt)
        self._runtime, engine = load_engine(trt, self._log, plan)
        context = None if engine is None else engine.create_execution_context()
        if engine is None or context is None:
            raise self._refused("an engine cannot be loaded to be timed")
        self._engine, self._context = engine, context
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        self._outputs = [name for name in names if name not in self._inputs]

    def microseconds(self, feeds: Sequence[Mapping[str, Tensor]], profile: int = 0) -> float:
        """Returns the median device time of one call in µs, over calls that use the feeds in turn.

        Args:
            feeds: inputs on the GPU by name, all of one shape. Unknown names are ignored: without the plugin an engine may
                lack the timestep.
            profile: index of the optimisation profile that holds their shapes.
        Raises:
            TrtconvertError: the engine refuses the shapes, or does not run.
            RuntimeError: see `timing_failures`.
        """
        context = self._context
        taken = [context.set_optimization_profile_async(profile, torch.cuda.current_stream().cuda_stream)]
        taken += [context.set_input_shape(name, tuple(feeds[0][name].shape)) for name in self._inputs]
        if not all(taken):
            raise self._refused("an engine does not take the shapes that it was built for")
        outputs = [self._room(name) for name in self._outputs]
        for name, output in zip(self._outputs, outputs, strict=True):
            context.set_tensor_address(name, output.data_ptr())
        return device_microseconds([partial(self._enqueue, feed) for feed in feeds])

    def _room(self, name: str) -> Tensor:
        size = math.prod(self._context.get_tensor_shape(name)) * self._engine.get_tensor_dtype(name).itemsize
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def _enqueue(self, feed: Mapping[str, Tensor]) -> None:
        for name in self._inputs:
            self._context.set_tensor_address(name, feed[name].data_ptr())
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise self._refused("an engine could not be timed")

    def _refused(self, problem: str) -> TrtconvertError:
        return TrtconvertError(
            problem,
            expected="an engine that runs on the GPU that built it",
            got=self._log.last(),
            remedy=_REMEDY,
        )


def denoiser_microseconds(
    trt: Any,
    inputs: Sequence[TensorRecord],
    timestep_input: str,
    profiles: Sequence[Dims],
    plan: SerializedEngine,
    bins: Mapping[float, int],
) -> float:
    """Returns the device time of one call of a denoiser's engine in µs: the mean over bins, summed over the opt shapes.

    Floating-point inputs are N(0, 1), others zeros, which are valid indices. Booleans are true: hidden keys may cost no time.
    Layers that quantise deltas read their caches, as in any step but the first: one set of caches for all calls, since caches may
    take gigabytes.

    Args:
        trt: the bindings' module.
        inputs: the signature. timestep_input: name of the timestep.
        profiles: the engine's, in its order.
        bins: timesteps to time, each with its number of timestep bins.
    Raises:
        TrtconvertError: the engine cannot be loaded or run, or memory ran out.
    """
    with timing_failures("an engine"):
        runner = EngineRunner(trt, plan)
        total = 0.0
        for index, dims in enumerate(profiles):
            # The engine's outputs are the second set of caches.
            caches = {spec.name: _draw(spec, dims) for spec in inputs if spec.name.startswith(CACHE)}
            others = [spec for spec in inputs if spec.name not in caches]
            feeds = [caches | {spec.name: _draw(spec, dims) for spec in others} for _ in range(ROTATION)]
            for timestep, count in bins.items():
                for feed in feeds:
                    feed[timestep_input].fill_(timestep)
                total += count * runner.microseconds(feeds, index)
        return total / sum(bins.values())


def _draw(spec: TensorRecord, dims: Dims) -> Tensor:
    shape = [dims[dim][1] if isinstance(dim, str) else dim for dim in spec.shape]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.name == LAST:
        return torch.full(shape, math.inf, dtype=dtype, device="cuda")
    if dtype.is_floating_point:
        return torch.randn(shape, device="cuda").to(dtype)
    return torch.full(shape, dtype == torch.bool, dtype=dtype, device="cuda")
