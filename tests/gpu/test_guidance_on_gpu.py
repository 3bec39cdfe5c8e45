"""Guidance inside a TensorRT engine: its scale follows every call, and a pipeline on the GPU draws with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support import WEIGHTS
from tolerances import HALF_DENOISER, INT8_IMAGES_PSNR

from trtconvert import runtime
from trtconvert.bundle import read_manifest
from trtconvert.cache import Cache
from trtconvert.engine import tensorrt
from trtconvert.evaluate.verify import psnr
from trtconvert.models.recorded_calls import relative_error
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not tensorrt.status().available, reason=tensorrt.status().detail)]


def built(folder: Path, model: dict, **engine) -> Path:
    recipe = {
        "model": model | {"dtype": "float16"},
        "attention": {"modes": ["precision", "balanced"]},
        "layers": {"modes": "off"},
        "calibration": {"samples": 2, "batch": 2, "steps": 4, "bins": 2},
        "engine": {"backend": "tensorrt", "attention": "plugin", "optimization_level": 1, "guidance": "fused"} | engine,
        "verify": {"samples": 2, "steps": 4, "min_psnr": 15},
        "output": {"grid": 2},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    build(
        load_recipe(folder / "recipe.yaml"), folder / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True))
    )
    return folder / "bundle"


@pytest.fixture(scope="module")
def digits_fused(tmp_path_factory) -> Path:
    """The shipped model, for one to eight samples."""
    shapes = {"batch": [1, 4, 8], "height": 8, "width": 8}
    return built(tmp_path_factory.mktemp("fused"), {"source": "digits-dit", "weights": str(WEIGHTS)}, shapes=shapes)


def inputs_of(batch: int, seed: int, scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(batch, 1, 8, 8, generator=generator).to("cuda", torch.float16),
        "timestep": (torch.rand(batch, generator=generator) * 999).cuda(),
        "label": torch.randint(0, 10, (batch,), generator=generator).cuda(),
        "negative_label": torch.full((batch,), 10, device="cuda"),
        "guidance_scale": torch.linspace(1, scale, batch).cuda(),
    }


def test_predictions_with_guidance_inside_are_measured(digits_fused):
    (engine,) = read_manifest(digits_fused).components["denoiser"].engines
    assert len(engine.prediction_error) == 2 and all(error and error < 0.03 for error in engine.prediction_error)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_an_engine_computes_what_onnx_runtime_does(digits_fused, batch):
    inputs = inputs_of(batch, 0, 2.0)
    with (
        runtime.load(digits_fused, backend="tensorrt") as bundle,
        runtime.load(digits_fused, backend="onnxruntime") as reference,
    ):
        found, expected = bundle["denoiser"](**inputs), reference["denoiser"](**inputs)
    # Errors of both halves count |s| + |1 − s| times.
    assert relative_error(found.cpu(), expected.cpu()) <= 3 * HALF_DENOISER


def test_graphs_read_the_scale_of_each_call(digits_fused):
    with (
        runtime.load(digits_fused, backend="tensorrt") as bundle,
        runtime.load(digits_fused, backend="tensorrt", graphs=0) as plain,
    ):
        outputs = []
        for scale in (1.0, 1.0, 1.0, 4.0, 0.5):
            inputs = inputs_of(4, 1, scale)
            outputs.append(bundle["denoiser"](**inputs))
            assert torch.equal(outputs[-1], plain["denoiser"](**inputs))
        assert bundle["denoiser"].graphs_recorded == 1
    assert torch.equal(outputs[2], outputs[0]) and not torch.equal(outputs[3], outputs[0])


@pytest.mark.parametrize("name", ["stable_diffusion_3", "stable_diffusion"])
def test_a_pipeline_draws_with_guidance_inside(tmp_path, name):
    """Twenty steps in FP16, one call for each, which a CUDA graph takes."""
    pytest.importorskip("diffusers", reason="needs diffusers")
    import tiny_pipelines

    from trtconvert.models.loading import load_pipeline

    make, options = tiny_pipelines.PIPELINES[name]
    make().save_pretrained(tmp_path / "pipeline")
    model = {"source": "diffusers", "weights": "pipeline", "options": {"tokens": 8, "batch": [1, 1, 2]} | options}
    folder = built(tmp_path, model)
    pipe = load_pipeline(tmp_path / "pipeline").to("cuda", torch.float16)

    def images() -> torch.Tensor:
        return tiny_pipelines.images(pipe, name, like=torch.empty(0, dtype=torch.float16, device="cuda"))

    full = images()
    with runtime.load(folder, backend="tensorrt") as bundle:
        record = bundle.manifest.components["denoiser"]
        calls, own = [], bundle["denoiser"].call

        def counted(trajectory, inputs, named):
            calls.append(named[record.inputs[0].name].shape[0])
            return own(trajectory, inputs, named)

        bundle["denoiser"].call = counted
        setattr(pipe, record.diffusers.component, bundle.as_diffusers())
        drawn = images()
        assert calls == [1] * tiny_pipelines.STEPS and bundle["denoiser"].graphs_recorded == 1
        pipe.enable_model_cpu_offload()
        assert psnr(images().float(), full.float()).min() >= INT8_IMAGES_PSNR
    assert psnr(drawn.float(), full.float()).min() >= INT8_IMAGES_PSNR
