"""A CUDA graph with new addresses of inputs and outputs at every launch.

A captured graph keeps its addresses. The work therefore reads and writes fixed buffers, and the graph also copies between the
buffers and the caller's memory: one kernel for all inputs and one for all outputs, of our library (graph_copies.h). One library
call updates the caller's addresses and launches the graph.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import runtime as cudart  # pyright: ignore[reportAttributeAccessIssue]  # no stubs
from torch import Tensor

from trtconvert import c_structs
from trtconvert.c_structs import CopyNode
from trtconvert.errors import BackendUnavailable
from trtconvert.library import load_library, outdated

REMEDY = "free device memory if it is short; else run with CUDA_LAUNCH_BLOCKING=1 and report the message"
"""Remedy for a device that refuses work."""


class CopyingGraph:
    """See the module. One host thread at a time may use it, with the buffers' device as the current device.

    Args:
        work: enqueues the work from `inputs` to `outputs` on the stream with a given handle. Called once, during the capture, and
            must not wait for the device.
        inputs, outputs: contiguous buffers, which the caller keeps as long as launches run.
        stream: handle of the stream of launches.
    Raises:
        BackendUnavailable: CUDA cannot capture the work, or our library is missing or too old.
    """

    def __init__(
        self, work: Callable[[int], None], inputs: Sequence[Tensor], outputs: Sequence[Tensor], stream: int
    ) -> None:
        record, self._launch = _functions()
        into, out = _nodes(inputs, outwards=False), _nodes(outputs, outwards=True)
        graph = _record(record, work, into, out)
        # Updating node addresses needs the graph of the instance.
        _destroyed_with(self, cudart.cudaGraphDestroy, graph)
        flags = cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagAutoFreeOnLaunch  # as torch's own graphs
        instance = _checked(cudart.cudaGraphInstantiate(graph, flags), "instantiate the recorded call")
        _destroyed_with(self, cudart.cudaGraphExecDestroy, instance)
        self._nodes = (CopyNode * len(into + out))(*into, *out)
        self._addresses = (ctypes.c_uint64 * (len(inputs) + len(outputs)))()
        where = [ctypes.addressof(x) for x in (self._nodes, self._addresses)]
        # Made once: ctypes' conversions for a call cost as much as the call.
        self._argument = ctypes.byref(c_structs.CopyingGraph(int(instance), stream, *where, len(self._nodes)))

    def launch(self, addresses: list[int]) -> None:
        """Enqueue copies and work.

        The caller may free its tensors at once, because torch's allocator reuses memory in the stream's order. Pending launches
        keep their addresses.

        Args:
            addresses: addresses of contiguous tensors of the buffers' sizes that the device can access, at any alignment: inputs,
                then outputs.
        Raises:
            BackendUnavailable: the device refuses the launch.
        """
        self._addresses[:] = addresses
        if status := self._launch(self._argument):
            raise _failure(cudart.cudaError_t(status), "launch the recorded call")


def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """Return the library's functions for capturing copies and for launching.

    Raises:
        BackendUnavailable: the library is missing or too old.
    """
    library = load_library()
    try:
        return library.trtconvert_record_copies, library.trtconvert_launch_copies
    except AttributeError as error:
        raise outdated(error) from error


def _nodes(buffers: Sequence[Tensor], *, outwards: bool) -> list[CopyNode]:
    """Return the copies of all buffers, in order, in as few nodes as possible."""
    nodes = []
    for first in range(0, len(buffers), c_structs.MOST_COPIES):
        some = buffers[first : first + c_structs.MOST_COPIES]
        copies = [c_structs.Copy(buffer=x.data_ptr(), bytes=x.nbytes) for x in some]
        node = CopyNode(struct_size=ctypes.sizeof(CopyNode), outwards=outwards, count=len(some))
        node.copies[: len(some)] = copies
        nodes.append(node)
    return nodes


def _record(
    record: Callable[..., int], work: Callable[[int], None], into: Sequence[CopyNode], out: Sequence[CopyNode]
) -> Any:
    """Capture a sequence of copies, work and copies, which drivers launch faster than a graph with branches."""
    # A stream of its own captures no other work, and the default stream cannot be captured.
    stream = _checked(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking), "make a stream to record on")
    try:
        # Other threads may allocate meanwhile; their work is not captured.
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


def _record_copies(record: Callable[..., int], nodes: Sequence[CopyNode], stream: Any) -> None:
    for node in nodes:
        if status := record(ctypes.c_void_p(int(stream)), ctypes.byref(node)):
            raise _failure(cudart.cudaError_t(status), "record copies")


def _destroyed_with(owner: object, destroy: Callable[[Any], object], handle: Any) -> None:
    """Destroy a CUDA handle with its owner, except at the end of the process, when the driver destroys it."""
    weakref.finalize(owner, destroy, handle).atexit = False


def _checked(result: tuple, doing: str) -> Any:
    """Return the results of a CUDA call without its status.

    Raises:
        BackendUnavailable: the call failed.
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
