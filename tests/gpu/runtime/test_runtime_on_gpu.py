"""Loaded TensorRT engines: what they compute, and the CUDA graphs of their calls."""

from __future__ import annotations

import weakref

import pytest
import torch
from cuda.bindings import runtime as cudart
from gpu_runtime import held, make_inputs
from tolerances import HALF_DENOISER

from trtconvert import runtime
from trtconvert.engine import tensorrt
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.models.recorded_calls import relative_error
from trtconvert.runtime import lane

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tensorrt.status().available, reason=tensorrt.status().detail)]


@pytest.mark.parametrize("batch", [1, 2, 3, 16])
def test_engines_agree_with_onnx_runtime(denoiser, folder, batch):
    """In both profiles, at their limits."""
    inputs = make_inputs(batch)
    with runtime.load(folder, backend="onnxruntime") as reference:
        expected = reference["denoiser"](*inputs)
    assert relative_error(denoiser(*inputs).cpu(), expected) <= HALF_DENOISER


def test_a_graph_gives_the_bits_of_a_plain_call(folder, denoiser):
    with runtime.load(folder, backend="tensorrt", graphs=0) as plain:
        for batch in (2, 5, 2, 5, 2, 5):
            for seed in range(3):
                inputs = make_inputs(batch, seed)
                assert torch.equal(denoiser(*inputs), plain["denoiser"](*inputs))
        assert plain["denoiser"].graphs_recorded == 0
    assert denoiser.graphs_recorded == 2


def test_a_graph_that_no_call_launches_goes(folder, monkeypatch):
    monkeypatch.setattr(lane, "_UNUSED", 2)
    with runtime.load(folder, backend="tensorrt", graphs=1) as bundle:
        denoiser = bundle["denoiser"]
        expected = {batch: denoiser(*make_inputs(batch)) for batch in (1, 2)}
        recorded = []
        for batch in (1, 2, 1, 2, 2, 2, 2, 1):
            assert torch.equal(denoiser(*make_inputs(batch)), expected[batch])
            recorded.append(denoiser.graphs_recorded)
        assert recorded == [1, 1, 1, 1, 1, 2, 2, 2]


def test_outputs_are_fresh(denoiser):
    """A later call, replayed from a graph, leaves earlier outputs as they are."""
    inputs = make_inputs()
    first = denoiser(*inputs)
    kept = first.clone()
    for seed in range(1, 5):
        denoiser(*make_inputs(seed=seed))
    assert torch.equal(first, kept)


def test_inputs_are_taken_from_where_and_how_they_lie(denoiser):
    x, timestep, label = make_inputs()
    expected = denoiser(x, timestep, label)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert shifted.data_ptr() % 256
    for given in (x.transpose(2, 3).contiguous().transpose(2, 3), shifted, x.float(), x.double().requires_grad_()):
        for _ in range(3):  # plainly, recorded, replayed
            assert torch.equal(denoiser(given, timestep, label), expected)
    for _ in range(3):
        on_cpu = denoiser(x.cpu(), timestep, label)
        assert on_cpu.device.type == "cpu" and torch.equal(on_cpu, expected.cpu())


def test_inputs_may_go_while_the_device_is_still_busy(denoiser):
    """The launch is far behind when the host lets go of inputs, and other tensors take their memory."""
    sets = [make_inputs(seed=seed) for seed in range(10)]
    expected = [denoiser(*inputs) for inputs in sets]
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 4096
    given = []
    for x, timestep, label in sets:
        given.append(denoiser(x.clone(), timestep.clone(), label.clone()))
        for like in (x, timestep):
            torch.full_like(like, float("nan"))
    assert all(torch.equal(*pair) for pair in zip(given, expected, strict=True))


