"""`trtconvert compare`: two bundles on one page."""

from __future__ import annotations

import shutil
from dataclasses import replace

from support import refusal, run

from trtconvert.bundle import read_manifest, write_manifest
from trtconvert.evaluate.comparison import Side, render

SIDE = Side(
    "one", "digits", {"PSNR": "53.9 dB", "Size": "3 MiB"}, {"NVIDIA H200": 12_345.6, "sm80": None}, {"verify.steps": "50"}, ""
)  # fmt: skip


def test_differences_are_highlighted():
    other = replace(
        SIDE, title="two <b>", figures={"PSNR": "50.0 dB", "Size": "3 MiB"}, engines={"NVIDIA H200": 187.2}, settings={}
    )
    html = render(SIDE, other)
    assert "<strong>50.0 dB</strong>" in html and "<strong>3 MiB</strong>" not in html
    assert "12.346 ms" in html and "187 µs" in html and "not timed" in html and "no engine" in html
    assert "verify.steps" in html and "two &lt;b&gt;" in html and "two <b>" not in html


def test_recipes_that_are_the_same_are_left_out():
    assert "the recipes are the same" in render(SIDE, replace(SIDE, title="two"))


def test_two_bundles(digits_build, tmp_path):
    other, page = tmp_path / "other", tmp_path / "page.html"
    shutil.copytree(digits_build.bundle, other)
    manifest = read_manifest(other)
    verify = manifest.recipe.verify.model_copy(update={"steps": manifest.recipe.verify.steps + 1})
    write_manifest(other, manifest.model_copy(update={"recipe": manifest.recipe.model_copy(update={"verify": verify})}))
    outcome = run("compare", digits_build.bundle, other, "-o", page)
    assert outcome.exit_code == 0, outcome.output
    html = page.read_text(encoding="utf-8")
    assert "verify.steps" in html and html.count("data:image/png;base64,") == 2


def test_a_bundle_and_itself_are_refused(digits_build, tmp_path):
    refusal(
        run("compare", digits_build.bundle, digits_build.bundle, "-o", tmp_path / "page.html"), "compared with itself"
    )
    assert not (tmp_path / "page.html").exists()
