"""Timing of whole engines, with a stand-in for the device."""

from __future__ import annotations

import ctypes
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from rtx_builds import trt
from timed_sites import OnCpu

from trtconvert.bundle import TensorRecord
from trtconvert.engine import engine_timer
from trtconvert.engine.engine_timer import denoiser_microseconds
from trtconvert.engine.loading import load_engine
from trtconvert.engine.logs import make_log
from trtconvert.errors import TrtconvertError
from trtconvert.export.delta_caches import LAST
from trtconvert.linear.deltas import steps_of
from trtconvert.manifest_checks import CACHE


class Device:
    """Stands in for TensorRT's module and one engine: two inputs and an index, at 1 µs per element of x and unit of timestep.

    Attributes:
        calls: profile, batch and timestep of each call, read from the addresses of the inputs.
        x: the first numbers of x in each call.
    """

    ILogger = trt.ILogger
    TensorIOMode = trt.TensorIOMode
    NAMES = ("x", "timestep", "label", "out")

    def __init__(self, loads=True, takes=True):
        self.loads, self.takes, self.calls, self.x = loads, takes, [], []
        self.profile, self.shapes, self.addresses = 0, {}, {}
        self.num_io_tensors = len(self.NAMES)

    def Runtime(self, log):
        self.log = log
        return self

    def deserialize_cuda_engine(self, plan):
        if not self.loads:
            self.log.log(trt.ILogger.ERROR, "the plan is of another GPU")
        return self if self.loads else None

    def create_execution_context(self):
        return self

    def get_tensor_name(self, index):
        return self.NAMES[index]

    def get_tensor_mode(self, name):
        return trt.TensorIOMode.OUTPUT if name == "out" else trt.TensorIOMode.INPUT

    def get_tensor_dtype(self, name):
        return SimpleNamespace(itemsize=4)

    def get_tensor_shape(self, name):
        return self.shapes["x"]

    def set_optimization_profile_async(self, profile, stream):
        self.profile, self.shapes, self.addresses = profile, {}, {}
        return True

    def set_input_shape(self, name, shape):
        self.shapes[name] = shape
        return self.takes

    def set_tensor_address(self, name, address):
        self.addresses[name] = address

    def execute_async_v3(self, stream):
        batch, width = self.shapes["x"]
        timesteps = (ctypes.c_float * batch).from_address(self.addresses["timestep"])
        labels = (ctypes.c_int64 * batch).from_address(self.addresses["label"])
        x = (ctypes.c_float * (batch * width)).from_address(self.addresses["x"])
        ctypes.memset(self.addresses["out"], 1, 4 * batch * width)
        assert len(set(timesteps)) == 1 and set(labels) == {0}
        self.calls.append((self.profile, batch, timesteps[0]))
        self.x.append(list(x))
        return True

    def microseconds(self, calls):
        """Replaces `device_microseconds`."""
        before = len(self.calls)
        for call in calls:
            call()
        return sum(batch * timestep for _, batch, timestep in self.calls[before:]) / len(calls)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(engine_timer, "device_microseconds", made.microseconds)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with OnCpu():
        yield made


SIGNATURE = [
    TensorRecord(name="x", dtype="float32", shape=["batch", 8]),
    TensorRecord(name="timestep", dtype="float32", shape=["batch"]),
    TensorRecord(name="label", dtype="int64", shape=["batch"]),
]


BATCHES = [{"batch": (1, 2, 4)}, {"batch": (4, 6, 8)}]


def test_a_denoiser_is_timed_at_the_opt_shape_of_every_profile_and_bins_weigh_by_their_number(device):
    found = denoiser_microseconds(device, SIGNATURE, "timestep", BATCHES, b"plan", {100.0: 3, 500.0: 1})
    assert found == pytest.approx((2 + 6) * (3 * 100 + 500) / 4)
    assert set(device.calls) == {(i, n, t) for i, n in ((0, 2), (1, 6)) for t in (100.0, 500.0)}


