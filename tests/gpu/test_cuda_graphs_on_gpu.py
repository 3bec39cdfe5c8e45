"""Denoisers that are recorded in CUDA graphs compute what they compute eagerly, and what cannot be recorded stays eager."""

from __future__ import annotations

import pytest
import torch
from graphed_models import Digits, Doubling, Model, Noting, assert_same_calibration, assert_same_sensitivity, calls
from torch import Tensor, nn

from trtconvert.calib import calibrate as calibration
from trtconvert.calib import probes, sensitivity
from trtconvert.models.cuda_graphs import Graphed
from trtconvert.models.placed import Place, placed

pytestmark = pytest.mark.gpu


class Of(nn.Module):
    """A denoiser of a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.factor = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        return self.function(x) * self.factor + timestep[:, None]


def graphed_and_runs(function):
    """A recorded denoiser, and a list that grows with each run of Python."""
    runs, denoiser = [], Of(function).cuda()

    def counted(x: Tensor, timestep: Tensor) -> Tensor:
        runs.append(len(runs))
        return denoiser(x, timestep)

    return Graphed(counted, Model(denoiser)), denoiser, runs


def test_the_function_runs_twice_and_its_calls_are_right():
    graphed, denoiser, runs = graphed_and_runs(torch.sin)
    given = calls(6, device="cuda")
    outputs = [graphed(x, timestep) for x, timestep in given]
    for (x, timestep), output in zip(given, outputs, strict=True):
        assert torch.equal(output, denoiser(x, timestep))
    assert len(runs) == 2


def test_graphs_that_are_gone_leave_room_for_others():
    for _ in range(3):
        graphed, denoiser, runs = graphed_and_runs(torch.cos)
        for x, timestep in calls(4, device="cuda"):
            assert torch.equal(graphed(x, timestep), denoiser(x, timestep))
        assert len(runs) == 2


def test_other_shapes_are_recorded_by_themselves():
    graphed, denoiser, runs = graphed_and_runs(torch.sin)
    for rows in (3, 2, 3, 2, 3, 2, 3, 2):
        ((x, timestep),) = calls(1, rows, "cuda")
        assert torch.equal(graphed(x, timestep), denoiser(x, timestep))
    assert len(runs) == 4


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x * float(x[0, 0]),
        lambda x: x * len(x[x > 0]),
        lambda x: x + torch.arange(8).to(x.device),
        lambda x: x + torch.tensor(2.0).to(x.device),
        lambda x: (x.cpu() + 1).to(x.device),
    ],
)
def test_a_function_that_waits_for_the_device_stays_eager(waiting):
    graphed, denoiser, runs = graphed_and_runs(waiting)
    for x, timestep in calls(5, device="cuda"):
        assert torch.equal(graphed(x, timestep), denoiser(x, timestep))
    assert len(runs) == 5


def test_a_function_that_counts_its_calls_stays_eager():
    count, model = 0, Model(Doubling().cuda())

    def function(x: Tensor, timestep: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    graphed = Graphed(function, model)
    for x, timestep in calls(6, device="cuda"):
        assert torch.equal(graphed(x, timestep), x * count)
    assert count == 7


def test_a_function_that_fails_while_recorded_stays_eager_and_random_numbers_go_on():
    def function(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return x + 1

    graphed, denoiser, _ = graphed_and_runs(function)
    for x, timestep in calls(5, device="cuda"):
        assert torch.equal(graphed(x, timestep), denoiser(x, timestep))
        assert torch.randn(8, device="cuda").isfinite().all()
    held = [torch.randn(1024, 1024, device="cuda") for _ in range(4)]
    del held
    torch.cuda.synchronize()
    second, other, runs = graphed_and_runs(torch.sin)
    for x, timestep in calls(5, device="cuda"):
        assert torch.equal(second(x, timestep), other(x, timestep))
    assert len(runs) == 2


def test_notes_and_counts_are_those_of_eager_calls():
    model, counted = Model(Doubling().cuda()), torch.zeros(8, device="cuda")
    noting, given = Noting(model.denoiser), calls(6, device="cuda")

    def function(x: Tensor, timestep: Tensor) -> Tensor:
        counted.add_((x > 0).sum(0))
        return noting(x, timestep)

    graphed = Graphed(function, model, notes=(noting.notes,), counts=True)
    for x, timestep in given:
        graphed(x, timestep)
    noting.assert_noted(given)
    assert torch.equal(counted, torch.stack([(x > 0).sum(0) for x, _ in given]).sum(0).float())


def eager(model, function, **_):
    return function


@pytest.fixture(scope="module")
def digits():
    return Digits.load(lambda model: placed(model, Place("cuda", "float16", "")))


def test_a_calibration_is_that_of_eager_calls(digits, tmp_path, monkeypatch):
    made = digits.calibrated(tmp_path / "graphs")
    monkeypatch.setattr(calibration, "graphed", eager)
    assert_same_calibration(made, digits.calibrated(tmp_path / "eager"))


def test_sensitivities_are_those_of_eager_calls(digits, tmp_path, monkeypatch):
    made, recorded = digits.calibrated(tmp_path), []
    original = Graphed._recorded

    def recording(self, *given):
        recorded.append(original(self, *given))
        return recorded[-1]

    monkeypatch.setattr(Graphed, "_recorded", recording)
    found = digits.sensitivity(made, steps=20)
    assert recorded and all(graph is not None for graph in recorded)
    monkeypatch.setattr(sensitivity, "graphed", eager)
    monkeypatch.setattr(probes, "graphed", eager)
    assert_same_sensitivity(found, digits.sensitivity(made, steps=20), rtol=0.05)
