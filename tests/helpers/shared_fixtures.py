"""Fixtures that several test files share. `conftest.py` loads this module in processes that run tests."""

import functools
import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from browser import Page, chromium
from support import WEIGHTS, Built, run, tiny_recipe
from tiny_layers import WITH_CONV
from torch._export.utils import _collect_all_valid_cia_ops
from torch.onnx._internal.exporter._registration import ONNXRegistry

from trtconvert.files import locked
from trtconvert.models.digits import digits_model


@pytest.fixture(scope="session", autouse=True)
def one_registry():
    """Exports of a process share the exporter's table of operators, and torch's list of operators that it can decompose: torch
    would compile 500 functions and search all operators anew for each export, which is most of the time of a small one."""
    made = functools.cache(ONNXRegistry.from_torchlib)
    decomposable = functools.cache(lambda registered: _collect_all_valid_cia_ops())

    def copied(cls, **options):
        registry = cls()
        registry._opset_version, functions = made(**options).opset_version, made(**options).functions
        registry.functions = {target: list(decompositions) for target, decompositions in functions.items()}
        return registry

    def listed():
        return decomposable(len(torch._C._dispatch_get_all_op_names()))  # a test may register operators

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ONNXRegistry, "from_torchlib", classmethod(copied))
        for module in (torch.export.decomp_utils, torch.export.exported_program):
            patches.setattr(module, _collect_all_valid_cia_ops.__name__, listed)
        yield


@pytest.fixture
def searched_once():
    """For tests that collect garbage again and again: Python searches what there is once."""
    gc.collect()
    gc.freeze()


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


@pytest.fixture(scope="session")
def made_once(request, tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Returns a folder that a function filled. One of xdist's workers fills it, and each worker has a copy."""

    def folder_of(name: str, fill: Callable[[Path], object]) -> Path:
        if not hasattr(request.config, "workerinput"):
            fill(folder := tmp_path_factory.mktemp(name))
            return folder
        shared = tmp_path_factory.getbasetemp().parent / "shared" / name
        (shared / "lock").mkdir(parents=True, exist_ok=True)
        with locked(shared / "lock"):
            if not (shared / "finished").exists():
                shutil.rmtree(shared / "made", ignore_errors=True)  # of a worker that failed
                (shared / "made").mkdir()
                fill(shared / "made")
                (shared / "finished").touch()
        return shutil.copytree(shared / "made", tmp_path_factory.mktemp(name) / "copy")

    return folder_of


@pytest.fixture(scope="session")
def built_once(made_once) -> Callable[..., Built]:
    """Builds the recipe that a function writes into a folder."""

    def built_of(name: str, write: Callable[[Path], Path]) -> Built:
        def fill(folder: Path) -> None:
            outcome = run("build", write(folder), "-o", folder / "bundle", "--cache", folder / "cache")
            assert outcome.exit_code == 0, outcome.output

        folder = made_once(name, fill)
        return Built(folder / "recipe.yaml", folder / "bundle", folder / "cache")

    return built_of


@pytest.fixture(scope="session")
def digits_build(built_once) -> Built:
    """The shipped model converted with few samples and steps. Leave its files as they are."""
    sections = {
        "model": {"source": "digits-dit", "weights": str(WEIGHTS)},
        "attention": {"modes": ["precision", "balanced", "balanced", "aggressive"]},
        "layers": {"modes": "off"},
        "calibration": {"samples": 4, "batch": 2, "steps": 4, "bins": 4},
        "engine": {"backend": "onnxruntime", "shapes": {"batch": [1, 2, 8], "height": 8, "width": 8}},
        "verify": {"samples": 2, "steps": 4, "min_psnr": 20},
        "output": {"grid": 2},
    }
    return built_once("digits", lambda folder: tiny_recipe(folder, **sections))


@pytest.fixture(scope="session")
def tiny_build(built_once) -> Built:
    """A model of one attention, converted. Leave its files as they are."""
    return built_once("tiny", tiny_recipe)


@pytest.fixture(scope="session")
def flux_build(made_once):
    """Flux for a range of heights, in half precision but for its VAE, with all its models. Leave its files as they are."""
    import converted_pipelines as converted  # which skips without diffusers

    model = {"dtype": "float16", "options": converted.options("flux", height=[32, 32, 64])}
    folder = made_once("flux", lambda folder: converted.convert(folder, "flux", {"all": {}}, model=model))
    return converted.Whole(folder / "pipeline", folder / "bundle")


@pytest.fixture(scope="session")
def unet_build(made_once):
    """Stable Diffusion for embeddings of 8 to 32 tokens, with its text encoder of 8. Leave its files as they are."""
    import converted_pipelines as converted  # which skips without diffusers

    model = {"options": converted.options("stable_diffusion", tokens=[8, 16, 32])}
    folder = made_once(
        "unet", lambda folder: converted.convert(folder, "stable_diffusion", {"text_encoder": {}}, model=model)
    )
    return converted.Whole(folder / "pipeline", folder / "bundle")


@pytest.fixture(scope="session")
def layered_build(built_once) -> Built:
    """A model with layers of every kind, attention and layers converted. Leave its files as they are."""
    sections = {
        "model": {"source": "tiny_layers:build"},
        "layers": {"modes": "static", "include": WITH_CONV},
        "calibration": {"samples": 16},
    }
    return built_once("layered", lambda folder: tiny_recipe(folder, **sections))


@pytest.fixture(scope="session")
def stepped_build(built_once) -> Built:
    """A model that leaves steps out, converted. Leave its files as they are."""
    steps = {"computed": 0.5, "calibrated": 8, "samples": 2}
    return built_once("stepped", lambda folder: tiny_recipe(folder, steps=steps))


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
