"""Engines on streams, and the CUDA graphs of their calls, tried on the host: what CUDA and TensorRT are told, and when."""

import contextlib
import ctypes
import threading
import time
import warnings
import weakref
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from cuda.bindings import runtime as cudart
from support import at_once

from trtconvert.bundle import ComponentRecord, EngineRecord, TensorRecord
from trtconvert.engine import builder, loading, tensorrt
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.runtime import graph as graphs
from trtconvert.runtime import lane as _lane
from trtconvert.runtime import tensorrt as tensorrt_runtime
from trtconvert.runtime.graph import CopyingGraph
from trtconvert.runtime.lane import Call, Lane, Plan
from trtconvert.runtime.scratch import Scratch
from trtconvert.runtime.tensorrt import TensorRTComponent

# CUDA graphs -----------------------------------------------------------------------------------------------------------


class HostRuntime:
    """CUDA's runtime and our library as far as graphs of copies need them: addresses are the host's, a launch runs at once.

    Attributes:
        recording: nodes so far, or None. Copies are a number, work is a function.
        instances: graphs that were instantiated.
        launched: how many launches there were.
        streams, graphs: how many there are.
        recordable: whether recordings succeed; status: what other calls return.
        pause: seconds between the kernels of an engine.
    """

    def __init__(self) -> None:
        self.recording, self.instances, self.recordable = None, [], True
        self.launched = self.streams = self.graphs = self.pause = 0
        self.status = cudart.cudaError_t.cudaSuccess

    def __getattr__(self, name):
        return getattr(cudart, name)

    def run(self, work):
        """What a kernel's launch does."""
        work() if self.recording is None else self.recording.append(work)

    def cudaStreamCreateWithFlags(self, flags):
        self.streams += 1
        return self.status, 7

    def cudaStreamDestroy(self, stream):
        self.streams -= 1
        return (self.status,)

    def cudaStreamBeginCapture(self, stream, mode):
        self.recording = []
        return (self.status,)

    def cudaStreamEndCapture(self, stream):
        graph, self.recording = self.recording, None
        if not self.recordable:
            return cudart.cudaError_t.cudaErrorStreamCaptureUnsupported, None
        self.graphs += 1
        return self.status, graph

    def cudaGraphDestroy(self, graph):
        self.graphs -= 1
        return (self.status,)

    def cudaGraphInstantiate(self, graph, flags):
        self.instances.append(graph)
        return self.status, len(self.instances)

    def cudaGraphExecDestroy(self, instance):
        return (self.status,)

    def trtconvert_record_copies(self, stream, node):
        node._obj.node = len(self.recording) + 1
        self.recording.append(node._obj.node)
        return int(self.status)

    def trtconvert_launch_copies(self, given):
        graph = given._obj
        if self.status == cudart.cudaError_t.cudaSuccess:
            self.launched += 1
            nodes = {node.node: node for node in (graphs._Node * graph.num_nodes).from_address(graph.nodes)}
            count = sum(node.count for node in nodes.values())
            moved = iter((ctypes.c_uint64 * count).from_address(graph.addresses))
            outer = {number: [next(moved) for _ in range(node.count)] for number, node in nodes.items()}
            for node in self.instances[graph.exec - 1]:
                if not isinstance(node, int):
                    node()
                    continue
                for copy, address in zip(nodes[node].copies, outer[node], strict=False):
                    ends = (address, copy.buffer) if nodes[node].outwards else (copy.buffer, address)
                    ctypes.memmove(*ends, copy.bytes)
        return int(self.status)


@pytest.fixture
def cuda(monkeypatch):
    host = HostRuntime()
    monkeypatch.setattr(graphs, "cudart", host)
    monkeypatch.setattr(graphs, "load_library", lambda: host)
    return host


@pytest.fixture
def doubling(cuda):
    """A graph of y = 2 · a + b for vectors of four."""
    a, b, nothing, y = torch.ones(4), torch.ones(4), torch.ones(0), torch.ones(4)

    def work(stream):
        cuda.run(lambda: torch.add(b, a, alpha=2, out=y))

    yield CopyingGraph(work, [a, b, nothing], [y], 0)  # the buffers live until the test is over


def addresses(*tensors):
    return [x.data_ptr() for x in tensors]


