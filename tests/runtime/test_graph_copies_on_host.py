"""CUDA graphs that copy their inputs and outputs, on the host."""

import ctypes

import pytest
import torch
from cuda.bindings import runtime as cudart
from host_runtime import addresses

from trtconvert.errors import BackendUnavailable
from trtconvert.runtime import graph as graphs
from trtconvert.runtime.graph import CopyingGraph


@pytest.fixture
def doubling(cuda):
    """A graph of y = 2 · a + b for vectors of four."""
    a, b, nothing, y = torch.ones(4), torch.ones(4), torch.ones(0), torch.ones(4)

    def work(stream):
        cuda.run(lambda: torch.add(b, a, alpha=2, out=y))

    yield CopyingGraph(work, [a, b, nothing], [y], 0)  # the buffers live until the test is over


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


def test_cuda_memory_is_freed_with_the_graph(cuda):
    graph = CopyingGraph(lambda stream: None, [torch.ones(4)], [], 0)
    assert cuda.graphs == 1 and cuda.streams == 0
    del graph
    assert cuda.graphs == 0
