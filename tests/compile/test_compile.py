"""`trtconvert compile` on a machine without a GPU: changes of the bundle, with TensorRT-RTX in place of the builder."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest
from compiling import PLAN, VAE, compiled, fresh, with_vae
from pretend_engines import pretend_engines
from rich.console import Console
from support import contents, partials, refusal, run

from trtconvert.bundle import MANIFEST, check_files, read_manifest, write_manifest
from trtconvert.compile import compile_bundle
from trtconvert.engine import tensorrt
from trtconvert.errors import GateError, TrtconvertError, UserError
from trtconvert.files import temporary_folder
from trtconvert.progress import Reporter
from trtconvert.recipe import Recipe


def test_the_engine_joins_the_bundle_and_nothing_else_changes(bundle, gpu):
    before = contents(bundle)
    manifest = compiled(bundle)
    check_files(bundle, manifest)
    after = contents(bundle)
    assert after.keys() - before.keys() == {PLAN}
    assert {name for name in before if before[name] != after[name]} == {"manifest.json"}
    (engine,) = manifest.components["denoiser"].engines
    assert (engine.file, engine.gpu, engine.target) == (PLAN, "NVIDIA H200", "sm90")


def test_engines_of_other_gpus_stay_and_the_same_gpus_is_replaced(bundle, gpu):
    this = threading.current_thread().name
    compiled(bundle)
    gpu[this] = "sm80"
    compiled(bundle)
    gpu[this] = "sm90"
    manifest = compiled(bundle)
    check_files(bundle, manifest)
    assert [engine.target for engine in manifest.components["denoiser"].engines] == ["sm80", "sm90"]


def test_gpus_of_one_architecture_have_an_engine_each(bundle, builder):
    for builder.gpu in ("NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA H200"):
        manifest = fresh(bundle)
        check_files(bundle, manifest)
    engines = manifest.components["denoiser"].engines
    assert [engine.gpu for engine in engines] == ["NVIDIA H100 PCIe", "NVIDIA H200"]
    assert {engine.file for engine in engines} == {str(plan.relative_to(bundle)) for plan in bundle.rglob("*.plan")}


def test_an_engine_that_does_not_name_its_gpu_is_replaced(bundle, builder):
    """Older records do not name the GPU."""
    builder.gpu = ""
    compiled(bundle)
    builder.gpu = "NVIDIA H200"
    manifest = fresh(bundle)
    check_files(bundle, manifest)
    assert [engine.gpu for engine in manifest.components["denoiser"].engines] == ["NVIDIA H200"]
    assert len(list(bundle.rglob("*.plan"))) == 1


def test_a_bundle_in_use_keeps_its_files(bundle, builder, tmp_path):
    """Readers that opened or linked the old plan keep reading it."""
    fresh(bundle)
    os.link(bundle / PLAN, tmp_path / "old.plan")
    content = (tmp_path / "old.plan").read_bytes()
    manifest = fresh(bundle)
    check_files(bundle, manifest)
    assert (tmp_path / "old.plan").read_bytes() == content
    (plan,) = bundle.rglob("*.plan")
    assert plan.read_bytes() != content
    assert manifest.components["denoiser"].engines[0].file == str(plan.relative_to(bundle))


def test_a_failed_compile_leaves_the_old_bundle(bundle, gpu, monkeypatch):
    before = contents(bundle)

    def fail(*_):
        raise TrtconvertError("memory ran out", expected="memory", got="none", remedy="more")

    monkeypatch.setattr(tensorrt, "build_engine", fail)
    with pytest.raises(TrtconvertError, match="memory ran out"):
        compiled(bundle)
    assert contents(bundle) == before and [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_compile_that_is_killed_leaves_the_old_bundle_and_the_next_one_sweeps(bundle, gpu, cache, monkeypatch):
    before, build_engine = contents(bundle), tensorrt.build_engine
    monkeypatch.setattr(tensorrt, "build_engine", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    process = multiprocessing.get_context("fork").Process(target=compiled, args=(bundle,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert contents(bundle) == before and partials(cache)
    monkeypatch.setattr(tensorrt, "build_engine", build_engine)
    check_files(bundle, compiled(bundle))
    assert not partials(bundle, bundle.parent, cache)


def test_two_that_compile_one_bundle_keep_each_others_engines(bundle, gpu, monkeypatch):
    """The second compile waits, although the first replaces the locked manifest."""
    inside, go_on, waits = threading.Event(), threading.Event(), threading.Event()
    build_engine = tensorrt.build_engine

    def slow(name, *rest):
        inside.set()
        assert go_on.wait(30)
        return build_engine(name, *rest)

    class Saying(Console):
        def print(self, *objects, **_):
            waits.set()

    gpu |= {"first": "sm90", "second": "sm80"}
    monkeypatch.setattr(tensorrt, "build_engine", slow)
    first = threading.Thread(name="first", target=compiled, args=(bundle,))
    first.start()
    assert inside.wait(30)
    monkeypatch.setattr(tensorrt, "build_engine", build_engine)
    second = threading.Thread(name="second", target=compile_bundle, args=(bundle, Reporter(Saying(quiet=True))))
    second.start()
    assert waits.wait(30)
    go_on.set()
    first.join()
    second.join()
    manifest = read_manifest(bundle)
    check_files(bundle, manifest)
    assert [engine.target for engine in manifest.components["denoiser"].engines] == ["sm90", "sm80"]


def test_folders_that_are_not_bundles_are_refused(tmp_path, gpu):
    with pytest.raises(UserError, match="is not a bundle"):
        compiled(tmp_path)


def test_a_damaged_bundle_is_refused(bundle, gpu):
    with (bundle / "denoiser.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=r"denoiser\.onnx in the bundle .* is damaged"):
        compiled(bundle)


def test_without_a_gpu_the_command_says_what_is_missing(bundle):
    if tensorrt.device_architecture() is not None:
        pytest.skip("looks at a machine without a GPU")
    refusal(
        run("compile", bundle),
        "TensorRT cannot be used here",
        "no NVIDIA GPU",
        "run `trtconvert compile BUNDLE` on a machine with a GPU",
    )


def test_a_change_that_does_not_fit_is_told_without_a_gpu_too(bundle):
    refusal(run("compile", bundle, "--set", "engine.attention=naive"), "engine.attention: ", "'native'")


def test_the_command_and_inspect_tell_which_sites_stay_native_and_why(bundle, gpu):
    for command in ("compile", "inspect"):
        outcome = run(command, bundle)
        assert outcome.exit_code == 0, outcome.output
        text = " ".join(outcome.output.replace("│", " ").split())
        assert "sm90: built on NVIDIA H200, holds the plugin library 0.1.0" in text
        assert "sm90: 1 site stays native: 16 × 77 tokens, 21.2 µs against 33.7 µs" in text
        assert (
            "a call takes 418 µs with the plugin, 456 µs with native attention at every site: the faster engine is kept"
            in text
        )
        assert (
            "a call takes 418 µs with plugins, for group norms too, 512 µs without plugins: the faster engine is kept"
            in text
        )


def test_files_of_users_stay_in_a_bundle_and_are_no_part_of_it(bundle, builder):
    (bundle / "report.html").write_text("before")
    builder.meanwhile = lambda _: (bundle / "evaluation.json").write_text("meanwhile")
    manifest = compiled(bundle)
    assert {"report.html", "evaluation.json"} <= contents(bundle).keys()
    (bundle / "report.html").write_text("changed")
    (bundle / "evaluation.json").unlink()
    check_files(bundle, manifest)


def test_the_manifest_says_what_the_bundle_runs_on_now(bundle, builder):
    before = read_manifest(bundle)
    manifest = compiled(bundle)
    assert (before.backend, manifest.backend) == ("onnxruntime", "tensorrt")
    assert manifest.backend_reason == "`trtconvert compile` on NVIDIA H200"
    assert manifest.versions == before.versions | {"tensorrt": "10.6.0"}


def test_two_that_want_one_engine_build_it_once_and_have_the_same(bundle, gpu, builder, tmp_path):
    """Two copies of a bundle, compiled with one cache."""
    second = shutil.copytree(bundle, tmp_path / "second")
    waits = threading.Event()

    def begin_the_second(_):
        builder.meanwhile = lambda _: waits.set()
        thread.start()
        assert not waits.wait(1)  # it would build another engine

    gpu["second"] = "sm90"
    thread = threading.Thread(name="second", target=compiled, args=(second,))
    builder.meanwhile = begin_the_second
    compiled(bundle)
    thread.join(30)
    assert builder.names == ["denoiser"]
    for folder in (bundle, second):
        check_files(folder, read_manifest(folder))
    assert (bundle / PLAN).read_bytes() == (second / PLAN).read_bytes()


def test_an_engine_that_changes_in_the_cache_while_it_is_copied_is_refused(bundle, builder, monkeypatch):
    """Otherwise the manifest would name files that the bundle does not hold."""
    before, copyfile = contents(bundle), shutil.copyfile

    def replaced(source, target):
        Path(source).write_bytes(b"another's")
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", replaced)
    with pytest.raises(UserError, match="replaced or damaged while it was copied"):
        compiled(bundle)
    assert contents(bundle) == before and not partials(bundle, bundle / "engines")
    monkeypatch.setattr(shutil, "copyfile", copyfile)
    check_files(bundle, compiled(bundle))


def test_a_bundle_is_compiled_from_inside_of_it(bundle, builder, monkeypatch):
    monkeypatch.chdir(bundle)
    for command in ("compile", "inspect"):
        outcome = run(command, ".")
        assert outcome.exit_code == 0, outcome.output


def test_a_bundle_of_links_is_compiled_and_what_they_point_to_stays(bundle, builder, tmp_path):
    """Like those of `cp -rs`, and of snapshots in Hugging Face's cache."""
    compiled(bundle)
    before, copy = contents(bundle), tmp_path / "copy"
    (copy / "engines").mkdir(parents=True)
    for name in before:
        (copy / name).symlink_to(bundle / name)
    manifest = fresh(copy)
    check_files(copy, manifest)
    assert contents(bundle) == before
    check_files(bundle, read_manifest(bundle))
    assert not (copy / MANIFEST).is_symlink()


