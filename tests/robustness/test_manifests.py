"""Manifests that say something else than a build does, with digests that fit: nothing of them is acted on."""

import json
import os
import shutil

import pytest
from damage import seal
from support import Built, refusal, run

from trtconvert import bundle as bundles
from trtconvert import runtime
from trtconvert.bundle import MANIFEST, check_files, file_record, read_manifest, write_manifest
from trtconvert.errors import UserError


@pytest.fixture
def bundle(tiny_build, tmp_path):
    """A copy to damage."""
    return shutil.copytree(tiny_build.bundle, tmp_path / "bundle")


def change(folder, **changes):
    """Set fields of the manifest by their places, with dots between keys written as __; None removes one."""
    content = json.loads((folder / MANIFEST).read_text())
    for place, value in changes.items():
        *above, last = place.split("__")
        node = content
        for key in above:
            node = node[int(key) if isinstance(node, list) else key]
        key = int(last) if isinstance(node, list) else last
        node[key] = value
        if value is None:
            del node[key]
    seal(folder, content)


OUTSIDE = ("/etc/passwd", "../outside.onnx", "a/../../outside", "./denoiser.onnx", "", ".", "manifest.json")


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("field", ["calibration", "components__denoiser__onnx", "pipeline"])
def test_every_path_lies_in_the_bundle(bundle, field, path):
    if (field, path) == ("pipeline", ""):
        return  # a denoiser alone
    change(bundle, **{field: path})
    # The field has one value, or none: another version may have others.
    fault = "was made by another version" if field == "pipeline" else "is damaged"
    refusal(run("inspect", bundle), fault, f"{field.replace('__', '.')}")
    with pytest.raises(UserError, match=fault):
        runtime.load(bundle)


