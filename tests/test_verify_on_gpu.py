"""Samples of the gates and candidates of the search in builds that compute on a GPU."""

from __future__ import annotations

import json

import pytest
from support import tiny_recipe

from trtconvert import pipeline
from trtconvert.attention.modes import Mode
from trtconvert.calib.cost import KERNEL_COST
from trtconvert.models.placed import Place
from trtconvert.optimization import _merged
from trtconvert.recipe import VerifySection, load_recipe

CPU, GPU = Place("cpu", "float32", ""), Place("cuda", "float16", "")


def drawn(section: VerifySection) -> tuple[int, int]:
    return section.samples, section.steps


@pytest.mark.parametrize(
    ("on_gpu", "place", "expected"),
    [
        ({"samples": 16, "steps": 8}, GPU, (16, 8)),
        ({"samples": 16, "steps": 8}, CPU, (2, 4)),
        ({"samples": 5}, GPU, (5, 20)),
        (None, GPU, (2, 4)),
    ],
)
def test_a_gpu_draws_what_the_recipe_asks_for_on_one(tmp_path, on_gpu, place, expected):
    recipe = load_recipe(tiny_recipe(tmp_path, verify={"samples": 2, "steps": 4, "on_gpu": on_gpu}))
    settled = pipeline._for_place(recipe, place)
    assert drawn(settled.verify) == expected
    assert settled.verify.min_psnr == recipe.verify.min_psnr and settled.plan == recipe.plan


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (16, 10)),
        ({"min_psnr": 30}, (16, 10)),
        ({"samples": 3}, (3, 4)),
        ({"steps": 3}, (2, 3)),
        ({"samples": 3, "on_gpu": {"samples": 6, "steps": 7}}, (6, 7)),
    ],
)
def test_arguments_of_optimize_count_on_a_gpu_too(tmp_path, asked, expected):
    sections = _merged({"verify": asked}, {}, None, offload=False)
    sections["model"] = {"source": "tiny_models:build"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(sections))
    assert drawn(pipeline._for_place(load_recipe(tmp_path / "recipe.yaml"), GPU).verify) == expected


@pytest.mark.parametrize(
    ("here", "place", "plan", "expected"),
    [
        ("sm90", GPU, {}, ["precision", "fp8"]),
        ("sm86", GPU, {}, ["precision", "aggressive"]),
        ("sm90", CPU, {}, ["precision", "aggressive"]),
        ("sm90", GPU, {"candidates": ["precision"]}, ["precision"]),
        ("sm90", GPU, {"kernel_cost": "old.json"}, ["precision", "aggressive"]),
    ],
)
def test_a_search_on_hopper_may_choose_fp8_where_its_times_are_known(
    tmp_path, monkeypatch, here, place, plan, expected
):
    table = json.loads(KERNEL_COST.read_text())
    table["rows"] = [row for row in table["rows"] if row["mode"] != Mode.FP8]
    (tmp_path / "old.json").write_text(json.dumps(table))
    monkeypatch.setattr(pipeline, "device_architecture", lambda: here)
    recipe = load_recipe(tiny_recipe(tmp_path, attention={"modes": "auto"}, plan={"steps": 4} | plan))
    assert [*pipeline._for_place(recipe, place).plan.searched_modes] == expected
