"""Recipes: accepted fields, and refusals with the line and the remedy."""

import json
import os
import time
from pathlib import Path

import pytest

from trtconvert.attention.modes import Mode
from trtconvert.errors import UserError
from trtconvert.recipe import EngineSection, Range, Recipe, json_schema, load_recipe

SHIPPED = Path(__file__).parents[1] / "recipes" / "digits-dit.yaml"
MODEL = "model: {source: digits-dit}\n"


def load(folder: Path, text: str | bytes) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_recipe(path)


def refused(folder: Path, text: str | bytes) -> str:
    with pytest.raises(UserError) as error:
        load(folder, text)
    message = str(error.value)
    for label in ("expected: ", "remedy: "):
        assert label in message, message
    return message


def test_paths_are_relative_to_the_recipe_and_defaults_fill_the_rest(tmp_path):
    recipe = load(tmp_path, "model: {source: a:b, weights: w.safetensors}\ncalibration: {data: sub/inputs.npz}\n")
    assert recipe.model.weights == tmp_path / "w.safetensors"
    assert recipe.calibration.data == tmp_path / "sub/inputs.npz"
    assert (recipe.attention.include, recipe.engine.backend, recipe.calibration.samples) == (["*"], "auto", 64)
    assert load(tmp_path, MODEL).calibration.data == "denoise"


def test_a_shape_is_a_size_or_three_or_named(tmp_path):
    recipe = load(tmp_path, MODEL + "engine: {shapes: {a: 8, b: [1, 2, 4], c: {min: 1, opt: 1, max: 3}}}\n")
    assert recipe.engine.shapes == {
        "a": Range(min=8, opt=8, max=8),
        "b": Range(min=1, opt=2, max=4),
        "c": Range(min=1, opt=1, max=3),
    }


def test_an_engine_has_one_profile_or_several(tmp_path):
    one = load(tmp_path, MODEL + "engine: {shapes: {a: 8}}\n").engine
    assert one.ranges() == [one.shapes] and EngineSection().ranges() == [{}]
    several = load(tmp_path, MODEL + "engine: {profiles: [{a: 8}, {a: [16, 32, 64]}]}\n").engine
    assert several.ranges() == [{"a": Range(min=8, opt=8, max=8)}, {"a": Range(min=16, opt=32, max=64)}]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    assert load(tmp_path, b"\xef\xbb\xbf" + MODEL.encode()).model.source == "digits-dit"


