"""Builds on several processes: the bundle of one process, to the bit, and one message when a build fails."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import Quiet, contents, partials, run, tiny_recipe, torchrun
from tiny_models import build

from trtconvert import pipeline
from trtconvert.cache import Cache
from trtconvert.calib.distributed import Crew, Ranks
from trtconvert.calib.frontier import read_frontier
from trtconvert.calib.shared_drawing import draw_each
from trtconvert.errors import UserError
from trtconvert.stages.build import Build

SECONDS = (4, 3, 2, 1)
"""Times of the attention's modes: INT8 gains."""


def searched(folder: Path, **sections: dict[str, Any]) -> Path:
    """A recipe whose search measures plans, with layers in INT8."""
    rows = [{"mode": mode, "shape": [1, 1, 16, 16, 32], "seconds": s * 1e-5} for mode, s in enumerate(SECONDS)]
    (folder / "cost.json").write_text(json.dumps({"gpu": "", "date": "2026-01-01", "rows": rows}))
    given: dict[str, dict[str, Any]] = {
        "model": {"source": "tiny_layers:build"},
        "attention": {"modes": "auto"},
        "layers": {"modes": "static"},
        "calibration": {"samples": 10, "batch": 2, "statistic": "elements"},
        "plan": {"min_psnr": 10, "samples": 2, "steps": 4, "kernel_cost": "cost.json"},
        "verify": {"samples": 40, "min_psnr": 10, "min_site_sqnr": 5},
    }
    return tiny_recipe(folder, **given | sections)


def errors_of(output: str) -> list[str]:
    """Messages of the program, without those of torchrun."""
    return re.findall(r"^(?:internal )?error: .*", output, re.MULTILINE)


def exit_codes(output: str) -> dict[int, int]:
    """Exit codes by rank, as torchrun lists them."""
    found = re.findall(r"rank *: (\d+) \(local_rank: \d+\)\n *exitcode *: (-?\d+)", output)
    return {int(rank): int(code) for rank, code in found}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A recipe, and the folder of its bundle and its cache, built by one process."""
    folder = tmp_path_factory.mktemp("alone")
    recipe = searched(folder)
    outcome = run("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache")
    assert outcome.exit_code == 0, outcome.output
    frontier = read_frontier(folder / "bundle" / "frontier.json")
    chosen = next(point for point in frontier.points if point.name == frontier.chosen)
    assert any(chosen.modes["denoiser"]) and len(frontier.points) > 2
    return recipe, folder


@pytest.mark.slow
def test_two_processes_build_what_one_builds(alone, tmp_path):
    recipe, folder = alone
    told = torchrun(2, "build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache")
    assert contents(tmp_path / "bundle") == contents(folder / "bundle")
    # Every stage and every measurement of the search has its key and its bytes, whatever the number of processes.
    assert contents(tmp_path / "cache") == contents(folder / "cache")
    assert told.stdout.count("look at") == 1 and not partials(tmp_path, tmp_path / "cache")


@pytest.mark.soak
def test_all_processes_exit_with_the_code_of_the_first(alone, tmp_path):
    """The same stages with a stricter gate: all come from the cache."""
    recipe, folder = alone
    strict = json.loads(recipe.read_text())
    strict["verify"]["min_psnr"] = 300
    (folder / "strict.yaml").write_text(json.dumps(strict))
    missed = torchrun(
        2, "build", folder / "strict.yaml", "-o", tmp_path / "missed", "--cache", folder / "cache", code=1
    )
    stages = ["calibrate", "search", "plan", "reference", "export", "verify"]
    assert all(re.search(rf"{stage} .* from the cache", missed.stdout) for stage in stages)
    (error,) = errors_of(missed.stderr)
    assert "gate missed: PSNR" in error and exit_codes(missed.stderr) == {0: 1, 1: 1}
    assert (tmp_path / "missed.missed").is_dir() and not (tmp_path / "missed").exists()


DATA = """
import os
import torch

