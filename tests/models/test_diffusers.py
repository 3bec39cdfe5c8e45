"""Real diffusers pipelines with small random models: converted, put back, and compared with themselves in torch."""

from __future__ import annotations

import gc
import inspect
import json
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from rich.console import Console
from support import refusal, run
from tiny_pipelines import PIPELINES, STEPS, arguments, errors_beside, images
from tolerances import FLIPPED_CALL, INT8_CALL, INT8_IMAGES_PSNR, WHOLE_DENOISER

from trtconvert import models, runtime
from trtconvert.attention.sites import find_sites
from trtconvert.cache import Cache
from trtconvert.calib.calibration import Calibration
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import BackendUnavailable, UserError
from trtconvert.evaluate.torch_int8 import converted_layers
from trtconvert.evaluate.verify import psnr
from trtconvert.models.denoiser import intercepted
from trtconvert.models.diffusers import diffusers_model
from trtconvert.models.loading import load_pipeline
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.quant.forward import Int8Layers, Int8Sites
from trtconvert.recipe import load_recipe
from trtconvert.runtime.diffusers import DiffusersDenoiser

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")


# The others take half a minute to a minute each.
QUICK = ("flux",)
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in PIPELINES]


@dataclass(frozen=True)
class Converted:
    """A pipeline's folder, its model, and its bundle."""

    name: str
    pipeline: Path
    model: DiffusionModel
    bundle: Path

    def torch_pipeline(self):
        """Loads the pipeline again."""
        return load_pipeline(self.pipeline)


