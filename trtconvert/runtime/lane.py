"""One engine on one stream: its execution contexts, and the CUDA graphs recorded from them.

A lane is used under its lock, by one host thread at a time; lanes of other engines on the stream have the same lock. Work on one
stream runs in order anyway; concurrency comes from several streams, each of which has a lane of its own.
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
"""Bytes at multiples of which TensorRT wants tensors to begin (`IExecutionContext::setTensorAddress`)."""

_REST = 1000
"""Calls that run plainly after one that could not be recorded, for lack of memory, say: asking for it costs far more than a graph
spares."""

_UNUSED = 256
"""Calls after which a graph that none of them launched makes room for another. To record one takes TensorRT a tenth of a second,
and spares some microseconds a call: where more shapes take turns than graphs are kept, the others had better run plainly."""

_MOST_FAILURES = 3
"""Recordings that may fail, other than for lack of memory, before no more are tried. One that another thread's recording was in
the way of fails once."""

_OF_NO_STREAM = "invalid resource handle"
"""CUDA's words where a stream is not there any more."""


@dataclass(frozen=True, eq=False)
class Call:
    """What a call with inputs of certain shapes needs, worked out once.

    Attributes:
        profile: index of the optimisation profile.
        inputs, outputs: shapes, in the signature's order.
        caches: shapes of them, in the signature's order.
        reads, writes: the caches, where layers quantise deltas; such a call is one of a `_Caches`.
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
class Plan:
    """A deserialised engine, as the lanes use it.

    Attributes:
        trt: TensorRT's module; engine: its ICudaEngine; log: what it complains of in this engine's calls.
        inputs, input_dtypes, outputs, output_dtypes: names and types, in the signature's order.
        caches, cache_dtypes: likewise, of the caches of layers that quantise deltas.
        device: the GPU.
        scratch: memory for execution contexts.
        changing: held while an execution context is made or goes. TensorRT lets different threads use different contexts, and
            no more: one made while another one went, of the same engine, has crashed the process (TensorRT 10.6).
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

    def empty_outputs(self, call: Call) -> list[Tensor]:
        """Room for what a call gives."""
        return [
            torch.empty(shape, dtype=dtype, device=self.device)
            for shape, dtype in zip(call.outputs, self.output_dtypes, strict=True)
        ]

    def bytes_of(self, call: Call) -> int:
        """Of a call's inputs and outputs."""
        shapes, dtypes = call.inputs + call.outputs, self.input_dtypes + self.output_dtypes
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))

    def failure(self, problem: str) -> BackendUnavailable:
        """The error of a TensorRT call that failed, with what TensorRT logged since the one before."""
        got = self.log.last()
        self.log.errors.clear()
        return BackendUnavailable(problem, expected="TensorRT to run the engine that it loaded", got=got, remedy=REMEDY)


class _Context:
    """An execution context of one profile that remembers what it was told, so that only changes are set."""

    def __init__(self, plan: Plan, profile: int, scratch: Tensor, stream: torch.cuda.Stream) -> None:
        self._plan = plan
        strategy = plan.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context: Any = None
        with plan.changing, plan.log:
            self._context = plan.engine.create_execution_context(strategy)
            if self._context is None:
                raise plan.failure("TensorRT could not make an execution context")
            if not self._context.set_optimization_profile_async(profile, stream.cuda_stream):
                raise plan.failure(f"TensorRT does not take the optimisation profile {profile}")
        self.compute_in(scratch)
        self._shapes: tuple[tuple[int, ...], ...] | None = None
        self._names = plan.inputs + plan.outputs + plan.caches + tuple(name + NEXT for name in plan.caches)
        self._addresses = [0] * len(self._names)

    def __del__(self) -> None:
        # Whoever lets go of it last: a lane that closes, a graph that makes room, an error on the way, the garbage collector.
        with self._plan.changing:
            self._context = None

    def has_run(self, call: Call) -> bool:
        """Whether the last call was one of the call's shapes, and was enqueued."""
        return self._shapes == call.inputs

    def compute_in(self, scratch: Tensor) -> None:
        """From the next call on. What was enqueued before computes where it did."""
        self._scratch = scratch
        self._context.set_device_memory(scratch.data_ptr(), scratch.numel())

    def enqueue(self, call: Call, addresses: Sequence[int], stream: int) -> None:
        """Run on a stream, given by its handle.

        Args:
            addresses: of the inputs, then of the outputs.
        """
        with self._plan.log:
            self._enqueue(call, [*addresses, *call.cache_addresses], stream)

    def _enqueue(self, call: Call, addresses: Sequence[int], stream: int) -> None:
        context, plan = self._context, self._plan
        # Until it is enqueued: of a call that is refused here some shapes are set, and what they entail may not have been done.
        told, self._shapes = self._shapes, None
        if call.inputs is not told and call.inputs != told:
            for name, shape in zip(plan.inputs + plan.caches, call.inputs + call.caches, strict=True):
                if not context.set_input_shape(name, shape):
                    raise plan.failure(f"TensorRT does not take '{name}' of shape {list(shape)}")
            for name, shape in zip(plan.outputs, call.outputs, strict=True):
                if tuple(context.get_tensor_shape(name)) != shape:
                    raise plan.failure(
                        f"the engine's '{name}' is {list(context.get_tensor_shape(name))}, the manifest says {list(shape)}"
                    )
        known = self._addresses
        for index, address in enumerate(addresses):
            if known[index] != address:
                if not context.set_tensor_address(self._names[index], address):
                    raise plan.failure(f"TensorRT does not take an address for '{self._names[index]}'")
                known[index] = address
        if not context.execute_async_v3(stream):
            raise plan.failure("TensorRT could not run the engine")
        self._shapes = call.inputs


