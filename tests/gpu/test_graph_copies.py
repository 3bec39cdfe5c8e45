"""Graphs that copy their inputs and outputs, bit for bit, for any address of the caller's memory. Without TensorRT.

tests/plugins/test_copies_api.py has the refusals, without a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from cuda.bindings import runtime as cudart
from torch import Tensor

from trtconvert.c_structs import MOST_COPIES
from trtconvert.errors import BackendUnavailable
from trtconvert.library import library_path, load_library
from trtconvert.runtime.graph import CopyingGraph, _nodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(library_path() is None, reason="no library is installed; 'pip install .' builds it"),
]

SIZES = (0, 1, 2, 15, 16, 17, 4096 + 3, 5 * 2**20 + 7)
"""Bytes. The largest takes the thread blocks of eight copies more than one trip, on any GPU."""
CANARY = 0xA5


class Inverting:
    """A graph whose outputs are its inputs with every bit flipped.

    Args:
        sizes: bytes of each tensor; offset: of the buffers, from an aligned address.
    """

    def __init__(self, sizes: Sequence[int], offset: int = 0) -> None:
        self.inputs, self.outputs = ([at(offset, size) for size in sizes] for _ in range(2))
        self.invert()  # loads torch's kernel
        torch.cuda.synchronize()
        self.graph = CopyingGraph(self.work, self.inputs, self.outputs, torch.cuda.current_stream().cuda_stream)

    def invert(self) -> None:
        for x, y in zip(self.inputs, self.outputs, strict=True):
            torch.bitwise_not(x, out=y)

    def work(self, stream: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            self.invert()

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.graph.launch([x.data_ptr() for x in (*inputs, *outputs)])


def at(offset: int, size: int) -> Tensor:
    """Bytes that begin so far behind an aligned address, with canaries around them."""
    return torch.full((offset + size + 64,), CANARY, dtype=torch.uint8, device="cuda")[offset : offset + size]


def untouched_around(x: Tensor, offset: int) -> bool:
    whole = x.as_strided((offset + x.numel() + 64,), (1,), 0)
    return bool((whole[:offset] == CANARY).all() and (whole[offset + x.numel() :] == CANARY).all())


def random(sizes: Sequence[int], offset: int = 0) -> list[Tensor]:
    return [at(offset, size).random_(256) for size in sizes]


def flipped(given: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    return all(torch.equal(~x, y) for x, y in zip(given, results, strict=True))


@pytest.fixture(scope="module")
def inverting() -> Inverting:
    return Inverting(SIZES)


@pytest.mark.parametrize("into", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("out", [0, 1, 2, 4, 8])
def test_every_size_at_every_alignment(inverting, into, out):
    given, results = random(SIZES, into), [at(out, size) for size in SIZES]
    inverting(given, results)
    assert flipped(given, results)
    assert all(untouched_around(y, out) for y in results)
    assert all(untouched_around(y, 0) for y in (*inverting.inputs, *inverting.outputs))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_buffers_at_every_alignment(offset):
    inverting = Inverting(SIZES, offset)
    given, results = random(SIZES), [at(0, size) for size in SIZES]
    inverting(given, results)
    assert flipped(given, results)
    assert all(untouched_around(y, offset) for y in (*inverting.inputs, *inverting.outputs))


def test_one_large_tensor():
    """More than the thread blocks of one copy move in one trip."""
    sizes = [48 * 2**20 + 5]
    given, results = random(sizes), [at(0, sizes[0])]
    Inverting(sizes)(given, results)
    assert flipped(given, results)


def test_tensors_that_move_at_every_launch(inverting):
    kept = []
    for launch in range(20):
        given, results = random(SIZES, launch % 3), [at(launch % 5, size) for size in SIZES]
        if launch % 4 == 3:  # only the outputs moved, then nothing did
            given = kept[-1][0]
            inverting(given, results)
        inverting(given, results)
        kept.append((given, results))
    assert all(flipped(*pair) for pair in kept)


def test_launches_on_their_way_keep_their_addresses(inverting):
    sets = [(random(SIZES), [at(0, size) for size in SIZES]) for _ in range(8)]
    busy = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(50):
        busy = busy @ busy / 4096
    behind = torch.cuda.Event()
    behind.record()
    for given, results in sets:
        inverting(given, results)
    assert not behind.query(), "the device was done before the launches were"
    assert all(flipped(*pair) for pair in sets)


def test_more_tensors_than_one_node_copies():
    sizes = [i * 37 % 101 for i in range(2 * MOST_COPIES + 3)]
    inverting = Inverting(sizes)
    for _ in range(3):
        given, results = random(sizes), [at(1, size) for size in sizes]
        inverting(given, results)
        assert flipped(given, results)


def test_memory_of_other_kinds(inverting):
    """Pinned memory of the host, which the device reads through the bus, and memory of CUDA's own pool."""
    given, results = random(SIZES), [torch.empty(size, dtype=torch.uint8).pin_memory() for size in SIZES]
    inverting(given, results)
    torch.cuda.synchronize()
    assert flipped([x.cpu() for x in given], results)
    stream = torch.cuda.current_stream().cuda_stream
    status, pool = cudart.cudaMallocAsync(SIZES[-1], stream)
    assert status == cudart.cudaError_t.cudaSuccess
    kind = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    cudart.cudaMemcpyAsync(pool, given[-1].data_ptr(), SIZES[-1], kind, stream)
    results = [at(0, size) for size in SIZES]
    inverting.graph.launch([x.data_ptr() for x in given[:-1]] + [int(pool)] + [x.data_ptr() for x in results])
    cudart.cudaFreeAsync(pool, stream)
    assert flipped(given, results)


def test_only_nodes_whose_tensors_moved_are_told():
    """Nodes that CUDA would refuse are left alone while nothing moves, and are told everything after they failed."""
    sizes = [64, 5]
    inverting, given, other = Inverting(sizes), random(sizes), random(sizes)
    first, second = ([at(0, size) for size in sizes] for _ in range(2))
    inverting(given, first)
    nodes = inverting.graph._nodes
    into, nodes[0].node = nodes[0].node, None
    inverting(given, second)
    assert flipped(given, first) and flipped(given, second)
    with pytest.raises(BackendUnavailable, match=r"(?s)launch.*got: cudaErrorInvalidValue.*remedy: "):
        inverting(other, first)
    nodes[0].node = into
    inverting(given, second)
    inverting(other, first)
    assert flipped(other, first) and flipped(given, second)


def test_null_is_refused_and_nothing_launched(inverting):
    given, results = random(SIZES), [at(0, size) for size in SIZES]
    with pytest.raises(BackendUnavailable, match="cudaErrorInvalidValue"):
        inverting.graph.launch([x.data_ptr() for x in given] + [0] * len(SIZES))
    with pytest.raises(ValueError):
        inverting.graph.launch([x.data_ptr() for x in given])
    inverting(given, results)
    assert flipped(given, results)


def test_a_stream_that_is_not_captured_is_refused():
    (node,) = _nodes([at(0, 16)], outwards=False)
    stream = ctypes.c_void_p(torch.cuda.Stream().cuda_stream)
    status = load_library().trtconvert_record_copies(stream, ctypes.byref(node))
    assert status == cudart.cudaError_t.cudaErrorStreamCaptureUnmatched
    assert node.node is None
