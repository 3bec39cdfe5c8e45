"""Fixtures of the runtime's tests, on `host_runtime`."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from host_runtime import (
    LOG,
    REFIT_TYPES,
    TRT,
    HostEngine,
    HostRefitter,
    HostRuntime,
    Machine,
    engine_graph,
    engine_weights,
)

from trtconvert.bundle import ComponentRecord, EngineRecord, TensorRecord
from trtconvert.engine import loading, lowered_model, tensorrt
from trtconvert.export import storage
from trtconvert.export.lowering.int8_layers import refitted_constants
from trtconvert.runtime import graph as graphs
from trtconvert.runtime.lane import Lane, LoadedEngine
from trtconvert.runtime.scratch import Scratch
from trtconvert.runtime.tensorrt import TensorRTComponent
from trtconvert.weights.unquantised import save_unquantised


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
        """The segment of the last allocation, and one before it outside of its pool; the end of a segment counts."""
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
    """Makes loaded engines that share scratch memory."""
    scratch, types = Scratch(torch.device("cpu")), (torch.float32, torch.float32)
    scratch.reserve(HostEngine.device_memory_size_v2)
    return lambda engine: LoadedEngine(
        TRT, engine, LOG, ("a", "b"), types, ("y",), types[:1], torch.device("cpu"), scratch
    )


@pytest.fixture
def open_lane(cuda, machine, plan_of):
    """Makes lanes with a number of graphs, on one stream and one scratch memory."""
    return lambda graphs: Lane(plan_of(HostEngine(cuda)), machine.stream(7), graphs)


@pytest.fixture
def component(cuda, machine, monkeypatch):
    """Makes a `TensorRTComponent` of the engine, and its scratch memory."""
    engine = HostEngine(cuda)
    monkeypatch.setattr(tensorrt, "bindings", lambda: TRT)
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
        fields = {name: options.pop(name) for name in ("refittable", "weights", "int8_constants") if name in options}
        scratch = Scratch(torch.device("cpu"))
        made = TensorRTComponent(
            path, record.model_copy(update=fields), component, device=torch.device("cpu", 0), scratch=scratch, **options
        )
        return made, scratch

    return make


@pytest.fixture
def load(component, monkeypatch, tmp_path):
    """Loads an "engine" with the weights of an ONNX model, as `engine_graph` lowers it; the host computes something else.

    It takes options of a component, `layers` of an engine section, and what INT8 layers are quantised `of`: a module, and the
    layers.
    """
    types = SimpleNamespace(**{name: f"torch.{of}" for name, of in REFIT_TYPES.items()})
    places = SimpleNamespace(HOST="host", DEVICE="device")
    trt = SimpleNamespace(
        **vars(TRT), Refitter=HostRefitter, DataType=types, TensorLocation=places, Weights=lambda *of: of
    )
    monkeypatch.setattr(tensorrt, "bindings", lambda: trt)
    monkeypatch.setattr(lowered_model, "against_plugins", lambda options: "")

    def loaded(model, *, layers="exact", of=None, **options):
        storage.save(model, tmp_path / "x.onnx")
        if of is not None:
            save_unquantised(*of, tmp_path / "x.onnx")
        lowered = engine_graph(storage.load(tmp_path / "x.onnx"), layers)
        monkeypatch.setattr(HostRefitter, "engine", engine_weights(lowered))
        shapes = {name: list(x.shape) for name, x in HostRefitter.engine.items() if x.dim() > 1}
        options = {"refittable": True, "weights": shapes, "onnx": tmp_path / "x.onnx"} | options
        constants = refitted_constants(lowered)
        return component(tmp_path / "x.plan", int8_constants=constants, **options)[0]

    return loaded
