"""`trtconvert compile` on a machine without a GPU: what it does to the bundle. TensorRT-RTX stands in for the builder."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
import pytest
from rich.console import Console
from support import contents, files_of_at_most, partials, refusal, run, tiny_recipe

from trtconvert import compile as compile_module
from trtconvert import stages
from trtconvert.bundle import MANIFEST, EngineRecord, NativeSite, check_files, read_manifest, write_manifest
from trtconvert.cache import Cache
from trtconvert.compile import compile_bundle
from trtconvert.engine import BuiltEngine, tensorrt, tensorrt_rtx
from trtconvert.errors import TrtconvertError, UserError
from trtconvert.export import storage
from trtconvert.export.lowering import lower_to_native
from trtconvert.files import temporary_folder
from trtconvert.progress import Reporter
from trtconvert.recipe import EngineSection

pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra 'rtx'")
PLAN = "engines/denoiser-tensorrt-sm90.plan"
FLOCK = fcntl.flock


VAE = "vae_decoder"


@pytest.fixture
def bundle(tiny_build, tmp_path):
    """A copy to compile."""
    return shutil.copytree(tiny_build.bundle, tmp_path / "bundle")


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """The user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "trtconvert"


@pytest.fixture
def gpu(monkeypatch, cache):
    """A builder that takes what TensorRT's takes and gives what it gives. Returns its target, by the thread's name."""
    main = threading.current_thread().name
    targets = {main: "sm90"}

    def build_engine(name, component, onnx, options, watch):
        native = onnx.with_name("native.onnx")
        model = ir.load(onnx)
        lower_to_native(model)
        storage.save(model, native)
        plan = tensorrt_rtx.build_engine(name, component, native, options, "sm89", watch).plan
        native.unlink()
        site = NativeSite(name="denoiser", query_tokens=16, key_tokens=77, native_us=21.2, plugin_us=33.7)
        record = EngineRecord.of(name, "tensorrt", "10.6.0", targets[threading.current_thread().name])
        found = {
            "gpu": "NVIDIA H200",
            "plugin": "0.1.0",
            "native_sites": [site],
            "plugin_us": 418.3,
            "native_us": 456.0,
            "with_plugins_us": 418.3,
            "plain_us": 512.4,
        }
        return BuiltEngine(plan, record.model_copy(update=found))

    monkeypatch.setattr(tensorrt, "load", lambda: None)
    monkeypatch.setattr(tensorrt, "device_architecture", lambda: targets[threading.current_thread().name])
    monkeypatch.setattr(tensorrt, "build_engine", build_engine)
    return targets


@dataclass
class Builder:
    """A builder whose plans are no engines, but each another one.

    Attributes:
        meanwhile: called with a component's name while its engine is built.
        gpu: the name of what it builds for.
        built: names and options of what was built.
    """

    meanwhile: Callable[[str], None] = lambda _: None
    gpu: str = "NVIDIA H200"
    built: list[tuple[str, EngineSection]] = field(default_factory=list)

    def __call__(self, name, component, onnx, options, watch):
        self.meanwhile(name)
        self.built.append((name, options))
        record = EngineRecord.of(name, "tensorrt", "10.6.0", "sm90")
        record = record.model_copy(update={"gpu": self.gpu, "profiles": component.profiles})
        return BuiltEngine(os.urandom(5000), record)

    @property
    def names(self):
        return [name for name, _ in self.built]


@pytest.fixture
def builder(gpu, monkeypatch):
    quick = Builder()
    monkeypatch.setattr(tensorrt, "build_engine", quick)
    return quick


def with_vae(bundle):
    """The bundle with a second component."""
    manifest = read_manifest(bundle)
    denoiser = manifest.components["denoiser"]
    vae = denoiser.model_copy(update={"timestep_input": "", "timestep_max": 0.0, "sites": []})
    (bundle / MANIFEST).unlink()
    write_manifest(bundle, manifest.model_copy(update={"components": {"denoiser": denoiser, VAE: vae}}))
    return bundle


def compiled(folder, **options):
    return compile_bundle(folder, Reporter(Console(quiet=True)), **options)


def fresh(folder):
    """Compiled with a new engine, whatever the cache has."""
    with temporary_folder() as place:
        return compiled(folder, cache=Cache(place / "cache"))


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
    """As records of before do not."""
    builder.gpu = ""
    compiled(bundle)
    builder.gpu = "NVIDIA H200"
    manifest = fresh(bundle)
    check_files(bundle, manifest)
    assert [engine.gpu for engine in manifest.components["denoiser"].engines] == ["NVIDIA H200"]
    assert len(list(bundle.rglob("*.plan"))) == 1