def test_a_graph_reads_and_writes_where_it_is_aimed(cuda, doubling):
    none = torch.ones(0)
    for _ in range(3):
        a, b, first, second = torch.randn(4, 4)
        doubling.launch(addresses(a, b, none, first))
        assert torch.equal(first, 2 * a + b)
        kept = first.clone()
        doubling.launch(addresses(b, b, none, second))
        assert torch.equal(second, 3 * b) and torch.equal(first, kept)


def test_more_tensors_than_a_node_copies(cuda):
    inputs, outputs = ([torch.empty(1 + i % 3) for i in range(count)] for count in (69, 33))
    graph = CopyingGraph(
        lambda stream: cuda.run(lambda: [y.copy_(x) for x, y in zip(inputs[36:], outputs, strict=True)]),
        inputs,
        outputs,
        0,
    )
    given, results = [torch.randn_like(x) for x in inputs], [torch.empty_like(x) for x in outputs]
    graph.launch(addresses(*given, *results))
    assert [node if isinstance(node, int) else 0 for node in cuda.instances[0]] == [1, 2, 3, 0, 5, 6]
    assert all(torch.equal(*pair) for pair in zip(given[36:], results, strict=True))


def test_a_launch_that_fails_says_what_cuda_says(cuda, doubling):
    cuda.status = cudart.cudaError_t.cudaErrorIllegalAddress
    with pytest.raises(BackendUnavailable, match=r"(?s)launch.*got: cudaErrorIllegalAddress: an illegal.*remedy: "):
        doubling.launch(addresses(*torch.ones(4, 4)))


def test_a_recording_that_fails_leaves_nothing_behind(cuda):
    def work(stream):
        raise BackendUnavailable("no")

    with pytest.raises(BackendUnavailable):
        CopyingGraph(work, [torch.ones(4)], [], 0)
    assert cuda.streams == cuda.graphs == 0 and cuda.recording is None


def test_a_library_of_an_older_version_is_named(monkeypatch):
    older = ctypes.CDLL(None)  # what the process has, without our functions
    monkeypatch.setattr(graphs, "load_library", lambda: older)
    with pytest.raises(BackendUnavailable, match=r"(?s)older than.*got: .*trtconvert_record_copies.*remedy: "):
        CopyingGraph(lambda stream: None, [torch.ones(4)], [], 0)


def test_what_cuda_keeps_goes_with_the_graph(cuda):
    graph = CopyingGraph(lambda stream: None, [torch.ones(4)], [], 0)
    assert cuda.graphs == 1 and cuda.streams == 0
    del graph
    assert cuda.graphs == 0


# Engines ---------------------------------------------------------------------------------------------------------------


class HostContext:
    """TensorRT's execution context as far as lanes need it, of an engine for y = 2 · a + b in two kernels.

    The first leaves 2 · a in the context's memory. Between the two, other threads may run.

    Attributes:
        told: shapes in the order in which they were set, and whether the caller was recording then.
        memory: address of what it computes in; computed_in: what it was at each run.
    """

    def __init__(self, cuda) -> None:
        self.cuda, self.at, self.shape, self.told, self.memory, self.computed_in = cuda, {}, (), [], 0, []

    def set_optimization_profile_async(self, profile, stream):
        return True

    def set_device_memory(self, address, size):
        self.memory = address

    def set_input_shape(self, name, shape):
        self.shape = shape
        self.told.append((shape, torch.cuda.is_current_stream_capturing()))
        return True

    def get_tensor_shape(self, name):
        return (7,) if self.shape == (REFUSED,) else self.shape

    def set_tensor_address(self, name, address):
        self.at[name] = address
        return True

    def execute_async_v3(self, stream):
        self.computed_in.append(self.memory)
        doubled = self.vector(self.memory)
        a, b, y = (self.vector(self.at[name]) for name in "aby")
        self.cuda.run(lambda: torch.mul(a, 2, out=doubled))
        if self.cuda.recording is None:
            time.sleep(self.cuda.pause)
        self.cuda.run(lambda: torch.add(doubled, b, out=y))
        return True

    def vector(self, address):
        (length,) = self.shape
        return torch.frombuffer((ctypes.c_float * length).from_address(address), dtype=torch.float32)


REFUSED = 10
"""A length for which the engine gives outputs of another."""

LOG = SimpleNamespace(last=lambda: "what TensorRT logged", errors=[])


class HostEngine:
    """TensorRT's engine of `HostContext`. Attributes: contexts: those that were made."""

    num_io_tensors, device_memory_size_v2 = 3, 4096

    def __init__(self, cuda) -> None:
        self.cuda, self.contexts = cuda, []

    def get_tensor_name(self, index):
        return "aby"[index]

    def create_execution_context(self, strategy):
        self.contexts.append(HostContext(self.cuda))
        return self.contexts[-1]