def give(model):
    for number in range(2):
        if number and {condition}:
            raise ValueError("no more")
        yield {{"x": torch.randn(2, 1, 4, 4), "timestep": torch.full((2,), 500.0)}}
"""


@pytest.mark.soak
@pytest.mark.parametrize("where", ["one", "all"])
def test_a_failing_process_ends_the_others(tmp_path, where):
    (tmp_path / f"data_of_{where}.py").write_text(
        DATA.format(condition='os.environ["RANK"] == "1"' if where == "one" else "True")
    )
    recipe = tiny_recipe(tmp_path, calibration={"data": f"data_of_{where}:give", "samples": 4})
    ended = torchrun(2, "build", recipe, "-o", tmp_path / "bundle", "--cache", tmp_path / "cache", code=1)
    causes = [error for error in errors_of(ended.stderr) if "has lost the other processes" not in error]
    assert causes == [f"error: the calibration data data_of_{where}:give failed"]
    codes = exit_codes(ended.stderr)
    if where == "all":
        assert codes == {0: 2, 1: 2} and len(errors_of(ended.stderr)) == 1
    else:
        assert codes[1] == 2 and codes[0] in (1, 128 + 15)  # the latter if torchrun was faster
    assert not (tmp_path / "bundle").exists() and not partials(tmp_path, tmp_path / "cache")


class Threads(Ranks):
    """The ranks of one process's threads: `run` calls a function on each."""

    def run(self, function):
        size, box, results = self.size, {}, [None] * self.size
        barrier = threading.Barrier(size)

        class OfThread(Ranks):
            def gather(self, value):
                box[self.rank] = value
                barrier.wait()
                values = [box[rank] for rank in range(size)]
                barrier.wait()
                return values

            def to_first(self, value):
                values = self.gather(value)
                return values if self.rank == 0 else []

        def call(rank):
            results[rank] = function(OfThread(rank, size))

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Sampler:
    """A sampler that draws a few samples at a time, as pipelines do; calls: the seeds of each drawing."""

    def __init__(self, batch):
        self.batch, self.calls = batch, []

    def __call__(self, denoiser, seeds, *, steps, solver):
        for start in range(0, len(seeds), self.batch):
            self.calls.append((denoiser.number, tuple(seeds[start : start + self.batch])))
        return torch.tensor([[denoiser.number, seed] for seed in seeds])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("batch", [3, 4, 16, 100])
def test_drawings_have_the_seeds_of_one_process(size, batch):
    seeds, denoisers = range(100, 122), [lambda: SimpleNamespace(number=7), lambda: SimpleNamespace(number=8)]
    sampler, bars = Sampler(batch), {}

    def drawn(ranks):
        bars[ranks.rank] = Quiet()
        model = replace(build(), sample=sampler)
        return draw_each(model, denoisers, seeds, bars[ranks.rank], ranks, batch=16, steps=1, solver="ddim")

    results = Threads(0, size).run(drawn)
    expected = [torch.tensor([[denoiser().number, seed] for seed in seeds]) for denoiser in denoisers]
    assert all(map(torch.equal, results[0], expected))
    assert all(not len(samples) for of_rank in results[1:] for samples in of_rank)
    whole = [range(100, 116), range(116, 122)]
    parts = [tuple(one[i : i + batch]) for one in whole for i in range(0, len(one), batch)]
    assert sorted(sampler.calls) == sorted((denoiser().number, part) for denoiser in denoisers for part in parts)
    assert all(bar.done == pytest.approx(4) for bar in bars.values() if bar.done)


def test_a_cache_that_not_all_processes_see_is_refused(tmp_path):
    class Apart(Ranks):
        def broadcast(self, value):
            return value

        def to_first(self, value):
            return [value, False]

    crew = Crew(Apart(0, 2))
    asked = Build("recipe", "weights", "place", Cache(tmp_path / "cache"), "report", crew=crew)  # type: ignore[arg-type]
    with pytest.raises(UserError) as refused:
        pipeline._send_build(asked)
    assert "rank 1 does not see" in refused.value.got and "--cache" in refused.value.remedy
    assert not contents(tmp_path)
