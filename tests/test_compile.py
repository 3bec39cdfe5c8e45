"""`trtconvert compile` on a machine without a GPU: what it does to the bundle. TensorRT-RTX stands in for the builder."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading

import onnx_ir as ir
import pytest
from rich.console import Console
from support import contents, partials, refusal, run

from trtconvert import compile as compiling
from trtconvert.bundle import EngineRecord, NativeSite, check_files, read_manifest
from trtconvert.compile import compile_bundle
from trtconvert.engine import BuiltEngine, tensorrt, tensorrt_rtx
from trtconvert.errors import TrtconvertError, UserError
from trtconvert.export import storage
from trtconvert.export.lowering import lower_to_native
from trtconvert.progress import Reporter

pytest.importorskip("tensorrt_rtx_bindings", reason="needs the extra 'rtx'")
PLAN = "engines/denoiser-tensorrt-sm90.plan"


@pytest.fixture
def bundle(tiny_build, tmp_path):
    """A copy to compile."""
    return shutil.copytree(tiny_build.bundle, tmp_path / "bundle")


@pytest.fixture
def gpu(monkeypatch):
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
        }
        return BuiltEngine(plan, record.model_copy(update=found))

    monkeypatch.setattr(tensorrt, "load", lambda: None)
    monkeypatch.setattr(tensorrt, "build_engine", build_engine)
    return targets


def compiled(folder):
    return compile_bundle(folder, Reporter(Console(quiet=True)))


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


def test_a_bundle_in_use_keeps_its_files(bundle, gpu, tmp_path):
    """Who has opened the old plan, or linked to it, goes on reading the old one."""
    compiled(bundle)
    os.link(bundle / PLAN, tmp_path / "old.plan")
    (tmp_path / "content").write_bytes((tmp_path / "old.plan").read_bytes())
    compiled(bundle)
    assert not os.path.samefile(bundle / PLAN, tmp_path / "old.plan")
    assert (tmp_path / "old.plan").read_bytes() == (tmp_path / "content").read_bytes()


def test_a_failed_compile_leaves_the_old_bundle(bundle, gpu, monkeypatch):
    before = contents(bundle)

    def fail(*_):
        raise TrtconvertError("memory ran out", expected="memory", got="none", remedy="more")

    monkeypatch.setattr(tensorrt, "build_engine", fail)
    with pytest.raises(TrtconvertError, match="memory ran out"):
        compiled(bundle)
    assert contents(bundle) == before and [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_a_compile_that_is_killed_leaves_the_old_bundle_and_the_next_one_sweeps(bundle, gpu, monkeypatch):
    before, build_engine = contents(bundle), tensorrt.build_engine
    monkeypatch.setattr(tensorrt, "build_engine", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    process = multiprocessing.get_context("fork").Process(target=compiled, args=(bundle,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert contents(bundle) == before and partials(bundle.parent)
    monkeypatch.setattr(tensorrt, "build_engine", build_engine)
    check_files(bundle, compiled(bundle))
    assert not partials(bundle.parent)


def test_two_that_compile_one_bundle_keep_each_others_engines(bundle, gpu, monkeypatch):
    """The second waits, though the first puts another folder in the bundle's place."""
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
        assert "sm90: built on NVIDIA H200, holds the plugin 0.1.0" in text
        assert "sm90: 1 site stays native: 16 × 77 tokens, 21.2 µs against 33.7 µs" in text
        assert (
            "a call takes 418 µs with the plugin, 456 µs with native attention at every site: the faster is kept"
            in text
        )


def test_files_are_copied_where_they_cannot_be_linked(bundle, gpu, monkeypatch):
    def refuse(*_):
        raise OSError("no links on this file system")

    monkeypatch.setattr(compiling.os, "link", refuse)
    check_files(bundle, compiled(bundle))
