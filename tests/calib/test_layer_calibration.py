"""Calibrations with layers from end to end: contents of the file, loading, and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import Quiet, refusal, run, tiny_recipe
from tiny_layers import CHOSEN, LEFT, WITH_CONV, build

from trtconvert.calib.calibrate import calibrate, load_calibration, parts_to_convert
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.identity import calibration_reads
from trtconvert.errors import UserError
from trtconvert.recipe import AttentionSection, CalibrationSection, LayersSection, ModelSection, Recipe

BINS = 2
SECTION = CalibrationSection(samples=4, batch=2, steps=4, bins=BINS)


def made(work, model=None, **options):
    """A calibration of the tiny model, and its parts."""
    model, of_layers = model or build(), LayersSection(**{"include": WITH_CONV, "offsets": True} | options)
    parts = parts_to_convert(model, AttentionSection(), of_layers)
    calibration = calibrate(
        model, SECTION, "weights", parts.sites, work, Quiet(), layers=parts.layers, of_layers=of_layers
    )
    return calibration, parts


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    return made(tmp_path_factory.mktemp("work"))


def test_attention_and_layers_are_found_in_one_model(calibrated):
    parts = calibrated[1]
    assert [site.name for site in parts.sites] == ["denoiser"]
    assert tuple(layer.name for layer in parts.layers) == CHOSEN
    assert tuple(layer.name for layer in parts.left_layers) == LEFT


def test_there_are_scales_of_each_tensor_that_layers_read(calibrated):
    calibration, parts = calibrated
    assert set(calibration.layers) == {layer.input_group for layer in parts.layers} == set(CHOSEN) - {"k", "v"}
    channels = {layer.input_group: layer.in_channels for layer in parts.layers}
    assert all(scales.flaw(channels[input_group], BINS) == "" for input_group, scales in calibration.layers.items())
    assert any(len(scales.x_scale.unique()) == BINS for scales in calibration.layers.values())
    # A GELU's output has an offset, images never have one, and tied layers keep one weight.
    assert calibration.layers["mlp.2"].x_offset.all() and not calibration.layers["conv"].x_offset.any()
    assert all((calibration.layers[name].x_factor == 1).all() for name in ("tied", "tied#2"))


def test_observing_layers_changes_nothing_about_attention(calibrated, tmp_path):
    plain, parts = made(tmp_path, modes="off")
    assert parts.layers == parts.left_layers == [] and plain.layers == {}
    for name, table in plain.tables["denoiser"].items():
        assert torch.equal(table, calibrated[0].tables["denoiser"][name])


def test_the_recipe_says_how_scales_are_made(calibrated, tmp_path):
    calibration, _ = made(tmp_path, equalise=False, offsets=False, scales="maxima")
    assert all((scales.x_factor == 1).all() and not scales.x_offset.any() for scales in calibration.layers.values())
    # Percentiles of the calls' maxima clip little; ranges of least error may clip more.
    for input_group, scales in calibration.layers.items():
        least = calibrated[0].layers[input_group]
        if torch.equal(least.x_factor, scales.x_factor) and torch.equal(least.x_offset, scales.x_offset):
            assert (least.x_scale <= scales.x_scale * 1.1).all()


def test_the_file_gives_back_exactly_what_was_saved(calibrated, tmp_path):
    calibration, _ = calibrated
    calibration.save(tmp_path / "c.safetensors")
    loaded = Calibration.load(tmp_path / "c.safetensors")
    assert loaded.layers.keys() == calibration.layers.keys() and loaded.tables.keys() == calibration.tables.keys()
    for input_group, scales in calibration.layers.items():
        assert all(torch.equal(x, getattr(loaded.layers[input_group], name)) for name, x in scales.tensors().items())


def test_a_file_that_lacks_a_tensor_of_a_layer_is_none(calibrated, tmp_path):
    path = tmp_path / "c.safetensors"
    calibrated[0].save(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file({name: x for name, x in tensors.items() if name != "skip/x_factor"}, path, metadata)
    with pytest.raises(UserError, match="is not a calibration") as refused:
        Calibration.load(path)
    assert refused.value.got.startswith("skip: ")


# Taken from a file ----------------------------------------------------------------------------------------------------


def take(path, parts):
    return load_calibration(path, build(), "weights", BINS, parts.sites, parts.layers)


def test_only_needed_layers_are_taken(calibrated, tmp_path):
    calibration, parts = calibrated
    calibration.save(tmp_path / "c.safetensors")
    some = replace(parts, layers=[layer for layer in parts.layers if layer.name in ("q", "skip")])
    assert set(take(tmp_path / "c.safetensors", some).layers) == {"q", "skip"}
    assert set(take(tmp_path / "c.safetensors", parts).layers) == set(calibration.layers)


def test_a_calibration_without_layers_serves_no_recipe_with_them(calibrated, tmp_path):
    _, parts = calibrated
    plain, _ = made(tmp_path / "work", modes="off")
    plain.save(tmp_path / "c.safetensors")
    with pytest.raises(UserError, match="lacks the ranges of layers") as refused:
        take(tmp_path / "c.safetensors", parts)
    assert "conv, q, attended" in refused.value.expected and "attention only" in refused.value.got
    assert "layers.modes to off" in refused.value.remedy
    assert take(tmp_path / "c.safetensors", replace(parts, layers=[])).layers == {}


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"x_scale": torch.ones(BINS + 1)}, "x_scale of [3]"),
        ({"x_factor": torch.ones(16)}, "x_factor of [16]"),
        ({"x_offset": torch.zeros(32, dtype=torch.float16)}, "torch.float16"),
        ({"x_scale": torch.tensor([1.0, float("nan")])}, "NaN"),
        ({"x_factor": torch.zeros(32)}, "not positive"),
    ],
)
def test_scales_that_cannot_be_used_are_refused(calibrated, tmp_path, change, got):
    calibration, parts = calibrated
    broken = {**calibration.layers, "q": replace(calibration.layers["q"], **change)}
    replace(calibration, layers=broken).save(tmp_path / "c.safetensors")
    with pytest.raises(UserError, match="holds scales that cannot be used") as refused:
        take(tmp_path / "c.safetensors", parts)
    assert refused.value.got.startswith("q: ") and got in refused.value.got and refused.value.remedy


def test_one_observation_serves_all_modes():
    def reads(**layers):
        recipe = Recipe(model=ModelSection(source="tiny_layers:build"), layers=LayersSection(**layers))
        return calibration_reads(recipe, "weights")

    assert reads(modes="static") == reads(modes="weight_only") == reads(modes=["dynamic"] * 10) != reads(modes="off")
    assert reads(modes="off") == reads(modes="off", min_rows=7)
    others = ({"min_rows": 7}, {"equalise": False}, {"offsets": True}, {"scales": "maxima"}, {"kinds": ["conv"]})
    assert all(reads(**other) != reads() for other in (*others, {"include": ["q"]}, {"exclude": ["q"]}))


# The commands ---------------------------------------------------------------------------------------------------------


def layered_recipe(folder, model="build", **sections):
    folder.mkdir(exist_ok=True)
    layers = {"modes": "static", "include": WITH_CONV} | sections.pop("layers", {})
    return tiny_recipe(folder, model={"source": f"tiny_layers:{model}"}, layers=layers, **sections)


def test_calibrate_says_how_many_inputs_of_layers_there_are(tmp_path):
    recipe = layered_recipe(tmp_path)
    outcome = run("calibrate", recipe, "-o", tmp_path / "c.safetensors", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    assert f"inputs of layers: {len(CHOSEN) - 2}" in outcome.output


def test_a_recipe_that_takes_a_calibration_without_layers_is_refused_with_the_way_out(tmp_path):
    plain = layered_recipe(tmp_path, layers={"modes": "off"})
    assert run("calibrate", plain, "-o", tmp_path / "c.safetensors", "--cache", tmp_path / "cache").exit_code == 0

    def building(modes):
        taking = layered_recipe(tmp_path / "taking", layers={"modes": modes})
        document = json.loads(taking.read_text()) | {"calibration": {"from": "../c.safetensors", "bins": 2}}
        taking.write_text(json.dumps(document))
        return run("build", taking, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")

    refusal(building("static"), "lacks the ranges of layers", "attention only", "set layers.modes to off")
    assert building("off").exit_code == 0  # the remedy works


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        ({"include": ["no.*"]}, ["the layer pattern 'no.*' matches no layer", "mlp.0", "layers.include"]),
        ({"exclude": ["mlp.1"]}, ["the layer pattern 'mlp.1' matches no layer", "layers.exclude"]),
    ],
)
def test_patterns_that_match_nothing_are_refused(tmp_path, layers, parts):
    recipe = layered_recipe(tmp_path, layers=layers)
    for command in ("calibrate", "build"):
        refusal(run(command, recipe, "-o", tmp_path / "out", "--cache", tmp_path / "cache"), *parts)


def test_nan_at_a_layer_is_told_with_its_timestep(tmp_path):
    recipe = layered_recipe(tmp_path, "build_overflowing", calibration={"steps": 1})
    refusal(
        run("calibrate", recipe, "-o", tmp_path / "c.safetensors", "--cache", tmp_path / "cache"),
        "NaN or Inf at the input of mlp.2 at timestep",
    )
