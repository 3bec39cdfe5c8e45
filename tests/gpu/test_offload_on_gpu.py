"""Models on a GPU with weights in host memory: results equal those without offloading, in less GPU memory than
the weights take."""

from __future__ import annotations

import gc
import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from graphed_models import Digits, assert_same_calibration, assert_same_sensitivity
from safetensors.torch import load_file
from support import REPOSITORY
from torch import nn

from trtconvert.bars import NoBar
from trtconvert.bundle import read_manifest
from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.layer_plan import SearchedLayers
from trtconvert.calib.probes import Probes
from trtconvert.cli import main
from trtconvert.linear.modes import LayerMode
from trtconvert.models import offloading
from trtconvert.models.denoiser import intercepted
from trtconvert.models.digits import digits_model
from trtconvert.models.digits_dit import DigitsDiT
from trtconvert.models.offloading import move, offload_large_parts
from trtconvert.models.placed import Place, placed
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection

pytest.importorskip("diffusers", reason="needs diffusers")
import tiny_pipelines

from trtconvert.calib.candidates import candidates_of
from trtconvert.quant.forward import Int8Sites

pytestmark = pytest.mark.gpu

WEIGHTS = REPOSITORY / "recipes/digits-dit.safetensors"
WHOLE, OFFLOADED = Place("cuda", "float16", ""), Place("cuda", "float16", "", True)


@pytest.fixture(params=[True, False], ids=["pinned", "block by block"])
def pinned(request, monkeypatch):
    """Host memory that has room for pinned weights, and such that has none."""
    if not request.param:
        monkeypatch.setattr(offloading, "PINNED_SHARE", 0.0)
    return request.param


def test_digits_are_calibrated_and_measured_as_without(tmp_path, pinned):
    said = []
    there = Digits.load(lambda model: placed(model, OFFLOADED, said.append))
    whole = Digits.load(lambda model: placed(model, WHOLE))
    assert bool(said) != pinned and there.model.onload is not None
    assert all(x.device.type == "cpu" for x in there.model.denoiser.parameters())
    assert any(x.is_pinned() for x in there.model.denoiser.parameters()) == pinned
    assert there.parts == whole.parts
    made, expected = there.calibrated(tmp_path / "a"), whole.calibrated(tmp_path / "b")
    assert_same_calibration(made, expected)
    assert_same_sensitivity(there.sensitivity(expected), whole.sensitivity(expected), rtol=0.02)


def model_of_a_gigabyte():
    """Digits by 28 blocks of 19 million weights: 1 GiB in 16 bits. Two blocks are a fourteenth."""
    denoiser = DigitsDiT(width=1024, heads=16, depth=28).eval()
    generator = torch.Generator().manual_seed(0)
    for x in denoiser.parameters():
        if x.dim() > 1:
            nn.init.normal_(x, std=0.5 * x.shape[1] ** -0.5, generator=generator)
    return replace(digits_model(WEIGHTS), denoiser=denoiser.requires_grad_(False))


