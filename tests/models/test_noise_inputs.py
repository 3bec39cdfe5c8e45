"""Denoisers whose timestep input is σ, its logarithm or a share of noise: places, samplers, and names in ONNX files."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from sigma_unets import SIZE, sigma_unet
from stated_steps import StatedSteps
from support import refusal, run
from torch import Tensor

from trtconvert import runtime
from trtconvert.attention.reference import timestep_bin
from trtconvert.attention.schedules import FlowSchedule, NoiseSchedule, SigmaRange, ddpm_betas
from trtconvert.attention.sites import find_sites
from trtconvert.bundle import read_manifest
from trtconvert.diffusion_model import DiffusionModel
from trtconvert.errors import UserError
from trtconvert.models.denoiser import refuse_unfollowed
from trtconvert.models.onnx.model import onnx_model
from trtconvert.models.parametrisation import Parametrisation
from trtconvert.models.samplers import initial_noise, sample
from trtconvert.noise_input import NoiseInput
from trtconvert.runtime.reuse import Reusable, follow

DDPM, RANGE, FLOW = NoiseSchedule(ddpm_betas()), SigmaRange(0.002, 80.0), FlowSchedule(1000)

WAYS = {
    "timestep": Parametrisation(DDPM, "epsilon"),
    "a_tenth_of_the_timestep": Parametrisation(DDPM, "v_prediction", factor=0.1),
    "fraction": Parametrisation(FLOW, "flow", "fraction"),
    "sigma": Parametrisation(RANGE, "denoised", "sigma"),
    "sigma_of_ddpm": Parametrisation(DDPM, "epsilon", "sigma"),
    "log_sigma": Parametrisation(RANGE, "sample", "log_sigma"),
    "c_noise": Parametrisation(RANGE, "v_prediction", "c_noise"),
    "raw": Parametrisation(RANGE, "raw", "c_noise", sigma_data=0.5),
    "v_of_images_of_a_half": Parametrisation(RANGE, "v_prediction", "sigma", sigma_data=0.5),
    "noise_of_images_of_two": Parametrisation(RANGE, "epsilon", "log_sigma", sigma_data=2.0),
    "a_thousand_times_c_noise": Parametrisation(RANGE, "denoised", "c_noise", 1000.0),
}
SHAPE = (1, 6, 6)


def sigma_told(way: Parametrisation, given: Tensor) -> Tensor:
    """Returns σ from a timestep input, by the input's contents."""
    value = given.double() / way.factor
    match way.told:
        case "timestep":
            return DDPM.sigma(value)
        case "fraction":
            return value / (1 - value)
        case "sigma":
            return value
    return (value * (4 if way.told == "c_noise" else 1)).exp()


def knows(answer: Tensor, way: Parametrisation):
    """The perfect denoiser of a data set of one image."""

    def denoiser(x: Tensor, timestep: Tensor) -> Tensor:
        sigma = sigma_told(way, timestep)[:, None, None, None]
        signal = {"denoised": torch.ones_like(sigma), "flow": 1 / (1 + sigma)}.get(
            way.prediction, (way.sigma_data**2 + sigma**2).rsqrt()
        )
        noise = (x / signal - answer) / sigma
        v = signal * way.sigma_data * noise - signal * sigma * answer / way.sigma_data
        predictions = {"epsilon": noise, "v_prediction": v, "raw": -v, "flow": noise - answer}
        return predictions.get(way.prediction, answer.expand_as(x))

    return denoiser


@pytest.mark.parametrize("name", WAYS)
def test_places_lie_in_the_table_of_noise(name):
    way = WAYS[name]
    assert len(way.sigmas) == way.timestep_max and bool((way.sigmas.diff() > 0).all())
    for sigma in (0.02, 0.7, 11.0):
        given = way.input_at(torch.tensor(sigma, dtype=torch.float64))
        assert float(sigma_told(way, given)) == pytest.approx(sigma, rel=1e-6)
        place = given if way.noise_input is None else way.noise_input.place(given)
        assert float(way.sigmas[int(place.round())]) == pytest.approx(sigma, rel=0.06)
        assert way.noise_input is None or torch.allclose(way.noise_input.at(place), given)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("solver", ["ddim", "heun"])
