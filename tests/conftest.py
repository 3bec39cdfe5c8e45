"""Fixtures that several test files share."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from browser import Page, chromium
from support import WEIGHTS, Built, finish, start, tiny_recipe
from tiny_layers import WITH_CONV

from trtconvert.models.digits import digits_model


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items):
    cases = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        one_in = item.get_closest_marker("one_in")
        if cases[test] % (one_in.args[0] if one_in else 1) or (cases[test] and "first_case" in item.keywords):
            item.add_marker(pytest.mark.soak)
        cases[test] += 1
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    """A page of a browser."""
    executable = chromium()
    if executable is None:
        pytest.skip("needs Chromium, and there is none (Debian: apt-get install chromium)")
    page = Page(executable, tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


@pytest.fixture(scope="session")
def digits():
    """The shipped model."""
    return digits_model(WEIGHTS)


def built(folder: Path, recipe: Path) -> Built:
    outcome = finish(start("build", recipe, "-o", folder / "bundle", "--cache", folder / "cache"))
    assert outcome.exit_code == 0, outcome.output
    return Built(recipe, folder / "bundle", folder / "cache")


@pytest.fixture(scope="session")
def digits_build(tmp_path_factory) -> Built:
    """The shipped model converted with few samples and steps. Leave its files as they are."""
    folder = tmp_path_factory.mktemp("digits")
    recipe = folder / "recipe.yaml"
    sections = {
        "model": {"source": "digits-dit", "weights": str(WEIGHTS)},
        "attention": {"modes": ["precision", "balanced", "balanced", "aggressive"]},
        "layers": {"modes": "off"},
        "calibration": {"samples": 4, "batch": 2, "steps": 4, "bins": 4},
        "engine": {"backend": "onnxruntime", "shapes": {"batch": [1, 2, 8], "height": 8, "width": 8}},
        "verify": {"samples": 2, "steps": 4, "min_psnr": 20},
        "output": {"grid": 2},
    }
    recipe.write_text(json.dumps(sections))  # JSON is YAML
    return built(folder, recipe)


@pytest.fixture(scope="session")
def tiny_build(tmp_path_factory) -> Built:
    """A model of one attention, converted. Leave its files as they are."""
    folder = tmp_path_factory.mktemp("tiny")
    return built(folder, tiny_recipe(folder))


@pytest.fixture(scope="session")
def flux_build(tmp_path_factory):
    """Flux for a range of heights, in half precision but for its VAE, with all its models. Leave its files as they are."""
    import converted_pipelines as converted  # which skips without diffusers

    folder = tmp_path_factory.mktemp("flux")
    model = {"dtype": "float16", "options": converted.options("flux", height=[32, 32, 64])}
    return converted.Whole(folder / "pipeline", converted.convert(folder, "flux", {"all": {}}, model=model))


@pytest.fixture(scope="session")
def layered_build(tmp_path_factory) -> Built:
    """A model with layers of every kind, attention and layers converted. Leave its files as they are."""
    folder = tmp_path_factory.mktemp("layered")
    sections = {
        "model": {"source": "tiny_layers:build"},
        "layers": {"modes": "static", "include": WITH_CONV},
        "calibration": {"samples": 16},
    }
    return built(folder, tiny_recipe(folder, **sections))


@pytest.fixture(scope="session")
def stepped_build(tmp_path_factory) -> Built:
    """A model that leaves steps out, converted. Leave its files as they are."""
    folder = tmp_path_factory.mktemp("stepped")
    return built(folder, tiny_recipe(folder, steps={"computed": 0.5, "calibrated": 8, "samples": 2}))


@pytest.fixture(scope="session")
def alexnet(tmp_path_factory) -> Path:
    """The convolutions of a file like torchvision's AlexNet, with random weights."""
    torchvision = pytest.importorskip("torchvision")
    pytest.importorskip("lpips")
    torch.manual_seed(0)
    state = torchvision.models.alexnet(weights=None).features.state_dict(prefix="features.")
    path = tmp_path_factory.mktemp("weights") / "alexnet.pth"
    torch.save(state, path)
    return path


@pytest.fixture
def one_noise(monkeypatch):
    """A seed stands for the same noise in half precision as in single, which torch 2.11 draws otherwise."""
    draw = torch.randn

    def rounded(*size, dtype=None, **options):
        return draw(*size, **options).to(dtype)

    monkeypatch.setattr(torch, "randn", rounded)
