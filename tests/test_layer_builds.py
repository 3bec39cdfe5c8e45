"""Builds with INT8 layers in every mode, and without: the content, results and messages of bundles."""

import json

import numpy as np
import onnx
import pytest
import torch
from exports import int8_weights
from safetensors.torch import load_file
from support import run, tiny_recipe
from tiny_layers import CHOSEN, LEFT, WITH_CONV, build
from tolerances import WHOLE_DENOISER

from trtconvert import runtime
from trtconvert.bundle import read_manifest, unquantised_file
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.fixed_plans import stated_attention
from trtconvert.engine import tensorrt_rtx
from trtconvert.evaluate.torch_int8 import TorchInt8
from trtconvert.export.nodes.layers import LAYER_METADATA
from trtconvert.export.trace import SiteOptions, trace
from trtconvert.linear.modes import LayerMode
from trtconvert.models.recorded_calls import relative_error
from trtconvert.recipe import AttentionSection
from trtconvert.weights.unquantised import Unquantised


def built(folder, attention=("precision", "balanced"), **layers):
    """A build of the tiny model with layers."""
    sections = {
        "model": {"source": "tiny_layers:build"},
        "attention": {"modes": attention},
        "layers": {"modes": "static", "include": WITH_CONV} | layers,
        "calibration": {"samples": 16},
    }
    recipe = tiny_recipe(folder, **sections)
    return run("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache")


def layers_of(folder):
    """Return the bodies of layer nodes in the bundle's ONNX model, by layer."""
    nodes = onnx.load(folder / "denoiser.onnx").graph.node
    metadata = [({entry.key: entry.value for entry in node.metadata_props}, node) for node in nodes]
    return {found[LAYER_METADATA]: node.overload for found, node in metadata if LAYER_METADATA in found}


def rows(linear, conv=None):
    return {name: list(conv or linear) if name == "conv" else list(linear) for name in CHOSEN}


MODES = {
    "static": rows([3, 3]),
    "dynamic": rows([2, 2], [3, 3]),
    "weight_only": rows([1, 1]),
    ("weight_only", "dynamic"): rows([1, 2], [1, 3]),
}


@pytest.fixture(params=MODES, ids=str)
def bundle_of(request, tmp_path):
    """Return modes, and a bundle with them; attention does not matter."""
    modes = request.param
    if modes == "static":
        return modes, request.getfixturevalue("layered_build").bundle
    attention = "sigma-rule" if modes == "dynamic" else ["precision", "balanced"]
    outcome = built(tmp_path, attention, modes=modes if isinstance(modes, str) else list(modes))
    assert outcome.exit_code == 0, outcome.output
    return modes, tmp_path / "bundle"


def test_a_bundle_computes_its_layers_as_the_recipe_says(bundle_of):
    modes, folder = bundle_of
    manifest = read_manifest(folder)
    component = manifest.components["denoiser"]
    assert {layer.name: layer.modes for layer in component.layers if layer.in_int8} == MODES[modes]
    assert tuple(layer.name for layer in component.layers if not layer.in_int8) == LEFT
    assert all(layer.reason for layer in component.layers if not layer.in_int8)
    assert set(manifest.quality.layer_sqnr) == set(CHOSEN)
    assert all(db is not None and db > 20 for row in manifest.quality.layer_sqnr.values() for db in row)
    if modes == "dynamic":
        plan = stated_attention(AttentionSection(modes="sigma-rule"), {"denoiser": "dynamic"}, build().sigmas, 2)
        assert component.sites[0].modes == plan["denoiser"].modes
    # A node of each layer, with the body of its modes.
    names = {name: [LayerMode(mode).name.lower() for mode in sorted(set(row))] for name, row in MODES[modes].items()}
    of_conv = "_".join(names["conv"]) + "_timed_2d"
    expected = {name: "_".join(found) + "_timed" for name, found in names.items()} | {"conv": of_conv}
    assert layers_of(folder) == expected
    # And the whole is what torch computes by the specification, in each timestep bin.
    bundle, model = runtime.load(folder), build()
    inputs = model.example(3, {"batch": 2})
    for timestep in (100.0, 900.0):
        given = inputs | {"timestep": torch.full((2,), timestep)}
        expected_output = TorchInt8(model, bundle.folder, manifest)(**given)
        assert relative_error(bundle["denoiser"](**given), expected_output) < WHOLE_DENOISER


