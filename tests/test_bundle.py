"""Bundles: the content of a manifest, and every kind of damage of a bundle."""

import hashlib
import json
import os
import shutil

import pytest
import torch
from support import contents, run, tiny_recipe

from trtconvert import runtime
from trtconvert.bundle import (
    FORMAT,
    MANIFEST,
    EngineRecord,
    check_files,
    covering,
    keep_others,
    read_manifest,
    write_manifest,
)
from trtconvert.errors import UserError
from trtconvert.export import storage

FILES = ("calibration.safetensors", "denoiser.onnx", "samples.png", "verify.safetensors")


@pytest.fixture
def bundle(tiny_build, tmp_path):
    """A copy to damage."""
    return shutil.copytree(tiny_build.bundle, tmp_path / "bundle")


def refused(folder, *parts):
    with pytest.raises(UserError) as error:
        check_files(folder, read_manifest(folder))
    for part in ("expected: ", "got: ", "remedy: ", str(folder), *parts):
        assert part in str(error.value)


def rewrite(folder, **fields):
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_manifest_names_every_file_beside_itself(bundle):
    manifest = read_manifest(bundle)
    assert set(manifest.files) == set(FILES) == {p.name for p in bundle.iterdir()} - {MANIFEST}
    component = manifest.components["denoiser"]
    assert {component.onnx, manifest.calibration} <= set(manifest.files)
    assert [(t.name, t.dtype, t.shape) for t in component.inputs] == [
        ("x", "float32", ["batch", 1, 4, 4]),
        ("timestep", "float32", ["batch"]),
    ]
    assert [site.modes for site in component.sites] == [[1, 2]]
    check_files(bundle, manifest)


def test_a_manifest_says_nothing_of_the_machine_that_made_it(digits_build):
    manifest = read_manifest(digits_build.bundle)
    assert str(manifest.recipe.model.weights) == "digits-dit.safetensors"
    assert str(digits_build.recipe.parent) not in (digits_build.bundle / MANIFEST).read_text()


def test_a_manifest_can_be_written_again(bundle):
    """Like a later step that adds an engine."""
    (bundle / "engines").mkdir()
    (bundle / "engines" / "new.plan").write_bytes(b"plan")
    write_manifest(bundle, read_manifest(bundle))
    manifest = read_manifest(bundle)
    assert set(manifest.files) == {*FILES, "engines/new.plan"}
    check_files(bundle, manifest)


def test_an_engine_of_a_bundle_from_before_has_one_profile_and_no_option():
    before = {"backend": "tensorrt", "library": "10.6.0", "target": "sm90", "attention": "plugin", "file": "a.plan"}
    record = EngineRecord.model_validate(before)
    assert (record.profiles, record.native_sites, record.plugin, record.gpu) == ([], [], "", "")
    assert record.plugin_us is record.native_us is record.with_plugins_us is record.plain_us is None
    assert not record.refittable and not record.weight_streaming


def test_the_sizes_of_several_profiles_reach_from_the_least_to_the_largest():
    profiles = [{"batch": (2, 3, 4), "side": (8, 8, 8)}, {"batch": (1, 1, 2), "side": (16, 24, 32)}]
    assert covering(profiles) == {"batch": (1, 3, 4), "side": (8, 8, 32)}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(bundle, name):
    (bundle / name).unlink()
    refused(bundle, f"{name} in the bundle", "got: No such file")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(bundle, name):
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:-1])
    refused(bundle, f"{name} in the bundle", f"expected: {len(content)} bytes", f"got: {len(content) - 1} bytes")


@pytest.mark.parametrize("name", FILES)
def test_an_altered_file_is_named(bundle, name):
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    refused(bundle, f"{name} in the bundle", "SHA-256")


def test_a_folder_in_the_place_of_a_file_is_named(bundle):
    (bundle / FILES[0]).unlink()
    (bundle / FILES[0]).mkdir()
    refused(bundle, f"{FILES[0]} in the bundle")


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "No such file"),
        (b"", "not JSON"),
        (b'{"format": 1, "model": ', "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[]", "None"),
        (b"{}", "None"),
        (b'{"format": 2}', "2"),
        (b'{"format": 1}', "model: Field required"),
    ],
)
def test_foreign_manifests_are_refused(bundle, content, got):
    (bundle / MANIFEST).unlink()
    if content is not None:
        (bundle / MANIFEST).write_bytes(content)
    refused(bundle, got)