@dataclass
class Machine:
    """Streams of a GPU that is not there.

    Attributes:
        current: handle of the current stream; recording: whether the caller records it into a graph; torchs: by means of torch,
            which then keeps what it gives for the graph.
        destroyed: handles of streams that their owner destroyed.
        waited: handles of the streams that were waited for.
        memory: whether there is any for tensors of a call.
    """

    current: int = 7
    recording: bool = False
    torchs: bool = True
    memory: bool = True
    destroyed: set[int] = field(default_factory=set)
    waited: list[int] = field(default_factory=list)

    def stream(self, handle):
        def synchronize():
            self.waited.append(handle)
            if handle in self.destroyed:
                raise RuntimeError("CUDA error: invalid resource handle")

        return SimpleNamespace(cuda_stream=handle, synchronize=synchronize)


@pytest.fixture
def machine(monkeypatch):
    found = Machine()
    empty = torch.empty
    last: list[torch.Tensor] = []

    def allocated(*arguments, **options):
        if not found.memory:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        last[:] = [empty(*arguments, **options)]
        return last[0]

    def segments():
        """That of the last allocation, and one before it that is not of its pool: where a segment ends counts."""
        address, size = last[0].data_ptr(), last[0].nbytes
        of_recording = found.recording and found.torchs
        return [
            {"address": address - 4096, "total_size": 4096, "segment_pool_id": (0, int(not of_recording))},
            {"address": address, "total_size": size, "segment_pool_id": (0, int(of_recording))},
        ]

    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.recording)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found.stream(found.current))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.current, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    for place in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, place, lambda _: contextlib.nullcontext())
    return found


class HostLogger:
    """TensorRT's module, as far as a logger needs it."""

    class ILogger:
        ERROR, INTERNAL_ERROR, WARNING = "ERROR", "INTERNAL_ERROR", "WARNING"


TRT = SimpleNamespace(ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=0))


@pytest.fixture
def plan_of():
    """Makes plans of engines that compute in one memory."""
    scratch, types = Scratch(torch.device("cpu")), (torch.float32, torch.float32)
    scratch.reserve(HostEngine.device_memory_size_v2)
    return lambda engine: Plan(TRT, engine, LOG, ("a", "b"), types, ("y",), types[:1], torch.device("cpu"), scratch)


@pytest.fixture
def open_lane(cuda, machine, plan_of):
    """Makes lanes with room for so many graphs, on one stream and in one memory."""
    return lambda graphs: Lane(plan_of(HostEngine(cuda)), machine.stream(7), graphs)


CALLS = {length: Call(0, ((length,), (length,)), ((length,),)) for length in (4, 6, 8, REFUSED)}


def right(lane, length):
    """Whether a call with new inputs, one of them not contiguous, gives what it should."""
    a, b = torch.randn(length, 2)[:, 0], torch.randn(length)
    (y,) = lane.run(CALLS[length], (a, b))
    return torch.equal(y, 2 * a + b)


def test_the_second_call_of_a_shape_is_recorded_and_the_least_recently_used_graph_goes(cuda, open_lane):
    lane, recorded = open_lane(2), []
    for length in (4, 4, 6, 6, 4, 8, 8, 4, 6, 6):
        assert right(lane, length)
        recorded.append(lane.recorded)
    assert recorded == [0, 1, 1, 2, 2, 2, 3, 3, 3, 4] and cuda.launched == 6
    assert cuda.graphs == 2
    lane.close()
    assert cuda.graphs == 0


def test_an_engine_that_cannot_be_recorded_runs_plainly(cuda, open_lane, monkeypatch):
    lane = open_lane(4)
    assert right(lane, 4)
    cuda.recordable = False
    monkeypatch.setattr(_lane, "_REST", 2)
    with pytest.warns(RuntimeWarning, match=r"(?s)without CUDA graphs.*cudaErrorStreamCaptureUnsupported"):
        assert right(lane, 4)
    begun, begin = [], cuda.cudaStreamBeginCapture
    cuda.cudaStreamBeginCapture = lambda *given: (begun.append(given), begin(*given))[1]
    with warnings.catch_warnings(action="error"):  # said once
        assert all(right(lane, length) for length in (4, 6) * 20)
    assert cuda.launched == lane.recorded == 0 and len(begun) == _lane._MOST_FAILURES - 1