class _Graph:
    """A recorded call on one stream.

    It has its execution context to itself: shapes that a context is told later may reach what was recorded from it.

    Attributes:
        memory: bytes of its inputs and outputs.
        used: number of the lane's call that launched it last.

    Raises:
        BackendUnavailable, RuntimeError: the call cannot be recorded.
    """

    used = 0

    def __init__(self, plan: Plan, call: Call, context: _Context, stream: torch.cuda.Stream) -> None:
        inputs = [
            torch.zeros(shape, dtype=dtype, device=plan.device)
            for shape, dtype in zip(call.inputs, plan.input_dtypes, strict=True)
        ]
        outputs = plan.empty_outputs(call)
        addresses = [x.data_ptr() for x in (*inputs, *outputs)]
        # TensorRT finishes what a change of shapes entails in an ordinary call, and may wait for the device meanwhile,
        # which a recording must not.
        context.enqueue(call, addresses, stream.cuda_stream)
        self._graph = CopyingGraph(
            lambda handle: context.enqueue(call, addresses, handle), inputs, outputs, stream.cuda_stream
        )
        self.memory = sum(x.nbytes for x in (*inputs, *outputs))
        # What the recorded work refers to lives as long as the graph.
        self._context, self._inputs, self._outputs = context, inputs, outputs

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Enqueue the call.

        Args:
            tensors: contiguous, of the call's shapes and the engine's types and device.
        Returns:
            Fresh tensors.
        """
        outputs = [torch.empty_like(x) for x in self._outputs]
        self._graph.launch([x.data_ptr() for x in (*tensors, *outputs)])
        return outputs


class _Caches:
    """The caches of a trajectory in a lane, for calls of some shapes.

    There are two of each, which take turns: what a call writes is not what it reads. An engine has several kernels that read a
    cache, in an order of its own, so that a cache that is written in place could be read after it was written.

    Attributes:
        of: the call without caches.
        turns: the call that reads the first ones, and the call that reads the second ones.
        next: which of the two comes next.
    """

    def __init__(self, plan: Plan, call: Call) -> None:
        self.of, self.next = call, 0
        sides = [
            tuple(
                torch.zeros(shape, dtype=dtype, device=plan.device)
                for shape, dtype in zip(call.caches, plan.cache_dtypes, strict=True)
            )
            for _ in range(2)
        ]
        self.turns = [replace(call, reads=sides[i], writes=sides[1 - i]) for i in range(2)]
        self.memory = sum(x.nbytes for side in sides for x in side)
        self.forget()

    @property
    def call(self) -> Call:
        """That comes next."""
        return self.turns[self.next]

    def forget(self) -> None:
        """All samples begin in the next call. In the order of the current stream."""
        for call in self.turns:
            call.reads[0].fill_(FORGOTTEN)


class Lane:
    """See the module.

    Args:
        plan: the engine.
        stream: all work goes there.
        graphs: how many CUDA graphs are kept; one that no call launched for `_UNUSED` calls makes room. 0 for none.

    Attributes:
        lock: held by the caller during `run` and `close`. That of the memory which all engines share on the stream.
        used: time of the last `run`, for the choice of a lane to close.
        closed: `run` must not be called any more.
        recorded: CUDA graphs recorded so far.
    """

    def __init__(self, plan: Plan, stream: torch.cuda.Stream, graphs: int) -> None:
        room = plan.scratch.on(stream)
        self.lock = room.lock
        self.used, self.closed, self.recorded = time.monotonic(), False, 0
        self._plan, self._stream, self._rest, self._failures, self._calls = plan, stream, 0, 0, 0
        self._limit = graphs * (2 if plan.caches else 1)  # caches take turns
        self._handle = stream.cuda_stream
        self._room: Room | None = room
        self._contexts: dict[int, _Context] = {}  # by profile
        self._ready: dict[Call, _Context] = {}  # for the caller's recordings of a call
        self._recorded: list[_Context] = []  # what recordings of the caller's refer to
        self._graphs: OrderedDict[Call, _Graph] = OrderedDict()
        self._seen: weakref.WeakSet[Call] = weakref.WeakSet()
        self._wanted: set[Call] = set()  # calls that a recording of the caller's was refused
        self._caches: weakref.WeakKeyDictionary[Trajectory, _Caches] = weakref.WeakKeyDictionary()
        self._recorded_caches: list[tuple[Trajectory, _Caches]] = []  # what recordings of the caller's read and write

    def run(self, call: Call, tensors: Sequence[Tensor], trajectory: Trajectory | None = None) -> list[Tensor]:
        """Enqueue a call.

        Args:
            tensors: of `call`'s shapes, the engine's types and on its device; contiguous or not.
            trajectory: whose caches are read and written, of an engine that has some.
        Returns:
            Fresh tensors on the engine's device, ready in the stream's order.
        Raises:
            BackendUnavailable: TensorRT or the device refuses.
            UserError: the caller records a graph of its own, and nothing is ready for this call, or torch knows nothing of it.
            torch.OutOfMemoryError: there is no room for tensors of the call.
        """
        self.used = time.monotonic()
        # What is gathered here goes when it is enqueued: torch's allocator reuses memory in the stream's order.
        tensors = [x if x.is_contiguous() else x.detach().contiguous() for x in tensors]
        if trajectory is None or not self._plan.caches:
            return self._run(call, call, tensors)
        caches = self._caches_of(call, trajectory)
        turn = caches.call
        outputs = self._run(call, turn, tensors)
        if torch.cuda.is_current_stream_capturing():
            # Every launch of the recording reads and writes the same memory.
            for read, written in zip(turn.reads, turn.writes, strict=True):
                read.copy_(written)
            if (trajectory, caches) not in self._recorded_caches:
                self._recorded_caches.append((trajectory, caches))
        else:
            caches.next = 1 - caches.next
        return outputs

    def _run(self, shapes: Call, call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        """
        Args:
            shapes: the call without its caches. What is ready for one of a trajectory's calls is ready for the other too.
        """
        # A recording of the caller's takes plain calls: a launch in it would be recorded with the addresses of now.
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

    def _caches_of(self, call: Call, trajectory: Trajectory) -> _Caches:
        """Those that the call before left; for other shapes new ones, with which all samples begin.

        Raises:
            UserError: they have to be made, and the caller records.
        """
        caches = self._caches.get(trajectory)
        if caches is None or caches.of is not call:
            if torch.cuda.is_current_stream_capturing():
                self._wanted.add(call)
                raise unready("other shapes in the last call on this stream, whose caches are of no use")
            self._let_go_of(self._caches.pop(trajectory, None))
            recorded = next(
                (own for whose, own in self._recorded_caches if whose is trajectory and own.of is call), None
            )
            if recorded is not None:
                recorded.forget()
            caches = self._caches[trajectory] = recorded or _Caches(self._plan, call)
        return caches

    def _let_go_of(self, caches: _Caches | None) -> None:
        """Drop what was recorded with caches, so that their memory can be another's."""
        if caches is not None and any(turn in self._graphs for turn in caches.turns):
            self._stream.synchronize()
            for turn in caches.turns:
                self._graphs.pop(turn, None)

    def forget_caches(self, trajectory: Trajectory) -> None:
        """All samples of a trajectory begin in its next call, in the stream's order."""
        recorded = [own for whose, own in self._recorded_caches if whose is trajectory]
        current = self._caches.get(trajectory)
        with torch.cuda.stream(self._stream):
            for caches in (*recorded, *([] if current is None or current in recorded else [current])):
                caches.forget()

    def caches_of(self, trajectory: Trajectory) -> tuple[Tensor, ...]:
        """What the next call of a trajectory reads; nothing before its first call."""
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
        """Whether a recording of the caller's refers to it, or goes on now on its stream, for which nobody may wait."""
        if self._recorded:
            return True
        status, capturing = cudart.cudaStreamIsCapturing(self._handle)
        # The default stream, and another one is recorded.
        if status == cudart.cudaError_t.cudaErrorStreamCaptureImplicit:
            return True
        return not status and capturing != cudart.cudaStreamCaptureStatus.cudaStreamCaptureStatusNone

    @property
    def graphs_memory(self) -> int:
        """Bytes of the inputs and outputs that graphs have to themselves."""
        return sum(graph.memory for graph in list(self._graphs.values()))

    def forget_graphs(self) -> None:
        """Drop what was recorded, once the stream is done with it. Recordings of the caller's stay."""
        self._stream.synchronize()
        self._graphs.clear()
        self._seen.clear()

    def wait(self) -> None:
        """Until the stream is done, unless its owner has destroyed it."""
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            if _OF_NO_STREAM not in str(error):
                raise

    def close(self) -> None:
        """Wait for the stream, and let go of contexts, graphs and memory, also where the wait fails. Of a stream that its owner
        has destroyed nobody waits.
        """
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

    def _new_context(self, call: Call) -> _Context:
        return _Context(self._plan, call.profile, self._scratch, self._stream)

    def _enqueue_recorded(self, shapes: Call, call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A call that the caller records. It computes in memory of the recording, so that launches may go to any stream, beside
        calls on this one: torch gives what is let go of in a recording to later work of that recording, and to nobody else."""
        context = self._callers_context(shapes)
        memory = self._plan.scratch.new()
        if not _is_a_recordings(memory):
            raise UserError(
                "torch knows nothing of the recording, and would give the memory of the call to others",
                expected="a recording by torch.cuda.graph",
                got="one that something else began",
                remedy="record with torch.cuda.graph(…, stream=…)",
            )
        context.compute_in(memory)
        try:
            outputs = self._enqueue(call, tensors, context)
        finally:
            context.compute_in(self._scratch)
        # From now on it is the recording's: shapes that a context is told later may reach what was recorded from it.
        self._ready[shapes] = context
        if context not in self._recorded:
            self._recorded.append(context)
        if self._contexts.get(call.profile) is context:
            del self._contexts[call.profile]
        return outputs

    def _callers_context(self, call: Call) -> _Context:
        """A context for a recording of the caller's: that of the last plain call, since telling shapes may wait for the device.

        Raises:
            UserError: the last plain call had other shapes. The next one of these shapes gets a context to itself.
        """
        for context in (self._ready.get(call), self._contexts.get(call.profile)):
            if context is not None and context.has_run(call):
                return context
        self._wanted.add(call)
        raise unready("other shapes in the last call on this stream that no graph of ours ran")

    def _enqueue(self, call: Call, tensors: Sequence[Tensor], context: _Context) -> list[Tensor]:
        plan = self._plan
        tensors = [x.detach().clone() if x.data_ptr() % _ALIGNMENT else x for x in tensors]
        outputs = plan.empty_outputs(call)
        context.enqueue(call, [x.data_ptr() for x in (*tensors, *outputs)], self._handle)
        return outputs

    @property
    def _has_room(self) -> bool:
        """For a further graph, or in the place of one that is not needed any more."""
        if len(self._graphs) < self._limit:
            return True
        return bool(self._limit) and self._calls - next(iter(self._graphs.values())).used > _UNUSED

    def _record(self, call: Call) -> _Graph | None:
        """A graph of the call, where there are as many as may be in place of the least recently used one; None where there is no
        memory for it now, or the engine cannot be recorded."""
        if self._rest:
            self._rest -= 1
            return None
        try:
            graph = _Graph(self._plan, call, self._new_context(call), self._stream)
        except (BackendUnavailable, RuntimeError) as error:
            self._rest = _REST
            with contextlib.suppress(RuntimeError):  # of the device, which the call meets with as well
                self._stream.synchronize()  # its context goes, which the call before the recording may be using
            if isinstance(error, torch.OutOfMemoryError) or lacks_memory(str(error)):
                return None
            self._failures += 1
            if self._failures == 1:
                warn(f"the engine runs without CUDA graphs, which makes calls some microseconds slower: {error}")
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


def _is_a_recordings(memory: Tensor) -> bool:
    """Whether torch keeps memory that it just gave for the CUDA graph that is recorded, as long as the graph lives. It does for
    `torch.cuda.graph`, and knows nothing of recordings that something else began."""
    if not memory.numel():
        return True
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        return backend == "cudaMallocAsync"  # memory that CUDA gives and takes back in a recording is part of the graph
    address, ordinary = memory.data_ptr(), (0, 0)
    return any(
        segment["address"] <= address < segment["address"] + segment["total_size"]
        and tuple(segment["segment_pool_id"]) != ordinary
        for segment in torch.cuda.memory_snapshot()
    )


def unready(got: str) -> UserError:
    """The error of a call that the caller records, and for which nothing is ready: that takes work that cannot be recorded."""
    return UserError(
        "the component is not ready to be recorded into a CUDA graph",
        expected="a call with the same shapes on the same stream just before the recording",
        got=got,
        remedy="call it with these shapes on that stream once more, outside of a recording, and record again",
    )
