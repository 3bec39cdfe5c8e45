"""Graphs of torch's exporters have the models' sites and names, and convert like the models."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_graphs
import pytest
import torch
from support import refusal, run
from tiny_models import build as tiny_model
from torch import nn

from trtconvert import runtime
from trtconvert.bundle import read_manifest
from trtconvert.calib.calibrate import Parts, parts_to_convert
from trtconvert.calib.dtype_checks import fitting
from trtconvert.diffusion_model import DiffusionModel, InputSpec
from trtconvert.models.digits_dit import DigitsDiT
from trtconvert.models.onnx.model import onnx_model
from trtconvert.recipe import AttentionSection, LayersSection, load_recipe
from trtconvert.starter import recipe_of

_EXPORTERS = {"traced": {"opset": 17}, "new": {"opset": 18, "dynamo": True}, "opset_23": {"opset": 23, "dynamo": True}}


def _dit() -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    torch.manual_seed(0)
    model = DigitsDiT(64, 2, 1).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    inputs = {"sample": torch.randn(2, 1, 8, 8), "timestep": torch.tensor([3.0, 700.0]), "label": torch.tensor([1, 2])}
    varying = {"sample": {0: "batch", 2: "height", 3: "width"}, "timestep": {0: "batch"}, "label": {0: "batch"}}
    return _Renamed(model), inputs, varying


class _Renamed(nn.Module):
    """The DiT with diffusers' names of inputs."""

    def __init__(self, dit: nn.Module) -> None:
        super().__init__()
        self.dit = dit

    def forward(self, sample, timestep, label):
        return self.dit(sample, timestep, label)


def _unet() -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, dict[int, str]]]:
    inputs = {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3.0, 700.0]), "text": torch.randn(2, 5, 24)}
    varying = {"sample": {0: "batch"}, "timestep": {0: "batch"}, "text": {0: "batch", 1: "length"}}
    return onnx_graphs.UNet().eval(), inputs, varying


