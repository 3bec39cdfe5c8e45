"""Runs one engine on one stream: its execution contexts, and the CUDA graphs captured from them.

One host thread at a time uses a lane, under its lock, which all engines share on a stream. Work on one stream runs in order;
concurrency comes from several streams, each with its own lane.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cuda.bindings import runtime as cudart  # pyright: ignore[reportAttributeAccessIssue]  # no stubs
from torch import Tensor

from trtconvert.bundle import NEXT
from trtconvert.engine.logs import Log, lacks_memory
from trtconvert.errors import BackendUnavailable, UserError, warn
from trtconvert.runtime.graph import REMEDY, CopyingGraph
from trtconvert.runtime.scratch import Room, Scratch
from trtconvert.runtime.trajectory import FORGOTTEN, Trajectory

_ALIGNMENT = 256
"""Alignment of tensors in bytes that TensorRT needs (`IExecutionContext::setTensorAddress`)."""

_REST = 1000
"""Calls without a further attempt after a failed capture: an attempt costs far more than a graph saves."""

_UNUSED = 256
"""A graph may be replaced after this number of calls without a launch. A capture takes TensorRT a tenth of a second, and a graph
saves some microseconds a call: if more shapes take turns than graphs are kept, the further ones run without a graph."""

_MOST_FAILURES = 3
"""Captures stop after this number of failures, other than for lack of memory. A capture that collides with that of another
thread fails once."""

_DESTROYED_STREAM = "invalid resource handle"
"""CUDA's message for a destroyed stream."""


@dataclass(frozen=True, eq=False)
class CallShapes:
    """The profile and shapes of calls with certain input shapes.

    Attributes:
        profile: index of the optimisation profile.
        inputs, outputs, caches: shapes, in the signature's order.
        reads, writes: the MoDiff caches of a call in `_Caches.turns`.
    """

    profile: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    caches: tuple[tuple[int, ...], ...] = ()
    reads: tuple[Tensor, ...] = ()
    writes: tuple[Tensor, ...] = ()

    @property
    def cache_addresses(self) -> list[int]:
        return [x.data_ptr() for x in (*self.reads, *self.writes)]


@dataclass(frozen=True)
class LoadedEngine:
    """A deserialised engine.

    Attributes:
        trt: TensorRT's module; engine: its ICudaEngine; log: TensorRT's messages about this engine's calls.
        inputs, input_dtypes, outputs, output_dtypes: names and types, in the signature's order.
        caches, cache_dtypes: names and types of the MoDiff caches.
        device: the GPU.
        scratch: memory of execution contexts.
        changing: lock for making and deleting execution contexts: doing both at once in one engine has crashed the process
            (TensorRT 10.6).
    """

    trt: Any
    engine: Any
    log: Log
    inputs: tuple[str, ...]
    input_dtypes: tuple[torch.dtype, ...]
    outputs: tuple[str, ...]
    output_dtypes: tuple[torch.dtype, ...]
    device: torch.device
    scratch: Scratch
    caches: tuple[str, ...] = ()
    cache_dtypes: tuple[torch.dtype, ...] = ()
    changing: Any = field(default_factory=threading.RLock, init=False)

    def empty_outputs(self, call: CallShapes) -> list[Tensor]:
        """Allocate the outputs of a call."""
        return [
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in zip(call.outputs, self.output_dtypes, strict=True)
        ]

    def bytes_of(self, call: CallShapes) -> int:
        """Return the size in bytes of a call's inputs and outputs."""
        shapes, dtypes = call.inputs + call.outputs, self.input_dtypes + self.output_dtypes
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))

    def failure(self, problem: str) -> BackendUnavailable:
        """Return the error of a failed TensorRT call, with TensorRT's messages since the previous call."""
        got = self.log.last()
        self.log.errors.clear()
        return BackendUnavailable(problem, expected="TensorRT to run the loaded engine", got=got, remedy=REMEDY)