def convert(folder: Path, name: str, dtype: str = "float32", *, layers: str = "off", **options) -> Converted:
    """Saves a tiny pipeline and builds a bundle of it."""
    make, own = PIPELINES[name]
    make().save_pretrained(folder / "pipeline")
    recipe = {
        "model": {
            "source": "diffusers",
            "weights": "pipeline",
            "dtype": dtype,
            "options": {"tokens": 8, "batch": [1, 1, 2]} | own | options,
        },
        "attention": {"modes": ["precision", "balanced"]},
        "layers": {"modes": layers},
        "calibration": {"samples": 2, "batch": 2, "steps": 4, "bins": 2},
        "engine": {"backend": "onnxruntime"},
        "verify": {"samples": 2, "steps": 4, "min_psnr": 15},
        "output": {"grid": 2},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    loaded = load_recipe(folder / "recipe.yaml")
    build(loaded, folder / "bundle", Cache(folder / "cache"), Reporter(Console(quiet=True)))
    return Converted(name, folder / "pipeline", models.load(loaded.model), folder / "bundle")


@pytest.fixture(scope="module", params=NAMES)
def converted(request, tmp_path_factory) -> Converted:
    if request.param == "flux":
        return request.getfixturevalue("flux")
    return convert(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def flux(tmp_path_factory) -> Converted:
    """Flux with a range of sizes, as its tokens follow height and width. Attention and layers are in INT8."""
    sizes = {"height": [32, 32, 64], "width": [32, 32, 64]}
    return convert(tmp_path_factory.mktemp("ranges"), "flux", layers="static", **sizes)


def int8_in_torch(converted: Converted) -> DiffusersDenoiser:
    """Computes the bundle's INT8 arithmetic by the reference in torch."""
    manifest = runtime.load(converted.bundle).manifest
    component = manifest.components["denoiser"]
    modes = {site.name: torch.tensor(site.modes, dtype=torch.int32) for site in component.sites}
    calibration = Calibration.load(converted.bundle / manifest.calibration)
    scalings = {site.name: site.scaling for site in component.sites}
    smooth_k = manifest.recipe.attention.smooth_k
    sites = Int8Sites(calibration.with_modes(modes), component.timestep_max, scalings, smooth_k)
    of_layers = converted_layers(converted.model, component.layers, calibration.layers)
    tables = {name: layer.tables for name, layer in of_layers.items()}
    layers = Int8Layers(tables, component.timestep_max).handler() if tables else None
    denoiser = intercepted(converted.model, sites.handler(), layers)
    return DiffusersDenoiser(
        denoiser,
        component.diffusers,
        component.timestep_input,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_a_pipeline_draws_with_the_converted_denoiser(converted):
    """Twenty steps with embeddings that were not in the calibration: images are close to full precision, and calls near exact."""
    pipe = converted.torch_pipeline()
    component = converted.model.diffusers.component
    full = images(pipe, converted.name)
    in_torch = int8_in_torch(converted)
    with runtime.load(converted.bundle) as bundle:
        dropped_in = bundle.as_diffusers()
        errors = errors_beside(dropped_in, in_torch)
        setattr(pipe, component, dropped_in)
        drawn = images(pipe, converted.name)
    assert len(errors) in (STEPS, 2 * STEPS)  # Wan calls its denoiser once for each half of guidance
    assert max(errors) <= FLIPPED_CALL and median(errors) <= WHOLE_DENOISER
    assert psnr(drawn, full).min() >= INT8_IMAGES_PSNR
    assert full.std() > 0.05  # images with something on them


@pytest.mark.parametrize("converted", QUICK, indirect=True, scope="module")
@pytest.mark.parametrize("ignored", ["", "timestep", "encoder_hidden_states"])
def test_a_call_shows_what_the_denoiser_ignores(converted, ignored):
    """Compares each call with torch's without INT8, as the tests of engines on GPUs do."""
    pipe = converted.torch_pipeline()
    component = converted.model.diffusers.component
    with runtime.load(converted.bundle) as bundle:
        dropped_in = bundle.as_diffusers()
        called = dropped_in.forward.func
        denoiser = called._denoiser
        if ignored:
            called._denoiser = lambda **named: denoiser(**named | {ignored: torch.zeros_like(named[ignored])})
        errors = errors_beside(dropped_in, getattr(pipe, component))
        setattr(pipe, component, dropped_in)
        images(pipe, converted.name)
    assert (max(errors) > INT8_CALL) == bool(ignored)


@pytest.mark.parametrize("converted", QUICK[:1], indirect=True, scope="module")
def test_an_engine_goes_with_the_last_reference_to_its_pipeline(converted):
    """The engine goes without a garbage collection of cycles, as the next engine needs the GPU's memory."""
    gc.collect()
    gc.disable()
    try:
        dropped_in = runtime.load(converted.bundle).as_diffusers()
        engine = weakref.ref(dropped_in._denoiser)
        assert engine() is not None
        del dropped_in
        assert engine() is None
    finally:
        gc.enable()


@pytest.mark.soak
def test_a_denoiser_in_half_precision_goes_into_the_pipeline_in_single(tmp_path, one_noise):
    converted = convert(tmp_path, "stable_diffusion_xl", dtype="float16")
    pipe = converted.torch_pipeline()
    full = images(pipe, converted.name)
    with runtime.load(converted.bundle) as bundle:
        dropped_in = bundle.as_diffusers()
        errors = errors_beside(dropped_in, pipe.unet)
        pipe.unet = dropped_in
        assert pipe.unet.dtype == torch.float16
        pipe.vae.to(torch.float16)  # pipelines prepare latents in the denoiser's type, and decode them in it
        drawn = images(pipe, converted.name)
    assert max(errors) <= INT8_CALL
    assert psnr(drawn.float(), full).min() >= INT8_IMAGES_PSNR


def test_the_drop_in_stands_for_the_model(converted):
    """The drop-in has the configuration, type, device, parameters of forward and results of the model, without its weights."""
    pipe = converted.torch_pipeline()
    original = getattr(pipe, converted.model.diffusers.component)
    with runtime.load(converted.bundle) as bundle:
        dropped_in = bundle.as_diffusers()
    own = {
        name: value for name, value in original.config.items() if name not in ("_name_or_path", "_use_default_values")
    }
    assert json.loads(json.dumps(own)) == dict(dropped_in.config)
    assert dropped_in.dtype == original.dtype and dropped_in.device == original.device
    parameters = [list(inspect.signature(module.forward).parameters) for module in (dropped_in, original)]
    assert parameters[0] == parameters[1]
    (only,) = dropped_in.parameters()  # pipelines read the first one
    assert (only.numel(), only.dtype, only.device) == (0, original.dtype, original.device)


def test_forward_is_the_models(flux):
    """Arguments by name and by position, results as a dataclass and as a tuple, one timestep for all or one for each."""
    model, (sizes,) = flux.model, [{name: opt for name, (_, opt, _) in flux.model.dims.items()}]
    named = model.example(3, sizes)
    original = flux.torch_pipeline().transformer
    original.load_state_dict(model.denoiser.transformer.state_dict())
    timestep = named.pop("timestep")
    timestep.fill_(250)
    with runtime.load(flux.bundle) as bundle, torch.no_grad():
        ours = bundle.as_diffusers()
        # Flux pipelines divide the timestep by 1000.
        expected = original(**named, timestep=timestep / 1000)
        got = ours(**named, timestep=timestep / 1000)
        assert type(got) is type(expected) and got.sample.shape == expected.sample.shape
        (as_tuple,) = ours(**named, timestep=torch.tensor(0.25), return_dict=False)
        assert torch.equal(as_tuple, got.sample)
        assert torch.equal(ours(**named, timestep=0.25, joint_attention_kwargs=None).sample, got.sample)
        first = [named.pop(name) for name in ("hidden_states", "encoder_hidden_states", "pooled_projections")]
        assert torch.equal(ours(*first, timestep / 1000, **named).sample, got.sample)
        half = ours(first[0].half(), *first[1:], timestep / 1000, **named).sample
        assert half.dtype == torch.float16  # the type of the latents


def test_sizes_within_the_range_are_drawn_by_one_bundle(flux):
    """The build is for 32 × 32 at opt, which are 16 tokens; 64 × 48 are 48 tokens."""
    pipe = flux.torch_pipeline()
    pipe.set_progress_bar_config(disable=True)
    other = arguments(pipe, "flux") | {"height": 64, "width": 48, "num_inference_steps": 4}
    full = pipe(**other | {"generator": torch.Generator().manual_seed(1)})[0]
    with runtime.load(flux.bundle) as bundle:
        dropped_in = bundle.as_diffusers()
        errors = errors_beside(dropped_in, pipe.transformer)
        pipe.transformer = dropped_in
        drawn = pipe(**other | {"generator": torch.Generator().manual_seed(1)})[0]
        assert len(errors) == 4 and max(errors) <= INT8_CALL
        assert psnr(drawn, full).min() >= INT8_IMAGES_PSNR
        with pytest.raises(UserError, match=r"(?s)shape of 'hidden_states'.*tokens 16\.\.64.*got: \[1, 96, 64\]"):
            pipe(**other | {"height": 128, "width": 48})


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"joint_attention_kwargs": {"scale": 0.5}}, ["'joint_attention_kwargs.scale'", "got: 0.5"]),
        ({"controlnet_block_samples": [torch.zeros(1)]}, ["'controlnet_block_samples'", "model.options"]),
        ({"guidance": None}, ["'guidance'", "expected: a tensor", "got: None"]),
        ({"hidden_state": None}, ["does not fit FluxTransformer2DModel", "hidden_state"]),
        ({"controlnet_blocks_repeat": np.ones(3)}, ["'controlnet_blocks_repeat'", "got: an array of shape [3]"]),
        ({"timestep": torch.ones(5)}, ["values of 'timestep'", "or one for each of 1", "got: 5, a tensor"]),
        ({"timestep": torch.ones(2, 16)}, ["values of 'timestep'", "got: 32, a tensor of shape [2, 16]"]),
    ],
)
def test_arguments_that_the_engine_lacks_are_refused(flux, extra, expected):
    named = flux.model.example(3, {name: opt for name, (_, opt, _) in flux.model.dims.items()})
    with runtime.load(flux.bundle) as bundle, pytest.raises(UserError) as error:
        bundle.as_diffusers()(**named | extra)
    for part in ("expected: ", "got: ", "remedy: ", *expected):
        assert part in str(error.value)


