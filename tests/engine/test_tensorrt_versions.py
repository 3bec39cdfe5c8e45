"""Installed versions of TensorRT and its libraries: the choice, and the reasons of refusals."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from rtx_builds import LINEAR, model_of, refused, trt
from support import REPOSITORY

from trtconvert.engine import tensorrt, tensorrt_rtx
from trtconvert.errors import BackendUnavailable, TrtconvertError


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_without_a_gpu_tensorrt_says_so():
    state = tensorrt.status()
    assert (state.available, state.detail) == (False, "no NVIDIA GPU") and state.remedy
    assert tensorrt.device_name() == ""


class Driver:
    """A CUDA driver whose cuInit fails."""

    def __init__(self, failure):
        self.failure = failure

    def cuInit(self, flags):
        return self.failure

    def cuGetErrorString(self, failure, words):
        words._obj.value = b"system has unsupported display driver / cuda driver combination"


@pytest.mark.parametrize(
    ("failure", "visible", "detail", "remedy"),
    [
        (803, None, "fails with error 803: system has unsupported", "restart the machine"),
        (803, "0", "fails with error 803: system has unsupported", "restart the machine"),
        (
            100,
            None,
            "no NVIDIA GPU",
            "run `trtconvert compile BUNDLE` on a machine with a GPU",
        ),
        (100, "", "no NVIDIA GPU, with CUDA_VISIBLE_DEVICES=''", "unset it"),
        (3, None, "forked from one that uses CUDA", "spawn"),
    ],
)
def test_why_the_driver_gives_no_gpu_is_said(monkeypatch, failure, visible, detail, remedy):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(failure))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    state = tensorrt.status()
    assert not state.available and detail in state.detail and remedy in state.remedy
    assert tensorrt.device_architecture() is None and tensorrt.device_name() == ""


class Gpus:
    """A CUDA driver of an A100 and an H100. used: the GPU that the thread uses."""

    def __init__(self, used):
        self.used = used

    def cuInit(self, flags):
        return 0

    def cuCtxGetDevice(self, device):
        if self.used is None:
            return 201
        device._obj.value = self.used
        return 0

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = {75: (8, 9), 76: (0, 0)}[attribute][device.value]
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = (b"NVIDIA A100", b"NVIDIA H100")[device.value]
        return 0


@pytest.mark.parametrize(
    ("used", "found"), [(None, ("sm80", "NVIDIA A100")), (0, ("sm80", "NVIDIA A100")), (1, ("sm90", "NVIDIA H100"))]
)
def test_engines_are_those_of_the_gpu_that_the_thread_uses(monkeypatch, used, found):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Gpus(used))
    assert (tensorrt.device_architecture(), tensorrt.device_name()) == found


class Registry:
    """A plugin registry with some creators, and more after loading a library."""

    def __init__(self, first, loaded):
        self.names, self.loaded, self.loads = first, loaded, 0

    def get_creator(self, name, version, namespace):
        return name if name in self.names else None

    def load_library(self, path):
        self.loads += 1
        self.names = self.loaded
        return None if self.loaded is None else path


@pytest.mark.parametrize(
    ("first", "loaded", "loads", "lacking"),
    [
        (tensorrt._PLUGINS, (), 0, None),
        ((), tensorrt._PLUGINS, 1, None),
        ((), tensorrt._PLUGINS[:1], 1, f"without {', '.join(tensorrt._PLUGINS[1:])}"),
        (
            ("Int8Attention",),
            tuple(name for name in tensorrt._PLUGINS if name != "ResidualNorm"),
            1,
            "without ResidualNorm",
        ),
    ],
)
def test_every_plugin_of_the_library_is_asked_for(monkeypatch, first, loaded, loads, lacking):
    registry = Registry(first, loaded)
    monkeypatch.setattr(
        tensorrt, "bindings", lambda: SimpleNamespace(__version__="10.6", get_plugin_registry=lambda: registry)
    )
    if lacking is None:
        assert tensorrt.load().__version__ == "10.6"
    else:
        with pytest.raises(TrtconvertError, match=rf"(?s)cannot be registered.*{lacking}.*remedy: run pip install"):
            tensorrt.load()
    assert registry.loads == loads


def test_a_plugin_library_that_does_not_load_says_what_it_lacks(monkeypatch):
    def broken():
        raise BackendUnavailable("the kernel library does not load", got="undefined symbol: cudaGetDevice")

    monkeypatch.setattr(tensorrt, "bindings", lambda: None)
    monkeypatch.setattr(tensorrt, "load_library", broken)
    with pytest.raises(BackendUnavailable, match="undefined symbol"):
        tensorrt.load()


def test_without_its_package_tensorrt_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tensorrt, "driver_problem", lambda: None)
    monkeypatch.setattr(tensorrt, "_PACKAGES", ("tensorrt_of_nobody",))
    state = tensorrt.status()
    assert (state.available, state.detail) == (False, "TensorRT's Python package is not installed")
    assert "pip install tensorrt" in state.remedy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no attribute '__version__'"),
        ("raise RuntimeError('no such driver')", "cannot be loaded: no such driver"),
        ("__version__ = '99.1.2'", "libnvinfer.so.99"),
        ("__version__ = 'unknown'", "library cannot be found by the package"),
    ],
)
def test_a_package_that_is_no_whole_tensorrt_is_told(monkeypatch, tmp_path, text, said):
    name = f"tensorrt_odd_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tensorrt, "driver_problem", lambda: None)
    monkeypatch.setattr(tensorrt, "_PACKAGES", (name,))
    state = tensorrt.status()
    assert not state.available and said in state.detail and state.remedy


VERSIONS = ("10.6", "10.15", "11.2")


def with_tensorrt(code, bindings, library=None, first=""):
    """Returns the output of a process with real TensorRT libraries and a stand-in for the GPU."""
    folder, library = REPOSITORY / "third_party" / "tensorrt", library or bindings
    if not (folder / bindings).exists() or not (folder / library).exists():
        pytest.skip("TensorRT is not here; 'make tensorrt' fetches it")
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder / library / "lib"),
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{folder / bindings / 'python'}",
    }
    begin = (
        f"from trtconvert.engine import tensorrt; tensorrt.driver_problem = lambda: None\n{first}"
        "tensorrt.cuda_problem = lambda: ''\n"
    )
    done = subprocess.run([sys.executable, "-c", begin + code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


STATUS = "s = tensorrt.status(); print(s.available, s.detail, s.remedy, sep='; ')"


def test_bindings_and_a_library_of_another_version_are_refused():
    found = with_tensorrt(STATUS, "10.6", "10.15")
    assert found.startswith("False; the Python bindings are of TensorRT 10.6.0, their library is 10.15.1; ")
    assert "LD_LIBRARY_PATH" in found


def test_bindings_whose_library_does_not_load_are_refused():
    found = with_tensorrt(STATUS, "10.6", "11.2")
    assert found.startswith("False; tensorrt_bindings cannot be loaded: libnvinfer.so.10")


@pytest.mark.parametrize("version", VERSIONS)
def test_without_the_plugin_library_tensorrt_says_so(version):
    found = with_tensorrt(f"tensorrt.library_path = lambda: None\n{STATUS}", version)
    assert found.startswith(
        "False; libtrtconvert.so, the plugin library, is not installed; run pip install --force-reinstall --no-deps"
    )


@pytest.mark.first_case
@pytest.mark.parametrize("version", VERSIONS)
def test_a_gpu_that_cuda_cannot_use_is_refused_with_its_reason(version):
    """A driver older than CUDA is an example: TensorRT's Runtime would end the process."""
    code = "tensorrt.library_path = lambda: 'there'\ntensorrt.cuda_problem = problem\n" + STATUS
    keep = "problem = tensorrt.cuda_problem\n"
    found = with_tensorrt(code, version, first=keep)
    assert found.startswith("False; torch cannot use the GPU: ") and "update the NVIDIA driver" in found


