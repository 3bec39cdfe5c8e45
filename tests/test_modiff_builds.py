"""Builds with MoDiff layers: bundles, their results, and refusals before the calibration."""

import json
from dataclasses import replace

import pytest
import tiny_models
import torch
from support import WEIGHTS, Quiet, refusal, run, tiny_recipe
from tiny_layers import CHOSEN, WITH_CONV, build
from tolerances import WHOLE_DENOISER

from trtconvert import runtime
from trtconvert.bundle import read_manifest
from trtconvert.calib.calibrate import calibrate, load_calibration, modulated_groups, parts_to_convert
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.layer_observer import LayerObserver, deltas_of
from trtconvert.errors import UserError
from trtconvert.evaluate.torch_int8 import TorchInt8
from trtconvert.manifest_checks import contradiction
from trtconvert.models.denoiser import intercepted
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection
from trtconvert.serving.triton import _component

STEPS = (950.0, 700.0, 450.0, 200.0)


def recipe_of(folder, modiff=True, calibration=None, engine=None, **layers):
    sections = {
        "model": {"source": "tiny_layers:build"},
        "layers": {"modes": "static", "include": WITH_CONV, "modiff": modiff} | layers,
        "calibration": {"samples": 4} | (calibration or {}),
        "engine": engine or {},
    }
    return tiny_recipe(folder, **sections)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modiff")
    recipe = recipe_of(folder, modiff=["conv", "q", "k", "mlp.*", "tied*"])
    outcome = run("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache")
    assert outcome.exit_code == 0, outcome.output
    assert "7 of them quantise deltas from step to step (MoDiff)" in " ".join(outcome.output.replace("│", "").split())
    return folder / "bundle"


def test_a_bundle_says_which_layers_quantise_deltas_and_what_they_keep(bundle):
    manifest = read_manifest(bundle)
    component = manifest.components["denoiser"]
    modulated = {layer.name for layer in component.layers if layer.modulated}
    assert modulated == {"conv", "q", "k", "mlp.0", "mlp.2", "tied", "tied#2"} < set(CHOSEN)
    names = [cache.name for cache in component.caches]
    assert names[0] == "modiff.timestep" and len(names) == 1 + 6 + 7  # k reads what q reads
    assert all(cache.dtype == "float32" and cache.shape[0] == "batch" for cache in component.caches)
    scales = Calibration.load(bundle / manifest.calibration).layers
    assert {name for name, of in scales.items() if of.change_scale is not None} == modulated - {"k"}


def test_a_bundle_computes_a_trajectory_as_torch_does(bundle):
    loaded, model = runtime.load(bundle), build()
    denoiser, torch_int8 = loaded["denoiser"], TorchInt8(model, bundle, loaded.manifest)
    inputs = model.example(3, {"batch": 3})
    for begin in (denoiser.reset_cache, torch_int8.reset_cache):
        begin()
    for timestep in (*STEPS, *STEPS):  # another trajectory begins by itself
        given = {"x": inputs["x"] * timestep / 1000, "timestep": torch.full((3,), timestep)}
        assert relative_error(denoiser(**given), torch_int8(**given)) < WHOLE_DENOISER
    denoiser.check_caches()


def test_samplers_begin_anew_whatever_was_before(bundle):
    """Samples equal those of a denoiser without earlier calls."""
    model, seeds = build(), range(2)
    with runtime.load(bundle) as fresh, runtime.load(bundle) as used:
        expected = model.sample(fresh["denoiser"], seeds, steps=3, solver="ddim")
        model.sample(used["denoiser"], range(7, 9), steps=5, solver="ddim")
        used["denoiser"](**model.example(0, {"batch": 2}) | {"timestep": torch.full((2,), 999.0)})
        assert torch.equal(model.sample(used["denoiser"], seeds, steps=3, solver="ddim"), expected)


def test_records_that_contradict_each_other_are_found(bundle):
    manifest = read_manifest(bundle)
    component = manifest.components["denoiser"]

    def found(**fields):
        return contradiction(
            manifest.model_copy(update={"components": {"denoiser": component.model_copy(update=fields)}})
        )

    first, *others = component.caches
    layers = [layer.model_copy(update={"modulated": False}) for layer in component.layers]
    assert found() == ""
    assert "caches: none, but layers" in found(caches=[])
    assert "caches: of other layers" in found(layers=layers)
    assert "caches: of other layers" in found(caches=[c for c in component.caches if c.name != "modiff.q.o_hat"])
    assert "the type 'int8'" in found(caches=[first.model_copy(update={"dtype": "int8"}), *others])
    assert "only the first dimension" in found(caches=[first.model_copy(update={"shape": ["batch", "batch"]}), *others])
    assert "twice" in found(caches=[first, *component.caches])
    dynamic = [x.model_copy(update={"modes": [2, 2]}) if x.name == "q" else x for x in component.layers]
    assert "not static in all timestep bins" in found(layers=dynamic)