def test_a_recording_that_another_ones_was_in_the_way_of_is_made_later(cuda, open_lane, monkeypatch):
    """As where another thread records with torch's default mode, in which nobody may allocate."""
    lane = open_lane(4)
    monkeypatch.setattr(_lane, "_REST", 2)
    assert right(lane, 4)
    cuda.recordable = False
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        assert right(lane, 4)
    cuda.recordable = True
    assert [right(lane, 4) and lane.recorded for _ in range(4)] == [0, 0, 1, 1]


def test_a_graph_without_memory_is_recorded_later(cuda, open_lane, monkeypatch):
    lane, zeros = open_lane(2), torch.zeros
    monkeypatch.setattr(_lane, "_REST", 3)

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert right(lane, 4) and right(lane, 4) and lane.recorded == 1
    with warnings.catch_warnings(action="error"):
        monkeypatch.setattr(torch, "zeros", full)
        assert right(lane, 6) and right(lane, 6)
        monkeypatch.setattr(torch, "zeros", zeros)
        recorded = []
        for _ in range(5):
            assert right(lane, 6)
            recorded.append(lane.recorded)
    assert recorded == [1, 1, 1, 2, 2]
    assert right(lane, 4) and cuda.graphs == 2  # nothing was given up for the graph that did not come to be


def test_a_driver_without_memory_for_a_graph_is_asked_later(cuda, open_lane, monkeypatch):
    lane = open_lane(2)
    monkeypatch.setattr(_lane, "_REST", 1)
    assert right(lane, 4)
    instantiate = cuda.cudaGraphInstantiate
    cuda.cudaGraphInstantiate = lambda graph, flags: (cudart.cudaError_t.cudaErrorMemoryAllocation, None)
    with warnings.catch_warnings(action="error"):
        assert right(lane, 4) and lane.recorded == 0
        cuda.cudaGraphInstantiate = instantiate
        assert right(lane, 4) and right(lane, 4) and lane.recorded == 1


def test_a_call_that_is_refused_leaves_no_shapes_behind(open_lane):
    lane = open_lane(0)
    assert right(lane, 4)
    with pytest.raises(BackendUnavailable, match=r"the engine's 'y' is \[7\], the manifest says \[10\]"):
        right(lane, REFUSED)
    assert right(lane, 4) and contexts_of(lane)[0].shape == (4,)


def test_engines_on_one_stream_do_not_mix_their_kernels(cuda, open_lane):
    """From two threads: each call is two kernels, with what lies between them in the memory of both."""
    cuda.pause, wrong, lanes = 0.0005, [], [open_lane(0), open_lane(0)]

    def work(lane):
        for _ in range(50):
            with lane.lock:
                if not right(lane, 8):
                    wrong.append(lane)

    at_once(work, lanes)
    assert not wrong


def test_an_error_says_what_was_logged_since_the_one_before(plan_of, cuda, monkeypatch):
    """Else memory that ran out once would be the reason of all that fails later."""
    plan = replace(plan_of(HostEngine(cuda)), log=builder.make_log(HostLogger))
    plan.log.log("ERROR", "out of memory")
    assert "got: out of memory" in str(plan.failure("a call"))
    assert "got: no reason was logged" in str(plan.failure("a call"))
    plan.log.log("ERROR", "no such kernel")
    assert "memory" not in plan.failure("a call").got


class FragileEngine(HostEngine):
    """One that, as TensorRT's, does not bear two threads which make contexts or let go of them.

    Attributes:
        met: how often two did.
    """

    def __init__(self, cuda) -> None:
        super().__init__(cuda)
        self.met, self._one = 0, threading.Lock()

    def create_execution_context(self, strategy):
        self.change()
        context = HostContext(self.cuda)
        weakref.finalize(context, self.change)
        return context

    def change(self):
        if not self._one.acquire(blocking=False):
            self.met += 1
            return
        time.sleep(0.0005)
        self._one.release()


def test_contexts_of_an_engine_are_made_and_go_one_at_a_time(cuda, machine, plan_of):
    """From threads with a stream each, whose lanes open and close."""
    engine, wrong = FragileEngine(cuda), []
    plan = plan_of(engine)

    def work(handle):
        for _ in range(10):
            lane = Lane(plan, machine.stream(handle), 0)
            if not right(lane, 4):
                wrong.append(handle)
            lane.close()

    at_once(work, (7, 8, 9))
    assert not wrong and not engine.met


