"""Components on several streams, on the host: their lanes, and the memory that they keep and free."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import runtime as cudart
from host_runtime import computes

from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.runtime import lane as _lane
from trtconvert.runtime import tensorrt as tensorrt_runtime
from trtconvert.runtime.lane import Lane


def test_a_layout_that_is_found_late_is_refused_as_at_once(component, tmp_path):
    """The cached checks do not cover the layout."""
    made, _ = component(tmp_path / "a.plan", graphs=0)
    assert computes(made)
    with pytest.raises(UserError, match=r"(?s)not a dense tensor.*to_dense"):
        made(torch.zeros(4).to_sparse(), torch.zeros(4))
    assert computes(made)


def test_longest_idle_stream_releases_its_memory(machine, component, tmp_path):
    made, scratch = component(tmp_path / "x.plan", streams=2)
    for machine.current in (11, 12, 11, 13):
        assert computes(made)
    assert set(made._lanes) == {11, 13} and scratch.allocated == 2 * scratch.size


@pytest.mark.parametrize(
    ("status", "capturing", "kept"),
    [
        ("cudaSuccess", "None", False),
        ("cudaSuccess", "Active", True),
        ("cudaSuccess", "Invalidated", True),
        ("cudaErrorStreamCaptureImplicit", None, True),  # the default stream while another one is recorded
        ("cudaErrorInvalidResourceHandle", None, False),  # of a stream that was destroyed
    ],
)
def test_nobody_waits_for_a_stream_that_is_recorded(machine, component, tmp_path, monkeypatch, status, capturing, kept):
    made, _ = component(tmp_path / "x.plan", streams=1)
    found = capturing and getattr(cudart.cudaStreamCaptureStatus, f"cudaStreamCaptureStatus{capturing}")
    monkeypatch.setattr(
        _lane.cudart, "cudaStreamIsCapturing", lambda handle: (getattr(cudart.cudaError_t, status), found)
    )
    for machine.current in (11, 12):
        assert computes(made)
    assert set(made._lanes) == ({11, 12} if kept else {12})


def test_whether_a_stream_is_idle_is_asked_while_nobody_else_uses_it(machine, component, tmp_path, monkeypatch):
    """Otherwise a capture could begin on the stream before the lane is closed."""
    made, _ = component(tmp_path / "x.plan", streams=1)
    asked = []

    def is_needed(lane):
        asked.append(lane.lock.locked())
        return False

    monkeypatch.setattr(Lane, "is_needed", property(is_needed))
    for machine.current in (11, 12):
        assert computes(made)
    assert asked == [True]


def test_a_stream_that_the_caller_recorded_keeps_its_memory(machine, component, tmp_path):
    made, scratch = component(tmp_path / "x.plan", streams=1)
    machine.current = 11
    assert computes(made)
    machine.recording = True
    assert computes(made)
    machine.current = 12
    with pytest.raises(UserError, match=r"(?s)not ready to be captured.*got: no call on this stream"):
        computes(made)
    machine.recording = False
    for machine.current in (12, 13, 12):
        assert computes(made)
    assert set(made._lanes) == {11, 12} and scratch.allocated == 2 * scratch.size


def test_a_stream_that_its_owner_destroyed_holds_up_nothing(machine, component, tmp_path):
    made, scratch = component(tmp_path / "x.plan", streams=2)
    for machine.current in (11, 12):
        assert computes(made)
    machine.destroyed = {11}
    machine.current = 13
    assert computes(made) and set(made._lanes) == {12, 13}
    machine.destroyed = {13}
    made.close()
    assert scratch.allocated == 0
    with pytest.raises(UserError, match="was closed"):
        computes(made)
    made.close()


def test_failures_while_a_component_closes_are_reported(machine, component, tmp_path):
    """An error of the device in its kernels, which the caller may not know yet."""
    made, scratch = component(tmp_path / "x.plan")
    assert computes(made)

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    (lane,) = made._lanes.values()
    lane._stream = SimpleNamespace(synchronize=fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made.close()
    assert scratch.allocated == 0


def test_graphs_are_found_again_after_the_record_of_their_call_is_dropped(component, tmp_path, machine, monkeypatch):
    monkeypatch.setattr(tensorrt_runtime, "_KNOWN_CALLS", 2)
    made, _ = component(tmp_path / "x.plan", graphs=1)
    for length in (4, 4, 5, 6, 7, 8, 9, 4):
        assert computes(made, length)
    assert made.graphs_recorded == 1
    plain, _ = component(tmp_path / "y.plan", graphs=0)
    for _ in range(3):
        for length in (6, 7, 8, 9, 5):
            assert computes(plain, length)
        machine.recording = True
        assert computes(plain, 5)
        machine.recording = False
    (lane,) = plain._lanes.values()
    assert len(lane._recorded) == 1


@pytest.mark.parametrize("recording", [False, True])
def test_a_component_that_nobody_refers_to_is_waited_for_before_it_goes(machine, component, tmp_path, recording):
    """Except during a capture, which waiting would break."""
    made, scratch = component(tmp_path / "x.plan")
    for machine.current in (11, 12):
        assert computes(made) and computes(made)
    machine.recording, machine.destroyed = recording, {11}
    engine = made.engine
    for context in engine.contexts:
        weakref.finalize(context, lambda: machine.waited.append(0))
    del context
    engine.contexts.clear()
    machine.waited.clear()
    del made
    assert machine.waited == ([] if recording else [11, 12]) + [0, 0, 0, 0] and scratch.allocated == 0


def test_the_memory_of_graphs_is_counted(component, tmp_path):
    made, _ = component(tmp_path / "x.plan", graphs=2)
    assert computes(made, 8) and made.graphs_memory == 0
    for length in (8, 16, 16, 4, 4):
        assert computes(made, length)
    assert made.graphs_memory == 3 * 4 * (8 + 16)  # FP32; two inputs and an output of the two
    made.close()
    assert made.graphs_memory == 0


def test_a_compiled_function_around_it_leaves_it_as_it_is(component, tmp_path):
    made, _ = component(tmp_path / "x.plan")
    compiled = torch.compile(lambda a, b: made(a * 1, b) + 1, backend="eager")
    try:
        for length in (4, 4, 4, 6, 6, 6, 4):
            a, b = torch.randn(length), torch.randn(length)
            assert torch.equal(compiled(a, b), 2 * a + b + 1)
    finally:
        torch._dynamo.reset()
    assert made.graphs_recorded == 2


def test_the_stream_that_differs_from_thread_to_thread_is_refused(machine, component, tmp_path):
    made, _ = component(tmp_path / "x.plan")
    machine.current = 2
    with pytest.raises(UserError, match=r"(?s)per-thread default stream.*remedy: "):
        computes(made)


def test_a_call_without_memory_for_its_tensors_says_how_much_it_needs(machine, component, tmp_path):
    made, _ = component(tmp_path / "x.plan")
    assert computes(made)
    machine.memory = False
    with pytest.raises(BackendUnavailable, match=r"(?s)no memory left for the tensors of a call.*remedy: "):
        computes(made)
    machine.memory = True
    assert computes(made)