@pytest.mark.parametrize(
    ("text", "line", "field", "nearest"),
    [
        ("calibratoin: {}\n", 2, "calibratoin", "calibration"),
        ("calibration:\n  samples: 4\n  sampels: 3\n", 4, "calibration.sampels", "samples"),
        ("engine:\n  shapes:\n    batch: {min: 1, opt: 2, max: 4, maxx: 8}\n", 4, "engine.shapes.batch.maxx", "max"),
        ("engine:\n  profiles:\n  - a: {min: 1, opt: 1, max: 2, mx: 8}\n", 4, "engine.profiles.0.a.mx", "max"),
        ("verify:\n  on_gpu: {sample: 4}\n", 3, "verify.on_gpu.sample", "samples"),
        ("components:\n  all: {dtipe: float16}\n", 3, "components.all.dtipe", "dtype"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_name(tmp_path, text, line, field, nearest):
    message = refused(tmp_path, MODEL + text)
    assert f"recipe.yaml:{line}: unknown field '{field}'" in message
    assert f"did you mean '{nearest}'?" in message


def test_an_unknown_field_that_is_like_no_other_is_to_be_removed(tmp_path):
    assert "remedy: remove it" in refused(tmp_path, MODEL + "qqq: 1\n")


def test_a_merged_key_is_placed_where_it_is_merged(tmp_path):
    message = refused(tmp_path, "model: &m {source: a}\n\nattention:\n  <<: *m\n")
    assert "recipe.yaml:3: unknown field 'attention.source'" in message


@pytest.mark.parametrize(
    ("text", "line", "field", "expected", "got"),
    [
        ("calibration:\n  samples: many\n", 3, "calibration.samples", "a whole number", "'many'"),
        ("calibration:\n  samples: '64'\n", 3, "calibration.samples", "a whole number", "'64'"),
        ("calibration:\n  samples: true\n", 3, "calibration.samples", "a whole number", "True"),
        ("calibration:\n  samples: 1.5\n", 3, "calibration.samples", "a whole number", "1.5"),
        ("calibration:\n  samples: 0\n", 3, "calibration.samples", "greater than or equal to 1", "0"),
        ("calibration:\n  bins: 65\n", 3, "calibration.bins", "less than or equal to 64", "65"),
        ("calibration:\n  percentile: 101\n", 3, "calibration.percentile", "less than or equal to 100", "101"),
        ("calibration:\n  data: [1]\n", 3, "calibration.data", "'denoise', or text, or a path", "[1]"),
        ("calibration: 3\n", 2, "calibration", "a mapping of fields", "3"),
        ("calibration:\n", 2, "calibration", "a mapping of fields", "nothing"),
        ("calibration: !!str y\n", 2, "calibration", "a mapping of fields", "a tagged value"),
        ("attention:\n  include: []\n", 3, "attention.include", "at least one entry", "[]"),
        ("attention:\n  include:\n    - a\n    - {b: 1}\n", 5, "attention.include.1", "text", "a mapping"),
        ("attention:\n  smooth_k: perhaps\n", 3, "attention.smooth_k", "true or false", "'perhaps'"),
        ("layers:\n  include: []\n", 3, "layers.include", "at least one entry", "[]"),
        ("layers:\n  min_rows: 0\n", 3, "layers.min_rows", "greater than or equal to 1", "0"),
        ("layers: static\n", 2, "layers", "a mapping of fields", "'static'"),
        ("layers:\n  modes: [static, off]\n", 3, "layers.modes.1", "'weight_only', 'dynamic' or 'static'", "'off'"),
        ("plan:\n  layer_candidates: []\n", 3, "plan.layer_candidates", "at least one entry", "[]"),
        (
            "plan:\n  sparse_candidates: [.1, .2, .3, .4, .5, .6, .7, .8, .9]\n",
            3,
            "plan.sparse_candidates",
            "at most 8 entries",
            "[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]",
        ),
        (
            "layers:\n  modiff: auto\n  modes: static\n",
            3,
            "layers.modiff",
            "true or patterns with stated layers.modes: modiff: auto needs layers.modes: auto",
            "'auto'",
        ),
        (
            "layers:\n  modiff: true\n  modes: off\n",
            4,
            "layers.modes",
            "static or auto with layers.modiff; or layers.modiff: false",
            "'off'",
        ),
        ("engine:\n  targets: [sm80, sm80]\n", 3, "engine.targets", "each target once", "['sm80', 'sm80']"),
        ("engine:\n  shapes:\n    batch: [4, 2, 1]\n", 4, "engine.shapes.batch", "min <= opt <= max", "[4, 2, 1]"),
        ("engine:\n  shapes:\n    batch: [1, 2]\n", 4, "engine.shapes.batch", "a size, or [min, opt, max]", "[1, 2]"),
        ("engine:\n  shapes:\n    batch: [0, 1, 2]\n", 4, "engine.shapes.batch", "greater than or equal to 1", "0"),
        ("engine:\n  shapes:\n    batch: [1, 2, x]\n", 4, "engine.shapes.batch", "a whole number", "'x'"),
        ("plan:\n  max_lpips: 0.02\n", 2, "plan", "lpips_weights as well, which max_lpips needs", "a mapping"),
        (
            "plan:\n  max_feature_distance: 1\n",
            2,
            "plan",
            "features as well, which max_feature_distance needs",
            "a mapping",
        ),
        (
            "plan:\n  features: my.module\n",
            3,
            "plan.features",
            "'digits-classifier', 'emoji-classifier' or 'inception', or package.module:function",
            "'my.module'",
        ),
        ("engine:\n  profiles:\n  - a: [4, 2, 1]\n", 4, "engine.profiles.0.a", "min <= opt <= max", "[4, 2, 1]"),
        ("engine:\n  shapes: {a: 1}\n  profiles: [{a: 2}]\n", 2, "engine", "shapes or profiles, not both", "a mapping"),
        ("engine:\n  optimization_level: 6\n", 3, "engine.optimization_level", "less than or equal to 5", "6"),
        ("engine:\n  workspace_mb: 0\n", 3, "engine.workspace_mb", "greater than or equal to 1", "0"),
        ("verify:\n  min_psnr: .nan\n", 3, "verify.min_psnr", "a finite number", "nan"),
        ("verify:\n  max_error: .inf\n", 3, "verify.max_error", "a finite number", "inf"),
        ("verify:\n  min_psnr: true\n", 3, "verify.min_psnr", "a number", "True"),
        ("calibration:\n  percentile: true\n", 3, "calibration.percentile", "a number", "True"),
        ("plan:\n  min_psnr: '36'\n", 3, "plan.min_psnr", "a number", "'36'"),
        (f"verify:\n  seed: {2**62}\n", 3, "verify.seed", f"less than {2**62}", str(2**62)),
    ],
)
def test_a_value_that_does_not_fit_is_refused(tmp_path, text, line, field, expected, got):
    message = refused(tmp_path, MODEL + text)
    assert f"recipe.yaml:{line}: '{field}' does not fit\n" in message
    assert f"expected: {expected}\n" in message
    assert f"got: {got}\n" in message


@pytest.mark.parametrize(
    ("text", "place", "nearest"),
    [
        ("attention:\n  modes: agressive\n", "3: 'attention.modes'", "aggressive"),
        ("attention:\n  modes:\n    - balanced\n    - precison\n", "5: 'attention.modes.1'", "precision"),
        ("layers:\n  modes: statick\n", "3: 'layers.modes'", "static"),
        ("layers:\n  modes: weight-only\n", "3: 'layers.modes'", "weight_only"),
        ("layers:\n  modes:\n    - static\n    - dynamc\n", "5: 'layers.modes.1'", "dynamic"),
        ("layers:\n  scales: max\n", "3: 'layers.scales'", "maxima"),
        ("layers:\n  kinds: [linear, convs]\n", "3: 'layers.kinds.1'", "conv"),
        ("components: {vae_decoder: {layers: int4}}\n", "2: 'components.vae_decoder.layers'", "int8"),
        ("engine:\n  backend: tensorrt-rtx\n", "3: 'engine.backend'", "tensorrt_rtx"),
        ("engine:\n  targets: [sm75, sm81]\n", "3: 'engine.targets.1'", "sm8"),
    ],
)
def test_a_misspelt_choice_is_answered_with_the_nearest_once(tmp_path, text, place, nearest):
    message = refused(tmp_path, MODEL + text)
    assert f"recipe.yaml:{place} does not fit" in message
    assert f"did you mean '{nearest}" in message
    assert message.count("does not fit") == 1


@pytest.mark.parametrize(
    ("text", "off"), [("off", True), ('"off"', True), ("auto", False), ("[static, dynamic]", False)]
)
def test_layers_are_off_by_a_word_that_old_yaml_takes_for_false(tmp_path, text, off):
    recipe = load(tmp_path, MODEL + f"layers:\n  modes: {text}\ncalibration: {{bins: 2}}\n")
    assert recipe.layers.off == off


@pytest.mark.parametrize("section", ["attention", "layers"])
@pytest.mark.parametrize("modes", ["[]", "[{0}]", "[{0}, {0}, {0}]"])
def test_a_list_of_modes_has_one_for_each_timestep_bin(tmp_path, section, modes):
    listed = modes.format("balanced" if section == "attention" else "static")
    message = refused(tmp_path, MODEL + f"calibration: {{bins: 2}}\n{section}:\n  modes: {listed}\n")
    assert f"expected: one entry of {section}.modes per timestep bin: calibration.bins is 2, the modes are" in message
    assert f"the modes are {modes.count('0')}" in message and "remedy: " in message


def test_a_list_of_modes_of_the_wrong_length_is_told_with_its_line(tmp_path):
    message = refused(tmp_path, MODEL + "calibration: {bins: 2}\nlayers:\n  modes: [static]\n")
    assert "recipe.yaml:4: 'layers.modes' does not fit" in message and "got: ['static']" in message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_turing_computes_in_float16_alone(tmp_path, dtype):
    message = refused(tmp_path, f"model: {{source: a, dtype: {dtype}}}\nengine:\n  targets: [sm75, sm80]\n")
    assert "recipe.yaml:3: 'engine.targets' does not fit 'model.dtype'" in message and "take sm75 out" in message
    for engine in ("{}", "{targets: [sm80]}", "{targets: [sm75], backend: onnxruntime}"):
        assert load(tmp_path, f"model: {{source: a, dtype: {dtype}}}\nengine: {engine}\n").model.dtype == dtype


def test_an_alias_may_be_used_again_and_again(tmp_path):
    recipe = load(
        tmp_path, "model: {source: a, options: {one: &o [1, {two: 2}], again: *o, nested: {here: [*o, *o]}}}\n"
    )
    assert recipe.model.options["nested"]["here"][1] == [1, {"two": 2}]


def test_every_mistake_is_reported(tmp_path):
    message = refused(tmp_path, "model: {dtype: fp16}\ncalibration: {samples: 0, qqq: 1}\n")
    for part in ("'model.source' is missing", "'model.dtype'", "'calibration.samples'", "'calibration.qqq'"):
        assert part in message


def test_a_search_sees_every_timestep_bin(tmp_path):
    message = refused(tmp_path, MODEL + "calibration: {bins: 32}\nplan:\n  samples: 2\n  steps: 31\n")
    assert "recipe.yaml:5: 'plan.steps'" in message and "at least 32" in message and "got: 31" in message
    assert "got: 20" in refused(tmp_path, MODEL + "calibration: {bins: 32}\n")
    load(tmp_path, MODEL + "calibration: {bins: 32}\nattention: {modes: balanced}\n")


def test_every_mode_can_be_named_and_fp8_is_no_default_of_all_gpus(tmp_path):
    names = [mode.name.lower() for mode in Mode]
    recipe = load(
        tmp_path, MODEL + f"attention: {{modes: [{', '.join(names)}]}}\ncalibration: {{bins: {len(names)}}}\n"
    )
    assert recipe.attention.modes == names and [*recipe.plan.searched_modes] == ["precision", "aggressive"]
    assert load(tmp_path, MODEL + "plan: {candidates: [precision, fp8]}\n").plan.candidates == ["precision", "fp8"]
    assert "'plan.candidates.0'" in refused(tmp_path, MODEL + "plan: {candidates: [fp4]}\n")


def test_modes_are_one_per_bin(tmp_path):
    message = refused(tmp_path, MODEL + "attention: {modes: [balanced, precision]}\ncalibration: {bins: 3}\n")
    assert "calibration.bins is 3, the modes are 2" in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "an empty file"),
        (b"# a comment\n", "an empty file"),
        (b"[1, 2]\n", "a list"),
        (b"some words\n", "text"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\xff", "bytes that are not UTF-8"),
        (b"model: \x00\n", "special characters are not allowed"),
        (b"model: " + b"[" * 500, "too deep within each other"),
        (b"model: {source: a}\nengine:\n\tbackend: auto\n", "recipe.yaml:3: not valid YAML"),
        (b"model: {source: a}\nmodel: {source: b}\n", "recipe.yaml:2: not valid YAML"),
        (b"model: {source: a}\n engine: {}\n", "recipe.yaml:2: not valid YAML"),
        (b"model: {source: a}\n---\nmodel: {source: b}\n", "recipe.yaml:2: not valid YAML"),
        (b"model: {source: a}\n1: 2\n", "recipe.yaml:2: a field's name is not text"),
        (b"model: &m\n  source: a\n  options: *m\n", "the text is too large"),
        (b"model: {source: a}\nattention:\n  include: &i [a, [*i]]\n", "recipe.yaml:3: the text is too large"),
        (b"model:\n  source: a\n  options: {null: 2}\n", "recipe.yaml:3: a field's name is not text"),
        (b"model:\n  source: a\n  weights: 2026-02-30\n", "recipe.yaml:3: a value cannot be read"),
        (b"model: {source: a}\nverify: {steps: !!int many}\n", "recipe.yaml:2: a value cannot be read"),
        (b"model: {source: a}\nverify: {steps: !!int ''}\n", "recipe.yaml:2: a value cannot be read"),
        (b"model: {source: a}\nverify: {steps: " + b"1" * 5000 + b"}\n", "recipe.yaml:2: a value cannot be read"),
        (b"model: {source: a}\ncalibration: !x y\n", "recipe.yaml:2: a value cannot be read"),
        (b"model: {source: a}\nplan: !!omap 5\n", "recipe.yaml:2: a value cannot be read"),
        (b"model: {source: a}\nplan: !!set {min_psnr, steps}\n", "got: the tag !!set"),
        (b"model: {source: a}\nplan: !!pairs [steps: 1]\n", "got: the tag !!pairs"),
        (b"model: {source: !!binary YQ==}\n", "got: the tag !!binary"),
        (b"model: {source: a}\nattention: {include: !!str [a]}\n", "got: the tag !!str"),
        (b"model: {source: a}\nplan: {<<: !!set {a}}\n", "got: the tag !!set"),
        (b"model: {source: a}\nplan: {<<: 5}\n", "recipe.yaml:2: not valid YAML"),
        (b"model: {source: a}\nplan:\n  ? [? x]\n  : 1\n", "recipe.yaml:3: a value cannot be read"),
        (b"model: {source: a}\nplan: " + b"{? " * 16 + b"x" + b"}" * 16, "recipe.yaml:2: a value cannot be read"),
        (b"model: {source: a}\nverify: {steps: 0x" + b"f" * 5000 + b"}\n", "recipe.yaml:2: a value cannot be read"),
        (b'model: {source: a, weights: "x\\0.safetensors"}\n', "a NUL character in 'x\\x00.safetensors'"),
        (b'model:\n  source: a\n  weights: "\\uD800"\n', "recipe.yaml:3: a value cannot be read"),
        (b"model: {source: a}\nattention: {include: [" + b"x," * 20_000 + b"]}\n", "over 10000 keys and values"),
        (b"model: {source: a}\n" + b"#" * 300_000, "the limit is 262144"),
        (b"model:\n  source: a\n  options: {b: [!c d]}\n", "recipe.yaml:3: a value cannot be read"),
        (b"model:\n  source: a\n  options: {b: 2026-01-01}\n", "got: a date"),
    ],
)
def test_files_that_are_not_recipes_are_refused(tmp_path, content, problem):
    message = refused(tmp_path, content)
    assert problem in message and "got: " in message


@pytest.mark.parametrize(("levels", "aliases"), [(9, 8), (40, 1)], ids=["wide", "deep"])
def test_aliases_of_aliases_are_counted_before_they_are_replaced(tmp_path, levels, aliases):
    """134 million entries, and 40 nested lists."""
    lists = [f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * aliases)}]\n" for i in range(1, levels)]
    started = time.monotonic()
    message = refused(tmp_path, "model:\n  source: a\n  options:\n    a0: &a0 [x]\n" + "".join(lists))
    assert "with aliases replaced" in message
    assert time.monotonic() - started < 1