def contexts_of(lane):
    return lane._plan.engine.contexts


@pytest.mark.parametrize("graphs", [0, 4])
def test_a_recording_of_the_callers_has_a_context_to_itself(cuda, machine, open_lane, graphs):
    lane = open_lane(graphs)
    for _ in range(3):
        assert right(lane, 4)
    launched, made = cuda.launched, len(contexts_of(lane))
    machine.recording = True
    assert right(lane, 4) and right(lane, 4)
    machine.recording = False
    assert cuda.launched == launched and len(contexts_of(lane)) == made  # plain calls, on what was there
    recorded = contexts_of(lane)[0]
    before = list(recorded.told)
    for length in (6, 4, 8, 4):
        assert right(lane, length)
    assert recorded.told == before and not any(recording for _, recording in before)


@pytest.mark.parametrize("graphs", [0, 4])
def test_a_recording_of_the_callers_wants_a_call_of_its_shapes_before(machine, open_lane, graphs):
    lane = open_lane(graphs)
    for length in (4, 4, 6, 6):
        assert right(lane, length)
    machine.recording = True
    for length in (4, 8):
        with pytest.raises(UserError, match=r"(?s)not ready to be recorded.*same shapes.*got: other shapes.*remedy: "):
            right(lane, length)
        # What the message asks for.
        machine.recording = False
        assert right(lane, length)
        machine.recording = True
        assert right(lane, length)
    # Both in one recording, though they share a profile, and whatever was worked out anew meanwhile.
    assert right(lane, 4) and right(lane, 8)
    assert not any(recording for context in contexts_of(lane) for _, recording in context.told)


def test_a_recording_of_the_callers_computes_in_memory_of_its_own(machine, open_lane):
    """Which torch keeps for the recording."""
    lane = open_lane(0)
    assert right(lane, 4)
    (context,) = contexts_of(lane)
    shared = context.memory
    machine.recording = True
    assert right(lane, 4) and right(lane, 4)
    assert shared not in context.computed_in[1:] and context.memory == shared


def test_a_recording_that_torch_knows_nothing_of_is_refused(machine, open_lane):
    """Its memory would be others' as soon as the call returns."""
    lane = open_lane(0)
    assert right(lane, 4)
    machine.recording, machine.torchs = True, False
    with pytest.raises(UserError, match=r"(?s)torch knows nothing.*remedy: record with torch\.cuda\.graph"):
        right(lane, 4)
    assert not lane.is_needed
    machine.torchs = True
    assert right(lane, 4) and lane.is_needed


def test_a_recording_without_memory_left_is_refused_and_holds_nothing(machine, open_lane):
    lane = open_lane(0)
    assert right(lane, 4)
    machine.recording, machine.memory = True, False
    with pytest.raises(BackendUnavailable, match=r"(?s)no memory left for the engine's execution context.*remedy: "):
        right(lane, 4)
    machine.recording = False
    assert not lane.is_needed
    machine.recording = machine.memory = True
    assert right(lane, 4)
    machine.recording = False
    assert right(lane, 4)


def test_a_call_that_failed_makes_nothing_ready_to_be_recorded(machine, open_lane):
    """What its shapes entail has not been done, and may wait for the device."""
    lane = open_lane(0)
    assert right(lane, 6)
    for memory in (False, True):
        machine.recording = machine.memory = True
        with pytest.raises(UserError, match="not ready to be recorded"):
            right(lane, 4)
        machine.recording, machine.memory = False, memory
        with contextlib.nullcontext() if memory else pytest.raises(torch.OutOfMemoryError):
            right(lane, 4)
    machine.recording = True
    assert right(lane, 4) and not any(recording for context in contexts_of(lane) for _, recording in context.told)


def test_a_recording_that_fails_leaves_those_before_it_as_they_are(machine, open_lane, monkeypatch):
    lane = open_lane(0)
    assert right(lane, 4)
    machine.recording = True
    assert right(lane, 4)
    (first,) = map(weakref.ref, lane._recorded)
    with monkeypatch.context() as failing, pytest.raises(BackendUnavailable):
        failing.setattr(HostContext, "execute_async_v3", lambda self, stream: False)
        right(lane, 4)
    with pytest.raises(UserError, match="not ready to be recorded"):
        right(lane, 4)
    machine.recording = False
    assert right(lane, 4)
    machine.recording = True
    assert right(lane, 4)
    assert len(lane._recorded) == 2 and first() is lane._recorded[0]


