"""Builds into places that cannot be written or are in use, and stopped builds."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import click
import pytest
from rich.console import Console
from support import contents, finish, handled, partials, refusal, reused, run, start, tiny_recipe

from trtconvert import cli, pipeline
from trtconvert.bundle import MANIFEST, EngineRecord, check_files, read_manifest, write_manifest
from trtconvert.cli import main
from trtconvert.files import sha256
from trtconvert.progress import Reporter, say


def test_foreign_folders_are_not_replaced(tiny_build, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("mine too")
    for place, got in (("mine", "a folder with other files"), ("file", "a file")):
        outcome = run("build", tiny_build.recipe, "-o", tmp_path / place, "--cache", tiny_build.cache)
        refusal(outcome, "exists and is not a bundle", f"got: {got}")
    assert contents(tmp_path) == {"mine/thesis.txt": b"years of work", "file": b"mine too"}


@pytest.mark.parametrize("content", ['{"name": "a web app", "icons": []}', "not JSON", '{"format": 1}'])
def test_a_folder_with_a_manifest_of_something_else_is_not_replaced(tiny_build, tmp_path, content):
    mine = {"mine/thesis.txt": b"years of work", "mine/manifest.json": content.encode()}
    (tmp_path / "mine").mkdir()
    for name, text in mine.items():
        (tmp_path / name).write_bytes(text)
    outcome = run("build", tiny_build.recipe, "-o", tmp_path / "mine", "--cache", tiny_build.cache)
    refusal(outcome, "exists and is not a bundle", "a manifest.json that is damaged or not a bundle's", "-o")
    assert contents(tmp_path) == mine


def test_user_files_in_a_bundle_survive_the_next_build(tiny_build, tmp_path):
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    assert run("report", output, "-o", output / "report.html").exit_code == 0
    (output / "notes").mkdir()
    (output / "notes" / "mine.txt").write_text("mine")
    outcome = run("build", tiny_build.recipe, "-o", output, "--cache", tiny_build.cache)
    assert outcome.exit_code == 0, outcome.output
    assert contents(output).keys() == contents(tiny_build.bundle).keys() | {"report.html", "notes/mine.txt"}
    manifest = read_manifest(output)
    assert "report.html" not in manifest.files
    check_files(output, manifest)


def test_engines_that_a_new_bundle_has_not_are_named(tiny_build, tmp_path):
    """Another machine compiled them, perhaps for another model."""
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    manifest = read_manifest(output)
    record = EngineRecord.of("denoiser", "tensorrt", "10.6.0", "sm90", "NVIDIA H200")
    (output / record.file).parent.mkdir(exist_ok=True)
    (output / record.file).write_bytes(b"plan")
    denoiser = manifest.components["denoiser"]
    denoiser = denoiser.model_copy(update={"engines": [*denoiser.engines, record]})
    (output / MANIFEST).unlink()
    write_manifest(output, manifest.model_copy(update={"components": {"denoiser": denoiser}}))
    arguments = ("build", tiny_build.recipe, "-o", output, "--cache", tiny_build.cache)
    outcome = run(*arguments)
    assert outcome.exit_code == 0, outcome.output
    assert "old one: denoiser-tensorrt-sm90-nvidia-h200; run `trtconvert compile`" in outcome.output
    assert contents(output) == contents(tiny_build.bundle)
    assert "notice: engines" not in run(*arguments).output


def test_files_that_appear_at_the_output_during_a_build_stay(tiny_build, tmp_path, monkeypatch):
    def leave_something(*arguments, **options):
        (tmp_path / "bundle").mkdir()
        (tmp_path / "bundle" / "thesis.txt").write_text("years of work")
        return verify_stage(*arguments, **options)

    verify_stage = pipeline.verify_stage
    monkeypatch.setattr(pipeline, "verify_stage", leave_something)
    outcome = run("build", tiny_build.recipe, "-o", tmp_path / "bundle", "--cache", tiny_build.cache)
    refusal(outcome, "exists and is not a bundle")
    assert contents(tmp_path) == {"bundle/thesis.txt": b"years of work"}


def test_a_bundle_is_built_again_from_inside_of_it(tiny_build, tmp_path, monkeypatch):
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    monkeypatch.chdir(output)
    outcome = run("build", tiny_build.recipe, "-o", ".", "--cache", tiny_build.cache)
    assert outcome.exit_code == 0, outcome.output
    assert contents(output) == contents(tiny_build.bundle)


@pytest.mark.soak
def test_a_build_without_a_cache_keeps_nothing(tiny_build, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    outcome = finish(start("build", tiny_build.recipe, "-o", tmp_path / "bundle", "--no-cache"))
    assert outcome.exit_code == 0, outcome.output
    assert contents(tmp_path / "bundle").keys() == contents(tiny_build.bundle).keys()
    assert not list((tmp_path / "temporary").glob("*trtconvert*"))


@pytest.mark.parametrize("place", ["/proc/bundle", "file/bundle"])
def test_an_unwritable_output_is_refused_before_anything_is_done(tiny_build, tmp_path, place):
    (tmp_path / "file").write_text("")
    outcome = run("build", tiny_build.recipe, "-o", tmp_path / place, "--cache", tmp_path / "cache")
    refusal(outcome, f"cannot write {tmp_path / place}")
    assert not (tmp_path / "cache").exists()


def test_an_unwritable_cache_is_refused(tiny_build, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = run("build", tiny_build.recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "file")
    refusal(outcome, f"cannot write {tmp_path / 'file'}", "--cache")
    assert contents(tmp_path).keys() == {"file"} and partials(tmp_path) == []


@pytest.mark.first_case
@pytest.mark.parametrize("warm", [True, False], ids=["bundle", "stage"])
def test_a_file_that_does_not_fit_ends_the_build_with_nothing_half_written(tiny_build, tmp_path, warm):
    """A limit on the size of files acts like a quota: the calibration fits, the ONNX file does not."""
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache") if warm else tmp_path / "cache"
    limit = (tiny_build.bundle / "denoiser.onnx").stat().st_size // 2
    assert (tiny_build.bundle / "calibration.safetensors").stat().st_size < limit
    process = start(
        *("build", tiny_build.recipe, "-o", tmp_path / "bundle", "--cache", cache),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    refusal(finish(process), "the disk is full", "File too large")
    assert not (tmp_path / "bundle").exists()
    assert partials(tmp_path, cache) == []
    assert_whole_stages(cache)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 128 KiB, which holds a bundle of the tiny model once but not twice."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_ends_the_build_and_keeps_the_earlier_bundle(tiny_build, small_disk):
    output = shutil.copytree(tiny_build.bundle, small_disk / "bundle")
    before = contents(output)
    refusal(run("build", tiny_build.recipe, "-o", output, "--cache", tiny_build.cache), "the disk is full", "MiB free")
    assert contents(small_disk) == {f"bundle/{name}": data for name, data in before.items()}
    assert partials(small_disk) == []


def test_a_full_cache_ends_the_build_with_nothing_half_written(tmp_path, small_disk):
    with pytest.raises(OSError), (small_disk / "filling").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)
    outcome = run("build", tiny_recipe(tmp_path), "-o", tmp_path / "bundle", "--cache", small_disk)
    refusal(outcome, "the disk is full")
    assert [path.name for path in small_disk.iterdir()] == ["filling"]
    assert not (tmp_path / "bundle").exists()


def assert_whole_stages(cache: Path) -> None:
    """Check that every finished stage matches its index."""
    for stage in cache.iterdir():
        if not stage.name.startswith("."):  # as what is not finished, and its lock
            hashes = json.loads((stage / "stage.json").read_text())
            files = [path for path in stage.iterdir() if path.name != "stage.json"]
            assert hashes == {path.name: [path.stat().st_size, sha256(path)] for path in files}


def stop_in(process: subprocess.Popen[str], cache: Path, stage: str, number: signal.Signals, delay: float) -> None:
    """Signal a build some time after the start of a stage."""
    while not any(name.startswith(f".{stage}-") for name in partials(cache)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    time.sleep(delay)
    process.send_signal(number)


@pytest.mark.soak
def test_builds_that_are_killed_leave_the_earlier_bundle_and_the_next_one_succeeds(tiny_build, tmp_path):
    cache, output = tmp_path / "cache", shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    before = contents(output)
    recipe = tiny_recipe(tmp_path, output={"grid": 1})
    arguments = ("build", recipe, "-o", output, "--cache", cache)
    delays = random.Random(0)
    for stage, longest in (("calibrate", 0.5), ("export", 1.0), ("verify", 0.02)):
        process = start(*arguments)
        stop_in(process, cache, stage, signal.SIGKILL, delays.uniform(0, longest))
        assert finish(process).exit_code == -signal.SIGKILL
        assert contents(output) == before
        assert_whole_stages(cache)
        assert len(partials(tmp_path)) == 1  # the build before swept those of the builds before it
    outcome = run(*arguments)
    assert outcome.exit_code == 0, outcome.output
    assert reused(outcome)["calibrate"], "what killed builds had finished is used"
    assert partials(tmp_path, cache) == []
    assert contents(output) != before
    check_files(output, read_manifest(output))


@pytest.mark.soak
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_build_clears_up_at_once(tiny_build, tmp_path, number, exit_code):
    output = shutil.copytree(tiny_build.bundle, tmp_path / "bundle")
    before = contents(output)
    # Everything before the export is there already.
    cache = shutil.copytree(tiny_build.cache, tmp_path / "cache", ignore=shutil.ignore_patterns("export-*", "verify-*"))
    process = start("build", tiny_build.recipe, "-o", output, "--cache", cache)
    stop_in(process, cache, "export", number, random.Random(exit_code).uniform(0, 1.0))
    outcome = finish(process)
    assert outcome.exit_code == exit_code, outcome.output
    assert "Traceback" not in outcome.output
    assert contents(output) == before
    assert partials(tmp_path, cache) == []
    assert_whole_stages(cache)


def signalling_recipe(folder: Path) -> Path:
    """A recipe whose model sends SIGINT to its process during the import."""
    code = "import os, signal\nfrom tiny_models import build as load\nos.kill(os.getpid(), signal.SIGINT)\n"
    (folder / "signalling.py").write_text(code)
    return tiny_recipe(folder, model={"source": "signalling:load"})


@pytest.mark.soak
def test_an_interrupt_during_an_import_ends_the_program_as_any_other(tmp_path, monkeypatch):
    """The signal is repeated until the import ends, and other code meets it first."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe = signalling_recipe(tmp_path)
    for _ in range(3):
        outcome = finish(start("build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache"))
        assert outcome.exit_code == 130 and "interrupted" in outcome.output, outcome.output