def test_a_builder_that_tensorrt_does_not_make_says_why(monkeypatch):
    """The bindings raise TypeError for a null pointer; the log has the reason."""

    def none_made(log):
        log.log(trt.ILogger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    monkeypatch.setattr(trt, "Builder", none_made)
    refused("cannot be built", "got: CUDA initialization failure with error: 35", model=model_of(*LINEAR))


@pytest.mark.parametrize("problem", [RuntimeError("driver too old\nmore"), AssertionError("driver too old")])
def test_why_cuda_cannot_be_used_is_one_line(monkeypatch, problem):
    def fail():
        raise problem

    monkeypatch.setattr(torch.cuda, "init", fail)
    assert tensorrt.cuda_problem() == "driver too old"
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert tensorrt.cuda_problem() == ""


def test_a_folder_of_tensorrts_name_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "tensorrt_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tensorrt, "_PACKAGES", ("tensorrt_of_nobody",))
    assert tensorrt._imported() == (None, "")
    (tmp_path / "tensorrt_broken.py").write_text("raise ImportError('libnvinfer.so.10')")
    (tmp_path / "tensorrt_whole.py").write_text("__version__ = '10.16.0a1'")
    monkeypatch.setattr(tensorrt, "_PACKAGES", ("tensorrt_broken", "tensorrt_whole"))
    assert tensorrt._imported()[0].__version__ == "10.16.0a1"
    monkeypatch.setattr(tensorrt, "_PACKAGES", ("tensorrt_broken",))
    assert tensorrt._imported() == (None, "tensorrt_broken cannot be loaded: libnvinfer.so.10")


def test_tensorrt_rtx_says_what_is_wrong_with_it(monkeypatch):
    assert tensorrt_rtx.status().available and tensorrt_rtx.status().detail == trt.__version__
    monkeypatch.setattr(trt, "__version__", "1.0.0")
    assert "bindings are of TensorRT-RTX 1.0.0, the libraries 1." in tensorrt_rtx.status().detail

    def fail(name):
        raise ImportError("libcudart.so.13")

    monkeypatch.setattr(tensorrt_rtx.importlib, "import_module", fail)
    state = tensorrt_rtx.status()
    assert not state.available and "cannot be loaded: libcudart.so.13" in state.detail and state.remedy


@pytest.mark.parametrize("version", VERSIONS)
def test_a_plugin_library_that_tensorrt_does_not_load_is_refused(version, tmp_path):
    (tmp_path / "libtrtconvert.so").write_bytes(b"no library")
    code = f"""
from pathlib import Path
from trtconvert.errors import BackendUnavailable, TrtconvertError
tensorrt.library_path = lambda: Path({str(tmp_path / "libtrtconvert.so")!r})
try:
    tensorrt.load()
except TrtconvertError as error:
    print(error)
"""
    assert "libtrtconvert.so cannot be registered\n  expected: a library that TensorRT " in with_tensorrt(code, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_has_what_the_builder_uses(version):
    """TensorRT 11 removed much of 10."""
    used = {
        "BuilderFlag": ("REFIT", "VERSION_COMPATIBLE", "WEIGHT_STREAMING"),
        "HardwareCompatibilityLevel": ("AMPERE_PLUS",),
        "MemoryPoolType": ("WORKSPACE",),
        "IBuilderConfig": (
            "add_optimization_profile", "set_timing_cache", "create_timing_cache", "get_timing_cache", "set_flag",
            "plugins_to_serialize", "progress_monitor", "builder_optimization_level", "hardware_compatibility_level",
            "set_memory_pool_limit", "avg_timing_iterations",
        ),
        "ITimingCache": ("combine", "serialize"),
        "OnnxParser": ("parse", "get_error", "num_errors"),
        "ParserError": ("node", "node_name", "node_operator", "desc", "local_function_stack"),
        "Runtime": ("deserialize_cuda_engine", "engine_host_code_allowed"),
        "ICudaEngine": ("create_execution_context", "get_tensor_mode", "get_tensor_dtype", "num_io_tensors"),
        "IExecutionContext": (
            "set_optimization_profile_async", "set_input_shape", "get_tensor_shape", "set_tensor_address", "execute_async_v3",
        ),
        "TensorIOMode": ("INPUT",),
        "DataType": ("itemsize",),
        "IProgressMonitor": ("phase_start", "step_complete", "phase_finish"),
    }  # fmt: skip
    code = f"""
import tensorrt_bindings as trt
print([f"{{name}}.{{part}}" for name, parts in {used!r}.items() for part in parts if not hasattr(getattr(trt, name), part)])
"""
    assert with_tensorrt(code, version) == "[]"