@pytest.mark.parametrize("changes", [{"components__denoiser__inputs": None}, {"quality__psnr": None}])
def test_a_manifest_without_fields_of_this_version_is_of_another_one(bundle, changes):
    """It was told as damaged, with the advice to copy it again."""
    change(bundle, **changes)
    got = next(iter(changes)).replace("__", ".")
    refusal(run("inspect", bundle), "was made by another version", got, "install the trtconvert that made the bundle")


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"files": {}}, "calibration: calibration.safetensors, which files does not list"),
        ({"components__denoiser__onnx": "other.onnx"}, "components.denoiser.onnx: other.onnx, which files does not"),
        ({"pipeline": "pipeline"}, "pipeline: pipeline/model_index.json, which files does not"),
        (
            {"recipe__model__images": {"image": "images/image.png"}},
            "recipe.model.images.image: images/image.png, which",
        ),
        ({"recipe__model__images": {"image": "/etc/passwd"}}, "recipe.model.images.image: /etc/passwd, which"),
        ({"components__denoiser__sites__0__modes": [65, 1]}, "components.denoiser.sites.0.modes.0: "),
        ({"components__denoiser__sites__0__modes": [-1, 1]}, "components.denoiser.sites.0.modes.0: "),
        ({"components__denoiser__sites__0__modes": [1]}, "sites.0.modes: 1 for 2 timestep bins"),
        ({"components__denoiser__sites__0__name": ""}, "components.denoiser.sites.0.name: "),
        ({"components__denoiser__sites__0__reason": "none"}, "modes, but also a reason to have none"),
        (
            {
                "components__denoiser__sites__0__sparse": [0.1, 0.0],
                "components__denoiser__sites__0__density": [0.5, 0.5],
            },
            "sites.0.density: less than 1 in a bin that loses no attention",
        ),
        (
            {
                "components__denoiser__sites__0__sparse": [0.1, 0.0],
                "components__denoiser__sites__0__density": [0.5, 1.0],
                "components__denoiser__sites__0__dense": "too many",
            },
            "sites.0.dense: a reason to have no block mask",
        ),
        ({"components__denoiser__dims": {}}, "dims: no batch, a dimension of an input"),
        ({"components__denoiser__dims": {"batch": [4, 2, 1]}}, "components.denoiser.dims: "),
        ({"components__denoiser__dims": {"batch": [0, 1, 2]}}, "components.denoiser.dims: "),
        (
            {"components__denoiser__profiles": [{"side": [1, 2, 4]}]},
            "profiles.0: the dimensions side, but dims has batch",
        ),
        ({"components__denoiser__inputs__0__dtype": "../x"}, "inputs: the type '../x' of x"),
        ({"components__denoiser__inputs__0__shape": ["batch", "8*"]}, "components.denoiser.inputs.0.shape: "),
        ({"components__denoiser__inputs__0__shape": ["batch", -1]}, "components.denoiser.inputs.0.shape: "),
        ({"components__denoiser__inputs__1__name": "x"}, "inputs: x twice"),
        ({"components__denoiser__inputs": []}, "inputs: none"),
        ({"components__denoiser__outputs__0__shape": ["height"]}, "outputs: the dimension height, which no input has"),
        (
            {"components__denoiser__outputs__0__shape": ["8*height"]},
            "outputs: the dimension height, which no input has",
        ),
        ({"components__denoiser__timestep_input": "t"}, "timestep_input: t, which is not an input"),
        ({"components__denoiser__timestep_input": ""}, "components: 0 denoisers"),
        ({"components__denoiser__timestep_max": 0}, "timestep_max: 0 with the timestep_input 'timestep'"),
        ({"components": {}}, "components: 0 denoisers"),
        ({"quality__site_sqnr": {}}, "quality.site_sqnr: no figure"),
        ({"quality__site_sqnr": {"denoiser": [None, None]}}, "quality.site_sqnr: no figure"),
        ({"quality__site_sqnr": {"another": [30.0, 30.0]}}, "quality.site_sqnr: another, which is not converted"),
        ({"quality__layer_sqnr": {"out": [30.0, 30.0]}}, "quality.layer_sqnr: out, which is not converted"),
        ({"quality__psnr": float("nan")}, "quality.psnr: nan, which no gate passes"),
        ({"quality__component_errors": {"vae_decoder": 0.1}}, "quality.component_errors: vae_decoder, which is not"),
        ({"files__samples.png": {"size": -1, "sha256": "0" * 64}}, "files.samples.png.size: "),
        ({"files__samples.png": {"size": 1, "sha256": "0"}}, "files.samples.png.sha256: "),
        ({"recipe__calibration__bins": 3}, "got: recipe: one entry of attention.modes per timestep bin"),
        (
            {"quality__site_sqnr": {"denoiser": [30.0]}},
            "quality.site_sqnr.denoiser: 1 figures for 2 timestep bins",
        ),
    ],
)
def test_inconsistent_files_are_refused_when_read(bundle, changes, got):
    change(bundle, **changes)
    refusal(run("inspect", bundle), "the manifest of", "is damaged", got)


ENGINE = {"backend": "tensorrt", "library": "10.6", "target": "sm90", "attention": "plugin", "file": "engines/a.plan"}
SITE = {"name": "none", "query_tokens": 1, "key_tokens": 1, "native_us": 1.0, "plugin_us": 2.0}


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({"file": "../a.plan"}, "components.denoiser.engines.0.file: "),
        ({"file": "engines/b.plan"}, "components.denoiser.engines.0.file: engines/b.plan, which files does not list"),
        ({"profiles": [{"side": [1, 2, 4]}]}, "engines.0.profiles.0: the dimension side, which dims lacks"),
        ({"native_sites": [SITE]}, "engines.0.native_sites: none, which is not a site"),
        ({"plugin_us": float("nan")}, "components.denoiser.engines.0.plugin_us: "),
        ({"layers_us": {"ours": 1.0}}, "components.denoiser.engines.0.layers_us.ours"),
        ({}, ""),
    ],
)
def test_engines_are_described_as_builds_do(bundle, fields, got):
    (bundle / "engines").mkdir()
    (bundle / "engines" / "a.plan").write_bytes(b"plan")
    write_manifest(bundle, read_manifest(bundle))
    change(bundle, components__denoiser__engines=[ENGINE | fields])
    if got:
        refusal(run("inspect", bundle), "made by another version" if got.endswith("ours") else "is damaged", got)
    else:
        assert run("inspect", bundle).exit_code == 0


