"""Fixtures that several tests of the runtime share, on `host_runtime`."""

import contextlib

import pytest
import torch
from host_runtime import LOG, TRT, HostEngine, HostRuntime, Machine

from trtconvert.bundle import ComponentRecord, EngineRecord, TensorRecord
from trtconvert.engine import builder, loading, tensorrt
from trtconvert.runtime import graph as graphs
from trtconvert.runtime.lane import Lane, Plan
from trtconvert.runtime.scratch import Scratch
from trtconvert.runtime.tensorrt import TensorRTComponent


@pytest.fixture
def cuda(monkeypatch):
    host = HostRuntime()
    monkeypatch.setattr(graphs, "cudart", host)
    monkeypatch.setattr(graphs, "load_library", lambda: host)
    return host


@pytest.fixture
def machine(monkeypatch):
    found = Machine()
    empty = torch.empty
    last: list[torch.Tensor] = []

    def allocated(*arguments, **options):
        if not found.memory:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        last[:] = [empty(*arguments, **options)]
        return last[0]

    def segments():
        """That of the last allocation, and one before it that is not of its pool: where a segment ends counts."""
        address, size = last[0].data_ptr(), last[0].nbytes
        of_recording = found.recording and found.torchs
        return [
            {"address": address - 4096, "total_size": 4096, "segment_pool_id": (0, int(not of_recording))},
            {"address": address, "total_size": size, "segment_pool_id": (0, int(of_recording))},
        ]

    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.recording)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found.stream(found.current))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.current, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**30, 2**31))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 0)
    for place in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, place, lambda _: contextlib.nullcontext())
    return found


@pytest.fixture
def plan_of():
    """Makes plans of engines that compute in one memory."""
    scratch, types = Scratch(torch.device("cpu")), (torch.float32, torch.float32)
    scratch.reserve(HostEngine.device_memory_size_v2)
    return lambda engine: Plan(TRT, engine, LOG, ("a", "b"), types, ("y",), types[:1], torch.device("cpu"), scratch)


@pytest.fixture
def open_lane(cuda, machine, plan_of):
    """Makes lanes with room for so many graphs, on one stream and in one memory."""
    return lambda graphs: Lane(plan_of(HostEngine(cuda)), machine.stream(7), graphs)


@pytest.fixture
def component(cuda, machine, monkeypatch):
    """Makes a `TensorRTComponent` of the engine, and the scratch that it computes in."""
    engine = HostEngine(cuda)
    monkeypatch.setattr(tensorrt, "bindings", lambda: TRT)
    monkeypatch.setattr(builder, "make_log", lambda trt: LOG)
    monkeypatch.setattr(loading, "load_engine", lambda trt, log, plan: (None, engine))
    vectors = [TensorRecord(name=name, dtype="float32", shape=["length"]) for name in "aby"]
    lengths = {"length": (1, 4, 16)}
    component = ComponentRecord(
        onnx="x.onnx",
        inputs=vectors[:2],
        outputs=vectors[2:],
        timestep_input="a",
        timestep_max=1,
        dims=lengths,
        engines=[],
    )
    record = EngineRecord.of("denoiser", "tensorrt", "10.6.0", "sm90")

    def make(path, **options):
        path.write_bytes(b"plan")
        fields = {name: options.pop(name) for name in ("refittable", "weights") if name in options}
        scratch = Scratch(torch.device("cpu"))
        made = TensorRTComponent(
            path, record.model_copy(update=fields), component, device=torch.device("cpu", 0), scratch=scratch, **options
        )
        return made, scratch

    return make