def test_a_model_of_a_gigabyte_takes_less_memory_than_its_weights(tmp_path):
    model = model_of_a_gigabyte()
    weights = sum(2 * x.numel() for x in model.denoiser.parameters())
    inputs = {name: x.cuda() for name, x in model.example(0, {"batch": 2, "height": 8, "width": 8}).items()}
    found, peaks = [], []
    for place in (WHOLE, OFFLOADED):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        there = placed(model, place)
        # One layer is in INT8, whose tables lie on the GPU: what is measured are the weights, and what autograd keeps of them.
        parts = parts_to_convert(there, AttentionSection(), LayersSection(include=["blocks.3.mlp.0"]))
        section = CalibrationSection(samples=2, batch=2, steps=2, bins=1, statistic="batch-max")
        folder = tmp_path / str(place.offload)
        made = calibrate(there, section, "", parts.sites, folder, NoBar(), layers=parts.layers)
        of_layers = LayersSection(modes="auto")
        layers = SearchedLayers.of(there, parts.layers, made, of_layers, lambda _: {*LayerMode} - {LayerMode.EXACT}, 1)
        sites = Int8Sites({}, there.timestep_max, "dynamic", True)
        candidates = candidates_of(there, layers.groups, sites, layers.int8, {})
        exact = intercepted(there, lambda call: call.exact())
        with torch.no_grad():
            for _ in range(
                3
            ):  # the first call finds the order of the blocks, later calls prefetch blocks in this order
                output = exact(**inputs)
            output, errors = Probes(there, candidates, draws=8).errors(exact, inputs)
            after = exact(**inputs)
        assert candidates and torch.stack(errors).isfinite().all()
        torch.testing.assert_close(after, output, rtol=1e-2, atol=1e-2)
        found.append((output, torch.stack(errors)))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del there, exact, candidates, layers
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0.05, atol=0)
    assert weights > 0.9 * 2**30
    assert peaks[0] > weights > 2 * peaks[1], (
        f"weights {weights / 2**20:.0f} MiB, peaks {[p // 2**20 for p in peaks]} MiB"
    )


def test_large_models_of_a_pipeline_compute_on_the_gpu_layer_by_layer(monkeypatch, pinned):
    monkeypatch.setattr(offloading, "LARGE", 1000)
    encoder = tiny_pipelines.t5()
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = encoder(ids)[0]
    offload_large_parts([encoder], pinning=True, notice=lambda _: None)
    move(encoder, "cuda")
    for _ in range(3):
        found = encoder(ids.cuda())[0]
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
    assert all(x.device.type == "cpu" for x in encoder.parameters())
    move(encoder, "cpu")
    assert torch.equal(encoder(ids)[0], expected)


def build(folder, recipe, *arguments):
    folder.mkdir()
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    command = ["build", str(folder / "recipe.yaml"), "-o", str(folder / "bundle"), "--cache", str(folder / "cache")]
    outcome = CliRunner().invoke(main, [*command, *arguments])
    assert outcome.exit_code == 0, outcome.output
    return read_manifest(folder / "bundle"), load_file(folder / "bundle/calibration.safetensors")


def assert_built_alike(folder, recipe):
    whole, scales = build(folder / "whole", recipe, "--device", "cuda")
    there, same_scales = build(folder / "offloaded", recipe, "--device", "cuda", "--offload")
    assert "block by block from host memory" in there.quality.computed
    assert scales.keys() == same_scales.keys()
    for name, x in scales.items():
        torch.testing.assert_close(same_scales[name], x, rtol=1e-3, atol=1e-5, msg=name)
    for part in ("sites", "layers"):
        modes = [
            {one.name: one.modes for one in getattr(built.components["denoiser"], part)} for built in (whole, there)
        ]
        assert modes[0] == modes[1] and modes[0]
    assert abs(there.quality.psnr - whole.quality.psnr) < 2


def test_digits_are_built_alike(tmp_path):
    recipe = {
        "model": {"source": "digits-dit", "weights": str(WEIGHTS), "dtype": "float16"},
        "attention": {"modes": "precision"},
        "calibration": {"samples": 8, "steps": 5, "bins": 5},
        "engine": {"backend": "onnxruntime"},
        "verify": {"samples": 4, "steps": 5, "min_psnr": 15},
    }
    assert_built_alike(tmp_path, recipe)


def test_a_flux_with_its_text_encoders_is_built_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(offloading, "LARGE", 1000)  # so that its text encoders are large
    tiny_pipelines.with_text("flux").save_pretrained(tmp_path / "pipeline")
    options = {"height": 32, "width": 32, "batch": [1, 1, 2], "prompts": ["a cat", "a dog"]}
    recipe = tiny_pipelines.SMALL_BUILD | {
        "model": {
            "source": "diffusers",
            "weights": str(tmp_path / "pipeline"),
            "dtype": "bfloat16",
            "options": options,
        },
        "attention": {"modes": "precision"},
        "layers": {"modes": "static", "min_rows": 1},
    }
    assert_built_alike(tmp_path, recipe)
