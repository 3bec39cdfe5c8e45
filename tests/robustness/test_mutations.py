"""Recipes, bundles and manifests, each damaged at random by a seed: read as what they are, or refused as users are owed.

A few seconds of each in every run; `make soak` takes many more.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from damage import ODD, ROUNDS, Watch, damage_file, fresh_copy, garbled, mutated, rounds, seal
from safetensors.torch import load_file

from trtconvert import runtime
from trtconvert.bundle import MANIFEST, check_files, read_manifest
from trtconvert.calib.calibration import Calibration
from trtconvert.calib.frontier import read_frontier
from trtconvert.cli import main
from trtconvert.recipe import Recipe, json_schema, load_recipe

# Recipes --------------------------------------------------------------------------------------------------------------


def invented(schema: dict[str, Any], definitions: dict[str, Any], generator: random.Random) -> Any:
    """A value that a schema of JSON describes, or nearly."""
    if "$ref" in schema:
        return invented(definitions[schema["$ref"].rpartition("/")[2]], definitions, generator)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return invented(generator.choice(schema[several]), definitions, generator)
    if "enum" in schema or "const" in schema:
        return generator.choice(schema.get("enum") or [schema["const"]])
    match schema.get("type"):
        case "object" if "properties" in schema:
            required = schema.get("required", ())
            chosen = [name for name in schema["properties"] if name in required or generator.random() < 0.3]
            return {name: invented(schema["properties"][name], definitions, generator) for name in chosen}
        case "object":
            inner = schema.get("additionalProperties")
            names = generator.sample(["batch", "vae_decoder", "text_encoder", "all", "image", "x"], 2)
            return {
                name: invented(inner, definitions, generator) if isinstance(inner, dict) else name for name in names
            }
        case "array":
            return [invented(schema.get("items", {}), definitions, generator) for _ in range(generator.randrange(4))]
        case "integer" | "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -2))
            return generator.choice([low, low + 1, 10, schema.get("maximum", 1000)])
        case "string":
            return generator.choice(["digits-dit", "tiny_models:build", "*", "w.safetensors", "denoise"])
        case "boolean":
            return generator.random() < 0.5
        case "null":
            return None
        case _:
            return generator.choice(ODD)


def test_mutated_recipes(tmp_path: Path):
    schema, watch, path = json_schema(), Watch(), tmp_path / "recipe.yaml"
    for seed in rounds(250):
        generator = random.Random(seed)
        value = invented(schema, schema["$defs"], generator)
        for _ in range(generator.choice([0, 1, 1, 2, 3])):
            value = mutated(value, generator)
        text = json.dumps(value, indent=generator.choice([None, 1]), ensure_ascii=False)
        for _ in range(generator.choice([0, 0, 1, 2])):
            text = garbled(text, generator)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        recipe = watch(lambda: load_recipe(path), seed)
        if recipe is not None:  # bundles keep it as JSON
            assert Recipe.model_validate(json.loads(recipe.model_dump_json(by_alias=True))) == recipe, seed
    assert watch.read and watch.refused


# Bundles --------------------------------------------------------------------------------------------------------------


def whole(folder: Path) -> None:
    check_files(folder, read_manifest(folder))


def test_damaged_bundles(tiny_build, tmp_path: Path):
    """Every damage is found, except damage without effect."""
    watch, before = Watch(), {path.name: path.read_bytes() for path in tiny_build.bundle.iterdir()}
    for seed in rounds(150):
        generator, folder = random.Random(seed), fresh_copy(tiny_build.bundle, tmp_path / "bundle")
        files = sorted(folder.iterdir())
        damage_file(generator.choice(files), files, generator)
        reads = watch.read
        watch(lambda folder=folder: whole(folder), seed)
        if watch.read > reads:
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, seed
    assert watch.refused


def test_bundles_that_end_anywhere(tiny_build, tmp_path: Path):
    folder, watch = fresh_copy(tiny_build.bundle, tmp_path / "bundle"), Watch()
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for share in range(0, 100, 1 if ROUNDS else 10):
            path.write_bytes(content[: len(content) * share // 100])
            watch(lambda: whole(folder), share)
        path.write_bytes(content)
    assert not watch.read
    whole(folder)


@pytest.mark.parametrize("kind", ["tiny_build", pytest.param("layered_build", marks=pytest.mark.soak)])
def test_mutated_manifests_whose_digests_fit(request, tmp_path: Path, kind: str):
    """Accepted bundles are shown, and run by ONNX Runtime."""
    build = request.getfixturevalue(kind)
    folder, watch, content = tmp_path / "bundle", Watch(), json.loads((build.bundle / MANIFEST).read_text())
    fresh_copy(build.bundle, folder)
    for seed in rounds(100):
        generator, changed = random.Random(seed), content
        for _ in range(generator.choice([1, 1, 2])):
            changed = mutated(changed, generator)
        if not isinstance(changed, dict):
            continue
        seal(folder, changed)
        manifest = watch(lambda: read_manifest(folder), seed)
        if manifest is not None:
            shown = CliRunner().invoke(main, ["inspect", str(folder)])
            assert shown.exit_code in (0, 2) and "internal error" not in shown.output, f"seed {seed}: {shown.output}"
            watch(lambda: runtime.load(folder, backend="onnxruntime").close(), seed)
    assert watch.refused


# Files of tensors, and plans ------------------------------------------------------------------------------------------


def test_damaged_calibrations(layered_build, tmp_path: Path):
    path = tmp_path / "calibration.safetensors"
    content, watch = (layered_build.bundle / path.name).read_bytes(), Watch()
    header = int.from_bytes(content[:8], "little")
    for seed in rounds(150):
        generator = random.Random(seed)
        changed = bytearray(content)
        for _ in range(generator.choice([1, 2, 8])):
            # Half of the damage in the header, which decides how the rest is read.
            place = generator.randrange(8 + header if generator.random() < 0.5 else len(content))
            changed[place] ^= 1 << generator.randrange(8)
        path.write_bytes(changed[: generator.randrange(len(changed))] if generator.random() < 0.1 else changed)
        made = watch(lambda: Calibration.load(path), seed)
        if made is not None:
            assert all(x.isfinite().all() for x in load_file(path).values() if x.is_floating_point()), seed
    assert watch.read and watch.refused


def test_mutated_frontiers(tmp_path: Path):
    path, watch = tmp_path / "frontier.json", Watch()
    point = {"name": "a", "speed": 1.5, "figures": {"psnr": 40.0}, "keeps_budget": True, "int8_values": 0.5}
    points = [point | {"name": name, "modes": {"x": [1, 2]}, "layers": {"y": [3, 0]}} for name in ("a", "b")]
    frontier = {"gpu": "", "date": "", "limits": {"psnr": 36.0}, "points": points, "chosen": "a"}
    for seed in rounds(150):
        path.write_text(json.dumps(mutated(frontier, random.Random(seed))))
        found = watch(lambda: read_frontier(path), seed)
        if found is not None:
            watch(lambda found=found: found.choose(None), seed)
            watch(lambda found=found: found.choose("b"), seed)
    assert watch.read and watch.refused