class _Context:
    """An execution context of one profile, which sets only changed shapes and addresses."""

    def __init__(self, loaded: LoadedEngine, profile: int, scratch: Tensor, stream: torch.cuda.Stream) -> None:
        self._loaded = loaded
        strategy = loaded.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context: Any = None
        with loaded.changing, loaded.log:
            self._context = loaded.engine.create_execution_context(strategy)
            if self._context is None:
                raise loaded.failure("TensorRT could not make an execution context")
            if not self._context.set_optimization_profile_async(profile, stream.cuda_stream):
                raise loaded.failure(f"TensorRT does not take the optimisation profile {profile}")
        self.compute_in(scratch)
        self._shapes: tuple[tuple[int, ...], ...] | None = None
        self._names = loaded.inputs + loaded.outputs + loaded.caches + tuple(name + NEXT for name in loaded.caches)
        self._addresses = [0] * len(self._names)

    def __del__(self) -> None:
        with self._loaded.changing:
            self._context = None

    def has_run(self, call: CallShapes) -> bool:
        """Return whether the last call had these shapes and was enqueued."""
        return self._shapes == call.inputs

    def compute_in(self, scratch: Tensor) -> None:
        """Set the scratch memory of later calls."""
        self._scratch = scratch
        self._context.set_device_memory(scratch.data_ptr(), scratch.numel())

    def enqueue(self, call: CallShapes, addresses: Sequence[int], stream: int) -> None:
        """Enqueue a call.

        Args:
            addresses: addresses of the inputs, then of the outputs.
            stream: handle of the stream.
        """
        with self._loaded.log:
            self._enqueue(call, [*addresses, *call.cache_addresses], stream)

    def _enqueue(self, call: CallShapes, addresses: Sequence[int], stream: int) -> None:
        context, loaded = self._context, self._loaded
        # A call that fails below leaves some shapes set: the next call must set all of them again.
        before, self._shapes = self._shapes, None
        if call.inputs is not before and call.inputs != before:
            for name, shape in zip(loaded.inputs + loaded.caches, call.inputs + call.caches, strict=True):
                if not context.set_input_shape(name, shape):
                    raise loaded.failure(f"TensorRT does not take '{name}' of shape {list(shape)}")
            for name, shape in zip(loaded.outputs, call.outputs, strict=True):
                if tuple(context.get_tensor_shape(name)) != shape:
                    raise loaded.failure(
                        f"the engine's '{name}' is {list(context.get_tensor_shape(name))}, but the manifest has {list(shape)}"
                    )
        known = self._addresses
        for index, address in enumerate(addresses):
            if known[index] != address:
                if not context.set_tensor_address(self._names[index], address):
                    raise loaded.failure(f"TensorRT does not take an address for '{self._names[index]}'")
                known[index] = address
        if not context.execute_async_v3(stream):
            raise loaded.failure("TensorRT could not run the engine")
        self._shapes = call.inputs


