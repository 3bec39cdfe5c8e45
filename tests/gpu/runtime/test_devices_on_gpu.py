"""A denoiser's samples shared out among TensorRT sessions: two on one GPU, and one on each of two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_runtime import make_inputs
from tolerances import HALF_DENOISER

from trtconvert import runtime
from trtconvert.engine import tensorrt
from trtconvert.errors import UserError
from trtconvert.models.recorded_calls import relative_error
from trtconvert.runtime.devices import DataParallel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tensorrt.status().available, reason=tensorrt.status().detail)]

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one kind")


@pytest.fixture(params=["one GPU", pytest.param("two GPUs", marks=TWO)])
def together(request, folder) -> Iterator[DataParallel]:
    if request.param == "two GPUs":
        with runtime.load(folder, backend="tensorrt", devices=["cuda:0", "cuda:1"]) as bundle:
            yield bundle["denoiser"]
    else:  # which `load` refuses
        with runtime.load(folder, backend="tensorrt") as one, runtime.load(folder, backend="tensorrt") as other:
            yield DataParallel([one["denoiser"], other["denoiser"]])


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16, 32])
def test_samples_are_those_of_one_session(together, denoiser, batch):
    """No single profile of the engine takes both parts of three samples, two and one; each part has its own profile."""
    inputs = make_inputs(batch)
    expected = torch.cat([denoiser(*(x[start : start + 16] for x in inputs)) for start in range(0, batch, 16)])
    found = together(*inputs)
    assert found.device == inputs[0].device and found.dtype == expected.dtype
    assert relative_error(found, expected) <= HALF_DENOISER
    assert relative_error(together(*(x.cpu() for x in inputs)), expected.cpu()) <= HALF_DENOISER


def test_calls_follow_each_other_on_any_stream(together, denoiser):
    """Inputs that a long kernel has just written, on a stream of the caller's, and outputs that are read at once; graphs are
    recorded meanwhile. Anything out of order gives samples of other inputs."""
    wanted = [denoiser(*make_inputs(8, seed)) for seed in range(12)]
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            kept = make_inputs(8)
            busy = torch.randn(4096, 4096, device="cuda")
            for seed, expected in enumerate(wanted):
                given = make_inputs(8, seed)
                for _ in range(4):
                    busy = busy @ busy * 1e-3
                for x, y in zip(kept, given, strict=True):
                    x.copy_(y)
                found = together(*kept) + 0
                for x in kept:
                    x.zero_()  # the call has read them by then
                assert relative_error(found, expected) <= HALF_DENOISER, f"seed {seed}"
        torch.cuda.synchronize()
    assert together.graphs_recorded >= 2  # of each session


def test_recordings_are_refused(together):
    inputs = make_inputs(4)
    together(*inputs)
    torch.cuda.synchronize()
    with (
        pytest.raises(UserError, match="cannot be captured into a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        together(*inputs)


def test_weights_change_in_all_sessions(together, digits):
    """With its last layer zero every sample is: what a session had left would show."""
    inputs = make_inputs(4)
    assert together(*inputs).any()
    state = {
        name: torch.zeros_like(x) if name.startswith("project_out.") else x
        for name, x in digits.denoiser.state_dict().items()
    }
    assert together.refit(state) > 0
    assert not together(*inputs).any()


@TWO
def test_inputs_may_lie_on_either_gpu(folder):
    with runtime.load(folder, backend="tensorrt", devices=["cuda:1", "cuda:0"], check=True) as bundle:
        denoiser = bundle["denoiser"]
        assert str(denoiser.device) == "cuda:1" and bundle.device_memory.weights > 0
        expected = denoiser(*(x.to("cuda:1") for x in make_inputs(6)))
        found = denoiser(*make_inputs(6))
        assert str(expected.device) == "cuda:1" and str(found.device) == "cuda:0"
        assert torch.equal(found.cpu(), expected.cpu())
        # Each half of guidance has a GPU of its own.
        x, timestep, label = make_inputs(1)
        both = denoiser(torch.cat([x, x]), torch.cat([timestep] * 2), torch.cat([torch.full_like(label, 10), label]))
        assert not torch.equal(both[0], both[1])
