"""Helpers for tests of the report: parsed pages, checks in a browser, evaluations, hostile text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from browser import Page
from PIL import Image

from trtconvert.evaluate.records import Evaluation, PairedQuality, SetQuality

HOSTILE = '<script>alert("1")</script>&\'"'
VOID = {"meta", "link", "img", "br", "hr", "wbr"}


class Document(HTMLParser):
    """Parses the elements of a page; refuses wrong nesting."""

    def __init__(self, html):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(html)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def all(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]


def evaluation_of(manifest, **changes):
    def quality(fid):
        return SetQuality(
            nonfinite=0, fid=fid, sfid=2.0, kid=0.01, kid_std=0.001, inception_score=9.1, inception_score_std=0.1,
            precision=0.7, recall=0.6, accuracy=0.98,
        )  # fmt: skip

    fields = {
        "created": "2026-01-01T00:00:00+00:00", "bundle": manifest.digest, "model": manifest.model,
        "weights": manifest.weights, "samples": 1000, "steps": 100, "solver": "ddim", "seed": 1, "features": "classifier",
        "features_identity": "0", "reference": "digits", "reference_count": 360, "reference_identity": "0",
        "backend": "ONNX Runtime", "int8": quality(5.25), "full": quality(5.0), "other": quality(5.125),
        "paired": PairedQuality(
            psnr=40.0, psnr_worst=30.0, psnr_worst_seed=7, ssim=0.99, ssim_worst=0.9, lpips=0.01, lpips_worst=0.1,
            fid_int8=1.0, fid_full=1.0, nonfinite_sites={"a": 0},
        ),
        "versions": {},
    }  # fmt: skip
    return Evaluation.model_validate(fields | changes)


def assert_shown(page: Page, report: Path, picture: Path, width: int, scheme: str) -> None:
    """Checks a report in a browser at a width: nothing is loaded, overflows, is too small or broken."""
    page.open(report, width, scheme=scheme)
    assert page.complaints() == []
    assert [url for url in page.requests() if not url.startswith("data:")] == [report.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    small = "[...document.querySelectorAll('td, th, p, dd, dt, a')].filter(e => parseFloat(getComputedStyle(e).fontSize) < 12)"
    assert page.evaluate(f"{small}.length") == 0
    names = "[...document.querySelectorAll('tbody th')].filter(e => e.offsetWidth > 0 && e.offsetWidth < 60)"
    assert page.evaluate(f"{names}.length") == 0  # no name is broken letter by letter
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 22, 26)") == (scheme == "dark")
    page.screenshot(picture)
    assert_drawn(picture, width)


def assert_drawn(path: Path, width: int) -> None:
    """Checks that the screenshot has this width and is not empty."""
    with Image.open(path) as image:
        assert image.width == width and image.height > 2000
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50