class _Graph:
    """A captured call on one stream, with its own execution context: shapes set later could change the captured work.

    Attributes:
        memory: bytes of the inputs and outputs.
        used: number of the lane's last call that launched the graph.

    Raises:
        BackendUnavailable, RuntimeError: the call cannot be captured.
    """

    used = 0

    def __init__(self, loaded: LoadedEngine, call: CallShapes, context: _Context, stream: torch.cuda.Stream) -> None:
        inputs = [
            torch.zeros(shape, dtype=dtype, device=loaded.device)
            for shape, dtype in zip(call.inputs, loaded.input_dtypes, strict=True)
        ]
        outputs = loaded.empty_outputs(call)
        addresses = [x.data_ptr() for x in (*inputs, *outputs)]
        # TensorRT applies a change of shapes in the next call, and may wait for the device then, which a capture must not.
        context.enqueue(call, addresses, stream.cuda_stream)
        self._graph = CopyingGraph(
            lambda handle: context.enqueue(call, addresses, handle), inputs, outputs, stream.cuda_stream
        )
        self.memory = sum(x.nbytes for x in (*inputs, *outputs))
        # The captured work refers to these.
        self._context, self._inputs, self._outputs = context, inputs, outputs

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Enqueue the call.

        Args:
            tensors: contiguous tensors with the call's shapes, and the engine's types and device.
        Returns:
            New tensors.
        """
        outputs = [torch.empty_like(x) for x in self._outputs]
        self._graph.launch([x.data_ptr() for x in (*tensors, *outputs)])
        return outputs


class _Caches:
    """The MoDiff caches of a trajectory in a lane, for calls of certain shapes.

    Two copies take turns, because a call must not write the copy that it reads: several kernels read a cache, in an order of the
    engine's own.

    Attributes:
        of: the call without caches.
        turns: the call that reads the first copy, and the call that reads the second copy.
        next: index of the next turn.
    """

    def __init__(self, loaded: LoadedEngine, call: CallShapes) -> None:
        self.of, self.next = call, 0
        sides = [
            tuple(
                torch.zeros(shape, dtype=dtype, device=loaded.device)
                for shape, dtype in zip(call.caches, loaded.cache_dtypes, strict=True)
            )
            for _ in range(2)
        ]
        self.turns = [replace(call, reads=sides[i], writes=sides[1 - i]) for i in range(2)]
        self.memory = sum(x.nbytes for side in sides for x in side)
        self.forget()

    @property
    def call(self) -> CallShapes:
        """The call of the next turn."""
        return self.turns[self.next]

    def forget(self) -> None:
        """All samples begin in the next call. In the order of the current stream."""
        for call in self.turns:
            call.reads[0].fill_(FORGOTTEN)


class Lane:
    """Runs one engine on one stream; see the module.

    Args:
        loaded: the engine.
        stream: the stream of all work.
        graphs: number of CUDA graphs to keep; a graph without a launch for `_UNUSED` calls may be replaced. 0 for none.

    Attributes:
        lock: held by the caller during `run` and `close`; shared by all engines on the stream.
        used: time of the last `run`; the lane that was idle longest is closed first.
        closed: True if `run` must not be called any more.
        recorded: number of CUDA graphs captured so far.
    """

    def __init__(self, loaded: LoadedEngine, stream: torch.cuda.Stream, graphs: int) -> None:
        room = loaded.scratch.on(stream)
        self.lock = room.lock
        self.used, self.closed, self.recorded = time.monotonic(), False, 0
        self._loaded, self._stream, self._rest, self._failures, self._calls = loaded, stream, 0, 0, 0
        self._limit = graphs * (2 if loaded.caches else 1)  # caches take turns
        self._handle = stream.cuda_stream
        self._room: Room | None = room
        self._contexts: dict[int, _Context] = {}  # by profile
        self._ready: dict[CallShapes, _Context] = {}  # for the caller's captures
        self._recorded: list[_Context] = []  # contexts of the caller's captures
        self._graphs: OrderedDict[CallShapes, _Graph] = OrderedDict()
        self._seen: weakref.WeakSet[CallShapes] = weakref.WeakSet()
        self._wanted: set[CallShapes] = set()  # calls whose capture by the caller was refused
        self._caches: weakref.WeakKeyDictionary[Trajectory, _Caches] = weakref.WeakKeyDictionary()
        self._recorded_caches: list[tuple[Trajectory, _Caches]] = []  # caches of the caller's captures

    def run(self, call: CallShapes, tensors: Sequence[Tensor], trajectory: Trajectory | None = None) -> list[Tensor]:
        """Enqueue a call.

        Args:
            tensors: tensors with `call`'s shapes and the engine's types on its device, contiguous or not.
            trajectory: the trajectory whose caches are read and written, if the engine has caches.
        Returns:
            New tensors on the engine's device, ready in the stream's order.
        Raises:
            BackendUnavailable: TensorRT or the device fails.
            UserError: the caller captures a graph, and this call is not ready to be captured, or torch does not know the capture.
            torch.OutOfMemoryError: there is no memory for the call's tensors.
        """
        self.used = time.monotonic()
        # Copies may be freed after enqueueing: torch's allocator reuses memory in the stream's order.
        tensors = [x if x.is_contiguous() else x.detach().contiguous() for x in tensors]
        if trajectory is None or not self._loaded.caches:
            return self._run(call, call, tensors)
        caches = self._caches_of(call, trajectory)
        turn = caches.call
        outputs = self._run(call, turn, tensors)
        if torch.cuda.is_current_stream_capturing():
            # Every launch of the captured graph reads and writes the same memory.
            for read, written in zip(turn.reads, turn.writes, strict=True):
                read.copy_(written)
            if (trajectory, caches) not in self._recorded_caches:
                self._recorded_caches.append((trajectory, caches))
        else:
            caches.next = 1 - caches.next
        return outputs

    def _run(self, shapes: CallShapes, call: CallShapes, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run a call; `shapes` is the call without caches, so that both turns share contexts."""
        # The caller's capture takes plain calls: a launch of our graph would be captured with its current addresses.
        if torch.cuda.is_current_stream_capturing():
            return self._enqueue_recorded(shapes, call, tensors)
        if shapes in self._wanted:
            context = self._new_context(call)
            outputs = self._enqueue(call, tensors, context)
            self._ready[shapes] = context
            self._wanted.discard(shapes)
            return outputs
        self._calls += 1
        graph = self._graphs.get(call)
        if graph is None and call in self._seen and self._has_room:
            graph = self._record(call)
        if graph is not None:
            graph.used = self._calls
            self._graphs.move_to_end(call)
            return graph(tensors)
        self._seen.add(call)
        context = self._contexts.get(call.profile)
        if context is None:
            context = self._contexts[call.profile] = self._new_context(call)
        return self._enqueue(call, tensors, context)

    def _caches_of(self, call: CallShapes, trajectory: Trajectory) -> _Caches:
        """Return the caches of the previous call, or reset caches if the shapes changed.

        Raises:
            UserError: the caches must be allocated during the caller's capture.
        """
        caches = self._caches.get(trajectory)
        if caches is None or caches.of is not call:
            if torch.cuda.is_current_stream_capturing():
                self._wanted.add(call)
                raise unready("other shapes in the last call on this stream, so that the caches do not fit")
            self._let_go_of(self._caches.pop(trajectory, None))
            recorded = next(
                (own for whose, own in self._recorded_caches if whose is trajectory and own.of is call), None
            )
            if recorded is not None:
                recorded.forget()
            caches = self._caches[trajectory] = recorded or _Caches(self._loaded, call)
        return caches

    def _let_go_of(self, caches: _Caches | None) -> None:
        """Drop the graphs of caches, so that their memory can be freed."""
        if caches is not None and any(turn in self._graphs for turn in caches.turns):
            self._stream.synchronize()
            for turn in caches.turns:
                self._graphs.pop(turn, None)

    def forget_caches(self, trajectory: Trajectory) -> None:
        """Reset the caches of a trajectory, in the stream's order."""
        recorded = [own for whose, own in self._recorded_caches if whose is trajectory]
        current = self._caches.get(trajectory)
        with torch.cuda.stream(self._stream):
            for caches in (*recorded, *([] if current is None or current in recorded else [current])):
                caches.forget()

    def caches_of(self, trajectory: Trajectory) -> tuple[Tensor, ...]:
        """Return the caches that a trajectory's next call reads; empty before its first call."""
        caches = self._caches.get(trajectory)
        return () if caches is None else caches.call.reads

    @property
    def caches_memory(self) -> int:
        """Bytes of all caches."""
        every = {id(caches): caches for caches in list(self._caches.values())}
        every |= {id(caches): caches for _, caches in self._recorded_caches}
        return sum(caches.memory for caches in every.values())

    @property
    def is_needed(self) -> bool:
        """True if a capture of the caller's refers to the lane, or is running on its stream, so that waiting is not allowed."""
        if self._recorded:
            return True
        status, capturing = cudart.cudaStreamIsCapturing(self._handle)
        # This is the default stream, and another stream is captured.
        if status == cudart.cudaError_t.cudaErrorStreamCaptureImplicit:
            return True
        return not status and capturing != cudart.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone

    @property
    def graphs_memory(self) -> int:
        """Bytes of the graphs' inputs and outputs."""
        return sum(graph.memory for graph in list(self._graphs.values()))

    def forget_graphs(self) -> None:
        """Wait for the stream and drop all graphs, except the caller's."""
        self._stream.synchronize()
        self._graphs.clear()
        self._seen.clear()

    def wait(self) -> None:
        """Wait for the stream, unless its owner has destroyed it."""
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            if _DESTROYED_STREAM not in str(error):
                raise

    def close(self) -> None:
        """Wait for the stream, unless it was destroyed, and free contexts, graphs and memory, even if the wait fails."""
        try:
            self.wait()
        finally:
            self.closed = True
            self._graphs.clear()
            self._seen.clear()
            self._contexts.clear()
            self._ready.clear()
            self._recorded.clear()
            self._wanted.clear()
            self._caches.clear()
            self._recorded_caches.clear()
            self._room = None

    @property
    def _scratch(self) -> Tensor:
        assert self._room is not None  # not closed
        return self._room.memory

    def _new_context(self, call: CallShapes) -> _Context:
        return _Context(self._loaded, call.profile, self._scratch, self._stream)

    def _enqueue_recorded(self, shapes: CallShapes, call: CallShapes, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Enqueue a call that the caller captures, with scratch memory of the captured graph.

        Launches of the graph may then go to any stream, beside calls on this one: torch reuses memory that is freed during a
        capture for later work of that capture only.
        """
        context = self._callers_context(shapes)
        memory = self._loaded.scratch.new()
        if not _belongs_to_capture(memory):
            raise UserError(
                "torch does not know the capture of this CUDA graph, and would reuse the memory of the call",
                expected="a capture by torch.cuda.graph",
                got="a capture that another program part began",
                remedy="capture with torch.cuda.graph(…, stream=…)",
            )
        context.compute_in(memory)
        try:
            outputs = self._enqueue(call, tensors, context)
        finally:
            context.compute_in(self._scratch)
        # The context now belongs to the capture: shapes set later could change the captured work.
        self._ready[shapes] = context
        if context not in self._recorded:
            self._recorded.append(context)
        if self._contexts.get(call.profile) is context:
            del self._contexts[call.profile]
        return outputs

    def _callers_context(self, call: CallShapes) -> _Context:
        """Return the context of the last plain call for the caller's capture, because setting shapes may wait for the device.

        Raises:
            UserError: the last plain call had other shapes. The next call with these shapes gets its own context.
        """
        for context in (self._ready.get(call), self._contexts.get(call.profile)):
            if context is not None and context.has_run(call):
                return context
        self._wanted.add(call)
        raise unready("other shapes in the last call on this stream without our own graphs")

    def _enqueue(self, call: CallShapes, tensors: Sequence[Tensor], context: _Context) -> list[Tensor]:
        loaded = self._loaded
        tensors = [x.detach().clone() if x.data_ptr() % _ALIGNMENT else x for x in tensors]
        outputs = loaded.empty_outputs(call)
        context.enqueue(call, [x.data_ptr() for x in (*tensors, *outputs)], self._handle)
        return outputs

    @property
    def _has_room(self) -> bool:
        """True if a graph can be added, or can replace an unused graph."""
        if len(self._graphs) < self._limit:
            return True
        return bool(self._limit) and self._calls - next(iter(self._graphs.values())).used > _UNUSED

    def _record(self, call: CallShapes) -> _Graph | None:
        """Capture a graph of the call, in place of the least recently used one if all are taken; None if that fails."""
        if self._rest:
            self._rest -= 1
            return None
        try:
            graph = _Graph(self._loaded, call, self._new_context(call), self._stream)
        except (BackendUnavailable, RuntimeError) as error:
            self._rest = _REST
            with contextlib.suppress(RuntimeError):  # the call itself meets errors of the device too
                self._stream.synchronize()  # the call before the capture may still use the context
            if isinstance(error, torch.OutOfMemoryError) or lacks_memory(str(error)):
                return None
            self._failures += 1
            if self._failures == 1:
                warn(f"the engine runs without CUDA graphs, and calls are some microseconds slower: {error}")
            elif self._failures == _MOST_FAILURES:
                self._limit = 0
            return None
        if len(self._graphs) >= self._limit:
            self._stream.synchronize()
            oldest, _ = self._graphs.popitem(last=False)
            self._seen.discard(oldest)
        self.recorded += 1
        self._graphs[call] = graph
        return graph


def _belongs_to_capture(memory: Tensor) -> bool:
    """Return whether torch keeps memory allocated during a capture as long as the graph, as it does for `torch.cuda.graph`."""
    if not memory.numel():
        return True
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        return backend == "cudaMallocAsync"  # memory that CUDA allocates in a capture is part of the graph
    address, ordinary = memory.data_ptr(), (0, 0)
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        and tuple(segment["segment_pool_id"]) != ordinary
        for segment in torch.cuda.memory_snapshot()
    )


def unready(got: str) -> UserError:
    """Return the error for a call in the caller's capture that needs work which cannot be captured."""
    return UserError(
        "the component is not ready to be captured into a CUDA graph",
        expected="a call with the same shapes on the same stream just before the capture",
        got=got,
        remedy="call the component with these shapes on that stream once more, outside of a capture, and capture again",
    )