def test_the_drop_in_has_no_methods_that_change_the_model(flux):
    with runtime.load(flux.bundle) as bundle:
        transformer = bundle.as_diffusers()
        assert not hasattr(transformer, "load_lora_adapter")
        for name, remedy in (
            ("set_attn_processor", r"(?s)a change of the attention.*remedy: .*perturbed attention"),
            ("num_parameters", r"(?s)a use of the original model.*remedy: .*the pipeline's own model"),
            ("fuse_lora", r"(?s)a LoRA for a model without torch weights.*remedy: .*section loras"),
            ("_load_ip_adapter_weights", r"(?s)an IP-Adapter.*remedy: .*keep the pipeline's own model"),
        ):
            with pytest.raises(AttributeError) as error:
                getattr(transformer, name)
            assert isinstance(error.value, UserError) and f"has no '{name}'" in str(error.value)
            assert re.search(remedy, str(error.value))
        with pytest.raises(BackendUnavailable, match=r"(?s)cannot be replaced.*got: ONNX Runtime on the CPU"):
            transformer.refit({})


def test_a_model_that_is_not_of_diffusers_is_refused(tiny_build):
    with (
        runtime.load(tiny_build.bundle) as bundle,
        pytest.raises(UserError, match=r"(?s)not a model of diffusers.*remedy"),
    ):
        bundle.as_diffusers()


