"""A CUDA graph of work whose inputs and outputs lie somewhere else at every launch.

What a graph recorded keeps the addresses that it was recorded with. So the work reads and writes buffers of its own, and copies
between these and the caller's memory are part of the graph. Before a launch only copies whose outer end has moved are told
so, which the host does sooner than it enqueues a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import runtime as cudart  # pyright: ignore[reportAttributeAccessIssue]  # no stubs
from torch import Tensor

from trtconvert.errors import BackendUnavailable

_ON_DEVICE = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice

REMEDY = "free device memory if it is short; else run with CUDA_LAUNCH_BLOCKING=1 and report the message"
"""Where the device refuses work that it took before."""

_Copy = tuple[int, int, int]
"""Where to, where from, how many bytes."""


class CopyingGraph:
    """See the module. Used by one host thread at a time; the current device is that of the buffers.

    Args:
        work: enqueues on the stream whose handle it is given what reads `inputs` and writes `outputs`. Runs once, to be
            recorded, and must not wait for the device.
        inputs, outputs: buffers, contiguous, which the caller keeps for as long as launches go on.
    Raises:
        BackendUnavailable: CUDA cannot record the work.
    """

    def __init__(self, work: Callable[[int], None], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        # Ends for the recording only, of the same kind of memory as the caller's: `aim` moves all of them away.
        spares = [torch.empty_like(x) for x in (*inputs, *outputs)]
        ends = list(zip((*inputs, *outputs), spares, strict=True))
        into = [(x.data_ptr(), spare.data_ptr(), x.nbytes) for x, spare in ends[: len(inputs)]]
        out = [(spare.data_ptr(), x.data_ptr(), x.nbytes) for x, spare in ends[len(inputs) :]]
        graph = _record(work, into, out)
        # Copies can be told addresses as long as there is the graph that they were instantiated from.
        _destroyed_with(self, cudart.cudaGraphDestroy, graph)
        flags = cudart.cudaGraphInstantiateFlags.cudaGraphInstantiateFlagAutoFreeOnLaunch  # as torch's own graphs
        self._exec = _checked(cudart.cudaGraphInstantiate(graph, flags), "instantiate the recorded call")
        _destroyed_with(self, cudart.cudaGraphExecDestroy, self._exec)
        nodes = _copies(graph)
        self._nodes = [nodes.get((to, start)) for to, start, _ in (*into, *out)]  # None for tensors without elements
        self._buffers = [(x.data_ptr(), x.nbytes) for x, _ in ends]
        self._inputs = len(inputs)
        self._aimed = [0] * len(ends)

    def aim(self, addresses: list[int]) -> bool:
        """Set where the launches from now on read inputs and write outputs; those on their way keep what they have.

        Args:
            addresses: of contiguous tensors on the device, as large as the buffers: inputs, then outputs. At any alignment.
        Returns:
            False where CUDA refuses one: a graph's copy stays with the kind of memory that it was recorded with, and tensors
            of other libraries may be mapped in other ways than torch's.
        """
        aimed = self._aimed
        if addresses == aimed:
            return True
        for index, address in enumerate(addresses):
            if address != aimed[index]:
                node, (buffer, size) = self._nodes[index], self._buffers[index]
                to, start = (buffer, address) if index < self._inputs else (address, buffer)
                if node is not None:
                    (status,) = cudart.cudaGraphExecMemcpyNodeSetParams1D(self._exec, node, to, start, size, _ON_DEVICE)
                    if status:
                        aimed[index] = 0  # unknown
                        return False
                aimed[index] = address
        return True

    def launch(self, stream: int) -> None:
        """Enqueue copies and work on a stream, given by its handle.

        The memory that it was aimed at is used in the stream's order: torch's allocator gives what was allocated on the
        stream to others only behind the launch, so the host may let go of its tensors at once.

        Raises:
            BackendUnavailable: the device refuses.
        """
        (status,) = cudart.cudaGraphLaunch(self._exec, stream)
        if status:
            raise _failure(status, "launch the recorded call")


def _record(work: Callable[[int], None], into: Sequence[_Copy], out: Sequence[_Copy]) -> Any:
    """A graph of copies, work, copies: one after the other, as drivers launch soonest, and small beside the work."""
    # On a stream of its own, so that nobody else's work is recorded. The default stream cannot be recorded at all.
    stream = _checked(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking), "make a stream to record on")
    try:
        # Other threads may allocate meanwhile: what they do is not recorded.
        mode = cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _checked(cudart.cudaStreamBeginCapture(stream, mode), "record")
        try:
            _enqueue(into, stream)
            work(int(stream))
            _enqueue(out, stream)
        except BaseException:
            _, graph = cudart.cudaStreamEndCapture(stream)
            if graph is not None:
                cudart.cudaGraphDestroy(graph)
            raise
        return _checked(cudart.cudaStreamEndCapture(stream), "record the call")
    finally:
        cudart.cudaStreamDestroy(stream)


def _enqueue(copies: Sequence[_Copy], stream: Any) -> None:
    for to, start, size in copies:
        if size:
            _checked(cudart.cudaMemcpyAsync(to, start, size, _ON_DEVICE, stream), "record a copy")


def _copies(graph: Any) -> dict[tuple[int, int], Any]:
    """The copies of a graph by where to and where from."""
    _, count = _checked(cudart.cudaGraphGetNodes(graph), "count what was recorded")
    nodes, _ = _checked(cudart.cudaGraphGetNodes(graph, count), "list what was recorded")
    found = {}
    for node in nodes:
        kind = _checked(cudart.cudaGraphNodeGetType(node), "look at a node")
        if kind == cudart.cudaGraphNodeType.cudaGraphNodeTypeMemcpy:
            copy = _checked(cudart.cudaGraphMemcpyNodeGetParams(node), "look at a copy")
            found[copy.dstPtr.ptr, copy.srcPtr.ptr] = node
    return found


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