def test_memory_that_the_driver_had_back_meanwhile_is_read(denoiser):
    """A graph's copies keep addresses between launches; the memory at an address may be mapped anew."""
    expected = [denoiser(*make_inputs(seed=seed)) for seed in range(4)]
    for _ in range(3):
        for seed in range(4):
            assert torch.equal(denoiser(*make_inputs(seed=seed)), expected[seed])
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class Foreign:
    """Memory of the GPU that CUDA's own pool gave, as a tensor of some other library."""

    def __init__(self, x: torch.Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        status, self.address = cudart.cudaMallocAsync(x.nbytes, stream)
        assert status == cudart.cudaError_t.cudaSuccess
        self.__cuda_array_interface__ = x.__cuda_array_interface__ | {"data": (int(self.address), False)}
        weakref.finalize(self, cudart.cudaFreeAsync, self.address, stream)


def test_memory_that_torch_did_not_allocate_is_read(denoiser):
    x, timestep, label = make_inputs()
    expected = denoiser(x, timestep, label)
    foreign = torch.as_tensor(Foreign(x), device="cuda")
    foreign.copy_(x)
    for given in (x, foreign, x, foreign):
        assert torch.equal(denoiser(given, timestep, label), expected)


def test_a_call_that_cannot_be_recorded_runs_plainly(folder, monkeypatch):
    def refuse(*arguments):
        raise BackendUnavailable("the driver does not record")

    monkeypatch.setattr(lane, "CopyingGraph", refuse)
    with runtime.load(folder, backend="tensorrt") as bundle:
        denoiser, inputs = bundle["denoiser"], make_inputs()
        expected = denoiser(*inputs)
        with pytest.warns(RuntimeWarning, match="without CUDA graphs.*the driver does not record"):
            assert torch.equal(denoiser(*inputs), expected)
        assert torch.equal(denoiser(*inputs), expected) and denoiser.graphs_recorded == 0


def test_gradients_and_inference_mode_do_not_matter(denoiser):
    x, timestep, label = make_inputs()
    with torch.inference_mode():
        expected = [denoiser(x, timestep, label) for _ in range(3)][-1]
    output = denoiser(x.clone().requires_grad_(), timestep, label)  # from the graph that was recorded above
    assert not output.requires_grad and not output.is_inference() and torch.equal(output, expected)


def test_a_call_is_part_of_the_callers_own_graph(denoiser):
    inputs, stream = make_inputs(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            denoiser(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            output = denoiser(*inputs)
    for seed in (1, 2):
        other = make_inputs(seed=seed)
        for mine, new in zip(inputs, other, strict=True):
            mine.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, denoiser(*other))


@pytest.mark.parametrize("graphs", [0, 4])
def test_the_callers_own_graph_outlives_other_shapes_and_streams(folder, graphs):
    """Its context gets no other shapes and no other stream."""
    with runtime.load(folder, backend="tensorrt", graphs=graphs, streams=1) as bundle:
        denoiser, inputs, stream = bundle["denoiser"], make_inputs(2), torch.cuda.Stream()
        expected = [denoiser(*make_inputs(2, seed)) for seed in range(3)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            denoiser(*inputs)
            denoiser(*make_inputs(1))  # of the same profile
            graph = torch.cuda.CUDAGraph()
            with pytest.raises(UserError, match="not ready to be captured"), torch.cuda.graph(graph, stream=stream):
                denoiser(*inputs)
            denoiser(*inputs)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                output = denoiser(*inputs)
        for seed in range(3):
            for busy in (stream, torch.cuda.Stream(), torch.cuda.Stream()):
                with torch.cuda.stream(busy):
                    for batch in (1, 4, 16):
                        denoiser(*make_inputs(batch))
            torch.cuda.synchronize()
            for mine, new in zip(inputs, make_inputs(2, seed), strict=True):
                mine.copy_(new)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(output, expected[seed])


def test_the_callers_own_graph_may_run_beside_calls(denoiser):
    """Launched on another stream while calls run on the one that it was recorded on: neither computes in the other's memory."""
    recorded, called = make_inputs(16), make_inputs(16, seed=1)
    expected = [denoiser(*inputs) for inputs in (recorded, called)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]):
        denoiser(*recorded)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[0]):
            output = denoiser(*recorded)
    torch.cuda.synchronize()
    given: list[list[torch.Tensor]] = [[], []]
    for _ in range(300):
        with torch.cuda.stream(streams[0]):
            given[1].append(denoiser(*called))
        with torch.cuda.stream(streams[1]):
            graph.replay()
            given[0].append(output.clone())
    torch.cuda.synchronize()
    for outputs, right in zip(given, expected, strict=True):
        assert all(torch.equal(x, right) for x in outputs)


def test_a_recording_gives_its_memory_back(denoiser):
    """It is the graph's, however often a call is recorded."""
    inputs, stream = make_inputs(), torch.cuda.Stream()

    def record() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                denoiser(*inputs)

    with torch.cuda.stream(stream):
        denoiser(*inputs)
        record()
        before = held()
        for _ in range(20):
            record()
    assert held() <= before