def test_a_bundle_in_use_keeps_its_files(bundle, builder, tmp_path):
    """Who has opened the old plan, or linked to it, goes on reading the old one."""
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
    """The second waits, though the first puts another manifest in the place of the one that is locked."""
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


def test_what_is_no_bundle_is_refused(tmp_path, gpu):
    with pytest.raises(UserError, match="is not a bundle"):
        compiled(tmp_path)


def test_a_damaged_bundle_is_refused(bundle, gpu):
    with (bundle / "denoiser.onnx").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=r"denoiser\.onnx in the bundle .* is not what was built"):
        compiled(bundle)


def test_without_a_gpu_the_command_says_what_is_missing(bundle):
    if tensorrt.device_architecture() is not None:
        pytest.skip("looks at a machine without a GPU")
    refusal(
        run("compile", bundle), "TensorRT cannot be used here", "no NVIDIA GPU", "the machine that the engine is for"
    )


def test_the_command_and_inspect_tell_which_sites_stay_native_and_why(bundle, gpu):
    for command in ("compile", "inspect"):
        outcome = run(command, bundle)
        assert outcome.exit_code == 0, outcome.output
        text = " ".join(outcome.output.replace("│", " ").split())
        assert "sm90: built on NVIDIA H200, holds the plugin library 0.1.0" in text
        assert "sm90: 1 site stays native: 16 × 77 tokens, 21.2 µs against 33.7 µs" in text
        assert (
            "a call takes 418 µs with the plugin, 456 µs with native attention at every site: the faster is kept"
            in text
        )
        assert "a call takes 418 µs with plugins, for group norms too, 512 µs without any: the faster is kept" in text


def test_what_users_put_into_a_bundle_stays_and_is_no_part_of_it(bundle, builder):
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
    """Of two copies of a bundle, compiled with one cache."""
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
    """The manifest would name what the bundle does not hold."""
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


# What ends it, and what is kept ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [KeyboardInterrupt, TrtconvertError("memory ran out")])
def test_finished_engines_are_kept_whatever_ends_the_build_of_the_next(bundle, builder, failure):
    def fail_once(name):
        if name == VAE and builder.names == ["denoiser"]:
            builder.meanwhile = lambda _: None
            raise failure

    builder.meanwhile = fail_once
    before = contents(with_vae(bundle))
    with pytest.raises(BaseException, match=r"memory ran out|^$"):
        compiled(bundle)
    assert contents(bundle) == before
    manifest = compiled(bundle)
    assert builder.names == ["denoiser", VAE]
    check_files(bundle, manifest)


def test_an_unchanged_plan_is_read_as_often_as_something_depends_on_it(bundle, builder, cache, monkeypatch):
    """Plans may have gigabytes: once to check the bundle, once to check the cache, once to compare the two."""
    compiled(bundle)
    file_digest, read = hashlib.file_digest, []

    def counted(file, name):
        read.append(Path(file.name))
        return file_digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    compiled(bundle)
    assert [path.is_relative_to(cache) for path in read if path.suffix == ".plan"] == [False, True, False]


def test_other_options_and_another_onnx_are_not_answered_by_the_cache(bundle, builder):
    compiled(bundle)
    compiled(bundle)
    assert len(builder.built) == 1
    compiled(bundle, changes=["engine.workspace_mb=512"])
    assert len(builder.built) == 2
    manifest = read_manifest(bundle)
    (bundle / "denoiser.onnx").write_bytes(b"another")
    (bundle / MANIFEST).unlink()
    write_manifest(bundle, manifest)
    compiled(bundle)
    assert len(builder.built) == 3


def test_engines_of_compile_are_in_the_cache_that_the_command_names(bundle, builder, tmp_path):
    for _ in range(2):
        outcome = run("compile", bundle, "--cache", tmp_path / "here")
        assert outcome.exit_code == 0, outcome.output
    assert len(builder.built) == 1 and list((tmp_path / "here").rglob("engine.plan"))
    assert run("compile", bundle, "--no-cache").exit_code == 0
    assert len(builder.built) == 2