def test_a_context_whose_recording_failed_is_waited_for(cuda, machine, open_lane):
    """It ran the call in front of it."""
    lane = open_lane(4)
    assert right(lane, 4)
    cuda.recordable = False
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        assert right(lane, 4)
    assert machine.waited == [7]


def test_a_recording_takes_shapes_that_were_worked_out_anew(machine, open_lane, monkeypatch):
    """As after many other shapes: what is known of calls is forgotten, and their shapes are equal and not the same."""
    lane = open_lane(0)
    assert right(lane, 4)
    monkeypatch.setitem(CALLS, 4, Call(0, ((4,), (4,)), ((4,),)))
    machine.recording = True
    assert right(lane, 4)
    assert not any(recording for context in contexts_of(lane) for _, recording in context.told)


@pytest.fixture
def component(cuda, machine, monkeypatch):
    """Makes a `TensorRTComponent` of the engine, and the scratch that it computes in."""
    engine = HostEngine(cuda)
    monkeypatch.setattr(tensorrt, "bindings", lambda: TRT)
    monkeypatch.setattr(builder, "make_log", lambda trt: LOG)
    monkeypatch.setattr(loading, "load_engine", lambda trt, log, plan: (None, engine))
    vectors = [TensorRecord(name=name, dtype="float32", shape=["length"]) for name in "aby"]
    lengths = {"length": (1, 4, 16)}
    component = ComponentRecord(
        onnx="x.onnx",
        inputs=vectors[:2],
        outputs=vectors[2:],
        timestep_input="a",
        timestep_max=1,
        dims=lengths,
        engines=[],
    )
    record = EngineRecord.of("denoiser", "tensorrt", "10.6.0", "sm90")

    def make(path, **options):
        path.write_bytes(b"plan")
        fields = {name: options.pop(name) for name in ("refittable", "weights") if name in options}
        scratch = Scratch(torch.device("cpu"))
        made = TensorRTComponent(
            path, record.model_copy(update=fields), component, device=torch.device("cpu", 0), scratch=scratch, **options
        )
        return made, scratch

    return make


def computes(made, length=4):
    a, b = torch.randn(length), torch.randn(length)
    return torch.equal(made(a, b), 2 * a + b)


def test_a_layout_that_is_found_late_is_refused_as_at_once(component, tmp_path):
    """What is known of inputs does not tell it."""
    made, _ = component(tmp_path / "a.plan", graphs=0)
    assert computes(made)
    with pytest.raises(UserError, match=r"(?s)no numbers to read.*to_dense"):
        made(torch.zeros(4).to_sparse(), torch.zeros(4))
    assert computes(made)


def test_of_more_streams_the_one_that_was_idle_longest_gives_its_memory_back(machine, component, tmp_path):
    made, scratch = component(tmp_path / "x.plan", streams=2)
    for machine.current in (11, 12, 11, 13):
        assert computes(made)
    assert set(made._lanes) == {11, 13} and scratch.allocated == 2 * scratch.size


@pytest.mark.parametrize(
    ("status", "capturing", "kept"),
    [
        ("cudaSuccess", "None", False),
        ("cudaSuccess", "Active", True),
        ("cudaSuccess", "Invalidated", True),
        ("cudaErrorStreamCaptureImplicit", None, True),  # the default stream while another one is recorded
        ("cudaErrorInvalidResourceHandle", None, False),  # of a stream that was destroyed
    ],
)
def test_nobody_waits_for_a_stream_that_is_recorded(machine, component, tmp_path, monkeypatch, status, capturing, kept):
    made, _ = component(tmp_path / "x.plan", streams=1)
    found = capturing and getattr(cudart.cudaStreamCaptureStatus, f"cudaStreamCaptureStatus{capturing}")
    monkeypatch.setattr(
        _lane.cudart, "cudaStreamIsCapturing", lambda handle: (getattr(cudart.cudaError_t, status), found)
    )
    for machine.current in (11, 12):
        assert computes(made)
    assert set(made._lanes) == ({11, 12} if kept else {12})


def test_whether_a_stream_is_idle_is_asked_while_nobody_else_uses_it(machine, component, tmp_path, monkeypatch):
    """Else somebody could begin a recording on it before it is closed."""
    made, _ = component(tmp_path / "x.plan", streams=1)
    asked = []

    def is_needed(lane):
        asked.append(lane.lock.locked())
        return False

    monkeypatch.setattr(Lane, "is_needed", property(is_needed))
    for machine.current in (11, 12):
        assert computes(made)
    assert asked == [True]