@pytest.mark.parametrize(
    ("fields", "got"),
    [
        ({"modes": [1, 4]}, "components.denoiser.layers.0.modes.1: "),
        ({"modes": [0, 1]}, "components.denoiser.layers.0.modes.0: "),
        ({"modes": [3]}, "layers.0.modes: 1 for 2 timestep bins"),
        ({"name": ""}, "components.denoiser.layers.0.name: "),
        ({"name": "TWIN"}, "layers: TWIN twice"),
        ({"kernel": [3, 3]}, "layers.0.kernel: [3, 3] for the kind linear"),
        ({"rows": 0}, "components.denoiser.layers.0.rows: "),
        ({"kind": "rnn"}, "components.denoiser.layers.0.kind: "),
    ],
)
def test_layers_are_described_as_builds_do(layered_build: Built, tmp_path, fields, got):
    bundle = shutil.copytree(layered_build.bundle, tmp_path / "bundle")
    layers = json.loads((bundle / MANIFEST).read_text())["components"]["denoiser"]["layers"]
    first = next(layer for layer in layers if layer["modes"] and layer["kind"] == "linear")
    layers.sort(key=lambda layer: layer != first)
    layers[1]["name"] = "TWIN"
    change(bundle, components__denoiser__layers=[first | fields, *layers[1:]])
    refusal(run("inspect", bundle), "made by another version" if "kind" in fields else "is damaged", got)


@pytest.mark.parametrize("other", ["denoiser.onnx", "samples.png"])
def test_a_calibration_that_is_another_file_is_refused(bundle, other):
    change(bundle, calibration=other)
    refusal(run("inspect", bundle), f"{other} is not a calibration")
    refusal(run("report", bundle, "-o", bundle.parent / "report.html"), f"{other} is not a calibration")


def test_the_calibration_of_another_bundle_is_refused(bundle, digits_build, tmp_path):
    """The places that use its tables."""
    shutil.copyfile(digits_build.bundle / "calibration.safetensors", bundle / "calibration.safetensors")
    manifest = read_manifest(bundle)
    (bundle / MANIFEST).unlink()
    write_manifest(bundle, manifest)
    refusal(run("report", bundle, "-o", tmp_path / "report.html"), "is not the calibration of this bundle")


# Files that nothing lists ---------------------------------------------------------------------------------------------


def test_files_that_would_be_read_with_the_bundles_own_are_listed(bundle):
    (bundle / "denoiser.onnx.data").write_bytes(b"weights")
    refusal(run("inspect", bundle), "denoiser.onnx.data in the bundle", "is not listed", "move the file elsewhere")
    (bundle / "denoiser.onnx.data").unlink()
    (bundle / "pipeline" / "scheduler").mkdir(parents=True)
    (bundle / "pipeline" / "model_index.json").write_text('{"_class_name": "Tiny"}')
    assert run("inspect", bundle).exit_code == 0  # a user's own folder
    content = json.loads((bundle / MANIFEST).read_text())
    content["files"]["pipeline/model_index.json"] = file_record(bundle / "pipeline/model_index.json").model_dump()
    seal(bundle, content | {"pipeline": "pipeline"})
    assert run("inspect", bundle).exit_code == 0
    (bundle / "pipeline" / ".scheduler.partial-abcdefgh").mkdir()
    (bundle / "pipeline" / "scheduler" / ".DS_Store").write_text("")
    assert run("inspect", bundle).exit_code == 0
    (bundle / "pipeline" / "scheduler" / "scheduler_config.json").write_text("{}")
    refusal(run("inspect", bundle), "pipeline/scheduler/scheduler_config.json in the bundle", "is not listed")


def test_files_of_users_and_the_program_are_no_damage(bundle):
    (bundle / "engines").mkdir()
    for name in (
        "report.html",
        "bicycle.png",
        "evaluation.json",
        "frontier.json",
        "engines/denoiser-tensorrt-sm90-h200.plan",
    ):
        (bundle / name).write_text("a user's, or a killed compile's")
    (bundle / ".manifest.json.partial-killed_1").mkdir()
    assert run("inspect", bundle).exit_code == 0
    assert run("report", bundle, "-o", bundle / "report.html").exit_code == 0  # no frontier of the build's
    runtime.load(bundle).close()


