"""New weights of engines during calls, on the host."""

import threading
import time
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from host_runtime import TRT, computes

from trtconvert.engine import tensorrt
from trtconvert.errors import BackendUnavailable, UserError


class Refitter:
    """TensorRT's, of an engine with a weight [4, 6], one [6] and one that was made by transposing; of another [4, 6] the name is
    an input's, and it is there transposed as well."""

    SIZES = MappingProxyType({"w": 24, "turned.T": 24, "b": 6, "x:weight": 24, "x.T": 24})
    works, given = True, ()

    def __init__(self, engine, log) -> None:
        Refitter.given = []

    def get_all_weights(self):
        return list(self.SIZES)

    def get_weights_prototype(self, name):
        return SimpleNamespace(dtype="float", size=self.SIZES[name])

    def set_named_weights(self, name, weights, where):
        self.given.append(name)
        return True

    def unset_named_weights(self, name):
        return True

    def get_missing_weights(self):
        return []

    def refit_cuda_engine(self):
        return self.works


@pytest.fixture
def refittable(component, monkeypatch, tmp_path):
    types = SimpleNamespace(FLOAT="float", HALF="half", BF16="bf16", INT64="int64", INT32="int32")
    places = SimpleNamespace(HOST="host", DEVICE="device")
    trt = SimpleNamespace(
        **vars(TRT), Refitter=Refitter, DataType=types, TensorLocation=places, Weights=lambda *_: None
    )
    monkeypatch.setattr(tensorrt, "bindings", lambda: trt)
    shapes = {"w": [4, 6], "turned.T": [6, 4], "x:weight": [4, 6], "x.T": [6, 4]}
    return component(tmp_path / "x.plan", refittable=True, weights=shapes)[0]


def test_weights_of_the_right_size_and_another_shape_are_refused(refittable):
    assert refittable.refit({"w": torch.ones(4, 6), "turned": torch.ones(4, 6), "b": torch.ones(6)}) == 3
    assert refittable.refit({"x": torch.ones(4, 6)}) == 2 and Refitter.given == ["x:weight", "x.T"]
    for name in ("w", "turned", "x"):
        for shape in ((6, 4), (24,), (2, 12)):
            with pytest.raises(
                UserError, match=rf"(?s)'{name}' does not fit.*expected: shape \[4, 6\].*got: .*remedy: "
            ):
                refittable.refit({name: torch.ones(shape)})
            assert Refitter.given == []
    assert computes(refittable)


def test_a_mask_in_a_state_dict_is_refused_by_name(refittable, monkeypatch):
    """TensorRT keeps it as BOOL, which no weight of a layer is."""
    monkeypatch.setattr(Refitter, "get_weights_prototype", lambda self, name: SimpleNamespace(dtype="bool", size=24))
    with pytest.raises(UserError, match=r"(?s)'w' cannot be replaced.*got: bool.*remedy: leave it out"):
        refittable.refit({"w": torch.ones(4, 6, dtype=torch.bool)})
    assert Refitter.given == [] and computes(refittable)


def test_an_engine_with_old_and_new_weights_is_not_called(refittable, monkeypatch):
    assert computes(refittable)
    monkeypatch.setattr(Refitter, "works", False)
    with pytest.raises(BackendUnavailable, match=r"(?s)some may be new.*load the bundle again"):
        refittable.refit({"w": torch.ones(4, 6)})
    with pytest.raises(UserError, match="was closed"):
        computes(refittable)


def test_calls_that_wait_for_new_weights_get_no_mixed_ones(machine, refittable, monkeypatch):
    """On several streams, which `close` closes one after the other."""
    here, results = threading.local(), []
    here.stream = 7
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: here.stream)

    def current():
        return SimpleNamespace(cuda_stream=here.stream, synchronize=lambda: time.sleep(0.005))

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    for here.stream in (11, 12, 13):
        assert computes(refittable)
    inside, go = threading.Event(), threading.Event()

    def fail(refitter):
        inside.set()
        return not go.wait(5)

    def call(stream):
        here.stream = stream
        try:
            results.append(computes(refittable))
        except UserError as error:
            results.append(error.problem)

    def replace_weights():
        with pytest.raises(BackendUnavailable):
            refittable.refit({"w": torch.ones(4, 6)})

    monkeypatch.setattr(Refitter, "refit_cuda_engine", fail)
    threads = [threading.Thread(target=replace_weights)]
    threads[0].start()
    inside.wait(5)
    threads += [threading.Thread(target=call, args=(stream,)) for stream in (11, 12, 13)]
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.1)
    go.set()
    for thread in threads:
        thread.join()
    assert results == ["the component was closed"] * 3


def test_weights_are_replaced_though_the_owner_of_a_stream_destroyed_it(machine, refittable):
    for machine.current in (11, 12):
        assert computes(refittable)
    machine.destroyed = {11}
    for _ in range(2):
        assert refittable.refit({"w": torch.ones(4, 6)}) == 1
    assert set(refittable._lanes) == {12} and computes(refittable)
