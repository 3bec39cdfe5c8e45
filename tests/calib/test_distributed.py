"""Calibration on several real processes: the file of one process, byte for byte; killed runs resume."""

import signal
import socket
import subprocess
import sys
import time

import pytest
from safetensors import safe_open
from support import contents, environment, finish, run, start, tiny_recipe, torchrun
from tiny_layers import WITH_CONV

BATCHES = 8


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The recipe, and its calibration by one process."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = recipe_in(folder)
    outcome = run("calibrate", recipe, "-o", folder / "c.safetensors", "--cache", folder / "cache")
    assert outcome.exit_code == 0, outcome.output
    return recipe, (folder / "c.safetensors").read_bytes()


def recipe_in(folder, **calibration):
    """The calibration of a model with attention and layers of several kinds."""
    fields = {"samples": 2 * BATCHES, "steps": 3, "statistic": "elements"} | calibration
    model, layers = {"source": "tiny_layers:build"}, {"modes": "static", "include": WITH_CONV}
    return tiny_recipe(folder, model=model, layers=layers, calibration=fields)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def ranks(size, *arguments, separate_disks=None):
    """Starts processes like torchrun, but does not supervise them."""
    port = free_port()
    started = []
    for rank in range(size):
        of_rank = environment() | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        cache = ["--cache", f"{separate_disks}-{rank}"] if separate_disks else []
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "trtconvert.cli", *map(str, arguments), *cache],
                env=of_rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    return started


@pytest.mark.soak  # test_shared_builds.py compares a build of two processes with that of one
@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_make_what_one_makes(alone, tmp_path, size):
    recipe, expected = alone
    output = tmp_path / "c.safetensors"
    processes = ranks(size, "calibrate", recipe, "-o", output, "--cache", tmp_path / "cache")
    outcomes = [finish(process) for process in processes]
    assert [o.exit_code for o in outcomes] == [0] * size, outcomes
    assert output.read_bytes() == expected
    assert "written to" in outcomes[0].output and all(o.output == "" for o in outcomes[1:])
    assert contents(tmp_path / "cache") == {}


@pytest.mark.soak
def test_ranks_on_disks_of_their_own_make_what_one_makes(alone, tmp_path):
    recipe, expected = alone
    output = tmp_path / "c.safetensors"
    processes = ranks(2, "calibrate", recipe, "-o", output, separate_disks=tmp_path / "cache")
    outcomes = [finish(process) for process in processes]
    assert [o.exit_code for o in outcomes] == [0, 0], outcomes
    assert output.read_bytes() == expected


@pytest.mark.soak
def test_torchrun_starts_it(alone, tmp_path):
    recipe, expected = alone
    output = tmp_path / "c.safetensors"
    torchrun(2, "calibrate", recipe, "-o", output, "--cache", tmp_path / "cache")
    assert output.read_bytes() == expected


def finished_batches(cache):
    return sorted(path.name for path in cache.glob("observed-*/rows-*.safetensors"))


def wait_for(condition, process):
    until = time.monotonic() + 90
    while not condition():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.005)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_rank_loses_no_finished_batch(tmp_path, size):
    # Batches take long enough to be killed in between; a recipe of its own has its own result.
    recipe = recipe_in(tmp_path, steps=40, statistic="batch-max")
    expected = tmp_path / "expected.safetensors"
    assert run("calibrate", recipe, "-o", expected, "--cache", tmp_path / "other").exit_code == 0

    cache, output = tmp_path / "cache", tmp_path / "c.safetensors"
    arguments = ("calibrate", recipe, "-o", output, "--cache", cache)
    processes = ranks(size, *arguments)
    wait_for(lambda: len(finished_batches(cache)) >= 2, processes[0])
    processes[-1].send_signal(signal.SIGKILL)
    outcomes = [finish(process) for process in processes]
    assert outcomes[-1].exit_code == -signal.SIGKILL
    kept = finished_batches(cache)
    assert 2 <= len(kept) < BATCHES and not output.exists()
    for name in cache.glob("observed-*/rows-*.safetensors"):
        with safe_open(name, framework="pt") as file:
            assert {"denoiser/bin", "layer:skip/sample"} <= set(file.keys())
    for outcome in outcomes[:-1]:
        assert outcome.exit_code == 1
        for part in ("has lost the other processes", "expected: 2 running processes", "remedy: ", f"kept in {cache}"):
            assert part in outcome.output, outcome.output
        assert "Traceback" not in outcome.output

    modified = {path: path.stat().st_mtime_ns for path in cache.glob("observed-*/rows-*.safetensors")}
    # It resumes with another number of processes, which share the remaining batches.
    slow = ranks(3 - size, *arguments)
    wait_for(lambda: len(finished_batches(cache)) > len(kept) or output.exists(), slow[0])
    assert all(not path.exists() or path.stat().st_mtime_ns == then for path, then in modified.items())
    outcomes = [finish(process) for process in slow]
    assert [o.exit_code for o in outcomes] == [0] * len(slow), outcomes
    assert output.read_bytes() == expected.read_bytes()
    assert finished_batches(cache) == []


def test_a_terminated_run_says_how_to_go_on(tmp_path):
    recipe = recipe_in(tmp_path, steps=200, statistic="batch-max")
    cache = tmp_path / "cache"
    process = start("calibrate", recipe, "-o", tmp_path / "c.safetensors", "--cache", cache)
    wait_for(lambda: finished_batches(cache), process)
    process.terminate()
    outcome = finish(process)
    assert outcome.exit_code == 128 + signal.SIGTERM
    assert f"kept in {cache}" in outcome.output and "the same command resumes there" in outcome.output


def test_counts_of_elements_are_resumed(alone, tmp_path):
    recipe, expected = alone
    cache, output = tmp_path / "cache", tmp_path / "c.safetensors"
    arguments = ("calibrate", recipe, "-o", output, "--cache", cache)
    process = start(*arguments)
    wait_for(lambda: list(cache.glob("observed-*/elements-*.safetensors")), process)
    process.kill()
    process.wait()
    assert run(*arguments).exit_code == 0
    assert output.read_bytes() == expected
