"""Failures of `trtconvert compile` and concurrent changes of the bundle: the files that stay."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import stat

import pytest
from compiling import FLOCK, PLAN, VAE, compiled, fresh, killed, killed_half_way, with_vae, without_engines
from rich.console import Console
from support import contents, files_of_at_most, partials, refusal, run, tiny_recipe

from trtconvert import compile as compile_module
from trtconvert import files
from trtconvert.bundle import MANIFEST, check_files, read_manifest, write_manifest
from trtconvert.compile import compile_bundle
from trtconvert.errors import TrtconvertError, UserError
from trtconvert.progress import Reporter
from trtconvert.stages import engines


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
    """Plans may have gigabytes: one reading to check the bundle, one to check the cache, and one to compare the two."""
    compiled(bundle)
    of_part, read = files._sha256_of_part, []

    def counted(path, *part):
        read.append(path)
        return of_part(path, *part)

    monkeypatch.setattr(files, "_sha256_of_part", counted)
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
    write_manifest(bundle, read_manifest(bundle))
    size = sum(file.stat().st_size for file in bundle.glob("denoiser.onnx*"))
    notice, options = "the engine may not fit", {"--cache": [], "TMPDIR": ["--no-cache"]}
    for remedy, given in options.items():
        monkeypatch.setattr(engines, "free_space", lambda _: size - 1)
        outcome = run("compile", bundle, *given)
        assert outcome.exit_code == 0 and notice in outcome.output and remedy in outcome.output
    assert notice not in run("compile", bundle).output  # it is there
    monkeypatch.setattr(engines, "free_space", lambda _: size)
    assert notice not in run("compile", bundle, "--no-cache").output


@pytest.mark.parametrize(("given", "remedy"), [((), "--cache"), (("--no-cache",), "set TMPDIR to another folder")])
def test_a_full_disk_of_the_cache_names_what_places_it(bundle, builder, given, remedy):
    with files_of_at_most(4000):
        message = refusal(run("compile", bundle, *given), "the disk is full while writing", remedy)
    assert ("--cache" in message) == (remedy == "--cache")


@pytest.mark.parametrize(
    ("where", "what"),
    [((shutil, "copyfile"), killed_half_way), ((compile_module, "write_sealed"), killed), ((os, "unlink"), None)],
    ids=["in the copy", "before the manifest", "after the manifest"],
)
def test_leftover_plans_of_a_killed_compile_are_removed_by_the_next(bundle, builder, monkeypatch, where, what):
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


def test_a_bundle_that_is_built_meanwhile_is_not_undone(tiny_build, bundle, builder, tmp_path):
    """The new bundle, with the same ONNX model, gets its engine from the cache at once."""
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
    """The builder may have read either."""

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
    """Like NFS 4, which turns the lock into a lock of a byte range."""
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
