"""A CUDA graph of work whose inputs and outputs lie somewhere else at every launch.

What a graph recorded keeps the addresses that it was recorded with. So the work reads and writes buffers of its own, and copies
between these and the caller's memory are part of the graph: one kernel for all inputs, one for all outputs, of our library
(graph_copies.h). One call of the library tells these where the caller's memory is now, if it moved, and launches.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import runtime as cudart  # pyright: ignore[reportAttributeAccessIssue]  # no stubs
from torch import Tensor

from trtconvert.errors import BackendUnavailable
from trtconvert.library import load_library, outdated

REMEDY = "free device memory if it is short; else run with CUDA_LAUNCH_BLOCKING=1 and report the message"
"""Where the device refuses work that it took before."""

_MOST_COPIES = 32  # TRTCONVERT_MOST_COPIES of graph_copies.h


class _Copy(ctypes.Structure):
    """TrtConvertCopy."""

    _fields_ = [("buffer", ctypes.c_void_p), ("outer", ctypes.c_void_p), ("bytes", ctypes.c_uint64)]


class _Node(ctypes.Structure):
    """TrtConvertCopyNode, field by field; graph_copies.h says what each means."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        *[(name, ctypes.c_int32) for name in ("outwards", "count", "blocks")],
        ("node", ctypes.c_void_p),
        ("copies", _Copy * _MOST_COPIES),
    ]


class _Graph(ctypes.Structure):
    """TrtConvertCopyingGraph."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("exec", "stream", "nodes", "addresses")],
        ("num_nodes", ctypes.c_int32),
    ]


class CopyingGraph:
    """See the module. Used by one host thread at a time; the current device is that of the buffers.

    Args:
        work: enqueues on the stream whose handle it is given what reads `inputs` and writes `outputs`. Runs once, to be
            recorded, and must not wait for the device.
        inputs, outputs: buffers, contiguous, which the caller keeps for as long as launches go on.
        stream: handle of the stream that launches go to.
    Raises:
        BackendUnavailable: CUDA cannot record the work, or our library is missing or of an older version.
    """

    def __init__(
        self, work: Callable[[int], None], inputs: Sequence[Tensor], outputs: Sequence[Tensor], stream: int
    ) -> None:
        record, self._launch = _functions()
        into, out = _nodes(inputs, outwards=False), _nodes(outputs, outwards=True)
        graph = _record(record, work, into, out)
        # Nodes can be told addresses as long as there is the graph that they were instantiated from.
        _destroyed_with(self, cudart.cudaGraphDestroy, graph)
        flags = cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagAutoFreeOnLaunch  # as torch's own graphs
        instance = _checked(cudart.cudaGraphInstantiate(graph, flags), "instantiate the recorded call")
        _destroyed_with(self, cudart.cudaGraphExecDestroy, instance)
        self._nodes = (_Node * len(into + out))(*into, *out)
        self._addresses = (ctypes.c_uint64 * (len(inputs) + len(outputs)))()
        where = [ctypes.addressof(x) for x in (self._nodes, self._addresses)]
        # Made once: what ctypes converts for a call costs as much as what the call does.
        self._argument = ctypes.byref(_Graph(int(instance), stream, *where, len(self._nodes)))

    def launch(self, addresses: list[int]) -> None:
        """Enqueue copies and work.

        The memory is used in the stream's order: torch's allocator gives what was allocated on the stream to others only
        behind the launch, so the host may let go of its tensors at once. Launches on their way keep their addresses.

        Args:
            addresses: of contiguous tensors that kernels on the device can use, as large as the buffers: inputs, then
                outputs. At any alignment.
        Raises:
            BackendUnavailable: the device refuses.
        """
        self._addresses[:] = addresses
        if status := self._launch(self._argument):
            raise _failure(cudart.cudaError_t(status), "launch the recorded call")


def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """The library's, that record copies and that launch.

    Raises:
        BackendUnavailable: there is no library, or an older one.
    """
    library = load_library()
    try:
        return library.trtconvert_record_copies, library.trtconvert_launch_copies
    except AttributeError as error:
        raise outdated(error) from error


def _nodes(buffers: Sequence[Tensor], *, outwards: bool) -> list[_Node]:
    """Copies of all buffers, in their order, in as few nodes as hold them."""
    nodes = []
    for first in range(0, len(buffers), _MOST_COPIES):
        some = buffers[first : first + _MOST_COPIES]
        copies = [_Copy(buffer=x.data_ptr(), bytes=x.nbytes) for x in some]
        node = _Node(struct_size=ctypes.sizeof(_Node), outwards=outwards, count=len(some))
        node.copies[: len(some)] = copies
        nodes.append(node)
    return nodes


def _record(
    record: Callable[..., int], work: Callable[[int], None], into: Sequence[_Node], out: Sequence[_Node]
) -> Any:
    """A graph of copies, work, copies: one after the other, as drivers launch soonest, and small beside the work."""
    # On a stream of its own, so that nobody else's work is recorded. The default stream cannot be recorded at all.
    stream = _checked(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking), "make a stream to record on")
    try:
        # Other threads may allocate meanwhile: what they do is not recorded.
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _checked(cudart.cudaStreamBeginCapture(stream, mode), "record")
        try:
            _record_copies(record, into, stream)
            work(int(stream))
            _record_copies(record, out, stream)
        except BaseException:
            _, graph = cudart.cudaStreamEndCapture(stream)
            if graph is not None:
                cudart.cudaGraphDestroy(graph)
            raise
        return _checked(cudart.cudaStreamEndCapture(stream), "record the call")
    finally:
        cudart.cudaStreamDestroy(stream)


def _record_copies(record: Callable[..., int], nodes: Sequence[_Node], stream: Any) -> None:
    for node in nodes:
        if status := record(ctypes.c_void_p(int(stream)), ctypes.byref(node)):
            raise _failure(cudart.cudaError_t(status), "record copies")


def _destroyed_with(owner: object, destroy: Callable[[Any], object], handle: Any) -> None:
    """Free what CUDA keeps when its owner goes; at the end of the process the driver does so itself."""
    weakref.finalize(owner, destroy, handle).atexit = False


def _checked(result: tuple, doing: str) -> Any:
    """What a CUDA call gave, without its status: nothing, one value, or several.

    Raises:
        BackendUnavailable: it failed.
    """
    status, *values = result
    if status:
        raise _failure(status, doing)
    return values[0] if len(values) == 1 else values


def _failure(status: Any, doing: str) -> BackendUnavailable:
    name, text = (call(status)[1].decode() for call in (cudart.cudaGetErrorName, cudart.cudaGetErrorString))
    return BackendUnavailable(
        f"CUDA could not {doing}",
        expected="a device that takes work",
        got=f"{name}: {text}",
        remedy=REMEDY,
    )