def test_triton_which_mixes_clients_is_refused(bundle):
    with pytest.raises(UserError, match=r"(?s)Triton's clients would mix.*layers\.modiff: false"):
        _component("denoiser", read_manifest(bundle).components["denoiser"])


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        (
            {"calibration": {"data": "tiny_models:recorded"}},
            ("denoised step by step", "set calibration.data to denoise"),
        ),
        ({"calibration": {"steps": 1}}, ("calibration.steps", "2 steps or more")),
        ({"modiff": ["nothing.*"]}, ("'nothing.*' of layers.modiff matches no layer", "correct layers.modiff")),
        ({"exclude": ["*"]}, ("layers.modiff finds no layer with INT8 activations", "got: true")),
        ({"modes": "dynamic"}, ("layers.modes", "static or auto with layers.modiff")),
        ({"offsets": True}, ("deltas have no offsets", "layers.offsets")),
        ({"engine": {"refittable": True}}, ("engine.refittable", "false with layers.modiff")),
        ({"engine": {"layers": "exact"}}, ("engine.layers", "auto or native with layers.modiff")),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_before_a_calibration(tmp_path, monkeypatch, sections, parts):
    monkeypatch.setattr("trtconvert.calib.calibrate._run", lambda *_: pytest.fail("a calibration ran"))
    refusal(run("build", recipe_of(tmp_path, **sections), "-o", tmp_path / "b", "--cache", tmp_path / "c"), *parts)


def test_sizes_that_vary_are_refused_before_a_calibration_and_fixed_ones_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("trtconvert.calib.calibrate._run", lambda *_: pytest.fail("a calibration ran"))
    recipe = json.loads(recipe_of(tmp_path).read_text())
    recipe["model"] = {"source": "digits-dit", "weights": str(WEIGHTS)}
    recipe["layers"] = {"modes": "static", "modiff": True}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    outcome = run("build", tmp_path / "recipe.yaml", "-o", tmp_path / "b", "--cache", tmp_path / "c")
    refusal(outcome, "height 4..16, width 4..16", "engine.shapes, such as height: 8")


def test_a_calibration_without_changes_is_not_taken(tmp_path):
    model, layers = build(), LayersSection(modes="static", include=WITH_CONV)
    parts = parts_to_convert(model, AttentionSection(), layers)

    section = CalibrationSection(samples=1, batch=1, steps=2, bins=2)
    made = calibrate(
        model, section, "w", parts.sites, tmp_path / "work", Quiet(), layers=parts.layers, of_layers=layers
    )
    made.save(tmp_path / "c.safetensors")
    wanted = modulated_groups(parts.layers, layers.model_copy(update={"modiff": True}))
    with pytest.raises(UserError, match=r"(?s)lacks the scales of deltas.*remove calibration\.from"):
        load_calibration(tmp_path / "c.safetensors", model, "w", 2, parts.sites, parts.layers, wanted)
    scales = {
        name: replace(of, change_scale=of.x_scale.clone(), x_offset=of.x_offset + 1) for name, of in made.layers.items()
    }
    replace(made, layers=scales).save(tmp_path / "moved.safetensors")
    with pytest.raises(
        UserError, match=r"(?s)has offsets of layers, but deltas have no offsets.*remove calibration\.from"
    ):
        load_calibration(tmp_path / "moved.safetensors", model, "w", 2, parts.sites, parts.layers, wanted)
    assert (
        load_calibration(tmp_path / "c.safetensors", model, "w", 2, parts.sites, parts.layers).layers.keys()
        == made.layers.keys()
    )


def test_deltas_are_seen_between_steps_of_one_trajectory_alone():
    model = build()
    observer = LayerObserver({"q"}, 1000.0, 2, deltas={"q"})
    denoiser, x = intercepted(model, layers=observer), tiny_models.build().example(0, {"batch": 2})["x"]
    for timestep in (900.0, 600.0, 600.0, 100.0, 900.0, 700.0):
        denoiser(x=x, timestep=torch.full((2,), timestep))
    found = observer.finish()
    # 900 to 600 and 600 to 100, not 600 to itself, nor 100 to 900; and 900 to 700.
    assert found["q"].bin.tolist() == [1, 1, 1, 0, 1, 1] and found[deltas_of("q")].bin.tolist() == [1, 0, 1]
    denoiser(x=x, timestep=torch.full((2,), 10.0))
    assert deltas_of("q") not in observer.finish()  # of another batch
