"""MoDiff caches on both runtimes: their trajectories, and when they reset."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import onnx
import pytest
import torch
from host_runtime import LOG, TRT, HostContext, HostEngine

from trtconvert.bundle import ComponentRecord, EngineRecord, TensorRecord
from trtconvert.engine import loading, tensorrt
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.runtime.batches import AnyBatch
from trtconvert.runtime.diffusers import _Denoising
from trtconvert.runtime.lane import CallShapes, Lane, LoadedEngine
from trtconvert.runtime.scratch import Scratch
from trtconvert.runtime.session import OnnxRuntimeComponent
from trtconvert.runtime.tensorrt import TensorRTComponent
from trtconvert.runtime.trajectory import Trajectory

COUNTS = """
<ir_version: 10, opset_import: ["": 20]>
counts (float[length] t, float[length] b, float[length] last, float[length] s)
    => (float[length] y, float[length] "last.next", float[length] "s.next") {
    begins = Greater(t, last)
    zero = Constant<value = float {0.0}>()
    one = Constant<value = float {1.0}>()
    known = Where(begins, zero, s)
    "s.next" = Add(known, one)
    y = Add("s.next", b)
    "last.next" = Identity(t)
}
"""
"""y is the number of a sample's calls since its reset, plus b."""


class CountingContext(HostContext):
    """TensorRT's execution context of `COUNTS`."""

    def execute_async_v3(self, stream):
        names = ("t", "b", "last", "s", "y", "last.next", "s.next")
        t, b, last, s, y, last_next, s_next = (self.vector(self.at[name]) for name in names)
        assert len({x.data_ptr() for x in (last, s, last_next, s_next)}) == 4  # nothing is written where it is read

        def compute():
            s_next.copy_(torch.where(t > last, 0.0, s) + 1)
            y.copy_(s_next + b)
            last_next.copy_(t)

        self.cuda.run(compute)
        return True

    def vector(self, address):
        (length,) = self.shape
        return torch.frombuffer((ctypes.c_float * length).from_address(address), dtype=torch.float32)


class CountingEngine(HostEngine):
    num_io_tensors = 7

    def get_tensor_name(self, index):
        return ("t", "b", "last", "s", "y", "last.next", "s.next")[index]

    def create_execution_context(self, strategy):
        self.contexts.append(CountingContext(self.cuda))
        return self.contexts[-1]


def vector(name: str) -> TensorRecord:
    return TensorRecord(name=name, dtype="float32", shape=["length"])


RECORD = ComponentRecord(
    onnx="counts.onnx",
    inputs=[vector("t"), vector("b")],
    outputs=[vector("y")],
    timestep_input="t",
    timestep_max=1000,
    dims={"length": (1, 2, 4)},
    engines=[],
    caches=[vector("last"), vector("s")],
)


@pytest.fixture
def on_gpu(cuda, machine, monkeypatch, tmp_path) -> TensorRTComponent:
    engine = CountingEngine(cuda)
    monkeypatch.setattr(tensorrt, "bindings", lambda: TRT)
    monkeypatch.setattr(loading, "load_engine", lambda trt, log, plan: (None, engine))
    (tmp_path / "plan").write_bytes(b"plan")
    record = EngineRecord.of("denoiser", "tensorrt", "10.6.0", "sm90")
    device = torch.device("cpu", 0)
    return TensorRTComponent(tmp_path / "plan", record, RECORD, device=device, scratch=Scratch(torch.device("cpu")))


@pytest.fixture
def on_cpu(tmp_path) -> OnnxRuntimeComponent:
    onnx.save(onnx.parser.parse_model(COUNTS), tmp_path / "counts.onnx")
    return OnnxRuntimeComponent(tmp_path / "counts.onnx", RECORD)


@pytest.fixture(params=["on_gpu", "on_cpu"])
def component(request):
    return request.getfixturevalue(request.param)


def counts(component, timestep: float, batch: int = 2) -> list[float]:
    return component(torch.full((batch,), timestep), torch.zeros(batch)).tolist()


def aligned(value: float) -> torch.Tensor:
    """Two numbers at an address that is taken as it is: of a copy a recording would keep the memory, which nobody does here."""
    room = torch.zeros(128)
    start = -room.data_ptr() % 256 // 4
    return room[start : start + 2].fill_(value)


def falling(start: float = 900.0) -> Iterator[float]:
    while True:
        yield start
        start -= 10


def test_each_call_goes_on_from_the_one_before(component):
    """For plain calls, and for calls of the two captured graphs."""
    assert [counts(component, t) for t, _ in zip(falling(), range(9), strict=False)] == [[i, i] for i in range(1, 10)]
    assert list(component.caches) == ["last", "s"] and component.caches["s"].tolist() == [9, 9]
    if isinstance(component, TensorRTComponent):
        assert component.graphs_recorded == 2 and component.caches_memory == 2 * 2 * 2 * 4


def test_a_trajectory_begins_anew_where_timesteps_say_so_and_where_it_is_told_to(component):
    time = falling()
    for _ in range(6):
        counts(component, next(time))
    assert counts(component, 900.0) == [1, 1] and counts(component, 900.0) == [2, 2]
    component.reset_cache()
    assert counts(component, 100.0) == [1, 1] and counts(component, 90.0) == [2, 2]
    # Of samples by themselves.
    assert component(torch.tensor([80.0, 950.0]), torch.zeros(2)).tolist() == [3, 1]


def test_another_batch_begins_anew_and_so_does_the_one_before_it(component):
    found = [counts(component, 900.0 - i, batch) for i, batch in enumerate((2, 2, 2, 2, 3, 3, 3, 3, 2, 2, 2, 2))]
    assert [one[0] for one in found] == [1, 2, 3, 4] * 3
    if isinstance(component, TensorRTComponent):
        assert component.caches_memory == 2 * 2 * 2 * 4  # those of the batch before have gone