_MODELS = {"dit": _dit, "unet": _unet}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Returns the file that an exporter writes for a model, and writes it once."""
    folder, made = tmp_path_factory.mktemp("exported"), {}

    def file(model: str, exporter: str) -> Path:
        if (model, exporter) not in made:
            module, inputs, varying = _MODELS[model]()
            made[model, exporter] = onnx_graphs.exported(
                folder / f"{model}-{exporter}.onnx",
                module,
                tuple(inputs.values()),
                list(inputs),
                varying,
                **_EXPORTERS[exporter],
            )
        return made[model, exporter]

    return file


def _options(model: str) -> dict:
    return {"conditions": "random", "sizes": {"height": 8, "width": 8} if model == "dit" else {"length": [3, 5, 7]}}


def _parts(model: DiffusionModel) -> Parts:
    return parts_to_convert(model, AttentionSection(), LayersSection(min_rows=1, kinds=["linear", "conv"]))


def _of_torch(name: str) -> Parts:
    """Returns the sites of the torch model."""
    module, inputs, _ = _MODELS[name]()
    specs = tuple(
        InputSpec(n, "float32" if x.is_floating_point() else "int64", ("batch", *x.shape[1:]))
        for n, x in inputs.items()
    )
    return _parts(replace(tiny_model(), denoiser=module, inputs=specs, output=specs[0], dims={"batch": (1, 2, 4)}))


@pytest.mark.first_case
@pytest.mark.parametrize(
    ("model", "exporter"),
    [("dit", "traced"), ("dit", "new"), ("unet", "traced"), ("unet", "opset_23")],
)
def test_sites_and_layers_have_the_names_that_they_have_in_torch(model, exporter, files):
    found, expected = _parts(onnx_model(files(model, exporter), **_options(model))), _of_torch(model)
    assert [s.name for s in found.sites] == [s.name for s in expected.sites]
    assert [s.scale for s in found.sites] == pytest.approx([s.scale for s in expected.sites])
    assert {x.name for x in found.layers} == {x.name for x in expected.layers}
    for layer, alike in zip(
        sorted(found.layers, key=lambda x: x.name), sorted(expected.layers, key=lambda x: x.name), strict=True
    ):
        assert (layer.in_channels, layer.out_channels, layer.rows, layer.kernel) == (
            alike.in_channels,
            alike.out_channels,
            alike.rows,
            alike.kernel,
        )


@pytest.mark.parametrize("model", _MODELS)
def test_a_model_in_float16_computes_waves_of_the_timestep_in_float32(model, files):
    """In float16 the waves of timestep 700 would be noise; the torch model computes them in float32."""
    made = onnx_model(files(model, "traced"), **_options(model))
    with fitting(made, "float16", made):
        _parts(made)
    inputs = made.example(0, {name: opt for name, (_, opt, _) in made.dims.items()})
    exact = made.denoiser(**inputs)
    half = copy.deepcopy(made.denoiser).half()
    typed = {name: x.half() if x.is_floating_point() and name != "timestep" else x for name, x in inputs.items()}
    found = half(**typed)
    assert found.dtype == torch.float16
    assert float((found.float() - exact).norm() / exact.norm()) < 2e-3


@pytest.mark.parametrize("exporter", ["traced", "new"])
def test_gelus_are_found_in_what_exporters_write_for_them(exporter, files):
    made = onnx_model(files("dit", exporter), **_options("dit"))
    assert [step.attributes["approximate"] for step in made.denoiser._steps if step.op == "Gelu"] == ["tanh"]


def test_group_norms_are_found_in_what_exporters_write_for_them(files):
    made = onnx_model(files("unet", "traced"), **_options("unet"))
    norms = [step for step in made.denoiser._steps if step.op == "trtconvert::group_norm"]
    assert [step.attributes["num_groups"] for step in norms] == [8]
    assert made.denoiser.get_parameter("norm.weight").shape == (64,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "exporter", "dtype"),
    [pytest.param("dit", "traced", "float32", marks=pytest.mark.soak), ("unet", "opset_23", "float16")],
)
def test_an_exported_model_becomes_a_bundle_that_draws(model, exporter, dtype, files, tmp_path, monkeypatch):
    file = files(model, exporter)
    monkeypatch.chdir(tmp_path)
    started = run("init", file, "-o", "recipe.yaml")
    assert started.exit_code == 0, started.output
    text = (tmp_path / "recipe.yaml").read_text()
    assert "conditions: random" in text and load_recipe(tmp_path / "recipe.yaml").model.dtype == "float32"
    for old, new in (
        ("dtype: float32", f"dtype: {dtype}"),
        ("height: 64", "height: [4, 8, 12]"),
        ("width: 64", "width: 8"),
        ("length: 77", "length: [3, 5, 7]"),
        ("modes: auto # auto, fp16", "modes: balanced # auto, fp16"),
        ("modes: auto # of linear", "modes: static # of linear"),
        ("samples: 16", "samples: 2"),
        ("steps: 20", "steps: 2"),
        ("bins: 10", "bins: 2"),
        ("samples: 8", "samples: 2"),
    ):
        text = text.replace(old, new)
    (tmp_path / "recipe.yaml").write_text(text + "  min_site_sqnr: 5\nengine: {backend: onnxruntime}\n")
    outcome = run("build", "recipe.yaml", "-o", "bundle", "--cache", "cache")
    assert outcome.exit_code == 0, outcome.output
    manifest = read_manifest(tmp_path / "bundle")
    component = manifest.components["denoiser"]
    assert manifest.model == file.name and all(site.in_int8 for site in component.sites)
    assert sum(bool(layer.modes) for layer in component.layers) >= 3
    # The bundle's denoiser against the file in torch, at other sizes than those of the calibration.
    made = onnx_model(file, **load_recipe(tmp_path / "recipe.yaml").model.options)
    sizes = {name: high for name, (_, _, high) in made.dims.items()}
    inputs = made.example(3, sizes)
    exact = made.denoiser(**inputs)
    found = runtime.load(tmp_path / "bundle")["denoiser"](**inputs)
    assert float((found.float() - exact).norm() / exact.norm()) < 0.2
    (tmp_path / file.name).write_bytes(file.read_bytes())  # the sampler reads the file's inputs
    drawn = run("run", "bundle", "-o", "images.png", "-n", "1", "--steps", "2")
    assert drawn.exit_code == 0, drawn.output


def test_files_that_no_recipe_can_be_for_are_refused(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(run("build", tmp_path / "none.onnx"), "cannot read the model")
    file = files("dit", "traced")
    (tmp_path / "broken.onnx").write_bytes(file.read_bytes()[:-100])
    refusal(run("build", "broken.onnx"), "no ONNX model, or damaged")
    refusal(run("init", file, "--prompts", _file(tmp_path / "prompts.txt", "a cat")), "does not take prompts")


def test_a_file_stands_for_its_first_recipe(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blob").write_bytes(files("unet", "traced").read_bytes())
    (tmp_path / "link.onnx").symlink_to("blob")
    with recipe_of(Path("link.onnx")) as file:
        recipe = load_recipe(file)
    assert recipe.model.weights == tmp_path / "link.onnx" and recipe.model.options["sizes"]["length"] == 77
    assert run("init", "link.onnx", "-o", "sub/recipe.yaml").exit_code == 0
    weights = load_recipe(tmp_path / "sub" / "recipe.yaml").model.weights
    assert weights is not None and weights.name == "link.onnx" and weights.is_file()


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_recorded_inputs_calibrate_a_file(files, tmp_path):
    from trtconvert.calib.data import BadSamples, open_data
    from trtconvert.recipe import CalibrationSection

    made = onnx_model(files("unet", "traced"), **_options("unet"))
    sizes = {name: opt for name, (_, opt, _) in made.dims.items()} | {"batch": 4}
    np.savez(tmp_path / "inputs.npz", **{name: x.numpy() for name, x in made.example(0, sizes).items()})
    section = CalibrationSection(data=tmp_path / "inputs.npz", samples=4, batch=2)
    seen = []
    for drive in open_data(made, section, BadSamples()).batches:
        drive(lambda **inputs: seen.append(made.denoiser(**inputs)) or seen[-1])
    assert [x.shape[0] for x in seen] == [2, 2]
