"""Functions recorded in CUDA graphs compute the same as eager calls.

On a CPU a recording of torch.fx stands for the graph: like a graph, the recording repeats operations and runs no Python. Real
graphs are in tests/gpu/test_cuda_graphs_on_gpu.py.
"""

from __future__ import annotations

import pytest
import torch
from graphed_models import (
    Digits,
    Doubling,
    Entry,
    Model,
    Noting,
    assert_same_calibration,
    assert_same_sensitivity,
    calls,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from trtconvert.calib import calibrate as calibration
from trtconvert.calib import probes, sensitivity
from trtconvert.models import cuda_graphs
from trtconvert.models.cuda_graphs import Graphed
from trtconvert.noted import Notes, PackedEntries


class Recording:
    """`_Graph` without a GPU."""

    def __init__(self, function, given, notes) -> None:
        self._notes = notes
        starts = [len(one) for one in notes]

        def run(inputs):
            outputs = function(**inputs)
            self._packed = [PackedEntries(one.cut(start)) for one, start in zip(notes, starts, strict=True)]
            return outputs, [packed._packed for packed in self._packed]

        copies = {name: x.clone() for name, x in given.items()}
        self._graph = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(copies)
        for node in self._graph.graph.nodes:
            # CUDA does not run operations while it records; torch.fx does.
            if node.target is torch.ops.aten.add_.Tensor and node.args[0].op == "get_attr":
                getattr(self._graph, node.args[0].target).sub_(node.args[1])

    def __call__(self, given):
        outputs, tensors = self._graph({name: given[name] for name in given})
        for notes, packed, filled in zip(self._notes, self._packed, tensors, strict=True):
            packed._packed = filled
            packed.add_copies(notes)
        return outputs

    def gives(self, first) -> bool:
        outputs, _ = self._graph(first.inputs)
        got, expected = cuda_graphs._prediction(outputs), first.prediction
        return bool((got - expected).norm() <= cuda_graphs.CLOSE * expected.norm())


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_Graph", Recording)
    monkeypatch.setattr(cuda_graphs, "_on_gpu", lambda given: True)


def test_the_function_runs_twice_and_its_calls_are_right():
    runs = []

    def function(x: Tensor, timestep: Tensor) -> Tensor:
        runs.append(len(runs))
        return x.sin() + timestep[:, None]

    graphed = Graphed(function, Model(Doubling()))
    for x, timestep in calls(6):
        torch.testing.assert_close(graphed(x, timestep=timestep), x.sin() + timestep[:, None])
    assert len(runs) == 2


def test_other_shapes_are_recorded_by_themselves():
    graphed = Graphed(Doubling(), Model(Doubling()))
    for rows in (3, 2, 3, 2, 3, 2):
        ((x, timestep),) = calls(1, rows)
        assert torch.equal(graphed(x, timestep), 2 * x + timestep[:, None])


def test_a_function_that_counts_its_calls_stays_eager():
    count = 0

    def function(x: Tensor, timestep: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    graphed = Graphed(function, Model(Doubling()))
    for x, timestep in calls(6):
        assert torch.equal(graphed(x, timestep), x * count)
    assert count == 7


def test_a_function_that_fails_to_record_stays_eager(monkeypatch):
    def refuse(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "_Graph", refuse)
    graphed = Graphed(Doubling(), Model(Doubling()))
    for x, timestep in calls(4):
        assert torch.equal(graphed(x, timestep), 2 * x + timestep[:, None])


def test_notes_are_those_of_eager_calls():
    model = Model(Doubling())
    noting, given = Noting(model.denoiser), calls(6)
    graphed = Graphed(noting, model, notes=(noting.notes,), counts=True)
    for x, timestep in given:
        graphed(x, timestep)
    noting.assert_noted(given)


def test_copies_of_entries_share_what_the_entries_share():
    notes: Notes[Entry] = Notes()
    x = torch.ones(2)
    notes.add("a", Entry(x, {"same": x}))
    packed = PackedEntries(notes.cut(0))
    packed.add_copies(notes)
    (noted,) = notes.take()["a"]
    copy = noted.entry
    assert copy.x is copy.of["same"] and copy.x is not x and torch.equal(copy.x, x[None])


def test_copies_of_entries_have_their_types_and_shapes():
    notes: Notes[Entry] = Notes()
    given = [torch.rand(3, 2).T, torch.arange(4), torch.rand(()), torch.rand(2, 0, 3), torch.rand(5).half()]
    for number, x in enumerate(given):
        notes.add(f"{number}", Entry(x, {"doubled": 2 * x, "number": number}))
    packed = PackedEntries(notes.cut(0))
    packed.add_copies(notes)
    first = notes.take()
    packed.add_copies(notes)
    for number, x in enumerate(given):
        (noted,) = first[f"{number}"]
        copy = noted.entry
        assert copy.of["number"] == number
        for found, expected in ((copy.x, x), (copy.of["doubled"], 2 * x)):
            assert found.dtype == expected.dtype and torch.equal(found, expected[None])
            found.zero_()
    assert torch.equal(notes.take()["0"][0].entry.x[0], given[0])


@pytest.mark.parametrize("names", ["ab", "aa"])
def test_calls_stay_in_order_between_and_among_replays(names):
    """Ten replays are joined in two parts; a module that a forward calls twice is not joined over calls."""
    notes: Notes[Entry] = Notes()
    value = torch.zeros(1)
    for name in names:
        notes.add(name, Entry(value, {}))
    packed, given = PackedEntries(notes.cut(0)), iter(range(1, 100))

    def replay():
        for tensor in packed._packed.values():
            tensor.fill_(next(given))
        packed.add_copies(notes)

    notes.add("a", Entry(torch.full((1,), next(given)), {}))
    for _ in range(10):
        replay()
    notes.add("a", Entry(torch.full((1,), next(given)), {}))
    replay()
    taken = notes.take()
    each = {name: [place for noted in seen for place in noted.places] for name, seen in taken.items()}
    assert sorted(place for places in each.values() for place in places) == [*range(24)] and not len(notes)
    assert all(places == sorted(places) for places in each.values())
    calls = torch.cat([noted.entry.x for noted in taken["a"]])[:, 0].tolist()
    assert calls == [1, *(call for call in range(2, 12) for _ in range(names.count("a"))), 12, *[13] * names.count("a")]


def always(model, function, **named):
    return Graphed(function, model, **named)


@pytest.fixture(scope="module")
def digits():
    return Digits.load()


@pytest.mark.soak  # tests/gpu has it with real graphs
def test_a_calibration_is_that_of_eager_calls(digits, tmp_path, monkeypatch):
    expected = digits.calibrated(tmp_path / "eager")
    monkeypatch.setattr(calibration, "graphed", always)
    assert_same_calibration(digits.calibrated(tmp_path / "graphs"), expected)


@pytest.mark.soak
def test_sensitivities_are_those_of_eager_calls(digits, tmp_path, monkeypatch):
    made = digits.calibrated(tmp_path)
    expected = digits.sensitivity(made)
    monkeypatch.setattr(sensitivity, "graphed", always)
    assert_same_sensitivity(digits.sensitivity(made), expected, rtol=1e-3)


@pytest.mark.soak
def test_probes_keep_what_candidates_change_only_where_there_is_room(digits, tmp_path, monkeypatch):
    made, errors = digits.calibrated(tmp_path), []
    for room in (0, 2**20, 2**31):
        monkeypatch.setattr(probes, "_KEPT_ON_CPU", room)
        errors.append(digits.sensitivity(made).error.nan_to_num())
    torch.testing.assert_close(errors[1], errors[0])
    torch.testing.assert_close(errors[2], errors[0])