def test_a_rebuild_takes_nothing_along_that_it_would_refuse(bundle, tmp_path):
    (bundle / "denoiser.onnx.png").write_text("a drawing")
    (bundle / "drawing.png").write_text("a drawing")
    new = tmp_path / "new"
    new.mkdir()
    bundles.keep_others(bundle, new)
    assert [path.name for path in new.iterdir()] == ["drawing.png"]


# What stands in the place of the manifest -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("[" * 100_000, "deep within each other"),
        ('{"format": 1, "format": 1}', "the key 'format' twice"),
        ('{"format": 1, "model": "\\ud800"}', "half of a surrogate pair"),
        ('{"format": 1, "model": "a\\u0000"}', "a NUL character"),
        ("9" * 10_000, "limit"),
        ('"' + "x" * (64 * 2**20) + '"', "a file of more than 67,108,864 bytes"),
    ],
    ids=["deep", "twice", "surrogate", "nul", "number", "large"],
)
def test_a_manifest_is_json_of_some_size_with_one_meaning(bundle, content, got):
    (bundle / MANIFEST).unlink()
    (bundle / MANIFEST).write_text(content)
    refusal(run("inspect", bundle), "is not a bundle", got)


def test_a_manifest_is_a_file(bundle):
    path = bundle / MANIFEST
    path.unlink()
    os.mkfifo(path)
    refusal(run("inspect", bundle), "manifest.json: a pipe, not a file")
    path.unlink()
    path.symlink_to("/dev/zero")
    refusal(run("inspect", bundle), "manifest.json: a device, not a file")


@pytest.mark.parametrize("name", ["denoiser.onnx", "calibration.safetensors", "samples.png"])
def test_the_files_of_a_bundle_are_files(bundle, name):
    """Also of the size that was recorded."""
    content = json.loads((bundle / MANIFEST).read_text())
    content["files"][name]["size"] = 0
    seal(bundle, content)
    (bundle / name).unlink()
    (bundle / name).symlink_to("/dev/zero")
    refusal(run("inspect", bundle), f"{name} in the bundle", "a device, not a file")
    (bundle / name).unlink()
    os.mkfifo(bundle / name)
    refusal(run("inspect", bundle), f"{name} in the bundle", "a pipe, not a file")


def test_links_to_whole_files_are_files(bundle, tmp_path):
    """Like a store of downloaded bundles."""
    shutil.move(bundle / "denoiser.onnx", tmp_path / "blob")
    (bundle / "denoiser.onnx").symlink_to(tmp_path / "blob")
    assert run("inspect", bundle).exit_code == 0


# A bundle that is replaced while it is read ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "inspect --json", "report"])
def test_a_bundle_that_is_replaced_while_it_is_read_is_read_again(bundle, tmp_path, monkeypatch, command):
    other, calls = shutil.copytree(bundle, tmp_path / "other"), []
    (other / "samples.png").write_bytes(b"of another build")
    manifest = read_manifest(other)
    (other / MANIFEST).unlink()
    write_manifest(other, manifest.model_copy(update={"backend_reason": "of another build"}))

    def replaced_first(folder, manifest):
        calls.append(manifest.backend_reason)
        if len(calls) == 1:
            bundle.rename(tmp_path / "before")
            other.rename(bundle)
        check_files(folder, manifest)

    for module in ("trtconvert.bundle", "trtconvert.evaluate.report"):
        monkeypatch.setattr(f"{module}.check_files", replaced_first)
    name, *options = command.split()
    outcome = run(name, bundle, *options, *(["-o", tmp_path / "report.html"] if name == "report" else []))
    assert outcome.exit_code == 0, outcome.output
    assert len(calls) == 2 and calls[1] == "of another build"


def test_a_damaged_bundle_that_nobody_replaces_is_read_once(bundle):
    (bundle / "samples.png").write_bytes(b"")
    refusal(run("inspect", bundle), "samples.png in the bundle")
