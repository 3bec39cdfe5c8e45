"""A bundle's INT8 layers in torch: equal to the bundle, and counts of NaN and Inf."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from support import run
from tiny_layers import CHOSEN, build
from tolerances import WHOLE_DENOISER

from trtconvert import runtime
from trtconvert.calib.calibration import Calibration
from trtconvert.evaluate import torch_int8
from trtconvert.evaluate.records import read_evaluation
from trtconvert.evaluate.table import watch_line
from trtconvert.evaluate.torch_int8 import TorchInt8
from trtconvert.linear.modes import LayerMode
from trtconvert.models.recorded_calls import relative_error

NONE: dict[str, list[int]] = {name: [] for name in CHOSEN}


@pytest.fixture(scope="module")
def bundle(layered_build):
    return runtime.load(layered_build.bundle)


@pytest.fixture(scope="module")
def inputs():
    return build().example(3, {"batch": 4})


def changed(bundle, modes):
    """Changes the modes of layers in the manifest."""
    component = bundle.manifest.components["denoiser"]
    layers = [x.model_copy(update={"modes": modes.get(x.name, x.modes)}) for x in component.layers]
    return bundle.manifest.model_copy(
        update={"components": {"denoiser": component.model_copy(update={"layers": layers})}}
    )


def test_the_int8_model_in_torch_agrees_with_the_bundle(bundle, inputs):
    int8 = TorchInt8(build(), bundle.folder, bundle.manifest)(**inputs)
    assert relative_error(int8, bundle["denoiser"](**inputs)) < WHOLE_DENOISER
    # It is neither the model nor attention alone.
    without = TorchInt8(build(), bundle.folder, changed(bundle, NONE))(**inputs)
    assert relative_error(int8, without) > 3 * WHOLE_DENOISER


def test_layers_that_a_plan_leaves_are_the_models_own(bundle, inputs):
    """Including the first layer of an input group, which names its scales."""
    model, (static, exact) = build(), ([LayerMode.STATIC] * 2, [])
    some = TorchInt8(model, bundle.folder, changed(bundle, {name: exact for name in CHOSEN if name not in "kv"}))
    some(**inputs)
    assert set(some.take_nonfinite()["layer"]) == {"k", "v"}
    all_of_them = TorchInt8(model, bundle.folder, changed(bundle, dict.fromkeys(CHOSEN, static)))
    assert relative_error(some(**inputs), all_of_them(**inputs)) > 1e-4


def test_modes_are_those_of_the_manifest(bundle, inputs):
    weights = TorchInt8(build(), bundle.folder, changed(bundle, dict.fromkeys(CHOSEN, [LayerMode.WEIGHT_ONLY] * 2)))
    exact = TorchInt8(build(), bundle.folder, changed(bundle, NONE))
    static = TorchInt8(build(), bundle.folder, bundle.manifest)
    errors = [relative_error(int8(**inputs), exact(**inputs)) for int8 in (weights, static)]
    assert 0 < errors[0] < errors[1]


def test_the_watch_names_the_layer_that_breaks(bundle, monkeypatch):
    calibration = Calibration.load(bundle.folder / bundle.manifest.calibration)
    scale = calibration.layers["skip"].x_scale.clone()
    scale[0] = torch.nan  # the last steps' bin
    broken = {**calibration.layers, "skip": replace(calibration.layers["skip"], x_scale=scale)}
    # No file with NaN is read.
    monkeypatch.setattr(torch_int8, "load_of_bundle", lambda *_: replace(calibration, layers=broken))
    model = build()
    int8 = TorchInt8(model, bundle.folder, bundle.manifest)
    model.sample(int8, range(3), steps=4, solver="ddim")
    found = int8.take_nonfinite()
    assert found["layer"].pop("skip") == 3 + 3  # two steps of three samples
    assert set(found["layer"]) == set(CHOSEN) - {"skip"}
    assert int8.take_nonfinite() == {"site": {}, "layer": {}}


def test_an_evaluation_counts_layers_apart_from_sites(layered_build, tmp_path, bundle):
    """An attention site and a layer may have equal names."""
    reference = tmp_path / "reference"
    reference.mkdir()
    for index in range(12):
        pixels = torch.randint(0, 256, (4, 4), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(reference / f"{index}.png")
    arguments = ("--reference", reference, "--features", "tiny_features:pixels", "-n", 20, "--steps", 2)
    outcome = run("evaluate", layered_build.bundle, *arguments, "--int8", "torch", "-o", tmp_path / "out.json")
    assert outcome.exit_code == 0, outcome.output
    found = read_evaluation(tmp_path / "out.json")
    assert found.paired is not None
    assert found.paired.nonfinite_int8_layers == dict.fromkeys(CHOSEN, 0)
    assert found.paired.nonfinite_int8_sites == {"denoiser": 0}
    broken = found.paired.model_copy(update={"nonfinite_int8_layers": {"skip": 2, "q": 0}})
    line = watch_line(found.model_copy(update={"paired": broken}))
    assert line.endswith("; layers in INT8: skip 2")
    # Older evaluations have no layers.
    old = json.loads((tmp_path / "out.json").read_text())
    del old["paired"]["nonfinite_int8_layers"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert read_evaluation(tmp_path / "old.json").paired.nonfinite_int8_layers == {}