def test_a_denoiser_that_knows_the_answer_gives_it(name, solver):
    noise = initial_noise(range(2), SHAPE).double()
    answer = torch.linspace(-1, 1, 72, dtype=torch.float64).reshape(2, *SHAPE)
    images = sample(knows(answer, WAYS[name]), noise, WAYS[name], solver=solver, steps=6)
    torch.testing.assert_close(images, ((answer + 1) / 2).float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_consistency_model_denoises_and_adds_noise_anew(steps):
    """For data N(0, 1/4) the mean of x₀ follows from x: the next step shows the noise that a step adds."""
    way, seen = Parametrisation(RANGE, "denoised", "sigma", consistency=True), []

    def denoiser(x: Tensor, sigma: Tensor) -> Tensor:
        seen.append((float(sigma[0]), float(x.std())))
        return 0.25 / (0.25 + sigma[:, None, None, None] ** 2) * x

    shape = (1, 64, 64)
    drawn = sample(
        denoiser, initial_noise([5], shape), way, steps=steps, fresh=lambda step: initial_noise([5], shape, seed=step)
    )
    levels, spread = zip(*seen, strict=True)
    assert len(seen) == steps and levels[0] == 80 and list(levels) == sorted(levels, reverse=True) and levels[-1] > 0.01
    assert spread == pytest.approx(levels, rel=0.2) and drawn.std() < 0.5


def test_a_consistency_model_has_one_sampler():
    way = Parametrisation(RANGE, "denoised", "sigma", consistency=True)
    with pytest.raises(UserError, match="sampler of its own"):
        way.levels("heun", 2)
    with pytest.raises(UserError, match=r"(?s)adds noise in each step.*remedy: pass fresh="):
        sample(lambda x, sigma: x, initial_noise([0], SHAPE), way, steps=2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Parametrisation(RANGE, "denoised", "timestep"), "a range of σ has no timesteps"),
        (lambda: Parametrisation(FLOW, "flow", "sigma"), "fraction is the input from 0 to 1"),
        (lambda: Parametrisation(RANGE, "flow", "sigma"), "do not fit together"),
        (lambda: Parametrisation(RANGE, "denoised", "sigmas"), "did you mean 'sigma'"),
        (lambda: Parametrisation(DDPM, "raw", "c_noise"), "a range of σ and raw"),
        (
            lambda: Parametrisation(RANGE, "denoised", "sigma", sigma_data=0.5),
            "leave it out: a network that takes x₀ + σ·n",
        ),
        (lambda: Parametrisation(DDPM, "epsilon", sigma_data=0.5), "with a range of σ"),
        (lambda: Parametrisation(RANGE, "raw", "c_noise", sigma_data=0.0), "a positive number"),
        (lambda: SigmaRange(2.0, 1.0), "range of σ is not valid"),
        (lambda: NoiseInput(0.0, 80.0, logarithmic=True), "above 0"),
        (lambda: NoiseInput(1.0, math.inf), "finite"),
        (lambda: sample(knows, initial_noise([0], SHAPE), WAYS["sigma"], prediction="epsilon"), "given twice"),
    ],
)
def test_contradictory_noise_inputs_are_refused(make, told):
    with pytest.raises(UserError) as error:
        make()
    assert told in str(error.value) and "remedy" in str(error.value)


def test_ends_are_in_the_range_in_float32():
    told = NoiseInput(0.002, 80.0, logarithmic=True)
    assert told.covers(torch.tensor([0.002, 0.0020001, 1.0, 80.0])).all()
    assert not told.covers(torch.tensor([0.0019, 80.1, 0.0, math.nan])).any()
    bins = timestep_bin(told.place(torch.tensor([0.0, 0.002, 0.39, 80.0])), told.timestep_max, 4)
    assert bins.tolist() == [0, 0, 1, 3]  # even in ln σ: 0.4 is the middle of the range


