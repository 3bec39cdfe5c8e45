"""Errors by probes: they rank candidates like one forward for each candidate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support import REPOSITORY

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.bars import NoBar
from trtconvert.calib import probes
from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.candidates import attention_units, candidates_of
from trtconvert.calib.layer_plan import SearchedLayers
from trtconvert.calib.probes import Probes
from trtconvert.calib.sensitivity import measure_sensitivity
from trtconvert.linear.modes import LayerMode
from trtconvert.models.denoiser import intercepted
from trtconvert.models.digits import digits_model
from trtconvert.quant.forward import Int8Sites
from trtconvert.recipe import load_recipe

BINS = 5
SEEDS, STEPS = range(500, 502), 5


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The digits model, its sites in INT8, and its groups of layers."""
    recipe = load_recipe(REPOSITORY / "recipes/digits-dit.yaml")
    model = digits_model(REPOSITORY / "recipes/digits-dit.safetensors")
    recipe = recipe.model_copy(update={"layers": recipe.layers.model_copy(update={"modes": "auto"})})
    parts = parts_to_convert(model, recipe.attention, recipe.layers)
    section = recipe.calibration.model_copy(update={"samples": 4, "batch": 4, "steps": 10, "bins": BINS})
    folder = tmp_path_factory.mktemp("observed")
    made = calibrate(model, section, "", parts.sites, folder, NoBar(), layers=parts.layers, of_layers=recipe.layers)
    layers = SearchedLayers.of(model, parts.layers, made, recipe.layers, lambda _: [LayerMode.STATIC], BINS)
    exact = torch.zeros(BINS, dtype=torch.int32)
    tables = {site.name: AttentionTables(**made.tables[site.name], modes=exact) for site in parts.sites}
    sites = Int8Sites(tables, model.timestep_max, "dynamic", True)
    return model, sites, layers


def units_of(sites, layers, modes):
    return [*attention_units(dict.fromkeys(sites.tables, "dynamic"), modes), *layers.groups]


def ranks(x: torch.Tensor) -> torch.Tensor:
    return x.argsort().argsort().double()


def test_probes_rank_as_one_forward_for_each_candidate_does(digits):
    model, sites, layers = digits
    measure = partial(
        measure_sensitivity, model, units_of(sites, layers, Mode), sites, BINS, layers=layers.int8, seeds=SEEDS, steps=STEPS
    )  # fmt: skip
    exact, estimated = measure(method="exact").error, measure(method="probes").error
    assert torch.equal(exact.isnan(), estimated.isnan())
    assert torch.equal(exact[..., Mode.FP16], estimated[..., Mode.FP16])
    measured = exact.isfinite() & (exact > 0)
    assert measured.sum() > 100
    x, y = exact[measured].log(), estimated[measured].log()
    assert torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1] > 0.95
    assert 0.8 < (y - x).exp().median() < 1.25


@pytest.fixture
def call(digits):
    """One call of the digits model: inputs by name, and all candidates."""
    model, sites, layers = digits
    units = units_of(sites, layers, [Mode.FP16, Mode.AGGRESSIVE])
    every = candidates_of(model, units, sites, layers.int8, {})
    return model, every, model.example(3, {name: 6 for name in model.dims})


def test_the_output_is_the_models_own(call):
    model, every, inputs = call
    exact = intercepted(model, lambda one: one.exact())
    output, errors = Probes(model, every, draws=4).errors(exact, inputs)
    with torch.no_grad():
        assert torch.equal(output, exact(**inputs))
    assert not output.requires_grad
    assert all(error.shape == (6,) and bool((error > 0).all()) for error in errors)


@pytest.mark.soak
def test_samples_in_chunks_are_those_together(call, monkeypatch):
    monkeypatch.setattr(probes, "MOST_PROBES", 64)
    model, every, inputs = call
    exact = intercepted(model, lambda one: one.exact())
    together = Probes(model, every, draws=4096)
    chunked = Probes(model, every, draws=4096)
    chunked._chunk = 2
    whole, parts = together.errors(exact, inputs), chunked.errors(exact, inputs)
    torch.testing.assert_close(whole[0], parts[0])
    of_all, of_parts = (torch.stack(errors).mean(1).log() for errors in (whole[1], parts[1]))
    assert torch.corrcoef(torch.stack([of_all, of_parts]))[0, 1] > 0.95


def test_layers_of_a_group_change_the_prediction_together(call, monkeypatch):
    monkeypatch.setattr(probes, "MOST_PROBES", 64)
    model, every, inputs = call
    groups = [candidate for candidate in every if candidate.unit.kind == "layer"]
    assert groups
    exact = intercepted(model, lambda one: one.exact())
    with torch.no_grad():
        expected = exact(**inputs)
        alone = [
            (intercepted(model, *candidate.handlers())(**inputs) - expected).square().flatten(1).mean(1).mean()
            for candidate in groups
        ]
    _, errors = Probes(model, groups, draws=4096).errors(exact, inputs)
    ratios = torch.stack([error.mean() for error in errors]) / torch.stack(alone)
    assert ratios.min() > 0.5 and ratios.max() < 2
