"""What the C API of copies in CUDA graphs refuses before it asks CUDA. tests/gpu/test_graph_copies.py lets it copy."""

import ctypes

import pytest
import torch
from cuda.bindings import runtime as cudart

from trtconvert.c_structs import MOST_COPIES, Copy, CopyingGraph, CopyNode
from trtconvert.library import library_path, load_library

pytestmark = pytest.mark.skipif(library_path() is None, reason="no library is installed; 'pip install .' builds it")

INVALID = int(cudart.cudaError_t.cudaErrorInvalidValue)
BUFFER = 0x1000
"""An address that nothing reads."""


def node(**fields) -> CopyNode:
    """Two copies, the second without bytes."""
    made = CopyNode(**{"struct_size": ctypes.sizeof(CopyNode), "count": 2, "node": 0x2000} | fields)
    made.copies[0] = Copy(buffer=BUFFER, bytes=4)
    return made


def record(given: CopyNode | None) -> int:
    return load_library().trtconvert_record_copies(None, None if given is None else ctypes.byref(given))


def launch(nodes: list[CopyNode], addresses: list[int], /, **fields) -> tuple[int, list[CopyNode]]:
    """The status, and the nodes as they are after it."""
    array, where = (CopyNode * len(nodes))(*nodes), (ctypes.c_uint64 * len(addresses))(*addresses)
    all_fields = {
        "exec": 0x3000,
        "nodes": ctypes.addressof(array),
        "addresses": ctypes.addressof(where),
        "num_nodes": len(nodes),
    } | fields
    return load_library().trtconvert_launch_copies(ctypes.byref(CopyingGraph(**all_fields))), list(array)


def test_the_library_and_python_agree_on_the_struct():
    """The C API refuses a struct of another size first; the next complaint is that the default stream is not captured."""
    assert record(node()) not in (0, INVALID)
    assert record(node(struct_size=ctypes.sizeof(CopyNode) - 8)) == INVALID


def test_a_stream_that_is_not_captured_is_refused():
    without_gpu = ("cudaErrorNoDevice", "cudaErrorInsufficientDriver")
    name = cudart.cudaError_t(record(node())).name
    assert name == "cudaErrorStreamCaptureUnmatched" if torch.cuda.is_available() else name in without_gpu


def test_recordings_of_nothing_or_too_much_are_refused():
    without_buffer = node()
    without_buffer.copies[1].bytes = 4
    for given in (None, node(count=0), node(count=-1), node(count=MOST_COPIES + 1), without_buffer):
        assert record(given) == INVALID


@pytest.mark.parametrize("fields", [{"exec": None}, {"nodes": None}, {"addresses": None}, {"num_nodes": -1}])
def test_launches_of_nothing_are_refused(fields):
    assert launch([node()], [BUFFER, 0], **fields)[0] == INVALID
    assert load_library().trtconvert_launch_copies(None) == INVALID


def test_tensors_at_null_are_refused_and_the_node_forgets_its_addresses():
    """Also where nothing moved: a node that was never aimed is at null."""
    for outer in (None, 0x4000):
        given = node()
        given.copies[0].outer = outer
        status, (after,) = launch([given], [0, 0])
        assert status == INVALID and after.copies[0].outer is None
    assert launch([node(node=None)], [BUFFER, 0])[0] == INVALID


def test_a_node_that_cuda_does_not_take_forgets_its_addresses():
    if torch.cuda.is_available():
        pytest.skip("a driver would follow the made-up handles")
    status, (after,) = launch([node()], [BUFFER, 0])
    assert status not in (0, INVALID) and after.copies[0].outer is None