def test_inputs_take_turns_and_are_spread_like_noise(device):
    denoiser_microseconds(device, SIGNATURE, "timestep", [{"batch": (1, 64, 64)}], b"plan", {100.0: 1})
    sets = [torch.tensor(x) for x in device.x]
    assert len({tuple(x.tolist()) for x in sets}) == engine_timer.ROTATION == len(sets)
    assert all(abs(float(x.mean())) < 0.3 and 0.8 < float(x.std()) < 1.2 for x in sets)


def test_layers_that_quantise_deltas_are_timed_at_a_step_that_goes_on(device, monkeypatch):
    """For falling and rising timesteps. A reset step reads other memory, and takes another time."""
    device.NAMES, device.num_io_tensors = (*Device.NAMES[:3], LAST, "out"), 5
    execute, seen = device.execute_async_v3, []

    def execute_and_see(stream):
        batch, _ = device.shapes["x"]
        seen.append(torch.tensor(list((ctypes.c_float * batch).from_address(device.addresses[LAST]))))
        return execute(stream)

    monkeypatch.setattr(device, "execute_async_v3", execute_and_see)
    cache = TensorRecord(name=LAST, dtype="float32", shape=["batch"])
    denoiser_microseconds(device, [*SIGNATURE, cache], "timestep", BATCHES, b"plan", {100.0: 1})
    resets = [steps_of(torch.full_like(last, 100.0), last, falls).reset for last in seen for falls in (True, False)]
    assert resets and not any(of_call.any() for of_call in resets)


def test_caches_are_one_set(device, monkeypatch):
    """Caches may take gigabytes, and a trajectory rereads the same memory too."""
    cache = TensorRecord(name=f"{CACHE}a.a_hat", dtype="float32", shape=["batch", 8])
    device.NAMES, device.num_io_tensors = (*Device.NAMES[:3], cache.name, "out"), 5
    execute, seen = device.execute_async_v3, set()

    def execute_and_see(stream):
        seen.add((device.addresses["x"], device.addresses[cache.name]))
        return execute(stream)

    monkeypatch.setattr(device, "execute_async_v3", execute_and_see)
    denoiser_microseconds(device, [*SIGNATURE, cache], "timestep", BATCHES[:1], b"plan", {100.0: 1, 500.0: 1})
    assert [len(set(places)) for places in zip(*seen, strict=True)] == [engine_timer.ROTATION, 1]


def timing_refusal(device, *parts):
    with pytest.raises(TrtconvertError) as error:
        denoiser_microseconds(device, SIGNATURE, "timestep", BATCHES, b"plan", {100.0: 1})
    for part in ("expected: ", "remedy: ", "engine.attention", *parts):
        assert part in str(error.value), str(error.value)


def test_an_engine_is_handed_out_when_the_gpu_is_done_with_loading_it(device, monkeypatch):
    """TensorRT returns before the device is done: dropping the engine then breaks the process."""
    order = []
    monkeypatch.setattr(device, "deserialize_cuda_engine", lambda plan: order.append("loading") or device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("done"))
    runtime, engine = load_engine(device, make_log(device), b"plan")
    assert runtime is engine is device and order == ["loading", "done"]
    assert runtime.engine_host_code_allowed


def test_ctrl_c_while_an_engine_is_loaded_waits_for_it(device, monkeypatch, at_ctrl_c):
    at_ctrl_c(signal.default_int_handler)
    done = []
    monkeypatch.setattr(device, "deserialize_cuda_engine", lambda plan: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append(True))
    with pytest.raises(KeyboardInterrupt):
        load_engine(device, make_log(device), b"plan")
    assert done == [True]


def test_an_engine_that_cannot_be_timed_says_why(device, monkeypatch):
    timing_refusal(Device(loads=False), "cannot be loaded", "got: the plan is of another GPU")
    timing_refusal(Device(takes=False), "does not take the shapes")
    monkeypatch.setattr(device, "execute_async_v3", lambda stream: False)
    timing_refusal(device, "an engine could not be timed")

    def out_of_memory(calls):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.")

    monkeypatch.setattr(engine_timer, "device_microseconds", out_of_memory)
    timing_refusal(device, "an engine could not be timed", "got: CUDA out of memory.")
