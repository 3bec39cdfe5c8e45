"""TensorRT engines whose layers quantise deltas from step to step: their numbers, caches, and CUDA graphs of their calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support import WEIGHTS
from tiny_layers import WITH_CONV, build
from tolerances import HALF_LAYERS

from trtconvert import runtime
from trtconvert.cache import Cache
from trtconvert.evaluate.verify import psnr
from trtconvert.models.digits import digits_model
from trtconvert.models.recorded_calls import relative_error
from trtconvert.pipeline import build as build_bundle
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe

pytestmark = pytest.mark.gpu
pytest.importorskip("tensorrt_bindings", reason="needs TensorRT")

TIMESTEPS = (950.0, 800.0, 650.0, 500.0, 350.0, 200.0, 50.0)
CLOSE = 1e-3
"""Between calls of one engine: kernels may sum in another order where memory is aligned otherwise."""
LEAST_PSNR = 40.0
"""dB against full precision. The specification has 58 on these samples; Q/DQ rounds on the way."""


def built(folder: Path, sections: dict) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(sections))
    build_bundle(load_recipe(path), folder / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return folder / "bundle"


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    sections = {
        "model": {"source": "digits-dit", "weights": str(WEIGHTS), "dtype": "float16"},
        "attention": {"modes": "precision"},
        "layers": {"modes": "static", "modiff": True},
        "calibration": {"samples": 4, "batch": 2, "steps": 10, "bins": 4},
        "engine": {
            "backend": "tensorrt",
            "attention": "plugin",
            "shapes": {"batch": [1, 8, 16], "height": 8, "width": 8},
        },
        "verify": {"samples": 2, "steps": 10, "min_psnr": 20},
        "output": {"grid": 2},
    }
    return built(tmp_path_factory.mktemp("digits"), sections)


def steps(batch: int = 4) -> list[list[torch.Tensor]]:
    """Inputs of a trajectory on the GPU."""
    generator = torch.Generator().manual_seed(0)
    noise, image = (torch.randn(batch, 1, 8, 8, generator=generator) for _ in range(2))
    label = torch.arange(batch).cuda() % 10
    return [
        [
            (noise * t / 1000 + image * (1 - t / 1000)).half().cuda(),
            torch.full((batch,), t, device="cuda"),
            label,
        ]
        for t in TIMESTEPS
    ]


def test_samples_are_close_to_full_precision_whatever_was_before(digits):
    model = digits_model(WEIGHTS)
    with runtime.load(digits, backend="tensorrt") as bundle:
        denoiser = bundle["denoiser"]
        full = model.sample(model.denoiser, range(2000, 2008), steps=20, solver="ddim")

        def on_gpu(*inputs, **named):
            return denoiser(*inputs, **named)

        first = model.sample(denoiser, range(2000, 2008), steps=20, solver="ddim")
        assert float(psnr(first.flatten()[None], full.flatten()[None])) > LEAST_PSNR
        # A sampler that says nothing is followed by its timesteps.
        again = model.sample(on_gpu, range(2000, 2008), steps=20, solver="ddim")
        assert float(psnr(again.flatten()[None], first.flatten()[None])) > 2 * LEAST_PSNR - 20
        denoiser.check_caches()


def test_graphs_of_ours_compute_what_plain_calls_do(digits):
    with runtime.load(digits, graphs=0) as plain, runtime.load(digits, graphs=4) as recorded:
        for inputs in (*steps(), *steps(2), *steps()):
            expected, got = plain["denoiser"](*inputs), recorded["denoiser"](*inputs)
            assert relative_error(got, expected) < CLOSE
        assert recorded["denoiser"].graphs_recorded >= 2 and plain["denoiser"].graphs_recorded == 0
        assert recorded.device_memory.caches == plain.device_memory.caches > 0


def test_a_graph_of_the_callers_goes_from_step_to_step(digits):
    with runtime.load(digits) as bundle:
        denoiser, stream = bundle["denoiser"], torch.cuda.Stream()
        expected = [denoiser(*inputs).clone() for inputs in steps()]
        held, graph = [x.clone() for x in steps()[0]], torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            denoiser(*held)
            with torch.cuda.graph(graph, stream=stream):
                output = denoiser(*held)
            denoiser.reset_cache()  # a step that is taken twice goes on
            for _ in range(2):  # the second time it begins by the timestep alone
                for inputs, one in zip(steps(), expected, strict=True):
                    for to, x in zip(held, inputs, strict=True):
                        to.copy_(x)
                    graph.replay()
                    assert relative_error(output, one) < CLOSE
            denoiser.reset_cache()
            late = steps()[-1]
            for to, x in zip(held, late, strict=True):
                to.copy_(x)
            graph.replay()
            begun = output.clone()
            graph.replay()
        torch.cuda.synchronize()
        denoiser.reset_cache()
        assert relative_error(begun, denoiser(*late)) < CLOSE
        assert relative_error(output, denoiser(*late)) < CLOSE


def test_streams_have_caches_of_their_own(digits):
    with runtime.load(digits) as bundle:
        denoiser, streams = bundle["denoiser"], [torch.cuda.Stream() for _ in range(2)]
        expected = [denoiser(*inputs).clone() for inputs in steps()]
        torch.cuda.synchronize()
        for index, inputs in enumerate(steps()):
            for stream in streams:
                with torch.cuda.stream(stream):
                    got = denoiser(*inputs)
                stream.synchronize()
                assert relative_error(got, expected[index]) < CLOSE


def test_convolutions_and_every_kind_of_layer_keep_to_the_specification(tmp_path):
    sections = {
        "model": {"source": "tiny_layers:build", "dtype": "float16"},
        "attention": {"modes": "precision"},
        "layers": {"modes": "static", "include": WITH_CONV, "modiff": True},
        "calibration": {"samples": 16, "batch": 2, "steps": 8, "bins": 2},
        "engine": {"backend": "tensorrt", "attention": "native"},
        "verify": {"samples": 2, "steps": 8, "min_psnr": 15, "max_error": 0.1},
        "output": {"grid": 2},
    }
    folder, model = built(tmp_path, sections), build()
    x = model.example(3, {"batch": 2})["x"]
    with runtime.load(folder, backend="tensorrt") as ours, runtime.load(folder, backend="onnxruntime") as theirs:
        for timestep in TIMESTEPS:
            inputs = {"x": x * (0.5 + timestep / 2000), "timestep": torch.full((2,), timestep)}
            exact = model.denoiser(**inputs)
            expected, got = (bundle["denoiser"](**{**inputs, "x": inputs["x"].half()}) for bundle in (theirs, ours))
            # Both have the same distance from full precision, except for numbers that FP16 moves across the edge of a code.
            assert relative_error(got.cpu(), exact) < 1.5 * relative_error(expected, exact) + HALF_LAYERS