def test_a_second_interrupt_does_not_cut_the_way_out_short(monkeypatch):
    """The removal of temporary files completes."""
    cleared = []

    @click.command()
    def slow() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            cleared.append(True)

    monkeypatch.setitem(main.commands, "slow", slow)
    assert run("slow").exit_code == 130 and cleared


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_lost_on_its_way_up_is_not_the_last(monkeypatch):
    """Python drops exceptions of finalizers."""
    monkeypatch.setattr(cli, "_CLEARING_SECONDS", 0.05)

    @click.command()
    def losing() -> None:
        class Owner:
            def __del__(self) -> None:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

        Owner()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setitem(main.commands, "losing", losing)
    started = time.monotonic()
    assert run("losing").exit_code == 143 and time.monotonic() - started < 4


@pytest.mark.soak
def test_ignored_signals_stay_ignored(tmp_path, monkeypatch):
    """Like Ctrl-C for background jobs of a shell."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe = signalling_recipe(tmp_path)
    with handled(signal.SIGINT, signal.SIG_IGN):
        process = start("build", recipe, "-o", tmp_path / "bundle", "--no-cache")
    outcome = finish(process)
    assert outcome.exit_code == 0, outcome.output


def test_two_builds_into_one_folder_at_once_leave_one_whole_bundle(digits_build, tmp_path):
    arguments = ("build", digits_build.recipe, "-o", tmp_path / "bundle", "--cache", digits_build.cache)
    for outcome in [finish(process) for process in [start(*arguments) for _ in range(3)]]:
        assert outcome.exit_code == 0, outcome.output
    assert contents(tmp_path / "bundle") == contents(digits_build.bundle)
    assert partials(tmp_path) == []


def test_brackets_in_what_a_builder_tells_are_no_markup():
    """TensorRT names layers with brackets, which rich would read as markup."""
    report = Reporter(Console(file=io.StringIO(), force_terminal=True, width=200))
    with pytest.raises(ZeroDivisionError), report.live(), report.stage("engine [/of] sm90") as bar:
        bar.share("costs of {ForeignNode[/blocks.0/MatMul.../blocks.0/Add]}", 0.3)
        raise ZeroDivisionError
    assert "ForeignNode[/blocks.0/MatMul" in report.console.file.getvalue()


def test_lines_that_name_files_keep_their_paths_whole():
    file = io.StringIO()
    path = Path("/tmp") / ("long" * 40) / "[red]" / "samples.png"
    say(Console(file=file, width=80), f"look at {path}")
    assert file.getvalue() == f"look at {path}\n"


@pytest.mark.soak
def test_a_locale_of_ascii_alone_is_as_good_as_utf8(tiny_build, tmp_path, monkeypatch):
    folder = tmp_path / "Modèle été"
    folder.mkdir()
    bundle = shutil.copytree(tiny_build.bundle, folder / "bündel")
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    outcome = finish(start("inspect", bundle))
    assert (
        outcome.exit_code == 0 and "×" in outcome.output and "Modèle" in outcome.output and "bündel" in outcome.output
    )
    outcome = finish(start("build", tiny_build.recipe, "-o", bundle, "--cache", folder / "çache"))
    assert outcome.exit_code == 0, outcome.output
