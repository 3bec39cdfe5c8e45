"""A search's measurements survive the search."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from support import tiny_recipe

from trtconvert.bundle import read_manifest
from trtconvert.calib import plan as planning
from trtconvert.calib.frontier import read_frontier
from trtconvert.cli import main


class Stopped(BaseException):
    """Stands for a signal that ends the program."""


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """Counts measurements, in order."""
    done: list[str] = []

    def counting(name):
        real = getattr(planning, name)

        def counted(*args, **kwargs):
            done.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(planning, name, counted)

    counting("measure_sensitivity")
    counting("figures")
    return done


def build(folder, *, out="bundle", **plan):
    recipe = json.loads(tiny_recipe(folder, attention={"modes": "auto"}).read_text())
    recipe["plan"] = {"min_psnr": 25, "samples": 2, "steps": 4} | plan
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    command = ["build", str(folder / "recipe.yaml"), "-o", str(folder / out), "--cache", str(folder / "cache")]
    outcome = CliRunner().invoke(main, command)
    assert outcome.exit_code == 0, outcome.output
    return read_frontier(folder / out / "frontier.json")


def test_another_budget_draws_with_no_plan_again(tmp_path, measured):
    first = build(tmp_path)
    assert "measure_sensitivity" in measured and len(measured) > 3
    measured.clear()
    second = build(tmp_path, min_psnr=25.5)
    assert "measure_sensitivity" not in measured
    assert {p.name: p.figures for p in first.points if p.name == "fp16"} == {
        p.name: p.figures for p in second.points if p.name == "fp16"
    }
    drawn_again = len(measured)
    assert drawn_again < len(second.points)  # only those that the bisection had not reached
    measured.clear()
    build(tmp_path, out="again")
    assert measured == []


def test_other_samples_are_measured_anew(tmp_path, measured):
    build(tmp_path)
    measured.clear()
    build(tmp_path, seed=900)
    assert "measure_sensitivity" in measured


def test_a_search_that_was_interrupted_goes_on_where_it_was(tmp_path, measured, monkeypatch):
    with monkeypatch.context() as stopping:
        real, left = planning.figures, 2

        def stops(*args):
            nonlocal left
            if not left:
                raise Stopped
            left -= 1
            return real(*args)

        stopping.setattr(planning, "figures", stops)
        with pytest.raises(Stopped):
            build(tmp_path)
    measured.clear()
    frontier = build(tmp_path)
    assert "measure_sensitivity" not in measured
    (tmp_path / "alone").mkdir()
    before = len(measured)
    measured.clear()
    assert [p.figures for p in build(tmp_path / "alone").points] == [p.figures for p in frontier.points]
    assert len([name for name in measured if name == "figures"]) == before + 2
    assert read_manifest(tmp_path / "bundle").quality.psnr > 0


@pytest.mark.soak
def test_a_damaged_file_is_measured_again(tmp_path, measured):
    frontier = build(tmp_path)
    (work,) = (tmp_path / "cache").glob("searched-*")
    for file in work.iterdir():
        file.write_bytes(b"{")
    measured.clear()
    again = build(tmp_path, min_psnr=25.001)
    assert "measure_sensitivity" in measured
    assert again.points[0].figures.keys() == frontier.points[0].figures.keys()
