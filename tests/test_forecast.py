"""The forecast of a build's time: its counts of calls, and the timing of the first calls."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from support import tiny_recipe

from trtconvert import forecast as forecasts
from trtconvert.cache import Cache
from trtconvert.forecast import IN_INT8, OBSERVED, forecast
from trtconvert.models.placed import Place
from trtconvert.pipeline import build
from trtconvert.progress import Reporter
from trtconvert.recipe import load_recipe

SITES = [SimpleNamespace(query_tokens=tokens) for tokens in (4096, 9000)]


def recipe_of(folder, **sections):
    return load_recipe(tiny_recipe(folder, **sections))


def test_calls_are_those_of_the_stages(tmp_path):
    recipe = recipe_of(
        tmp_path,
        calibration={"samples": 16, "steps": 20, "bins": 10, "statistic": "batch-max"},
        verify={"samples": 16, "steps": 20},
        plan={"samples": 4, "steps": 20},
        attention={"modes": "auto"},
    )
    found = forecast(recipe, "cuda", choices=200, sites=SITES, step=0.5)
    assert list(found) == ["calibration", "the search", "verification"]
    assert found["calibration"] == 16 * 20 * OBSERVED["cuda"] * 0.5
    # 16 images of 20 steps; the errors of sites in 20 steps, over as many samples as make 16,384 tokens
    assert found["verification"] == pytest.approx((1 + IN_INT8["cuda"]) * (16 + 4) * 20 * 0.5)
    fewer, exact = (forecast(recipe, "cuda", choices=n, sites=SITES, step=0.5)["the search"] for n in (10, 60))
    assert fewer < found["the search"] < exact, "probes take as long for any number of choices"


def test_stated_modes_are_not_searched(tmp_path):
    stated = forecast(recipe_of(tmp_path, attention={"modes": "precision"}), "cpu", choices=200, sites=SITES, step=1.0)
    assert "the search" not in stated and "the choice of steps" not in stated
    reused = forecast(
        recipe_of(tmp_path, steps={"computed": 0.5, "calibrated": 8}), "cpu", choices=200, sites=SITES, step=1.0
    )
    assert reused["the choice of steps"] > 0


def denoising(monkeypatch, seconds):
    """A clock that advances by some seconds in each call of a denoiser."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(forecasts.time, "perf_counter", lambda: clock.now)

    def denoiser(x, timestep):
        clock.now += seconds
        return x

    return denoiser


def test_one_step_of_one_sample_is_timed_and_told_once(monkeypatch):
    told = []

    def sampler(denoiser, seeds, *, steps):
        for _ in range(steps):
            denoiser(torch.zeros(len(seeds), 1), torch.zeros(len(seeds)))
        return torch.zeros(len(seeds), 1)

    timed = forecasts._Timed(sampler, Place("cpu", "float32", ""), told.append)
    denoiser = denoising(monkeypatch, 6.0)
    for _ in range(2):
        timed(denoiser, [1, 2, 3], steps=8)
    assert told == [pytest.approx(2.0)]
    sampler.batch = 1  # it draws one sample after the other
    forecasts._Timed(sampler, Place("cpu", "float32", ""), told.append)(denoiser, [1, 2, 3], steps=8)
    assert told[1] == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "5 s"), (80, "80 s"), (150, "2.5 min"), (1500, "25 min"), (9000, "2.5 h"), (1e6, "12 days")],
)
def test_times_are_told_as_people_do(seconds, words):
    assert forecasts._words(seconds) == words


def test_a_long_build_says_its_time_after_its_first_calls_and_a_short_one_nothing(tmp_path, monkeypatch):
    def said(cache):
        console = Console(record=True, width=300, file=io.StringIO())
        recipe = recipe_of(
            tmp_path,
            calibration={"samples": 4, "steps": 6, "bins": 2},
            verify={"samples": 2, "steps": 2, "min_psnr": 1},
        )
        build(recipe, tmp_path / "bundle", Cache(tmp_path / cache), Reporter(console))
        return [line for line in console.export_text().splitlines() if "estimated from the first calls" in line]

    assert said("short") == []
    monkeypatch.setattr(forecasts, "LEAST_SECONDS", 0.0)
    (line,) = said("long")
    assert line.startswith("notice: about") and "calibration" in line and "verification" in line
    assert said("long") == [], "the calibration came from the cache"


def test_memory_is_told_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    assert "3.0 of the GPU's 80 GiB" in forecasts._memory(Place("cuda", "float16", ""))
    assert forecasts._memory(Place("cpu", "float32", "")) == ""
