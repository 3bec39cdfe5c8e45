"""One call: a pipeline in memory is converted once, found again by its weights, and draws as before."""

from __future__ import annotations

import copy
import shutil

import pytest
import tiny_pipelines
import torch
from safetensors.torch import load_file
from tiny_pipelines import PIPELINES, images

import trtconvert
from trtconvert.engine import tensorrt
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


@pytest.mark.slow
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

    # Other weights are built into another folder.
    builds = []

    def noted(recipe, output, *_):
        (weights,) = (recipe.model.weights / "unet").glob("*.safetensors")
        builds.append((output, load_file(weights)["conv_out.weight"]))
        shutil.copytree(bundle, output)

    monkeypatch.setattr("trtconvert.pipeline.build", noted)
    with torch.no_grad():
        other.conv_out.weight.mul_(1.5)
    pipe.unet = other
    optimize(pipe, tmp_path)
    ((output, weight),) = builds
    assert {*tmp_path.iterdir()} == {bundle, output} and len({bundle, output}) == 2
    assert torch.equal(weight, other.conv_out.weight)


@pytest.mark.skipif(tensorrt.status().available, reason="looks at a machine without TensorRT")
def test_without_a_gpu_it_says_what_it_could_do(tmp_path):
    with pytest.raises(BackendUnavailable, match=r'(?s)expected: an NVIDIA GPU.*device="cpu", which runs ONNX Runtime'):
        trtconvert.optimize(tiny_pipelines.with_text("stable_diffusion"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_objects_and_contradictory_arguments_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"(?s)cannot be optimized.*got: Linear"):
        trtconvert.optimize(torch.nn.Linear(2, 2), tmp_path, device="cpu")
    with pytest.raises(UserError, match=r"(?s)recipe\[.model.\] has fields that the arguments decide.*got: weights"):
        optimize(tiny_pipelines.with_text("stable_diffusion"), tmp_path, model={"weights": "elsewhere"})
    with pytest.raises(UserError, match=r"unknown field 'attention.mode'"):
        optimize(tiny_pipelines.with_text("stable_diffusion"), tmp_path, attention={"mode": "auto"})
