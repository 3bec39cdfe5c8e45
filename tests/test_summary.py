"""Messages of `build` and `inspect` about attention and layers, which stay short for any number of them."""

import io
import re

import pytest
from rich.console import Console

from trtconvert.attention.modes import Mode
from trtconvert.bundle import DiffusersRecord, EngineRecord, LayerRecord, read_manifest
from trtconvert.evaluate.little import why_little
from trtconvert.linear.modes import LayerMode
from trtconvert.summary import manifest_table

MANY = 700


def layers_of_a_large_unet():
    """Layers like SDXL's: most are INT8, some have few rows, and the first and last are not converted."""
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
    """Return the rows of the table: label and text."""
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(manifest_table(manifest, folder))
    rows = [tuple(cell.strip() for cell in line.split("│")[1:3]) for line in console.export_text().splitlines()]
    return [row for row in rows if len(row) == 2]


@pytest.fixture
def manifest(digits_build):
    """The bundle of the digits model with many layers and engines."""
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
    assert "91.3 µs native, 1234 µs exact INT8 layers: the fastest engine is kept" in text
    assert re.search(r"ONNX .* attention and layers: INT8, the op's function body", text)


def test_a_refittable_engine_says_which_layers_new_weights_reach(manifest, digits_build):
    component = manifest.components["denoiser"]
    constants = {f"{layer}, {table}": (layer, table) for layer in "ab" for table in ("weight", "weight_scale")}
    fields = {"layers": "plugin", "refittable": True, "int8_constants": constants, "target": "sm90"}
    engines = [component.engines[0].model_copy(update=fields)]
    changed = {"denoiser": component.model_copy(update={"engines": engines})}
    told = shown(manifest.model_copy(update={"components": changed}), digits_build.bundle)
    assert ("", "sm90: refittable") in told
    assert ("", "sm90: 2 INT8 layers in plugins, which take new weights and LoRAs; the others run in 16 bits") in told


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


def told_why(manifest, folder):
    """Return the text about little INT8."""
    rows = shown(manifest, folder)
    start = next((i for i, (label, _) in enumerate(rows) if label == "little in INT8"), len(rows))
    lines = [rows[start][1]] if start < len(rows) else []
    for label, text in rows[start + 1 :]:
        if label:
            break
        lines.append(text)
    return " ".join(lines)


def with_parts(manifest, recipe, sites=None, layers=None):
    """Return the manifest with other sites, layers and sections of its recipe."""
    component = manifest.components["denoiser"]
    parts = {name: of for name, of in (("sites", sites), ("layers", layers)) if of is not None}
    sections = {
        name: getattr(manifest.recipe, name).model_copy(update=fields, deep=True) for name, fields in recipe.items()
    }
    return manifest.model_copy(
        update={
            "components": {"denoiser": component.model_copy(update=parts)},
            "recipe": manifest.recipe.model_copy(update=sections),
        }
    )


def test_no_hint_if_most_is_in_int8(manifest, digits_build):
    assert told_why(manifest, digits_build.bundle) == ""


def test_why_little_is_in_int8_is_told_with_what_would_change_it(manifest, digits_build):
    component = manifest.components["denoiser"]
    bins = len(component.sites[0].modes)
    half = [Mode.FP16] * (bins - 1) + [Mode.BALANCED]
    sites = [
        site.model_copy(update={"modes": half if site.modes else []}) for site in component.sites
    ]  # six converted and three left, see above
    layers = [layer for layer in component.layers if not layer.modes or layer.name in ("down.0", "down.1")]
    plan = {"attention": {"modes": "auto"}, "plan": {"min_psnr": 41.0}}
    assert told_why(with_parts(manifest, plan, sites, layers), digits_build.bundle) == (
        f"attention: 6 of {9 * bins} timestep bins of its sites; of the others {6 * (bins - 1)}: the plan's budget leaves them "
        f"(plan.min_psnr 41, plan.max_prediction_error 0.025); {3 * bins}: head_dim 0 to 16 what would change most: a budget "
        "that allows more takes more in, such as a lower plan.min_psnr and a higher plan.max_prediction_error "
        "layers: 2 of 62; of the others 50: it has 1 to 3 rows for each sample; 8: the plan's budget leaves them "
        "(plan.min_psnr 41, plan.max_prediction_error 0.025); 1: it is the first layer; 1: it is the last layer what would "
        "change most: no setting of the recipe changes that"
    )


@pytest.mark.parametrize(
    ("reason", "recipe", "told"),
    [
        ("the recipe excludes it", {}, "layers.include and layers.exclude in the recipe say so"),
        ("layers.kinds leaves convolutions out", {}, "layers.kinds: [linear, conv] takes them in"),
        (
            "it has 3 rows for each sample, layers.min_rows asks for 7",
            {"layers": {"min_rows": 7}},
            "a lower layers.min_rows than 7 takes them in",
        ),
        ("", {"attention": {"modes": "auto"}, "plan": {"point": "x"}}, "without plan.point the fastest plan"),
        ("it is the first layer; name it in layers.include to convert it", {}, "their names in layers.include"),
    ],
)
def test_each_reason_has_its_setting(manifest, digits_build, reason, recipe, told):
    layers = [
        layer.model_copy(update={"modes": [], "reason": reason}) for layer in manifest.components["denoiser"].layers
    ]
    of_layers = told_why(with_parts(manifest, recipe, layers=layers), digits_build.bundle)
    assert of_layers.startswith("layers: 0 of 700; of the others 700: ") and told in of_layers


def test_a_plan_that_no_budget_held_back_is_told_by_its_times(manifest):
    component = manifest.components["denoiser"]
    sites = [site.model_copy(update={"modes": [Mode.FP16] * len(site.modes)}) for site in component.sites]
    recipe = with_parts(manifest, {"attention": {"modes": "auto"}}).recipe
    told = "".join(why_little(component.model_copy(update={"sites": sites, "layers": []}), recipe, in_time=True))
    assert "INT8 is not faster there by the times in plan.kernel_cost" in told and "attention.modes: precision" in told


def test_the_sampler_of_a_pipeline_is_called_by_its_scheduler(manifest, digits_build):
    def drawn(manifest):
        return next(text for label, text in shown(manifest, digits_build.bundle) if label == "PSNR of the samples")

    assert f"ddim {manifest.quality.steps} steps" in drawn(manifest)
    record = DiffusersRecord(
        pipeline="FluxPipeline", component="transformer", model="M", config={}, output="", parameters=[], arguments={}
    )
    for scheduler, name in (("FlowMatchEulerDiscreteScheduler",) * 2, ("", "the pipeline's scheduler")):
        component = manifest.components["denoiser"].model_copy(
            update={"diffusers": record.model_copy(update={"scheduler": scheduler})}
        )
        of_pipeline = manifest.model_copy(update={"components": {"denoiser": component}})
        assert f"samples, {name} {manifest.quality.steps} steps" in drawn(of_pipeline)