def test_a_full_disk_is_named_and_leaves_the_old_bundle(bundle, builder):
    compiled(bundle)  # so that the engine is there, and does not fit into the bundle
    (bundle / PLAN).unlink()
    manifest = read_manifest(bundle)
    (bundle / MANIFEST).unlink()
    write_manifest(bundle, manifest.model_copy(update={"components": without_engines(manifest)}))
    before = contents(bundle)
    with files_of_at_most(4000), pytest.raises(UserError, match=f"the disk is full while writing {bundle}") as error:
        compiled(bundle)
    assert " -o" not in str(error.value)
    assert contents(bundle) == before and not partials(bundle, bundle / "engines")
    assert len(builder.built) == 1


def test_a_cache_with_little_space_is_named_before_the_build(bundle, builder, monkeypatch):
    (bundle / "denoiser.onnx.data").write_bytes(b"weights")
    size = sum(file.stat().st_size for file in bundle.glob("denoiser.onnx*"))
    notice, options = "the engine may not fit", {"--cache": [], "TMPDIR": ["--no-cache"]}
    for remedy, given in options.items():
        monkeypatch.setattr(stages, "free_space", lambda _: size - 1)
        outcome = run("compile", bundle, *given)
        assert outcome.exit_code == 0 and notice in outcome.output and remedy in outcome.output
    assert notice not in run("compile", bundle).output  # it is there
    monkeypatch.setattr(stages, "free_space", lambda _: size)
    assert notice not in run("compile", bundle, "--no-cache").output


@pytest.mark.parametrize(("given", "remedy"), [((), "--cache"), (("--no-cache",), "set TMPDIR to another folder")])
def test_a_full_disk_of_the_cache_names_what_places_it(bundle, builder, given, remedy):
    with files_of_at_most(4000):
        message = refusal(run("compile", bundle, *given), "the disk is full while writing", remedy)
    assert ("--cache" in message) == (remedy == "--cache")


def without_engines(manifest):
    return {name: of.model_copy(update={"engines": []}) for name, of in manifest.components.items()}


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_half_way(_, target):
    Path(target).write_bytes(b"half")
    killed()


