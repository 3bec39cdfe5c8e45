"""Engines on streams and the CUDA graphs of their calls, on the host: the calls to CUDA and TensorRT."""

import contextlib
import threading
import time
import warnings
import weakref
from dataclasses import replace

import pytest
import torch
from cuda.bindings import runtime as cudart
from host_runtime import REFUSED, TRT, HostContext, HostEngine
from support import at_once

from trtconvert.engine.logs import make_log
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.runtime import lane as _lane
from trtconvert.runtime.lane import CallShapes, Lane

CALLS = {length: CallShapes(0, ((length,), (length,)), ((length,),)) for length in (4, 6, 8, REFUSED)}


def right(lane, length):
    """Return whether a call with new inputs, one of them not contiguous, gives the right output."""
    a, b = torch.randn(length, 2)[:, 0], torch.randn(length)
    (y,) = lane.run(CALLS[length], (a, b))
    return torch.equal(y, 2 * a + b)


def test_the_second_call_of_a_shape_is_recorded_and_a_graph_that_no_call_launches_goes(cuda, open_lane, monkeypatch):
    monkeypatch.setattr(_lane, "_UNUSED", 3)
    lane, recorded = open_lane(2), []
    for length in (4, 4, 6, 6, 4, 8, 8, 4, 6, 8, 4, 8, 8, 6, 4, 6, 8, 4):
        assert right(lane, length)
        recorded.append(lane.recorded)
    assert recorded == [0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert cuda.graphs == 2
    lane.close()
    assert cuda.graphs == 0


def test_shapes_that_take_turns_do_not_take_each_others_graphs(cuda, open_lane):
    """More shapes than graphs take turns: capturing takes far longer than a call."""
    lane = open_lane(2)
    assert all(right(lane, length) for length in (4, 6, 8) * 50)
    assert lane.recorded == 2 and cuda.launched == 2 * 49


def test_an_engine_that_cannot_be_recorded_runs_plainly(cuda, open_lane, monkeypatch):
    lane = open_lane(4)
    assert right(lane, 4)
    cuda.recordable = False
    monkeypatch.setattr(_lane, "_REST", 2)
    with pytest.warns(RuntimeWarning, match=r"(?s)without CUDA graphs.*cudaErrorStreamCaptureUnsupported"):
        assert right(lane, 4)
    begun, begin = [], cuda.cudaStreamBeginCapture
    cuda.cudaStreamBeginCapture = lambda *given: (begun.append(given), begin(*given))[1]
    with warnings.catch_warnings(action="error"):  # said once
        assert all(right(lane, length) for length in (4, 6) * 20)
    assert cuda.launched == lane.recorded == 0 and len(begun) == _lane._MOST_FAILURES - 1


def test_a_recording_that_another_ones_was_in_the_way_of_is_made_later(cuda, open_lane, monkeypatch):
    """Another thread captures in torch's default mode, which forbids allocations."""
    lane = open_lane(4)
    monkeypatch.setattr(_lane, "_REST", 2)
    assert right(lane, 4)
    cuda.recordable = False
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        assert right(lane, 4)
    cuda.recordable = True
    assert [right(lane, 4) and lane.recorded for _ in range(4)] == [0, 0, 1, 1]


def test_a_graph_without_memory_is_recorded_later(cuda, open_lane, monkeypatch):
    lane, zeros = open_lane(2), torch.zeros
    monkeypatch.setattr(_lane, "_REST", 3)

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    assert right(lane, 4) and right(lane, 4) and lane.recorded == 1
    with warnings.catch_warnings(action="error"):
        monkeypatch.setattr(torch, "zeros", full)
        assert right(lane, 6) and right(lane, 6)
        monkeypatch.setattr(torch, "zeros", zeros)
        recorded = []
        for _ in range(5):
            assert right(lane, 6)
            recorded.append(lane.recorded)
    assert recorded == [1, 1, 1, 2, 2]
    assert right(lane, 4) and cuda.graphs == 2  # nothing was given up for the graph that did not come to be


def test_a_driver_without_memory_for_a_graph_is_asked_later(cuda, open_lane, monkeypatch):
    lane = open_lane(2)
    monkeypatch.setattr(_lane, "_REST", 1)
    assert right(lane, 4)
    instantiate = cuda.cudaGraphInstantiate
    cuda.cudaGraphInstantiate = lambda graph, flags: (cudart.cudaError_t.cudaErrorMemoryAllocation, None)
    with warnings.catch_warnings(action="error"):
        assert right(lane, 4) and lane.recorded == 0
        cuda.cudaGraphInstantiate = instantiate
        assert right(lane, 4) and right(lane, 4) and lane.recorded == 1


def test_a_call_that_is_refused_leaves_no_shapes_behind(open_lane):
    lane = open_lane(0)
    assert right(lane, 4)
    with pytest.raises(BackendUnavailable, match=r"the engine's 'y' is \[7\], but the manifest has \[10\]"):
        right(lane, REFUSED)
    assert right(lane, 4) and contexts_of(lane)[0].shape == (4,)


def test_engines_on_one_stream_do_not_mix_their_kernels(cuda, open_lane):
    """From two threads: each call is two kernels with intermediate results in the shared scratch memory."""
    cuda.pause, wrong, lanes = 0.0005, [], [open_lane(0), open_lane(0)]

    def work(lane):
        for _ in range(50):
            with lane.lock:
                if not right(lane, 8):
                    wrong.append(lane)

    at_once(work, lanes)
    assert not wrong


def test_an_error_says_what_was_logged_since_the_one_before(plan_of, cuda):
    """Otherwise an old lack of memory would explain every later failure."""
    plan = replace(plan_of(HostEngine(cuda)), log=make_log(TRT))
    plan.log.logger.log("ERROR", "out of memory")
    assert "got: out of memory" in str(plan.failure("a call"))
    assert "got: no reason was logged" in str(plan.failure("a call"))
    plan.log.logger.log("ERROR", "no such kernel")
    assert "memory" not in plan.failure("a call").got


def test_log_of_one_engine_is_no_reason_of_another(plan_of, cuda, machine, monkeypatch):
    plan, other = (replace(plan_of(HostEngine(cuda)), log=make_log(TRT)) for _ in range(2))

    def refuse(*_arguments):
        plan.log.logger.log("ERROR", "no such kernel")
        return False

    monkeypatch.setattr(HostContext, "execute_async_v3", refuse)
    with pytest.raises(BackendUnavailable, match="got: no such kernel"):
        right(Lane(plan, machine.stream(7), 0), 4)
    assert other.failure("a call").got == "no reason was logged"


class FragileEngine(HostEngine):
    """One that, as TensorRT's, does not bear two threads which make contexts or let go of them.

    Attributes:
        met: how often two did.
    """

    def __init__(self, cuda) -> None:
        super().__init__(cuda)
        self.met, self._one = 0, threading.Lock()

    def create_execution_context(self, strategy):
        self.change()
        context = HostContext(self.cuda)
        weakref.finalize(context, self.change)
        return context

    def change(self):
        if not self._one.acquire(blocking=False):
            self.met += 1
            return
        time.sleep(0.0005)
        self._one.release()


def test_contexts_of_an_engine_are_made_and_go_one_at_a_time(cuda, machine, plan_of):
    """From threads with a stream each, whose lanes open and close."""
    engine, wrong = FragileEngine(cuda), []
    plan = plan_of(engine)

    def work(handle):
        for _ in range(10):
            lane = Lane(plan, machine.stream(handle), 0)
            if not right(lane, 4):
                wrong.append(handle)
            lane.close()

    at_once(work, (7, 8, 9))
    assert not wrong and not engine.met


def contexts_of(lane):
    return lane._loaded.engine.contexts


@pytest.mark.parametrize("graphs", [0, 4])
def test_a_recording_of_the_callers_has_a_context_to_itself(cuda, machine, open_lane, graphs):
    lane = open_lane(graphs)
    for _ in range(3):
        assert right(lane, 4)
    launched, made = cuda.launched, len(contexts_of(lane))
    machine.recording = True
    assert right(lane, 4) and right(lane, 4)
    machine.recording = False
    assert cuda.launched == launched and len(contexts_of(lane)) == made  # plain calls, on existing contexts
    recorded = contexts_of(lane)[0]
    before = list(recorded.told)
    for length in (6, 4, 8, 4):
        assert right(lane, length)
    assert recorded.told == before and not any(recording for _, recording in before)


@pytest.mark.parametrize("graphs", [0, 4])
def test_a_recording_of_the_callers_wants_a_call_of_its_shapes_before(machine, open_lane, graphs):
    lane = open_lane(graphs)
    for length in (4, 4, 6, 6):
        assert right(lane, length)
    machine.recording = True
    for length in (4, 8):
        with pytest.raises(UserError, match=r"(?s)not ready to be captured.*same shapes.*got: other shapes.*remedy: "):
            right(lane, length)
        # What the message asks for.
        machine.recording = False
        assert right(lane, length)
        machine.recording = True
        assert right(lane, length)
    # Both in one recording, though they share a profile, and whatever was worked out anew meanwhile.
    assert right(lane, 4) and right(lane, 8)
    assert not any(recording for context in contexts_of(lane) for _, recording in context.told)


def test_a_recording_of_the_callers_computes_in_memory_of_its_own(machine, open_lane):
    """torch keeps this memory for the captured graph."""
    lane = open_lane(0)
    assert right(lane, 4)
    (context,) = contexts_of(lane)
    shared = context.memory
    machine.recording = True
    assert right(lane, 4) and right(lane, 4)
    assert shared not in context.computed_in[1:] and context.memory == shared


def test_a_recording_that_torch_knows_nothing_of_is_refused(machine, open_lane):
    """torch would reuse its memory after the call."""
    lane = open_lane(0)
    assert right(lane, 4)
    machine.recording, machine.torchs = True, False
    with pytest.raises(
        UserError, match=r"(?s)torch does not know the capture.*remedy: capture with torch\.cuda\.graph"
    ):
        right(lane, 4)
    assert not lane.is_needed
    machine.torchs = True
    assert right(lane, 4) and lane.is_needed


def test_a_recording_without_memory_left_is_refused_and_holds_nothing(machine, open_lane):
    lane = open_lane(0)
    assert right(lane, 4)
    machine.recording, machine.memory = True, False
    with pytest.raises(BackendUnavailable, match=r"(?s)no memory left for the engine's execution context.*remedy: "):
        right(lane, 4)
    machine.recording = False
    assert not lane.is_needed
    machine.recording = machine.memory = True
    assert right(lane, 4)
    machine.recording = False
    assert right(lane, 4)


def test_a_call_that_failed_makes_nothing_ready_to_be_recorded(machine, open_lane):
    """TensorRT has not applied the shapes, and may wait for the device to do so."""
    lane = open_lane(0)
    assert right(lane, 6)
    for memory in (False, True):
        machine.recording = machine.memory = True
        with pytest.raises(UserError, match="not ready to be captured"):
            right(lane, 4)
        machine.recording, machine.memory = False, memory
        with contextlib.nullcontext() if memory else pytest.raises(torch.OutOfMemoryError):
            right(lane, 4)
    machine.recording = True
    assert right(lane, 4) and not any(recording for context in contexts_of(lane) for _, recording in context.told)


def test_a_recording_that_fails_leaves_those_before_it_as_they_are(machine, open_lane, monkeypatch):
    lane = open_lane(0)
    assert right(lane, 4)
    machine.recording = True
    assert right(lane, 4)
    (first,) = map(weakref.ref, lane._recorded)
    with monkeypatch.context() as failing, pytest.raises(BackendUnavailable):
        failing.setattr(HostContext, "execute_async_v3", lambda self, stream: False)
        right(lane, 4)
    with pytest.raises(UserError, match="not ready to be captured"):
        right(lane, 4)
    machine.recording = False
    assert right(lane, 4)
    machine.recording = True
    assert right(lane, 4)
    assert len(lane._recorded) == 2 and first() is lane._recorded[0]


def test_a_context_whose_recording_failed_is_waited_for(cuda, machine, open_lane):
    """The context ran the call just before."""
    lane = open_lane(4)
    assert right(lane, 4)
    cuda.recordable = False
    with pytest.warns(RuntimeWarning, match="without CUDA graphs"):
        assert right(lane, 4)
    assert machine.waited == [7]


def test_a_recording_takes_shapes_that_were_worked_out_anew(machine, open_lane, monkeypatch):
    """After many other shapes: the checks are forgotten, and the shapes are equal but not identical."""
    lane = open_lane(0)
    assert right(lane, 4)
    monkeypatch.setitem(CALLS, 4, CallShapes(0, ((4,), (4,)), ((4,),)))
    machine.recording = True
    assert right(lane, 4)
    assert not any(recording for context in contexts_of(lane) for _, recording in context.told)