def test_a_stream_that_the_caller_recorded_keeps_its_memory(machine, component, tmp_path):
    made, scratch = component(tmp_path / "x.plan", streams=1)
    machine.current = 11
    assert computes(made)
    machine.recording = True
    assert computes(made)
    machine.current = 12
    with pytest.raises(UserError, match=r"(?s)not ready to be recorded.*got: no call on this stream"):
        computes(made)
    machine.recording = False
    for machine.current in (12, 13, 12):
        assert computes(made)
    assert set(made._lanes) == {11, 12} and scratch.allocated == 2 * scratch.size


def test_a_stream_that_its_owner_destroyed_holds_up_nothing(machine, component, tmp_path):
    made, scratch = component(tmp_path / "x.plan", streams=2)
    for machine.current in (11, 12):
        assert computes(made)
    machine.destroyed = {11}
    machine.current = 13
    assert computes(made) and set(made._lanes) == {12, 13}
    machine.destroyed = {13}
    made.close()
    assert scratch.allocated == 0
    with pytest.raises(UserError, match="was closed"):
        computes(made)
    made.close()


def test_what_fails_while_a_component_closes_is_said(machine, component, tmp_path):
    """An error of the device, which its kernels met with: nobody else may have told the caller yet."""
    made, scratch = component(tmp_path / "x.plan")
    assert computes(made)

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    (lane,) = made._lanes.values()
    lane._stream = SimpleNamespace(synchronize=fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.close()
    assert scratch.allocated == 0


def test_what_was_recorded_is_found_again_when_what_is_known_of_calls_is_forgotten(
    component, tmp_path, machine, monkeypatch
):
    monkeypatch.setattr(tensorrt_runtime, "_KNOWN_CALLS", 2)
    made, _ = component(tmp_path / "x.plan", graphs=1)
    for length in (4, 4, 5, 6, 7, 8, 9, 4):
        assert computes(made, length)
    assert made.graphs_recorded == 1
    plain, _ = component(tmp_path / "y.plan", graphs=0)
    for _ in range(3):
        for length in (6, 7, 8, 9, 5):
            assert computes(plain, length)
        machine.recording = True
        assert computes(plain, 5)
        machine.recording = False
    (lane,) = plain._lanes.values()
    assert len(lane._recorded) == 1


@pytest.mark.parametrize("recording", [False, True])
def test_a_component_that_nobody_refers_to_is_waited_for_before_it_goes(machine, component, tmp_path, recording):
    """But while its caller records: waiting would spoil that."""
    made, scratch = component(tmp_path / "x.plan")
    for machine.current in (11, 12):
        assert computes(made) and computes(made)
    machine.recording, machine.destroyed = recording, {11}
    engine = made.engine
    for context in engine.contexts:
        weakref.finalize(context, lambda: machine.waited.append(0))
    del context
    engine.contexts.clear()
    machine.waited.clear()
    del made
    assert machine.waited == ([] if recording else [11, 12]) + [0, 0, 0, 0] and scratch.allocated == 0


def test_the_memory_of_graphs_is_counted(component, tmp_path):
    made, _ = component(tmp_path / "x.plan", graphs=2)
    assert computes(made, 4) and made.graphs_memory == 0
    for length in (4, 8, 8, 16, 16):
        assert computes(made, length)
    assert made.graphs_memory == 3 * 4 * (8 + 16)  # FP32; two inputs and an output of the two that were called last
    made.close()
    assert made.graphs_memory == 0


def test_a_compiled_function_around_it_leaves_it_as_it_is(component, tmp_path):
    made, _ = component(tmp_path / "x.plan")
    compiled = torch.compile(lambda a, b: made(a * 1, b) + 1, backend="eager")
    try:
        for length in (4, 4, 4, 6, 6, 6, 4):
            a, b = torch.randn(length), torch.randn(length)
            assert torch.equal(compiled(a, b), 2 * a + b + 1)
    finally:
        torch._dynamo.reset()
    assert made.graphs_recorded == 2


def test_the_stream_that_differs_from_thread_to_thread_is_refused(machine, component, tmp_path):
    made, _ = component(tmp_path / "x.plan")
    machine.current = 2
    with pytest.raises(UserError, match=r"(?s)per-thread default stream.*remedy: "):
        computes(made)


def test_a_call_without_memory_for_its_tensors_says_how_much_it_needs(machine, component, tmp_path):
    made, _ = component(tmp_path / "x.plan")
    assert computes(made)
    machine.memory = False
    with pytest.raises(BackendUnavailable, match=r"(?s)no memory left for the tensors of a call.*remedy: "):
        computes(made)
    machine.memory = True
    assert computes(made)


# New weights -----------------------------------------------------------------------------------------------------------


class Refitter:
    """TensorRT's, of an engine with a weight [4, 6], one [6] and one that was made by transposing; of another [4, 6] the name is
    an input's, and it is there transposed as well."""

    SIZES = MappingProxyType({"w": 24, "turned.T": 24, "b": 6, "x:weight": 24, "x.T": 24})
    works, given = True, ()

    def __init__(self, engine, log) -> None:
        Refitter.given = []

    def get_all_weights(self):
        return list(self.SIZES)

    def get_weights_prototype(self, name):
        return SimpleNamespace(dtype="float", size=self.SIZES[name])

    def set_named_weights(self, name, weights):
        self.given.append(name)
        return True

    def get_missing_weights(self):
        return []

    def refit_cuda_engine(self):
        return self.works


@pytest.fixture
def refittable(component, monkeypatch, tmp_path):
    types = SimpleNamespace(FLOAT="float", HALF="half", BF16="bf16", INT64="int64", INT32="int32")
    trt = SimpleNamespace(**vars(TRT), Refitter=Refitter, DataType=types, Weights=lambda *_: None)
    monkeypatch.setattr(tensorrt, "bindings", lambda: trt)
    shapes = {"w": [4, 6], "turned.T": [6, 4], "x:weight": [4, 6], "x.T": [6, 4]}
    return component(tmp_path / "x.plan", refittable=True, weights=shapes)[0]


def test_weights_of_the_right_size_and_another_shape_are_refused(refittable):
    assert refittable.refit({"w": torch.ones(4, 6), "turned": torch.ones(4, 6), "b": torch.ones(6)}) == 3
    assert refittable.refit({"x": torch.ones(4, 6)}) == 2 and Refitter.given == ["x:weight", "x.T"]
    for name in ("w", "turned", "x"):
        for shape in ((6, 4), (24,), (2, 12)):
            with pytest.raises(
                UserError, match=rf"(?s)'{name}' does not fit.*expected: shape \[4, 6\].*got: .*remedy: "
            ):
                refittable.refit({name: torch.ones(shape)})
            assert Refitter.given == []
    assert computes(refittable)


def test_an_engine_with_old_and_new_weights_is_not_called(refittable, monkeypatch):
    assert computes(refittable)
    monkeypatch.setattr(Refitter, "works", False)
    with pytest.raises(BackendUnavailable, match=r"(?s)some may be new.*load the bundle again"):
        refittable.refit({"w": torch.ones(4, 6)})
    with pytest.raises(UserError, match="was closed"):
        computes(refittable)


def test_calls_that_wait_for_new_weights_get_no_mixed_ones(machine, refittable, monkeypatch):
    """On several streams, which the closing takes one after the other."""
    here, results = threading.local(), []
    here.stream = 7
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: here.stream)

    def current():
        return SimpleNamespace(cuda_stream=here.stream, synchronize=lambda: time.sleep(0.005))

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    for here.stream in (11, 12, 13):
        assert computes(refittable)
    inside, go = threading.Event(), threading.Event()

    def fail(refitter):
        inside.set()
        return not go.wait(5)

    def call(stream):
        here.stream = stream
        try:
            results.append(computes(refittable))
        except UserError as error:
            results.append(error.problem)

    def replace_weights():
        with pytest.raises(BackendUnavailable):
            refittable.refit({"w": torch.ones(4, 6)})

    monkeypatch.setattr(Refitter, "refit_cuda_engine", fail)
    threads = [threading.Thread(target=replace_weights)]
    threads[0].start()
    inside.wait(5)
    threads += [threading.Thread(target=call, args=(stream,)) for stream in (11, 12, 13)]
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.1)
    go.set()
    for thread in threads:
        thread.join()
    assert results == ["the component was closed"] * 3


def test_weights_are_replaced_though_the_owner_of_a_stream_destroyed_it(machine, refittable):
    for machine.current in (11, 12):
        assert computes(refittable)
    machine.destroyed = {11}
    for _ in range(2):
        assert refittable.refit({"w": torch.ones(4, 6)}) == 1
    assert set(refittable._lanes) == {12} and computes(refittable)