def test_the_command_line_samples_with_the_pipeline(flux, tmp_path, monkeypatch):
    """Bundles do not hold the pipeline; the command looks for it in the current folder."""
    refusal(
        run("run", flux.bundle, "-n", 1, "--steps", 2, "-o", tmp_path / "grid.png"), "pipeline in the current folder"
    )
    monkeypatch.chdir(flux.pipeline.parent)
    outcome = run("run", flux.bundle, "-n", 1, "--steps", 2, "-o", tmp_path / "grid.png")
    assert outcome.exit_code == 0 and (tmp_path / "grid.png").is_file(), outcome.output


def test_arguments_for_all_samples_are_repeated(flux):
    """Embeddings of one prompt broadcast to latents of two images, as in torch."""
    pipe = flux.torch_pipeline()
    given = arguments(pipe, "flux") | {"num_images_per_prompt": 2, "num_inference_steps": 2}
    expected = pipe(**given | {"generator": torch.Generator().manual_seed(1)})[0]
    with runtime.load(flux.bundle) as bundle:
        pipe.transformer = bundle.as_diffusers()
        drawn = pipe(**given | {"generator": torch.Generator().manual_seed(1)})[0]
    assert drawn.shape == expected.shape and len(drawn) == 2
    assert psnr(drawn, expected).min() >= INT8_IMAGES_PSNR


def test_sites_and_weights_are_called_as_in_the_pipeline(flux):
    model = flux.model
    inputs = model.example(0, {name: opt for name, (_, opt, _) in model.dims.items()})
    sites = find_sites(model.denoiser, inputs, model.timestep_input)
    assert [site.name for site in sites] == [
        "transformer.transformer_blocks.0.attn",
        "transformer.single_transformer_blocks.0.attn",
    ]
    assert all(name.startswith("transformer.") for name in model.denoiser.state_dict())


def test_noise_of_diffusion_and_of_flow_matching(saved, flux):
    betas = diffusers.DDIMScheduler(beta_schedule="scaled_linear").betas.double()
    alpha_bar = (1 - betas).cumprod(0)
    diffusion = diffusers_model(saved, height=32, width=32)
    assert torch.allclose(diffusion.sigmas, ((1 - alpha_bar) / alpha_bar).sqrt(), rtol=1e-4)
    flow = flux.model
    clean, noise = torch.ones(1, 4), torch.full((1, 4), 3.0)
    mixed = flow.noised(clean, noise, torch.tensor([250.0]))  # a quarter is noise: (1 - σ)·x₀ + σ·n
    assert torch.allclose(mixed, 0.75 * clean + 0.25 * noise)
    assert bool((flow.sigmas.diff() >= 0).all()) and bool(flow.sigmas.isfinite().all())