def test_many_mistakes_are_limited_and_long_values_cut(tmp_path):
    message = refused(tmp_path, MODEL + f"attention:\n  include: [{'1, ' * 5000}]\n  scaling: {'x' * 5000}\n")
    assert len(message) < 50_000 and "'attention.include.0' does not fit" in message
    assert "x" * 300 not in refused(tmp_path, MODEL + f"attention:\n  scaling: {'x' * 5000}\n")


def test_a_recipe_that_cannot_be_read_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path / "pipe", "a pipe, not a file"),
        (Path("/dev/zero"), "a device, not a file"),
    ):
        with pytest.raises(UserError, match=f"(?s){path}.*expected: .*got: {reason}.*remedy: "):
            load_recipe(path)


def test_the_shipped_recipe_fits_the_published_schema():
    """The schema for editors has every field of the recipe, and every choice."""
    schema = json.loads(json.dumps(json_schema()))
    recipe = load_recipe(SHIPPED).model_dump(mode="json", exclude_unset=True)
    assert set(schema["required"]) == {"model"}
    for section, fields in recipe.items():
        definition = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        assert definition["additionalProperties"] is False
        for name, value in fields.items():
            described = definition["properties"][name]
            if "enum" in described:
                assert value in described["enum"]
            if described.get("type") == "integer":
                assert value >= described["minimum"]
