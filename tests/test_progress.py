"""Output of commands with --json and --quiet, and the times that bars estimate."""

from __future__ import annotations

import io
import json
import re
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from safetensors.torch import save_file
from support import REPOSITORY, refusal, run, tiny_recipe

from trtconvert import bundle as bundles
from trtconvert import progress
from trtconvert.bars import NoBar
from trtconvert.cli import main
from trtconvert.errors import GateError, UserError, warn
from trtconvert.models.digits import digits_model
from trtconvert.models.drawings import with_progress
from trtconvert.progress import Event, Output, Reporter, events_schema, failure, write_result

EVENT = TypeAdapter(Event)
PAGE = REPOSITORY / "docs" / "automation.md"


def spoken(*arguments: object) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def told(*arguments: object) -> tuple[int, dict[str, Any] | None, list[Any]]:
    """Return exit code, result and events of a command with --json."""
    code, out, err = spoken(*arguments, "--json")
    assert out.count("\n") <= 1, out
    return code, json.loads(out) if out else None, [EVENT.validate_json(line) for line in err.splitlines()]


def documented() -> dict[str, set[str]]:
    """Return the fields of each command's result, as listed on the page."""
    rows = re.findall(r"^\| ([`\w, ]+) \| (`.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        command: set(re.findall(r"`(\w+)`", fields.partition(";")[0]))
        for commands, fields in rows
        for command in re.findall(r"`(\w+)`", commands)
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Convert a tiny model with --json, and return its folder with recipe, bundle and cache, the result and the events."""
    folder = tmp_path_factory.mktemp("spoken")
    code, result, events = told(*build_command(folder))
    assert code == 0 and result is not None, events
    return folder, result, events


def build_command(folder: Path, name: str = "bundle") -> tuple[object, ...]:
    return "build", tiny_recipe(folder), "-o", folder / name, "--cache", folder / "cache"


def test_a_build_tells_its_stages_and_leaves_its_result(built):
    folder, result, events = built
    assert result.keys() == documented()["build"] == documented()["compile"]
    assert result["bundle"] == str(folder / "bundle") and result["reused"] == []
    assert result["manifest"] == json.loads((folder / "bundle" / bundles.MANIFEST).read_text())
    for kind in ("started", "finished"):
        assert [event.stage for event in events if event.event == kind] == list(result["seconds"])
    export = {path.name: path for path in (folder / "cache").iterdir() if path.name.startswith("export-")}
    (files,) = export.values()
    assert result["bytes"]["export"] == sum(file.stat().st_size for file in files.iterdir()) > 0
    assert [event.bytes for event in events if event.event == "finished"] == list(result["bytes"].values())
    counted = [event for event in events if event.event == "progress"]
    assert counted and all(event.remaining_s is not None for event in counted if event.done)


def test_the_gpu_memory_of_each_stage_is_told(monkeypatch):
    class Cuda:
        """The part of torch.cuda that is asked."""

        peak = 50

        def reset_peak_memory_stats(self):
            self.peak = 0

        def max_memory_allocated(self):
            return self.peak

    cuda, told = Cuda(), []
    monkeypatch.setattr(progress, "_cuda_in_use", lambda: cuda)
    report = Reporter(Console(quiet=True), events=told.append)
    for name, peak in {"search": 7, "export": 3}.items():
        with report.stage(name):
            cuda.peak += peak
    assert report.gpu_bytes == {"search": 7, "export": 3}
    assert [event.gpu_bytes for event in told if event.event == "finished"] == [7, 3]


def test_reused_stages_are_reported(built):
    code, result, events = told(*build_command(built[0], "other"))
    assert code == 0 and result is not None and "calibrate" in result["reused"]
    assert {event.stage for event in events if event.event == "finished" and event.reused} == set(result["reused"])


def test_results_have_the_fields_that_the_page_lists(tmp_path, built):
    folder, bundle = built[0], built[0] / "bundle"
    recipe, cache = folder / "recipe.yaml", folder / "cache"
    assert spoken(*build_command(folder, "third"), "--quiet") == (0, "", "")
    save_file({"blocks.0.proj.weight": torch.randn(128, 128).bfloat16()}, tmp_path / "model.safetensors")
    commands = {
        "analyze": (tmp_path / "model.safetensors", "-o", tmp_path / "a.json"),
        "quantize": (tmp_path / "model.safetensors", "-o", tmp_path / "int8"),
        "dequantize": (tmp_path / "int8", "-o", tmp_path / "back"),
        "doctor": (),
        "run": (bundle, "-n", 1, "--steps", 2, "-o", tmp_path / "s.png"),
        "report": (bundle, "-o", tmp_path / "r.html"),
        "compare": (bundle, folder / "third", "-o", tmp_path / "c.html"),
        "calibrate": (recipe, "-o", tmp_path / "c.safetensors", "--cache", cache),
        "record": (recipe, "-o", tmp_path / "i.safetensors", "-n", 1, "--per-run", 2),
    }
    for name, arguments in commands.items():
        code, result, events = told(name, *arguments)
        assert code == 0 and result is not None, events
        assert result.keys() == documented()[name], name
        assert name != "compare" or [side["title"] for side in result["bundles"]] == ["bundle", "third"]


def test_every_command_that_has_the_options_is_on_the_page():
    def has(command: click.Command) -> bool:
        return {"--json", "--quiet"} <= {name for option in command.params for name in option.opts}

    assert {name for name, command in main.commands.items() if has(command)} == {*documented(), "inspect"}


def test_quiet_leaves_errors_and_the_exit_code(tmp_path, built):
    assert spoken("inspect", built[0] / "bundle", "-q") == (0, "", "")
    code, out, err = spoken("inspect", tmp_path, "--quiet")
    assert code == 2 and not out and "is not a bundle" in err


@pytest.mark.parametrize("form", ["text", "json", "quiet"])
def test_warnings_of_ours_are_notices_of_commands(form, capfd):
    with pytest.warns(FutureWarning, match="of a library") as others, Output(form).kept_clean():
        warn("the engine is slow; remedy: wait")
        warnings.warn("of a library", FutureWarning, stacklevel=1)
    out, err = capfd.readouterr()
    assert len(others) == 1
    shown = {
        "text": "notice: the engine is slow; remedy: wait\n",
        "json": '"text":"the engine is slow; remedy: wait"',
        "quiet": "",
    }
    assert shown[form] in out + err and "Advice" not in err and ("slow" in out + err) == (form != "quiet")


def test_errors_are_events_under_json(tmp_path):
    code, result, events = told("build", tmp_path / "none.yaml")
    assert code == 2 and result is None
    assert [(event.event, event.kind, event.exit_code) for event in events] == [("error", "user", 2)]
    assert "there is no recipe" in events[0].problem and events[0].expected and events[0].remedy
    # The next command in this process is asked for no JSON.
    assert "error: there is no recipe" in spoken("build", tmp_path / "none.yaml")[2]


def test_both_options_are_refused():
    refusal(run("doctor", "--json", "--quiet"), "--quiet and --json exclude each other", "leave --quiet out")


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (UserError("no", expected="yes"), 2, "user"),
        (GateError("not good enough"), 1, "failed"),
        (ValueError("odd"), 1, "internal"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_of_a_command_have_their_kind(error, code, kind):
    made = failure(error, code)
    assert (made.kind, made.exit_code) == (kind, code) and made.problem


def test_events_follow_their_schema():
    assert json.loads(run("schema", "events").output) == json.loads(json.dumps(events_schema()))
    with pytest.raises(ValidationError):
        EVENT.validate_python({"event": "progress", "stage": "x", "done": 2, "elapsed_s": 1})


def test_results_are_json_of_any_reader():
    stream = io.StringIO()
    write_result(stream, {"psnr": float("inf"), "name": "名", "of": [float("nan"), 1.5]})
    assert json.loads(stream.getvalue(), parse_constant=pytest.fail) == {"psnr": None, "name": "名", "of": [None, 1.5]}


def test_output_of_libraries_does_not_reach_the_result(capsys):
    out = Output("json")
    with out.kept_clean():
        print("a library speaks")
        out.result({"a": 1})
    captured = capsys.readouterr()
    assert captured.out == '{"a": 1}\n' and captured.err == "a library speaks\n"


def test_bars_tell_the_time_that_is_left(monkeypatch):
    now = [0.0]
    screen = io.StringIO()
    told_events = []
    report = Reporter(Console(file=screen, force_terminal=True, width=100), events=told_events.append)
    monkeypatch.setattr(report._bars, "get_time", lambda: now[0])
    with report.stage("calibrate [all]") as bar:
        bar.total(10)
        for _ in range(4):
            now[0] += 3
            bar.step()
        report._bars.console.print(report._bars.get_renderable())
        bar.notice("a name :smile: [b]")
    shown = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert "calibrate [all]" in shown and "0:00:18 left" in shown and "notice: a name :smile: [b]" in shown
    assert [(event.done, event.remaining_s) for event in told_events if event.event == "progress"][-1] == (0.4, 18.0)


def lines_of(monkeypatch, first=2.0, following=30.0):
    """Return a reporter whose output is not a terminal, its output, and its clock."""
    monkeypatch.setattr(progress, "_FIRST_LINE", first)
    monkeypatch.setattr(progress, "_NEXT_LINES", following)
    screen, now = io.StringIO(), [0.0]
    report = Reporter(Console(file=screen, width=100))
    monkeypatch.setattr(report._bars, "get_time", lambda: now[0])
    return report, screen, now


def test_a_bar_is_not_full_before_its_stage_is_done():
    events = []
    report = Reporter(Console(file=io.StringIO()), events=events.append)
    with report.stage("search") as bar:
        shares = []
        bar.total(4)
        for _ in range(9):  # of four
            bar.step()
            shares.append(bar._share())
            assert not report._bars.tasks[0].finished
        bar.within(1.0)
        assert bar._share() < 1
    assert shares == [0.25, 0.5, 0.75, 0.99, 5 / 8, 6 / 8, 7 / 8, 0.99, 9 / 12]
    assert report._bars.tasks[0].finished
    assert all(event.done < 1 for event in events if event.event == "progress")


def test_steps_that_were_skipped_say_nothing_of_the_time():
    now = [0.0]
    report = Reporter(Console(file=io.StringIO()))
    report._bars.get_time = lambda: now[0]
    with report.stage("calibrate") as bar:
        bar.total(5)
        bar.skip(3)
        assert bar.left() is None
        now[0] = 5
        bar.within(0.5)
        assert bar.left() == pytest.approx(15)  # a half took five seconds
        now[0] = 10
        assert bar.left() == pytest.approx(10)
        bar.more(1)
        bar.step()
        assert bar._total == 6 and bar.left() == pytest.approx(20)


def test_progress_lines_without_a_terminal(monkeypatch):
    report, screen, now = lines_of(monkeypatch)
    with report.live(), report.stage("search [all]") as bar:
        bar.print_line()
        bar.total(8)
        now[0] = 60
        bar.step()
        bar.within(0.5)
        bar.print_line()
    assert screen.getvalue().splitlines()[:2] == [
        "search [all]: 0:00:00 so far",
        "search [all]: 1 of 8 done, 18 %, 0:01:00 so far, about 0:04:20 left",
    ]


def test_the_first_line_comes_soon_and_the_others_now_and_then(monkeypatch):
    assert progress._FIRST_LINE < 3 and progress._NEXT_LINES == 30
    report, screen, _ = lines_of(monkeypatch, first=0.05, following=0.1)
    with report.live():
        with report.stage("quick"):
            pass
        with report.stage("slow"):
            time.sleep(0.4)
    assert "quick:" not in screen.getvalue()
    assert 1 <= screen.getvalue().count("slow: ") <= 4
    report, screen, _ = lines_of(monkeypatch, first=0.01)
    report.console.quiet = True
    with report.live(), report.stage("slow"):
        time.sleep(0.1)
    assert not screen.getvalue()


def test_drawings_tell_how_far_they_are_whatever_the_chunks(digits_drawings):
    """A sampler draws in chunks and calls its denoiser twice a step, which is known after the first drawing."""
    seen = digits_drawings
    assert len(seen[0]) == len(seen[1]) == 12
    assert seen[1] == pytest.approx([n / 12 for n in range(1, 13)])
    assert seen[0][:6] == pytest.approx([n / 6 for n in range(1, 7)]) and max(seen[0][6:11]) <= 1


@pytest.fixture
def digits_drawings():
    """Shares of two drawings of 4 seeds in chunks of 2 and 3 steps, with two calls a step."""

    class InChunks:
        batch = 2

        def __call__(self, denoiser, seeds, *, steps, solver):
            for _ in range(len(seeds) // self.batch * steps * 2):
                denoiser(torch.zeros(1))
            return torch.zeros(len(seeds), 1, 1, 1)

    class Noting(NoBar):
        def __init__(self):
            self.shares = []

        def within(self, share, count=1):
            self.shares.append(share)

    bar = Noting()
    model = digits_model(REPOSITORY / "recipes/digits-dit.safetensors")
    telling = with_progress(replace(model, sample=InChunks()), bar)
    found = []
    for _ in range(2):
        telling.sample(lambda x: x, range(4), steps=3, solver="ddim")
        found.append(bar.shares)
        bar.shares = []
    return found
