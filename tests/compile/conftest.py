"""Fixtures for the tests of `trtconvert compile`."""

from __future__ import annotations

import shutil
import threading

import onnx_ir as ir
import pytest
from compiling import Builder
from pretend_engines import pretend_engines

from trtconvert.bundle import EngineRecord, NativeSite
from trtconvert.engine import BuiltEngine, tensorrt, tensorrt_rtx
from trtconvert.export import storage
from trtconvert.export.lowering.native import lower_to_native


@pytest.fixture
def bundle(tiny_build, tmp_path):
    """A copy to compile."""
    return shutil.copytree(tiny_build.bundle, tmp_path / "bundle")


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """The user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "trtconvert"


@pytest.fixture
def gpu(monkeypatch, cache):
    """Stands in for TensorRT's builder. Returns its target, by the thread's name."""
    main = threading.current_thread().name
    targets = {main: "sm90"}

    def build_engine(name, component, onnx, options, watch):
        native = onnx.with_name("native.onnx")
        model = ir.load(onnx)
        lower_to_native(model)
        storage.save(model, native)
        plan = tensorrt_rtx.build_engine(name, component, native, options, "sm89", watch).plan
        native.unlink()
        site = NativeSite(name="denoiser", query_tokens=16, key_tokens=77, native_us=21.2, plugin_us=33.7)
        record = EngineRecord.of(name, "tensorrt", "10.6.0", targets[threading.current_thread().name])
        found = {
            "gpu": "NVIDIA H200",
            "plugin": "0.1.0",
            "native_sites": [site],
            "plugin_us": 418.3,
            "native_us": 456.0,
            "with_plugins_us": 418.3,
            "plain_us": 512.4,
        }
        return BuiltEngine(plan, record.model_copy(update=found))

    monkeypatch.setattr(tensorrt, "load", lambda: None)
    monkeypatch.setattr(tensorrt, "device_architecture", lambda: targets[threading.current_thread().name])
    monkeypatch.setattr(tensorrt, "build_engine", build_engine)
    pretend_engines(monkeypatch.setattr)
    return targets


@pytest.fixture
def builder(gpu, monkeypatch):
    quick = Builder()
    monkeypatch.setattr(tensorrt, "build_engine", quick)
    return quick