def test_a_link_that_is_switched_meanwhile_does_not_split_the_engine_from_its_manifest(bundle, builder, tmp_path):
    other, current = shutil.copytree(bundle, tmp_path / "other"), tmp_path / "current"
    current.symlink_to(bundle)
    before = contents(other)

    def switch(_):
        current.unlink()
        current.symlink_to(other)

    builder.meanwhile = switch
    check_files(bundle, compiled(current))
    assert contents(other) == before
    assert (bundle / PLAN).is_file()


def test_a_mount_point_is_compiled(bundle, builder, tmp_path):
    """Such a folder cannot be renamed."""
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(["mount", "--bind", bundle, place], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        check_files(place, compiled(place))
        assert (place / PLAN).is_file() and not partials(place, tmp_path)
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_bundle_that_cannot_be_written_is_refused_before_anything_is_built(bundle, builder):
    (bundle / "engines").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write .*/engines") as error:
        compiled(bundle)
    assert " -o" not in str(error.value) and "--cache" not in str(error.value)
    assert builder.built == []


def test_a_read_only_bundle_is_refused_before_anything_is_built(tiny_build, builder):
    with tempfile.TemporaryDirectory() as place:  # whose parents everybody may enter
        Path(place).chmod(0o755)
        bundle = shutil.copytree(tiny_build.bundle, Path(place) / "bundle")
        bundle.chmod(0o555)
        process = multiprocessing.get_context("fork").Process(target=refused_to_nobody, args=(bundle,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert contents(bundle) == contents(tiny_build.bundle) and not partials(bundle, bundle.parent)
        bundle.chmod(0o755)


def refused_to_nobody(bundle):
    if os.getuid() == 0:  # who may write everything
        os.setuid(65534)
    with pytest.raises(UserError, match="cannot write"):
        compiled(bundle)


def test_an_unusable_temporary_folder_is_not_blamed_on_the_bundle(bundle, builder, monkeypatch):
    def use(_):
        monkeypatch.setattr(tempfile, "tempdir", None)
        monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
        with temporary_folder():
            pass

    builder.meanwhile = use
    refusal(run("compile", bundle), "no temporary folder can be used", "set TMPDIR")


@pytest.mark.parametrize("name", ["../../escaped", "a/b", "", ".hidden"])
def test_components_whose_names_are_no_names_of_files_are_refused(bundle, builder, name):
    manifest = read_manifest(bundle)
    (bundle / MANIFEST).unlink()
    named = {"denoiser": manifest.components["denoiser"], name: manifest.components["denoiser"]}
    write_manifest(bundle, manifest.model_copy(update={"components": named}))
    refusal(run("compile", bundle), "the manifest of", "is damaged", "components")
    assert builder.built == []


def test_brackets_in_names_are_no_markup(tiny_build, builder, tmp_path):
    """rich would end bars that were never started."""
    bundle = shutil.copytree(tiny_build.bundle, tmp_path / "a[" / "bundle]")
    for command in ("compile", "inspect"):
        outcome = run(command, bundle)
        assert outcome.exit_code == 0, outcome.output
    assert "[" in outcome.output


def test_the_engine_section_is_changed_for_a_bundle_and_stays_so(bundle, builder):
    outcome = run("compile", bundle, "--set", "engine.attention=native", "--set", "engine.workspace_mb=512")
    assert outcome.exit_code == 0, outcome.output
    for engine in (builder.built[0][1], read_manifest(bundle).recipe.engine):
        assert (engine.attention, engine.workspace_mb) == ("native", 512)
    compiled(bundle)
    assert len(builder.built) == 1


def test_the_denoisers_shapes_are_narrowed(bundle, builder):
    manifest = compiled(with_vae(bundle), changes=["engine.shapes={batch: [1, 1, 2]}"])
    denoiser, vae = manifest.components["denoiser"], manifest.components[VAE]
    assert denoiser.dims == vae.dims == {"batch": (1, 2, 4)}  # the ONNX is what it was
    assert denoiser.engines[0].profiles == denoiser.profiles == [{"batch": (1, 1, 2)}]
    assert vae.engines[0].profiles == [{"batch": (1, 2, 4)}]
    shown = run("inspect", bundle).output
    assert "batch 1..4" in shown and "profile batch 1..1..2" in shown and "profile batch 1..2..4" not in shown
    manifest = compiled(bundle, changes=["engine.profiles=[{batch: 1}, {batch: 4}]"])
    assert manifest.recipe.engine.shapes == {}
    assert manifest.components["denoiser"].engines[0].profiles == [{"batch": (1, 1, 1)}, {"batch": (4, 4, 4)}]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("engine.atention=native", ["did you mean 'engine.attention=…'?", "the fields are attention, workspace_mb"]),
        ("attention=native", ["did you mean 'engine.attention=…'?"]),
        ("engine.attention", ["engine.FIELD=VALUE"]),
        ("verify.min_psnr=3", ["build the bundle again"]),
        ("engine.backend=tensorrt", ["engine.FIELD=VALUE"]),
        ("engine.attention=naive", ["engine.attention: ", "'native'", "got: --set engine.attention=naive"]),
        ("engine.workspace_mb=much", ["engine.workspace_mb: "]),
        ("engine.attention={", ["--set engine.attention: not valid YAML", "expected the node content", ": {"]),
        ("engine.shapes={batch: [1, 2, 4}", ["not valid YAML", "expected ',' or ']', but got '}'"]),
        ("engine.workspace_mb=2001-02-30", ["not valid YAML"]),
        ("engine.refittable=!!bool x", ["not valid YAML"]),
        ("engine.workspace_mb=!!int ''", ["not valid YAML"]),
        pytest.param(
            "engine.shapes=" + "[" * 3000, ["not valid YAML", "too deep within each other", "[[[…"], id="deep"
        ),
        (
            "engine.shapes={batch: [1, 2, 5]}",
            ["the range of 'batch'", "exceeds the range of denoiser", "expected: 1 to 4"],
        ),
        ("engine.shapes={frames: 2}", ["the dimension 'frames', which denoiser does not have", "expected: batch"]),
    ],
)
def test_a_change_that_does_not_fit_is_refused_before_anything_is_built(bundle, builder, change, parts):
    refusal(run("compile", bundle, "--set", change), *parts)
    assert builder.built == []


def test_a_change_that_does_not_fit_another_section_is_refused(bundle, builder):
    manifest = read_manifest(bundle)
    recipe = manifest.recipe.model_dump() | {"attention": {"modes": "auto"}, "layers": {"modiff": "auto"}}
    (bundle / MANIFEST).unlink()
    write_manifest(bundle, manifest.model_copy(update={"recipe": Recipe.model_validate(recipe)}))
    outcome = run("compile", bundle, "--set", "engine.refittable=true")
    refusal(outcome, "expected: engine.refittable: false with layers.modiff", "got: --set engine.refittable=true")
    assert builder.built == [] and not read_manifest(bundle).recipe.engine.refittable


def test_the_error_of_predictions_is_in_the_manifest(bundle, gpu, monkeypatch):
    pretend_engines(monkeypatch.setattr, error=0.02)
    compiled(bundle)
    (engine,) = [e for e in read_manifest(bundle).components["denoiser"].engines if e.backend == "tensorrt"]
    assert engine.prediction_error and set(engine.prediction_error) == {0.02}


def test_an_engine_whose_predictions_are_wrong_is_refused_and_the_bundle_stays(bundle, gpu, monkeypatch):
    pretend_engines(monkeypatch.setattr, error=0.2)
    before = contents(bundle)
    with pytest.raises(GateError, match="error of the prediction") as caught:
        compiled(bundle)
    assert (caught.value.expected, caught.value.got) == ("<= 0.03", "0.2")
    assert contents(bundle) == before