def test_extrapolation_is_linear_in_places():
    """A function that is linear in ln σ is not linear in σ."""
    reuse = StatedSteps([True, True, False, False, True])
    reuse.noise_input = NoiseInput(0.002, 80.0, logarithmic=True)

    def denoiser(x: Tensor, timestep: Tensor) -> Tensor:
        return timestep.log()[:, None] * torch.ones(2, 3)

    sigmas = torch.tensor([80.0, 20.0, 3.0, 0.5, 0.01])
    followed = follow(Reusable(denoiser, reuse), sigmas)
    for sigma in sigmas:
        found = followed(torch.zeros(2, 3), timestep=sigma.expand(2))
        torch.testing.assert_close(found, sigma.log() * torch.ones(2, 3))
    assert followed.computed == 3


# ONNX files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("sigma")
    np.savez(place / "rows.npz", difficulty=np.linspace(0, 1, 5, dtype=np.float32))
    for told in ("sigma", "log_sigma", "c_noise"):
        sigma_unet(place / f"{told}.onnx", told)
    return place


def refused(told: str, file: Path, **options) -> None:
    with pytest.raises(UserError) as error:
        onnx_model(file, conditions="random", **options)
    assert told in str(error.value), error.value


def test_a_file_computes_as_onnx_runtime_does_at_any_noise(folder):
    model = onnx_model(folder / "sigma.onnx", noise_input="sigma", conditions="rows.npz")
    assert model.noise_input == NoiseInput(0.002, 80.0, logarithmic=True) and float(model.sigmas[0]) == 0.002
    (site,) = find_sites(model.denoiser, model.example(0, {"batch": 2}), "sigma")
    assert (site.heads, site.head_dim, site.query_tokens, site.obstacle) == (2, 32, SIZE * SIZE, "")
    example = model.example(3, {"batch": 4})
    spread = (1 + example["sigma"] ** 2).sqrt()
    assert example["noisy"].std(dim=(1, 2, 3)).tolist() == pytest.approx(spread.tolist(), rel=0.3)
    session = onnxruntime.InferenceSession(folder / "sigma.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {name: x.numpy() for name, x in example.items()})
    torch.testing.assert_close(model.denoiser(**example), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("told", ["sigma", "log_sigma", "c_noise"])
def test_files_of_one_network_draw_alike_however_they_are_told_the_noise(folder, told):
    model = onnx_model(folder / f"{told}.onnx", noise_input=told, conditions="rows.npz")
    like = onnx_model(folder / "sigma.onnx", noise_input="sigma", conditions="rows.npz")
    drawn = [one.sample(one.denoiser, [3, 4], steps=3, solver="heun") for one in (model, like)]
    torch.testing.assert_close(*drawn, rtol=0, atol=1e-4)


def test_a_network_without_its_preconditioning_draws_as_with_it(folder):
    sigma_unet(folder / "network.onnx", "c_noise", raw=True, output="F")
    raw = onnx_model(folder / "network.onnx", noise_input="c_noise", prediction="raw", conditions="rows.npz")
    like = onnx_model(folder / "sigma.onnx", noise_input="sigma", conditions="rows.npz")
    drawn = [one.sample(one.denoiser, [3, 4], steps=3, solver="heun") for one in (raw, like)]
    torch.testing.assert_close(*drawn, rtol=0, atol=1e-4)
    other = onnx_model(
        folder / "network.onnx", noise_input="c_noise", prediction="raw", conditions="rows.npz", sigma_data=1.0
    )
    assert (other.sample(other.denoiser, [3, 4], steps=3, solver="heun") - drawn[0]).abs().max() > 0.01
    spread = raw.example(3, {"batch": 64})["noisy"].std(dim=(1, 2, 3))
    assert spread.tolist() == pytest.approx([1.0] * 64, rel=0.4)  # images of 0.5 and the noise in the network's scale
    refused("add `prediction: raw`", folder / "network.onnx", noise_input="c_noise")
    refused(
        "leave it out: a network", folder / "sigma.onnx", noise_input="sigma", prediction="denoised", sigma_data=0.5
    )
    refused("none, with the schedule flow", folder / "network.onnx", prediction="flow", schedule="flow", sigma_data=0.5)


def test_init_takes_c_noise_for_a_network_without_preconditioning(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sigma_unet(tmp_path / "network.onnx", "c_noise", raw=True, output="F")
    made = run("init", "network.onnx")
    assert made.exit_code == 0, made.output
    text = (tmp_path / "recipe.yaml").read_text()
    for line in ("noise_input: c_noise", "schedule: edm", "prediction: raw", "sigma_data: 0.5"):
        assert f" {line}" in text
    assert "assumed: model.options.prediction: raw" in made.output
    assert "assumed: model.options.sigma_data: 0.5" in made.output


def test_names_contradict_what_is_not_said(folder, tmp_path):
    refused("add `noise_input: sigma` under model.options", folder / "sigma.onnx")
    refused("add `noise_input: c_noise`", folder / "c_noise.onnx", schedule="linear", prediction="epsilon")
    file = sigma_unet(tmp_path / "model.onnx", level="timestep")
    refused("the output 'denoised' of", file)
    assert onnx_model(file, conditions="random", prediction="epsilon").noise_input is None  # the recipe decides
    told = onnx_model(folder / "sigma.onnx", conditions="random", noise_input="timestep", prediction="sample")
    assert told.noise_input is None and told.timestep_max == 1000


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"noise_input": "sigmas"}, "did you mean 'sigma'"),
        ({"noise_input": "sigma", "schedule": "flow"}, "fraction is the input from 0 to 1"),
        ({"noise_input": "sigma", "sigma_min": 90}, "range of σ is not valid"),
        ({"noise_input": "sigma", "timesteps": 100}, "none, with the schedule edm"),
        ({"noise_input": "timestep", "prediction": "sample", "sigma_max": 10}, "none, with the schedule scaled_linear"),
        ({"noise_input": "sigma", "sampling": "multistep"}, "expected: ode, consistency"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder, options, told):
    refused(told, folder / "sigma.onnx", **options)


def test_init_says_what_it_assumes(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_consistency.onnx").write_bytes((folder / "sigma.onnx").read_bytes())
    made = run("init", "my_consistency.onnx")
    assert made.exit_code == 0, made.output
    text = (tmp_path / "recipe.yaml").read_text()
    for line in ("noise_input: sigma", "schedule: edm", "prediction: denoised", "sampling: consistency", "bins: 1"):
        assert f" {line}" in text
    for told in ("schedule: edm", "sigma_min: 0.002", "sigma_max: 80.0", "conditions: random"):
        assert f"assumed: model.options.{told}" in made.output
    assert "assumed: model.options.prediction" not in made.output  # the output's name tells it
    sigma_unet(tmp_path / "plain.onnx", level="timestep", output="out")
    told = run("init", "plain.onnx", "-o", "plain.yaml").output
    assert (
        "assumed: model.options.schedule: scaled_linear" in told
        and "assumed: model.options.prediction: epsilon" in told
    )


def test_steps_of_a_sampler_that_adds_noise_cannot_be_left_out(folder):
    options = {"noise_input": "sigma", "conditions": "random"}
    refuse_unfollowed(onnx_model(folder / "sigma.onnx", **options), 4)
    with pytest.raises(UserError, match=r"(?s)can be left out.*adds noise.*remove steps.computed"):
        refuse_unfollowed(onnx_model(folder / "sigma.onnx", sampling="consistency", **options), 4)


# A build --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(folder) -> Path:
    recipe = {
        "model": {
            "source": "sigma.onnx",
            "dtype": "float32",
            "options": {"noise_input": "sigma", "sampling": "consistency", "conditions": "rows.npz"},
        },
        "attention": {"modes": ["precision", "balanced", "fp16", "aggressive"]},
        "layers": {"modes": "static", "kinds": ["linear", "conv"]},
        "calibration": {"samples": 4, "batch": 4, "steps": 4, "bins": 4},
        "engine": {"backend": "onnxruntime"},
        "verify": {"samples": 2, "steps": 2, "min_psnr": 20, "min_site_sqnr": 5},
        "output": {"grid": 2},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    made = run("build", folder / "recipe.yaml", "-o", folder / "bundle", "--cache", folder / "cache")
    assert made.exit_code == 0, made.output
    return folder / "bundle"


def test_a_bundle_takes_sigma_as_the_file_does(built, folder):
    component = read_manifest(built).components["denoiser"]
    assert component.noise_input == NoiseInput(0.002, 80.0, logarithmic=True)
    assert [spec.name for spec in component.inputs] == ["noisy", "sigma", "difficulty"]
    assert len(component.input_ranges["noisy"]) == 4 and component.input_ranges["noisy"][3] > 50
    model = onnx_model(folder / "sigma.onnx", noise_input="sigma", conditions="rows.npz")
    with runtime.load(built) as bundle:
        for sigma in (0.003, 0.3, 4.0, 80.0):  # one in each bin
            given = {"noisy": sigma * initial_noise([1, 2], (1, SIZE, SIZE)), "sigma": torch.full((2,), sigma)}
            given["difficulty"] = torch.tensor([0.2, 0.8])
            exact = model.denoiser(**given)
            assert float((bundle["denoiser"](**given) - exact).norm() / exact.norm()) < 0.2


def test_exported_nodes_choose_the_bin_of_the_logarithm(built):
    """At σ = 1, bin 2 of ln σ, attention is exact; by σ itself it would be bin 0."""
    graph = onnx.load(built / read_manifest(built).components["denoiser"].onnx).graph
    made = {name: node for node in graph.node for name in node.output}
    (node,) = [node for node in graph.node if node.op_type == "Int8Attention"]
    way, ops = node.input[3], Counter[str]()
    while way in made:
        ops[made[way].op_type] += 1
        way = made[way].input[0]
    assert way == "sigma" and ops["Log"] == ops["Sub"] == ops["Mul"] == 1


def test_noise_beyond_the_range_warns(built):
    given = {"noisy": initial_noise([1], (1, SIZE, SIZE)), "difficulty": torch.tensor([0.5])}
    with runtime.load(built, check=True) as bundle, pytest.warns(RuntimeWarning, match="has 0.002 to 80"):
        bundle["denoiser"](sigma=torch.tensor([200.0]), **given)
        bundle["denoiser"](sigma=torch.tensor([200.0]), **given)


def test_a_bundle_draws_with_its_own_sampler(built, folder, monkeypatch):
    monkeypatch.chdir(folder)
    drawn = run("run", "bundle", "-o", "images.png", "-n", "2", "--steps", "1")
    assert drawn.exit_code == 0, drawn.output
    refusal(run("run", "bundle", "-o", "images.png", "--solver", "heun"), "sampler of its own", "leave the solver out")


def test_timestep_max_is_that_of_the_noise_input(folder):
    model = onnx_model(folder / "sigma.onnx", noise_input="sigma", conditions="random")
    named = {
        name: getattr(model, name) for name in ("name", "denoiser", "inputs", "output", "sigmas", "dims", "sample")
    }
    with pytest.raises(UserError, match=r"(?s)do not fit together.*timestep_max=1000.*remedy: give both the same"):
        DiffusionModel(**named, timestep_input="sigma", timestep_max=500.0, noise_input=model.noise_input)