def test_a_bundle_of_another_format_is_refused(bundle):
    rewrite(bundle, format=FORMAT + 1)
    refused(
        bundle,
        "bundle format",
        f"expected: {FORMAT}",
        f"got: {FORMAT + 1}",
        "install the trtconvert that made the bundle",
    )


def test_a_bundle_with_a_field_of_a_later_version_is_whole(bundle):
    path = bundle / MANIFEST
    content = json.loads(path.read_text()) | {"colour": "blue"}
    rest = {name: value for name, value in content.items() if name != "digest"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {"digest": digest}))
    refused(
        bundle,
        "was made by another version",
        "got: the unknown field colour",
        "install the trtconvert that made the bundle",
    )


@pytest.mark.parametrize(
    "change",
    [{"weights": "0" * 64}, {"files": {}}, {"digest": ""}, {"unknown": 1}, {"backend": "other"}],
    ids=lambda change: next(iter(change)),
)
def test_an_altered_manifest_is_refused(bundle, change):
    rewrite(bundle, **change)
    refused(bundle, "the manifest of", "is damaged")


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({"components": {"../../outside": None}}, "components: .*names of letters.*'../../outside'"),
        ({"components": {"a/b": None}}, "components: .*'a/b'"),
        ({"files": {"../../outside": {"size": 1, "sha256": ""}}}, "files: .*paths in the bundle.*'../../outside'"),
        ({"files": {"/outside": {"size": 1, "sha256": ""}}}, "files: .*'/outside'"),
    ],
)
def test_names_that_lead_out_of_the_bundle_are_refused(bundle, fields, got):
    """Derived files are written and linked."""
    if "components" in fields:
        record = json.loads((bundle / MANIFEST).read_text())["components"]["denoiser"]
        fields = {"components": dict.fromkeys(fields["components"], record)}
    rewrite(bundle, **fields)
    with pytest.raises(UserError, match=got):
        read_manifest(bundle)


@pytest.mark.parametrize("linked", [True, False])
def test_user_files_move_to_the_replacing_bundle(bundle, tmp_path, monkeypatch, linked):
    if not linked:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError("no links here")))
    new = tmp_path / "new"
    new.mkdir()
    (new / "denoiser.onnx").write_text("new")
    (bundle / "notes").mkdir()
    (bundle / "notes" / "mine.txt").write_text("mine")
    (bundle / "latest").symlink_to("notes")
    (bundle / ".manifest.json.partial-killed_1").mkdir()
    (bundle / ".manifest.json.partial-killed_1" / MANIFEST).write_text("")
    keep_others(bundle, new)
    assert contents(new) == {"denoiser.onnx": b"new", "notes/mine.txt": b"mine"}
    assert os.readlink(new / "latest") == "notes"


def test_plans_that_a_killed_compile_left_are_no_users_files(bundle, tmp_path):
    (bundle / "engines").mkdir()
    for name in ("denoiser-tensorrt-sm90-h200.plan", "mine.plan", "another-tensorrt-sm90.plan"):
        (bundle / "engines" / name).write_bytes(b"plan")
    keep_others(bundle, tmp_path / "new")
    assert contents(tmp_path / "new").keys() == {"engines/mine.plan", "engines/another-tensorrt-sm90.plan"}


@pytest.mark.parametrize("place", ["nowhere", "file"])
def test_folders_that_are_not_bundles_are_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    refused(tmp_path / place, "is not a bundle")


def test_a_large_models_weights_are_a_file_of_their_own_and_hashed(tmp_path, monkeypatch):
    """The whole build, and ONNX Runtime on the bundle. Half a gigabyte counts as large in practice."""
    for limit in ("INLINE_LIMIT", "SMALL"):
        monkeypatch.setattr(storage, limit, 100)
    folder = tmp_path / "bundle"
    outcome = run("build", tiny_recipe(tmp_path), "-o", folder, "--cache", tmp_path / "cache")
    assert outcome.exit_code == 0, outcome.output
    weights = folder / "denoiser.onnx.data"
    assert read_manifest(folder).files[weights.name].size == weights.stat().st_size > 10_000
    assert runtime.load(folder)["denoiser"](torch.zeros(1, 1, 4, 4), torch.zeros(1)).isfinite().all()
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(folder, "denoiser.onnx.data in the bundle")