def test_weights_that_were_quantised_by_channel_are_in_the_engine_number_by_number(tmp_path):
    (tmp_path / "m").mkdir()
    torch.save(build().denoiser.state_dict(), tmp_path / "m" / "model.bin")
    options = ("--granularity", "channel", "--min-elements", "0", "--max-outliers", "1")
    assert run("quantize", tmp_path / "m", "-o", tmp_path / "q", *options).exit_code == 0
    sections = {
        "model": {"source": "tiny_layers:build_from", "weights": "q/model.safetensors"},
        "layers": {"modes": "dynamic", "include": WITH_CONV},
        "attention": {"modes": "precision"},
        "calibration": {"steps": 2, "bins": 1},
        "verify": {"samples": 1, "steps": 1},
    }
    outcome = run("build", tiny_recipe(tmp_path, **sections), "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    stored = load_file(tmp_path / "q" / "model.safetensors")
    found = int8_weights(tmp_path / "bundle" / "denoiser.onnx")
    assert found.keys() == {f"{name}.weight" for name in CHOSEN if "#" not in name}
    for name, (weight, scale) in found.items():
        assert weight.dtype == np.int8 and np.array_equal(weight, stored[name].numpy())
        assert np.array_equal(scale, stored[f"{name}_scale"].numpy())


def test_layers_that_are_off_leave_no_trace(tmp_path):
    """Neither the ONNX model, whose other nodes and weights are the model's own, nor the records have any."""
    assert built(tmp_path, modes="off", include=["*"]).exit_code == 0
    manifest = read_manifest(tmp_path / "bundle")
    component = manifest.components["denoiser"]
    assert component.layers == [] and manifest.quality.layer_sqnr == {} and not component.has_int8_layers
    calibration = Calibration.load(tmp_path / "bundle" / manifest.calibration)
    assert calibration.layers == {}
    written = onnx.load(tmp_path / "bundle" / "denoiser.onnx")
    model = build()
    tables = calibration.with_modes({"denoiser": torch.tensor(component.sites[0].modes, dtype=torch.int32)})
    alone = trace(model, tables, SiteOptions(model.timestep_max, "calibrated", True), dims=model.dims)
    assert [(node.domain, node.op_type) for node in written.graph.node] == [(n.domain, n.op_type) for n in alone.graph]
    assert {tensor.name for tensor in written.graph.initializer} == set(alone.graph.initializers)
    assert [function.name for function in written.functions] == ["Int8Attention"]


def test_a_calibration_that_is_taken_gives_the_bundle_that_it_came_from(layered_build, tmp_path):
    recipe = json.loads(layered_build.recipe.read_text())
    recipe["calibration"] = {"from": str(layered_build.bundle / "calibration.safetensors"), "bins": 2}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    outcome = run("build", tmp_path / "recipe.yaml", "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    files = [(folder / "denoiser.onnx").read_bytes() for folder in (layered_build.bundle, tmp_path / "bundle")]
    assert files[0] == files[1]


def test_a_refittable_bundle_keeps_what_layers_were_quantised_from(layered_build, tmp_path):
    """Its INT8 weights are rounded to the nearest, as new weights will be. Everything else stays the same."""
    recipe = json.loads(layered_build.recipe.read_text())
    recipe["engine"] |= {"refittable": True}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    outcome = run("build", tmp_path / "recipe.yaml", "-o", tmp_path / "bundle", "--cache", layered_build.cache)
    assert outcome.exit_code == 0 and "of unquantised weights" in outcome.output
    onnx_file = tmp_path / "bundle" / "denoiser.onnx"
    mine, usual = onnx.load(onnx_file), onnx.load(layered_build.bundle / "denoiser.onnx")
    assert [node.SerializeToString() for node in mine.graph.node] == [x.SerializeToString() for x in usual.graph.node]
    tensors, others = ({x.name: x for x in model.graph.initializer} for model in (mine, usual))
    different = {name for name, x in tensors.items() if x.raw_data != others[name].raw_data}
    assert tensors.keys() == others.keys() and different
    assert all(tensors[name].data_type == onnx.TensorProto.INT8 or name.endswith("bias") for name in different), (
        different
    )
    found = [
        Calibration.load(of / read_manifest(of).calibration).layers for of in (onnx_file.parent, layered_build.bundle)
    ]
    assert [any(scales.moments is not None for scales in layers.values()) for layers in found] == [False, True]
    kept, weights = Unquantised(unquantised_file(onnx_file)), build().denoiser.state_dict()
    assert kept.refs.keys() == set(CHOSEN)
    assert kept.shapes.keys() == {f"{name}.{part}" for name in CHOSEN for part in ("weight", "bias")} & weights.keys()
    assert all(torch.equal(kept[name].float(), weights[name]) for name in kept.shapes)
    assert not unquantised_file(layered_build.bundle / "denoiser.onnx").exists()
    assert runtime.load(tmp_path / "bundle")["denoiser"] is not None  # its files are the bundle's


def test_a_limit_of_lpips_without_weights_is_told(layered_build, tmp_path):
    recipe = json.loads(layered_build.recipe.read_text())
    recipe.setdefault("verify", {})["max_lpips"] = 0.2
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    outcome = run("build", tmp_path / "recipe.yaml", "-o", tmp_path / "bundle", "--cache", layered_build.cache)
    assert outcome.exit_code == 0, outcome.output
    assert "verify.max_lpips is no gate" in " ".join(outcome.output.split())


@pytest.mark.soak
def test_layers_of_half_precision(tmp_path):
    """The type of the model is the type of activations between layers."""
    recipe = tiny_recipe(
        tmp_path, model={"source": "tiny_layers:build", "dtype": "float16"}, layers={"modes": "static", "include": WITH_CONV},
        calibration={"samples": 16}, verify={"max_error": 0.03},
    )  # fmt: skip
    outcome = run("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    model = build()
    bundle = runtime.load(tmp_path / "bundle")
    inputs = {name: x.half() if name == "x" else x for name, x in model.example(3, {"batch": 2}).items()}
    got = bundle["denoiser"](**inputs)
    assert got.dtype == torch.float16
    assert relative_error(got, TorchInt8(model, bundle.folder, bundle.manifest)(**inputs)) < 0.03


@pytest.mark.soak
@pytest.mark.skipif(not tensorrt_rtx.status().available, reason=tensorrt_rtx.status().detail)
def test_bf16_bundles_have_engines_where_there_is_bf16_and_draw_anywhere(tmp_path):
    sections = {
        "model": {"source": "tiny_layers:build", "dtype": "bfloat16"},
        "layers": {"modes": "static", "include": WITH_CONV},
        "calibration": {"samples": 16},
        "engine": {"backend": "tensorrt_rtx"},
    }
    outcome = run("build", tiny_recipe(tmp_path, **sections), "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    assert "no engine of denoiser for sm75, which supports only float16" in " ".join(outcome.output.split())
    component = read_manifest(tmp_path / "bundle").components["denoiser"]
    assert [engine.target for engine in component.engines] == ["sm80", "sm86", "sm89", "sm120"]
    assert {spec.name: spec.dtype for spec in component.inputs} == {"x": "bfloat16", "timestep": "float32"}
    stored = onnx.load(tmp_path / "bundle" / "denoiser.onnx").graph.initializer
    assert onnx.TensorProto.BFLOAT16 in {x.data_type for x in stored}
    model = build()
    inputs = model.example(0, {name: opt for name, (_, opt, _) in model.dims.items()})
    with runtime.load(tmp_path / "bundle") as bundle, torch.no_grad():
        out = bundle["denoiser"](**inputs)
        assert out.dtype == torch.bfloat16
        assert relative_error(out, model.denoiser(**inputs)) < 0.1  # of INT8 attention and layers, and of BF16