def test_others_may_call_with_caches_of_their_own(component):
    other = component.apart()
    for step in range(1, 6):
        assert counts(component, 900.0 - step) == [step, step]
        assert counts(other, 900.0 - step, batch=3) == [step] * 3
    other.reset_cache()
    assert counts(other, 10.0, batch=3) == [1] * 3 and counts(component, 10.0) == [6, 6]
    if isinstance(component, TensorRTComponent):
        before = component.caches_memory
        del other
        assert component.caches_memory < before


def test_parts_of_a_batch_have_caches_of_their_own(component):
    drawing = AnyBatch(component)
    for step in range(1, 5):
        b = torch.arange(9.0) * 100
        found = drawing(torch.full((9,), 900.0 - step), b)
        assert torch.equal(found, b + step)
    drawing.reset_cache()
    assert drawing(torch.full((9,), 10.0), torch.zeros(9)).tolist() == [1] * 9


def test_contexts_of_a_pipeline_have_caches_of_their_own(component):
    called = _Denoising.__new__(_Denoising)
    called._denoiser, called.of_thread, called._contexts = component, SimpleNamespace(context=None), {}
    for step in range(1, 4):
        for context in ("cond", "uncond"):
            called.of_thread.context = context
            assert counts(called._in_context(), 900.0 - step) == [step, step]
    called.reset_cache()
    assert counts(called._in_context(), 10.0) == [1, 1]


def test_numbers_that_are_not_finite_are_found(component):
    component.check_caches()  # of no caches
    component(torch.full((2,), 900.0), torch.zeros(2))
    component.check_caches()
    component.caches["s"][1] = torch.inf
    with pytest.raises(UserError, match=r"(?s)the cache s holds numbers that are not finite.*1 of 2.*reset_cache\(\)"):
        component.check_caches()
    component.reset_cache()
    assert counts(component, 800.0) == [1, 1]
    component.check_caches()


def test_a_recording_of_the_callers_keeps_its_caches_where_they_are(cuda, machine, monkeypatch):
    """Each launch reads the caches of the launch before; a reset takes effect in the next launch."""
    scratch, types, device = Scratch(torch.device("cpu")), (torch.float32, torch.float32), torch.device("cpu")
    scratch.reserve(HostEngine.device_memory_size_v2)
    plan = LoadedEngine(
        TRT, CountingEngine(cuda), LOG, ("t", "b"), types, ("y",), types[:1], device, scratch, ("last", "s"), types
    )
    lane, trajectory, t, b = Lane(plan, machine.stream(7), 4), Trajectory(), aligned(900.0), aligned(0.0)
    call = CallShapes(0, ((2,), (2,)), ((2,),), ((2,), (2,)))
    lane.run(call, (t, b), trajectory)
    before = [x.data_ptr() for x in lane.caches_of(trajectory)]
    machine.recording, cuda.recording, copied = True, [], []
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda *ends: copied.append([x.data_ptr() for x in ends]))
        (y,) = lane.run(call, (t, b), trajectory)
    (work,), cuda.recording, machine.recording = cuda.recording, None, False
    assert [to for to, _ in copied] == before  # what was written goes to where it is read
    assert [x.data_ptr() for x in lane.caches_of(trajectory)] == before

    def launch() -> list[float]:
        work()
        for to, source in copied:
            ctypes.memmove(to, source, 8)
        return y.tolist()

    assert launch() == [2, 2] and launch() == [3, 3]
    lane.forget_caches(trajectory)
    assert launch() == [1, 1] and launch() == [2, 2]
    # Calls of another batch have other caches; those of the recording stay, and begin anew with the others.
    other = CallShapes(0, ((3,), (3,)), ((3,),), ((3,), (3,)))
    lane.run(other, (torch.full((3,), 800.0), torch.zeros(3)), trajectory)
    assert lane.caches_memory == 2 * 2 * (2 + 3) * 4 and launch() == [3, 3]
    lane.forget_caches(trajectory)
    assert launch() == [1, 1]
    lane.run(call, (t, b), trajectory)
    assert lane.caches_memory == 2 * 2 * 2 * 4 and [x.data_ptr() for x in lane.caches_of(trajectory)] != before


def test_a_recording_of_another_batch_is_refused_until_it_was_called(on_gpu, machine):
    counts(on_gpu, 900.0)
    machine.recording = True
    with pytest.raises(UserError, match="not ready to be captured"):
        counts(on_gpu, 900.0, 3)
    machine.recording = False
    assert counts(on_gpu, 900.0, 3) == [1] * 3


def test_threads_take_turns_with_one_trajectory(on_cpu):
    seen, together = [], threading.Barrier(4)

    def call():
        together.wait()
        seen.extend(counts(on_cpu, 900.0, 1)[0] for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 81))


def test_an_engine_without_the_caches_of_the_manifest_is_refused(cuda, machine, monkeypatch, tmp_path):
    monkeypatch.setattr(tensorrt, "bindings", lambda: TRT)
    monkeypatch.setattr(loading, "load_engine", lambda trt, log, plan: (None, HostEngine(cuda)))
    (tmp_path / "plan").write_bytes(b"plan")
    record = EngineRecord.of("denoiser", "tensorrt", "10.6.0", "sm90")
    with pytest.raises(
        BackendUnavailable, match=r"(?s)other inputs and outputs than the manifest.*last\.next, s\.next"
    ):
        TensorRTComponent(
            tmp_path / "plan", record, RECORD, device=torch.device("cpu", 0), scratch=Scratch(torch.device("cpu"))
        )
