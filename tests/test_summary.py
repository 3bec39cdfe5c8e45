"""What `build` and `inspect` tell of attention and of layers: short, however many there are."""

import io
import re

import pytest
from rich.console import Console

from trtconvert.attention.modes import Mode
from trtconvert.bundle import EngineRecord, LayerRecord, read_manifest
from trtconvert.linear.modes import LayerMode
from trtconvert.summary import print_manifest

MANY = 700


def layers_of_a_large_unet():
    """As SDXL's: most are INT8, some have few rows, and the ends stay."""
    sizes = {"in_channels": 640, "out_channels": 640, "rows": 4096}
    layers = [
        LayerRecord(name=f"down.{i}", kind="linear", weight=f"down.{i}.weight", modes=[LayerMode.STATIC] * 4, **sizes)
        for i in range(MANY - 60)
    ]
    few = {"kind": "linear", "in_channels": 1280, "out_channels": 640, "weight": "w"}
    layers += [
        LayerRecord(name=f"time.{i}", rows=1 + i % 3, reason=f"it has {1 + i % 3} rows for each sample", **few)
        for i in range(50)
    ]
    layers += [LayerRecord(name=f"plan.{i}", kind="linear", weight="p", **sizes) for i in range(8)]
    for name, end in (("conv_in", "first"), ("conv_out", "last")):
        conv = {"kind": "conv", "kernel": [3, 3], "weight": name, **sizes}
        layers.append(LayerRecord(name=name, reason=f"it is the {end} layer", **conv))
    return layers


def shown(manifest, folder):
    """Rows of the table: label and text."""
    console = Console(record=True, width=200, file=io.StringIO())
    print_manifest(console, manifest, folder)
    rows = [tuple(cell.strip() for cell in line.split("│")[1:3]) for line in console.export_text().splitlines()]
    return [row for row in rows if len(row) == 2]


@pytest.fixture
def manifest(digits_build):
    """The digits' bundle, as if it had many layers and engines."""
    found = read_manifest(digits_build.bundle)
    component = found.components["denoiser"]
    left = component.sites[:1] * 3
    sites = [
        *component.sites,
        *(
            site.model_copy(update={"name": f"odd.{i}", "modes": [], "reason": f"head_dim {8 * i}"})
            for i, site in enumerate(left)
        ),
    ]
    engine = EngineRecord.of("denoiser", "tensorrt", "10.6", "sm90").model_copy(
        update={"file": component.onnx, "layers": "native", "layers_us": {"native": 91.26, "exact": 1234.5}}
    )
    changed = component.model_copy(update={"sites": sites, "layers": layers_of_a_large_unet(), "engines": [engine]})
    quality = found.quality.model_copy(
        update={"layer_sqnr": {"down.1": [40.0, 31.4, None, 36.0], "down.2": [50.0] * 4}}
    )
    return found.model_copy(update={"components": {"denoiser": changed}, "quality": quality})


def test_hundreds_of_layers_make_a_few_lines(manifest, digits_build):
    rows = shown(manifest, digits_build.bundle)
    start = next(i for i, (label, _) in enumerate(rows) if label == "layers")
    assert rows[start : start + 6] == [
        ("layers", "700 found, 640 in INT8 (640 static), 8 in the model's type by the plan"),
        ("", "their weights: 251.6 MiB, 500.0 MiB in 16 bits"),
        ("", "left: time.0, time.1, time.2 and 47 more: it has 1 to 3 rows for each sample"),
        ("", "left: conv_in: it is the first layer"),
        ("", "left: conv_out: it is the last layer"),
        ("modes, low noise to high", "4 × static  (640 layers)"),
    ]
    assert ("worst layer", "down.1, bin 1: 31.4 dB signal to quantisation noise") in rows
    assert len(rows) < 40


def test_sites_that_stay_are_grouped_likewise(manifest, digits_build):
    rows = shown(manifest, digits_build.bundle)
    assert ("attention sites", "9 found, 6 in INT8") in rows
    assert ("", "left: odd.0, odd.1, odd.2: head_dim 0 to 16") in rows


def test_an_engine_says_how_its_layers_are_computed(manifest, digits_build):
    text = "\n".join(f"{label} {text}" for label, text in shown(manifest, digits_build.bundle))
    assert re.search(r"engines .* attention: INT8, our plugin; layers: INT8, TensorRT's kernels\n", text)
    assert "by how INT8 layers are computed 91.3 µs native, 1234 µs exact: the fastest is kept" in text
    assert re.search(r"ONNX .* attention and layers: INT8, the op's function body", text)


def test_a_refittable_engine_says_which_layers_new_weights_reach(manifest, digits_build):
    component = manifest.components["denoiser"]
    constants = {f"{layer}, {table}": (layer, table) for layer in "ab" for table in ("weight", "weight_scale")}
    fields = {"layers": "plugin", "refittable": True, "int8_constants": constants, "target": "sm90"}
    engines = [component.engines[0].model_copy(update=fields)]
    changed = {"denoiser": component.model_copy(update={"engines": engines})}
    told = shown(manifest.model_copy(update={"components": changed}), digits_build.bundle)
    assert ("", "sm90: refittable") in told
    assert ("", "sm90: 2 INT8 layers in plugins, which new weights and LoRAs reach; the others run in 16 bits") in told


def test_modes_by_timestep_are_told_in_runs(manifest, digits_build):
    component = manifest.components["denoiser"]
    rows = [[LayerMode.WEIGHT_ONLY] + [LayerMode.DYNAMIC] * 3] * 2 + [[LayerMode.STATIC] * 4]
    layers = [layer.model_copy(update={"modes": modes}) for layer, modes in zip(component.layers, rows, strict=False)]
    changed = manifest.model_copy(update={"components": {"denoiser": component.model_copy(update={"layers": layers})}})
    told = shown(changed, digits_build.bundle)
    assert ("layers", "3 found, 3 in INT8 (2 by timestep, 1 static)") in told
    assert ("modes, low noise to high", "1 × weight-only, 3 × dynamic  (2 layers)") in told


def test_other_models_of_a_pipeline_tell_their_layers_too(manifest, digits_build):
    component = manifest.components["denoiser"]
    layers = [layer.model_copy(update={"modes": layer.modes[:1]}) for layer in component.layers[:4]]
    encoder = component.model_copy(
        update={"timestep_input": "", "sites": [], "engines": [], "layers": layers, "diffusers": None}
    )
    both = manifest.model_copy(update={"components": {"denoiser": component, "text_encoder": encoder}})
    rows = shown(both, digits_build.bundle)
    start = next(i for i, (label, _) in enumerate(rows) if label == "text_encoder")
    assert ("layers", "4 found, 4 in INT8 (4 static)") in rows[start:]
    assert not any(label == "modes, low noise to high" for label, _ in rows[start:])  # it follows no timestep
    assert any(label == "ONNX, text_encoder" and "its own precision; layers: INT8" in text for label, text in rows)


def test_bundles_without_layers_say_nothing_of_them(digits_build):
    rows = shown(read_manifest(digits_build.bundle), digits_build.bundle)
    assert not any("layer" in label or "layers:" in text for label, text in rows)
    assert any(f"× {Mode.BALANCED.name.lower()}" in text for _, text in rows)
