"""Denoisers that are recorded in CUDA graphs compute what they compute eagerly, and what cannot be recorded stays eager."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support import REPOSITORY
from torch import Tensor

from trtconvert.attention.modes import Mode
from trtconvert.attention.reference import AttentionTables
from trtconvert.bars import NoBar
from trtconvert.calib import calibrate as calibration
from trtconvert.calib import probes, sensitivity
from trtconvert.calib.calibrate import calibrate, parts_to_convert
from trtconvert.calib.candidates import attention_units
from trtconvert.calib.layer_plan import SearchedLayers
from trtconvert.calib.sensitivity import measure_sensitivity
from trtconvert.linear.modes import LayerMode
from trtconvert.models.cuda_graphs import Graphed
from trtconvert.models.digits import digits_model
from trtconvert.models.placed import Place, placed
from trtconvert.noted import Notes
from trtconvert.quant.forward import Int8Sites
from trtconvert.recipe import load_recipe

pytestmark = pytest.mark.gpu
BINS = 5


def numbers(count: int, size: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, size, generator=generator).cuda() for _ in range(count)]


def test_the_function_runs_three_times_and_its_calls_are_right():
    runs = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        runs.append(len(runs))
        return (x @ y).sin()

    graphed, y = Graphed(function, ["x", "y"]), torch.ones(64, 64, device="cuda")
    for x in numbers(6):
        assert torch.equal(graphed(x, y=y), (x @ y).sin())
    assert len(runs) == 3


def test_other_shapes_are_recorded_by_themselves():
    graphed = Graphed(lambda x: x * 2, ["x"])
    for size in (64, 32, 64, 32, 64, 32, 64, 32):
        (x,) = numbers(1, size)
        assert torch.equal(graphed(x), x * 2)


def test_outputs_are_copies():
    graphed = Graphed(lambda x: x + 1, ["x"])
    given = numbers(6)
    for x, output in zip(given, [graphed(x) for x in given], strict=True):
        assert torch.equal(output, x + 1)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x * float(x[0, 0]),
        lambda x: x[x > 0],
        lambda x: x + torch.arange(64).to(x.device),
        lambda x: x + torch.tensor(2.0).to(x.device),
        lambda x: (x.cpu() + 1).to(x.device),
    ],
)
def test_what_waits_for_the_device_stays_eager(waiting):
    graphed = Graphed(waiting, ["x"])
    for x in numbers(5):
        assert torch.equal(graphed(x), waiting(x))


def test_what_follows_from_the_number_of_calls_stays_eager():
    count = 0

    def function(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    graphed = Graphed(function, ["x"])
    for x in numbers(6):
        output, now = graphed(x), count
        assert torch.equal(output, x * now)
    assert count > 5


def test_what_fails_while_it_is_recorded_stays_eager_and_random_numbers_go_on():
    def function(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return x + 1

    graphed = Graphed(function, ["x"])
    for x in numbers(5):
        assert torch.equal(graphed(x), x + 1)
        assert torch.randn(8, device="cuda").isfinite().all()
    held = [torch.randn(1024, 1024, device="cuda") for _ in range(4)]
    del held
    torch.cuda.synchronize()
    second = Graphed(lambda x: x * 3, ["x"])
    for x in numbers(5):
        assert torch.equal(second(x), x * 3)


@dataclass(frozen=True)
class Entry:
    x: Tensor
    of: dict[str, Tensor]


def test_notes_are_those_of_eager_calls():
    notes: Notes[Entry] = Notes()

    def function(x: Tensor) -> Tensor:
        low = x.amin(0)
        notes.add("a", Entry(low, {"high": x.amax(0), "low": low}))
        return x + 1

    given = numbers(6)
    graphed = Graphed(function, ["x"], notes=(notes,), proof=lambda x: x + 1)
    for x in given:
        graphed(x)
    found = notes.take()["a"]
    assert [place for place, _ in found] == [*range(6)]
    for x, (_, entry) in zip(given, found, strict=True):
        assert torch.equal(entry.x, x.amin(0)) and torch.equal(entry.of["high"], x.amax(0))
        assert torch.equal(entry.of["low"], x.amin(0))


def eager(model, denoiser, **_):
    return denoiser


@pytest.fixture(scope="module")
def digits():
    recipe = load_recipe(REPOSITORY / "recipes/digits-dit.yaml")
    recipe = recipe.model_copy(update={"layers": recipe.layers.model_copy(update={"modes": "auto"})})
    model = placed(digits_model(REPOSITORY / "recipes/digits-dit.safetensors"), Place("cuda", "float16", ""))
    return recipe, model, parts_to_convert(model, recipe.attention, recipe.layers)


def calibrated(digits, folder):
    recipe, model, parts = digits
    section = recipe.calibration.model_copy(update={"samples": 8, "batch": 4, "steps": 10, "bins": BINS})
    return calibrate(model, section, "", parts.sites, folder, NoBar(), layers=parts.layers, of_layers=recipe.layers)


def test_a_calibration_is_that_of_eager_calls(digits, tmp_path, monkeypatch):
    made = calibrated(digits, tmp_path / "graphs")
    monkeypatch.setattr(calibration, "graphed", eager)
    expected = calibrated(digits, tmp_path / "eager")
    for name, tables in expected.tables.items():
        for key, table in tables.items():
            assert torch.equal(made.tables[name][key], table), (name, key)
    for source, scales in expected.layers.items():
        assert torch.equal(made.layers[source].x_scale, scales.x_scale)
    assert made.provenance == expected.provenance
    for site, shares in expected.outliers.items():
        assert all(torch.equal(made.outliers[site][name], x) for name, x in shares.items())


def test_sensitivities_are_those_of_eager_calls(digits, tmp_path, monkeypatch):
    recipe, model, parts = digits
    made = calibrated(digits, tmp_path)
    layers = SearchedLayers.of(model, parts.layers, made, recipe.layers, {LayerMode.EXACT, LayerMode.STATIC}, BINS)
    exact = torch.zeros(BINS, dtype=torch.int32)
    tables = {site.name: AttentionTables(**made.tables[site.name], modes=exact) for site in parts.sites}
    sites = Int8Sites(tables, model.timestep_max, "dynamic", True).to("cuda")
    units = [*attention_units(dict.fromkeys(sites.tables, "dynamic"), Mode), *layers.groups]

    def measured():
        return measure_sensitivity(
            model, units, sites, BINS, layers=layers.int8, seeds=range(4), steps=20, method="probes"
        )

    found = measured()
    monkeypatch.setattr(sensitivity, "graphed", eager)
    monkeypatch.setattr(probes, "Graphed", lambda function: function)
    expected = measured()
    known = expected.error.isfinite()
    assert torch.equal(found.error.isfinite(), known)
    assert torch.allclose(found.error[known], expected.error[known], rtol=0.05, atol=0)
    assert torch.allclose(found.gain, expected.gain, rtol=0.1)
