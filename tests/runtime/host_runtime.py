"""Stand-ins for CUDA and TensorRT that record the host's calls."""

import ctypes
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import torch
from cuda.bindings import runtime as cudart

from trtconvert.engine import tensorrt
from trtconvert.engine.logs import make_log
from trtconvert.export.lowering.layers import expand_layers
from trtconvert.export.nodes.attention import attention_nodes
from trtconvert.recipe import EngineSection
from trtconvert.runtime import graph as graphs


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
        """Does the work of a kernel's launch."""
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
            nodes = {node.node: node for node in (graphs.CopyNode * graph.num_nodes).from_address(graph.nodes)}
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


def addresses(*tensors):
    return [x.data_ptr() for x in tensors]


class HostContext:
    """TensorRT's execution context as far as lanes need it, of an engine for y = 2 · a + b in two kernels.

    The first leaves 2 · a in the context's memory. Between the two, other threads may run.

    Attributes:
        told: shapes in the order of their setting, and whether the caller was recording then.
        memory: address of the context's memory; computed_in: this address at each run.
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
"""A length with engine outputs of another length."""


class HostEngine:
    """TensorRT's engine of `HostContext`. Attributes: contexts: its execution contexts."""

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


class HostLogger:
    """TensorRT's ILogger; tests call it in TensorRT's place."""

    ERROR, INTERNAL_ERROR, WARNING = "ERROR", "INTERNAL_ERROR", "WARNING"


class HostRefitter:
    """TensorRT's Refitter, of an engine with all weights of an ONNX model.

    Attributes:
        engine: its weights by name; they are replaced when it refits. fused: names that go together.
        given: names that the last one was given.
    """

    engine: ClassVar[dict[str, torch.Tensor]] = {}
    works, given, fused = True, (), ()

    def __init__(self, engine, log) -> None:
        self.new = {}
        HostRefitter.given = []

    def get_all_weights(self):
        return list(self.engine)

    def get_weights_prototype(self, name):
        return SimpleNamespace(dtype=str(self.engine[name].dtype), size=self.engine[name].numel())

    def set_named_weights(self, name, weights, where="host"):
        assert where == "host"  # there is no device
        self.given.append(name)
        self.new[name] = weights
        return True

    def unset_named_weights(self, name):
        return self.new.pop(name, None) is not None

    def get_missing_weights(self):
        return [n for n in self.fused if n not in self.new and self.new.keys() & set(self.fused)]

    def refit_cuda_engine(self):
        for name, (dtype, address, size) in self.new.items():
            old = self.engine[name]
            assert dtype == str(old.dtype) and size == old.numel()
            read = (ctypes.c_byte * old.nbytes).from_address(address)
            self.engine[name] = torch.frombuffer(bytearray(read), dtype=old.dtype).reshape(old.shape)
        return self.works


REFIT_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT64": "int64", "INT32": "int32"}
"""TensorRT's types of weights."""


def engine_graph(model, layers):
    """The graph of a refittable engine, its nodes in order. With INT8 layers, all attention is TensorRT's own."""
    if layers == "exact":
        expand_layers(model, exact=True)
        return model
    sites, dims = list(attention_nodes(model)), {"batch": (1, 4, 8)}
    return tensorrt.lowered(model, sites, EngineSection(refittable=True, layers=layers), [dims])


def engine_weights(lowered):
    """Return the weights of an engine by name."""
    types = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16, "INT32": torch.int32}
    tensors = {name: value.const_value for name, value in lowered.graph.initializers.items()}
    return {
        name: torch.tensor(x.numpy().astype("int32" if x.dtype.name == "INT32" else "float32")).to(types[x.dtype.name])
        for name, x in tensors.items()
        if x.dtype.name in types
    }


TRT = SimpleNamespace(ILogger=HostLogger, ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=0))
LOG = make_log(TRT)


def computes(made, length=4):
    a, b = torch.randn(length), torch.randn(length)
    return torch.equal(made(a, b), 2 * a + b)
