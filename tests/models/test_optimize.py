"""One call: a pipeline in memory is converted once, found again by its weights, and draws as before."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_pipelines
import torch
from tiny_pipelines import PIPELINES, images

import trtconvert
from trtconvert.engine import BackendStatus, tensorrt
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.runtime.diffusers import DiffusersDenoiser

pytest.importorskip("diffusers", reason="needs diffusers")

SECTIONS = {
    "calibration": {"samples": 2, "batch": 2, "steps": 4, "bins": 2},
    "verify": {"samples": 2, "steps": 4, "min_psnr": 10.0, "min_site_sqnr": 5.0},
}


def optimize(pipe, folder, **named):
    return trtconvert.optimize(
        pipe,
        folder,
        SECTIONS | named,
        device="cpu",
        quiet=True,
        **PIPELINES["stable_diffusion"][1] | {"batch": [1, 1, 2]},
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache of optimize"))


class Begun(Exception):
    """A build, which does not go on."""

    def __init__(self, bundle: Path) -> None:
        super().__init__()
        self.bundle = bundle


def begun(recipe, bundle, *others):
    raise Begun(bundle)


@pytest.mark.soak
def test_a_pipeline_is_converted_once_for_its_weights(tmp_path, monkeypatch):
    pipe = tiny_pipelines.with_text("stable_diffusion")
    other = copy.deepcopy(pipe.unet)
    expected = images(pipe, "stable_diffusion")
    assert optimize(pipe, tmp_path) is pipe and isinstance(pipe.unet, DiffusersDenoiser)
    (bundle,) = tmp_path.iterdir()
    drawn = images(pipe, "stable_diffusion")
    assert float((drawn - expected).abs().mean()) < 0.05
    with pytest.raises(UserError, match="the pipeline's unet is converted already"):
        optimize(pipe, tmp_path)

    made = (bundle / "manifest.json").stat().st_mtime_ns
    pipe.unet = other
    optimize(pipe, tmp_path)
    assert torch.equal(images(pipe, "stable_diffusion"), drawn)
    assert list(tmp_path.iterdir()) == [bundle] and (bundle / "manifest.json").stat().st_mtime_ns == made

    with torch.no_grad():
        other.conv_out.weight.mul_(1.5)
    pipe.unet = other
    monkeypatch.setattr("trtconvert.pipeline.build", begun)
    with pytest.raises(Begun) as build:
        optimize(pipe, tmp_path)
    assert build.value.bundle.parent == tmp_path and build.value.bundle != bundle


@pytest.mark.skipif(tensorrt.status().available, reason="looks at a machine without TensorRT")
def test_without_a_gpu_it_says_what_it_could_do(tmp_path):
    with pytest.raises(BackendUnavailable, match=r'(?s)expected: an NVIDIA GPU.*device="cpu", which runs ONNX Runtime'):
        trtconvert.optimize(tiny_pipelines.with_text("stable_diffusion"), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def two_gpus(monkeypatch):
    """Pretends that TensorRT and two GPUs are here. Returns the GPUs that blocks choose."""
    chosen = []

    @contextmanager
    def device(gpu):
        chosen.append(gpu)
        yield

    monkeypatch.setattr(tensorrt, "status", lambda: BackendStatus("tensorrt", "plugin: INT8", True, "10.6"))
    monkeypatch.setattr("trtconvert.pipeline.build", lambda *_: None)
    for name, value in (("is_available", lambda: True), ("device_count", lambda: 2), ("device", device)):
        monkeypatch.setattr(torch.cuda, name, value)
    return chosen


def test_a_gpu_that_is_not_there_is_refused_before_the_work(tmp_path, two_gpus, monkeypatch):
    monkeypatch.setattr("trtconvert.pipeline.build", begun)
    with pytest.raises(BackendUnavailable, match=r"no GPU 'cuda:2'\n.*cuda:0 to cuda:1"):
        trtconvert.optimize(tiny_pipelines.with_text("stable_diffusion"), tmp_path, device="cuda:2")


def test_engines_are_built_on_the_gpu_that_was_asked_for(tmp_path, two_gpus, monkeypatch):
    def load(folder, **named):
        raise BackendUnavailable(f"no engine for {named['device']}")

    def compile_bundle(folder, *_):
        raise Begun(folder)

    monkeypatch.setattr("trtconvert.runtime.load", load)
    monkeypatch.setattr("trtconvert.compile.compile_bundle", compile_bundle)
    with pytest.raises(Begun):
        trtconvert.optimize(tiny_pipelines.with_text("stable_diffusion"), tmp_path, device="cuda:1", quiet=True)
    assert two_gpus == [torch.device("cuda:1")]


@torch.inference_mode()
def test_the_conversion_computes_on_the_gpu_that_was_asked_for_and_with_gradients(tmp_path, two_gpus, monkeypatch):
    def built(*_):
        assert two_gpus == [torch.device("cuda:1")] and not torch.zeros(1).is_inference()
        raise Begun(tmp_path)

    monkeypatch.setattr("trtconvert.pipeline.build", built)
    with pytest.raises(Begun):
        trtconvert.optimize(tiny_pipelines.with_text("stable_diffusion"), tmp_path, device="cuda:1", quiet=True)


def test_other_objects_and_contradictory_arguments_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"(?s)cannot be optimized.*got: Linear"):
        trtconvert.optimize(torch.nn.Linear(2, 2), tmp_path, device="cpu")
    with pytest.raises(UserError, match=r"(?s)recipe\[.model.\] has fields that the arguments decide.*got: weights"):
        optimize(tiny_pipelines.with_text("stable_diffusion"), tmp_path, model={"weights": "elsewhere"})
    with pytest.raises(UserError, match=r"unknown field 'attention.mode'"):
        optimize(tiny_pipelines.with_text("stable_diffusion"), tmp_path, attention={"mode": "auto"})