@pytest.mark.parametrize(
    ("where", "what"),
    [((shutil, "copyfile"), killed_half_way), ((compile_module, "write_sealed"), killed), ((os, "unlink"), None)],
    ids=["in the copy", "before the manifest", "after the manifest"],
)
def test_what_a_killed_compile_leaves_of_plans_goes_with_the_next(bundle, builder, monkeypatch, where, what):
    first = contents(bundle)
    fresh(bundle)
    (bundle / "engines" / "mine.plan").write_text("a user's")
    unlink = os.unlink

    def killed_at_a_plan(path, **options):
        if "tensorrt-" in str(path):
            killed()
        unlink(path, **options)

    process = multiprocessing.get_context("fork").Process(
        target=killed_compile, args=(bundle, *where, what or killed_at_a_plan)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    left = [path for path in (bundle / "engines").rglob("*-tensorrt-*") if path.is_file()]
    assert len(left) == 2
    manifest = fresh(bundle)
    check_files(bundle, manifest)
    engine = manifest.components["denoiser"].engines[0].file
    assert contents(bundle).keys() == first.keys() | {engine, "engines/mine.plan"}
    assert not partials(bundle, bundle / "engines")


def killed_compile(folder, module, name, what):
    setattr(module, name, what)
    fresh(folder)


def test_a_compile_that_fails_as_it_finishes_leaves_no_plans(bundle, builder, monkeypatch):
    before, copyfile = contents(with_vae(bundle)), shutil.copyfile

    def full(source, target):
        if VAE in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(UserError, match="the disk is full"):
        compiled(bundle)
    assert contents(bundle) == before and not partials(bundle, bundle / "engines")


# Others that change the bundle ----------------------------------------------------------------------------------------


def test_a_bundle_that_is_built_meanwhile_is_not_undone(tiny_build, bundle, builder, tmp_path):
    """And the engine is there at once when the new bundle is compiled, whose ONNX is the same."""
    recipe = tiny_recipe(tmp_path, output={"grid": 1})

    def build_once(_):
        builder.meanwhile = lambda _: None
        outcome = run("build", recipe, "-o", bundle, "--cache", shutil.copytree(tiny_build.cache, tmp_path / "cache"))
        assert outcome.exit_code == 0, outcome.output

    builder.meanwhile = build_once
    with pytest.raises(UserError, match=r"was replaced while its engines were built"):
        compiled(bundle)
    manifest = read_manifest(bundle)
    assert manifest.recipe.output.grid == 1
    check_files(bundle, manifest)
    assert not list(bundle.rglob("*.plan")) and not partials(bundle, tmp_path)
    assert compiled(bundle).recipe.output.grid == 1
    assert builder.names == ["denoiser"]


def test_an_engine_of_an_onnx_that_was_replaced_meanwhile_is_not_kept(bundle, builder):
    """The builder may have read the one or the other."""

    def replace_once(_):
        builder.meanwhile = lambda _: None
        manifest = read_manifest(bundle)
        (bundle / "denoiser.onnx").write_bytes(b"another")
        (bundle / MANIFEST).unlink()
        write_manifest(bundle, manifest)

    onnx, manifest = (bundle / "denoiser.onnx").read_bytes(), (bundle / MANIFEST).read_bytes()
    builder.meanwhile = replace_once
    with pytest.raises(UserError, match=r"was replaced while its engines were built"):
        compiled(bundle)
    (bundle / "denoiser.onnx").write_bytes(onnx)
    (bundle / MANIFEST).write_bytes(manifest)
    compiled(bundle)
    assert len(builder.built) == 2


def test_a_bundle_that_goes_while_its_onnx_is_read_is_named(bundle, builder):
    def remove(_):
        shutil.rmtree(bundle)
        (bundle / "denoiser.onnx").read_bytes()

    builder.meanwhile = remove
    refusal(run("compile", bundle), "was replaced while its engines were built", "got: no bundle")
    assert not bundle.exists()


def test_an_error_of_reading_the_bundle_is_not_one_of_writing_it(bundle, builder):
    def fail(_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(bundle / "denoiser.onnx"))

    builder.meanwhile = fail
    assert "cannot write" not in refusal(run("compile", bundle), f"cannot read {bundle / 'denoiser.onnx'}")


def test_a_bundle_that_goes_while_another_process_has_its_lock_is_named(bundle, builder):
    handle = os.open(bundle / MANIFEST, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)

    class Removing(Console):
        def print(self, *_, **__):
            shutil.rmtree(bundle)
            os.close(handle)

    with pytest.raises(UserError, match="is not a bundle"):
        compile_bundle(bundle, Reporter(Removing(quiet=True)))


def flock_of_nfs(handle, operation):
    """As NFS 4 has it, which makes of it a lock of a range of bytes."""
    if stat.S_ISREG(os.fstat(handle).st_mode) and fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return FLOCK(handle, operation)


def no_flock(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize(("flock", "said"), [(flock_of_nfs, False), (no_flock, True)])
def test_bundles_on_network_file_systems_are_compiled(bundle, builder, monkeypatch, flock, said):
    monkeypatch.setattr(fcntl, "flock", flock)
    outcome = run("compile", bundle)
    assert outcome.exit_code == 0, outcome.output
    assert ("without locks" in outcome.output) == said
    check_files(bundle, read_manifest(bundle))


# Where the bundle is --------------------------------------------------------------------------------------------------


def test_a_bundle_is_compiled_from_inside_of_it(bundle, builder, monkeypatch):
    monkeypatch.chdir(bundle)
    for command in ("compile", "inspect"):
        outcome = run(command, ".")
        assert outcome.exit_code == 0, outcome.output


def test_a_bundle_of_links_is_compiled_and_what_they_point_to_stays(bundle, builder, tmp_path):
    """As `cp -rs` makes them, and the snapshots of Hugging Face's cache."""
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
    """It cannot be renamed."""
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
    """Rich's would end what was never begun."""
    bundle = shutil.copytree(tiny_build.bundle, tmp_path / "a[" / "bundle]")
    for command in ("compile", "inspect"):
        outcome = run(command, bundle)
        assert outcome.exit_code == 0, outcome.output
    assert "[" in outcome.output


# Another engine than the recipe asks for ------------------------------------------------------------------------------


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
        pytest.param("engine.shapes=" + "[" * 3000, ["not valid YAML", "too many brackets", "[[[…"], id="deep"),
        ("engine.shapes={batch: [1, 2, 5]}", ["more of 'batch' than denoiser supports", "expected: 1 to 4"]),
        ("engine.shapes={frames: 2}", ["the dimension 'frames', which denoiser does not have", "expected: batch"]),
    ],
)
def test_a_change_that_does_not_fit_is_refused_before_anything_is_built(bundle, builder, change, parts):
    refusal(run("compile", bundle, "--set", change), *parts)
    assert builder.built == []
